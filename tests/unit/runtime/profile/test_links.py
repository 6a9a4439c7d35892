from dataclasses import replace

import numpy as np
import pytest

from amp_ray.clusters.constants import Constants
from amp_ray.cost.collective import Path, all_gather_s, all_reduce_s, start_s
from amp_ray.cost.topology import Topology
from amp_ray.inputs.profiles.nccl_tests import Collective, NcclTest
from amp_ray.inputs.yaml_text import parse_yaml
from amp_ray.runtime.profile.links import (
    LinkSample,
    cluster_yaml,
    constants_yaml,
    fit_link,
    link_reports,
    links_of_tests,
    links_yaml,
)
from amp_ray.trials.profile.points import LayerPoint, LinkPoint, link_points
from amp_ray.trials.profile.records import LinkPlace, ProfileRecords
from support.experiments import small_experiment

EXPERIMENT = small_experiment(("{count:", "{intra_latency_us: 8, inter_latency_us: 25, count:"))
START_S = start_s(EXPERIMENT.constants, EXPERIMENT.traits)
INTRA = LinkPlace(scope="intra", devices="T4")
INTER = LinkPlace(scope="inter", devices="T4")


def counted_s(point: LinkPoint, place: LinkPlace) -> float:
    """Return what the cost model itself says of a message on the small experiment's links."""
    topology = Topology(cluster=EXPERIMENT.cluster, constants=EXPERIMENT.constants)
    intra = place.scope == "intra"
    if point.what == "p2p":
        links = topology.links  # the nodes are of one kind
        rate = links.intra_bytes_per_s[0] if intra else links.inter_bytes_per_s[0, 0]
        step = links.intra_step_s[0] if intra else links.inter_step_s[0, 0]
        return float(START_S + step + point.num_bytes / rate)
    group = np.array([[0, 1] if intra else [0, 2]])
    (path,) = topology.rings(group.tolist()).paths
    return all_reduce_s(point.num_bytes, 2, path, START_S)


def constants(found: ProfileRecords) -> dict[str, float]:
    value: dict[str, float] = parse_yaml(constants_yaml(found, EXPERIMENT), file="x").values[
        "constants"
    ]
    return value


def records(*places: LinkPlace) -> ProfileRecords:
    found = ProfileRecords()
    for place in places:
        for point in link_points(2):
            found.links[place, point] = counted_s(point, place)
    return found


@pytest.mark.parametrize(
    ("place", "gbit_per_s", "latency_us"), [(INTRA, 50.0, 8.0), (INTER, 10.0, 25.0)]
)
def test_a_link_like_the_stated_one_is_found(
    place: LinkPlace, gbit_per_s: float, latency_us: float
) -> None:
    (report,) = link_reports(records(place), EXPERIMENT)
    assert report.gbit_per_s == pytest.approx(gbit_per_s, rel=0.01)
    assert report.latency_us == pytest.approx(latency_us, rel=0.05)
    assert report.collective_us == pytest.approx(latency_us, rel=0.05)


def test_small_all_reduces_are_those_within_layers() -> None:
    found = records(INTRA)
    point = LayerPoint(micro_batch_size=1, tp=2, layer=1)
    found.layers["T4", point] = {"all_reduce_s": 1.0}
    slow, (fast,) = link_reports(found, EXPERIMENT)[0], link_reports(records(INTRA), EXPERIMENT)
    assert (slow.collective_us or 0) > 10 * (fast.collective_us or 0)
    assert slow.latency_us == pytest.approx(fast.latency_us, rel=0.3)
    assert set(slow.apart) == {"p2p", "all_reduce", "all_reduce within layers"}


def test_the_snippet_is_a_cluster() -> None:
    reports = link_reports(records(INTRA), EXPERIMENT)
    text = cluster_yaml(EXPERIMENT, reports)
    first, second = parse_yaml(text, file="x").values["cluster"]["nodes"]
    assert first == second
    assert first["intra_gbit_per_s"] == pytest.approx(50, rel=0.01)
    assert first["intra_collective_us"] == pytest.approx(8, rel=0.05)
    assert (first["inter_gbit_per_s"], first["inter_latency_us"]) == (10, 25)
    assert "inter_collective_us" not in first
    assert text.count("# inter not measured") == 2


def test_the_snippet_keeps_racks() -> None:
    racked = small_experiment(
        ("count: 2", "count: 3"), ("slots: 2", "slots: 2, rack: {nodes: 2, gbit_per_s: 30}")
    )
    text = cluster_yaml(racked, link_reports(records(INTRA), racked))
    rack, alone = parse_yaml(text, file="x").values["cluster"]["nodes"]
    assert (rack["count"], rack["slots"]) == (2, 2)
    assert rack["rack"] == {"nodes": 2, "gbit_per_s": 30, "latency_us": 5}
    assert rack["intra_gbit_per_s"] == alone["intra_gbit_per_s"] == pytest.approx(50, rel=0.01)
    assert "rack" not in alone
    place = LinkPlace(scope="rack", devices="T4")
    measured = cluster_yaml(racked, link_reports(records(INTRA, place, INTER), racked))
    rack, _ = parse_yaml(measured, file="x").values["cluster"]["nodes"]
    assert rack["rack"]["gbit_per_s"] != 30
    assert "not measured" in text
    assert "not measured" not in measured


def test_the_loss_becomes_its_traffic() -> None:
    found = ProfileRecords()
    loss = LayerPoint(micro_batch_size=2, tp=2, layer=EXPERIMENT.model.num_layers)
    found.layers["T4", loss] = {"forward_s": 1e-3, "backward_s": 1e-3}
    # 320 GB/s at 75 % for 2 ms, over 128 x 1024 logits of each of 2 samples, halved by tp.
    expected = 2e-3 * 320e9 * 0.75 / (128 * 1024 * 2 / 2)
    assert constants(found)["loss_bytes_per_logit"] == pytest.approx(expected, rel=1e-3)
    assert constants_yaml(ProfileRecords(), EXPERIMENT) == ""


def test_the_step_becomes_rate_and_host_work() -> None:
    found = ProfileRecords()
    found.steps["T4"] = {
        "host_s_per_micro_batch": 2e-4,
        "host_s_per_iteration": 0.0,
        "memory_bytes_per_s": 160e9,
    }
    assert constants(found) == {
        "memory_efficiency": 0.5,
        "host_s_per_micro_batch": 2e-4,
        "host_s_per_iteration": 15e-6,  # a constant must be positive
    }


def test_the_loss_is_counted_at_the_measured_rate() -> None:
    found, fast = ProfileRecords(), ProfileRecords()
    loss = LayerPoint(micro_batch_size=1, tp=1, layer=EXPERIMENT.model.num_layers)
    for records in (found, fast):
        records.layers["T4", loss] = {"forward_s": 1e-3, "backward_s": 1e-3}
    fast.steps["T4"] = {
        "host_s_per_micro_batch": 1e-3,
        "host_s_per_iteration": 1e-3,
        "memory_bytes_per_s": 320e9 * 1.5,
    }
    ratio = constants(fast)["loss_bytes_per_logit"] / constants(found)["loss_bytes_per_logit"]
    assert ratio == pytest.approx(2.0, rel=1e-3)


def test_a_link_that_is_slow_with_small_messages_becomes_a_table_of_rates() -> None:
    found = records(INTER)
    slow = {
        key: seconds + (key[1].num_bytes / 1e8 if key[1].num_bytes < 10**6 else 0)
        for key, seconds in found.links.items()
    }
    found.links.update(slow)
    (report,) = link_reports(found, EXPERIMENT)
    rates = report.gbit_per_s_by_size
    assert list(rates) == sorted(rates)
    assert list(rates.values()) == sorted(rates.values())
    assert rates[max(rates)] == pytest.approx(10, rel=0.1)
    assert rates[min(rates)] < 3
    node = parse_yaml(cluster_yaml(EXPERIMENT, [report]), file="x").values["cluster"]["nodes"][0]
    assert node["inter_gbit_per_s"] == [
        [size, pytest.approx(rate, rel=1e-3)] for size, rate in rates.items()
    ]


def test_one_small_message_that_was_too_fast_does_not_raise_the_rate_of_large_ones() -> None:
    found = records(INTER)
    for (place, point), seconds in found.links.items():
        found.links[place, point] = seconds + (
            point.num_bytes / 1e8 if point.num_bytes < 10**6 else 0
        )
    sizes = sorted({point.num_bytes for _, point in found.links if point.num_bytes < 10**6})
    for what in ("p2p", "all_reduce"):
        point = LinkPoint(what=what, num_ranks=2, num_bytes=sizes[-1])
        least_s = counted_s(replace(point, num_bytes=sizes[0]), INTER)
        found.links[INTER, point] = least_s + (counted_s(point, INTER) - least_s) / 4
    (report,) = link_reports(found, EXPERIMENT)
    assert report.gbit_per_s_by_size
    assert report.gbit_per_s == pytest.approx(10, rel=0.1)


def samples(latency_s: float, bytes_per_s: float, *, noise: float = 0.0) -> list[LinkSample]:
    return [
        LinkSample(
            num_steps=steps,
            num_bytes=num_bytes,
            start_s=1e-5,
            seconds=(1e-5 + steps * latency_s + num_bytes / bytes_per_s)
            * (1 + noise * (-1) ** index),
        )
        for steps in (1, 2, 6)
        for index, num_bytes in enumerate(4**n * 1024.0 for n in range(9))
    ]


@pytest.mark.parametrize("latency_s", [1e-6, 1e-4, 1e-2])
@pytest.mark.parametrize("bytes_per_s", [1e7, 1e9, 3e11])
def test_a_planted_link_is_found(latency_s: float, bytes_per_s: float) -> None:
    fit = fit_link(samples(latency_s, bytes_per_s))
    assert fit.latency_s == pytest.approx(latency_s, rel=1e-3)
    assert fit.bytes_per_s == pytest.approx(bytes_per_s, rel=1e-3)
    assert fit.error_fraction < 1e-3


def test_noise_does_not_lead_far_away() -> None:
    fit = fit_link(samples(1e-4, 1e9, noise=0.2))
    assert fit.latency_s == pytest.approx(1e-4, rel=0.25)
    assert fit.bytes_per_s == pytest.approx(1e9, rel=0.25)
    assert 0.1 < fit.error_fraction < 0.3


def test_half_is_as_wrong_as_twice() -> None:
    pair = [
        LinkSample(num_steps=1, num_bytes=1.0, start_s=0.0, seconds=seconds)
        for seconds in (1.0, 4.0)
    ]
    fit = fit_link(pair)
    assert fit.latency_s + 1 / fit.bytes_per_s == pytest.approx(2.0, rel=1e-3)


def test_a_link_without_latency_has_none() -> None:
    assert fit_link(samples(0.0, 1e9)).latency_s < 1e-7


@pytest.mark.parametrize("seconds", [0.0, -1.0])
def test_times_must_be_positive(seconds: float) -> None:
    sample = LinkSample(num_steps=1, num_bytes=1.0, start_s=0.0, seconds=seconds)
    with pytest.raises(ValueError, match="positive times"):
        fit_link([sample])
    with pytest.raises(ValueError, match="positive times"):
        fit_link([])


def test_a_collectives_step_has_a_latency_of_its_own() -> None:
    slow = [replace(sample, collective=True) for sample in samples(4e-4, 1e9)]
    fit = fit_link([*samples(5e-5, 1e9), *slow])
    assert fit.latency_s == pytest.approx(5e-5, rel=1e-3)
    assert fit.collective_latency_s == pytest.approx(4e-4, rel=1e-3)
    assert fit.bytes_per_s == pytest.approx(1e9, rel=1e-3)
    assert fit.error_fraction < 1e-3


def test_what_was_not_measured_is_not_told() -> None:
    together = fit_link([replace(sample, collective=True) for sample in samples(1e-4, 1e9)])
    assert together.latency_s == together.collective_latency_s == pytest.approx(1e-4, rel=1e-3)
    assert fit_link(samples(1e-4, 1e9)).collective_latency_s is None


def _tested(collective: Collective, num_nodes: int, path: Path, num_ranks: int) -> NcclTest:
    """Return a test that takes what the cost model counts."""
    start = Constants().collective_start_s
    sizes = [2**power for power in range(10, 30)]
    timed = all_reduce_s if collective == "all_reduce" else all_gather_s
    return NcclTest(
        collective=collective,
        num_ranks=num_ranks,
        num_nodes=num_nodes,
        times=tuple((size, timed(size, num_ranks, path, start)) for size in sizes),
    )


@pytest.mark.parametrize("collective", ["all_reduce", "all_gather"])
def test_links_of_nccl_tests_are_those_that_would_take_these_times(collective: Collective) -> None:
    inside = Path(bytes_per_s=3e11 / (1 + 0.5 / 8), step_s=4e-6)
    outside = Path(bytes_per_s=4e10, step_s=9e-6, num_nodes=4, tree_s=2 * 9e-6)
    tests = [_tested(collective, 1, inside, 8), _tested(collective, 4, outside, 32)]
    within, between = links_of_tests(tests, Constants())
    assert within.gbit_per_s == pytest.approx(2400, rel=0.01)
    assert within.collective_us == pytest.approx(4, rel=0.02)
    assert between.gbit_per_s * Constants().nic_efficiency == pytest.approx(320, rel=0.01)
    assert between.collective_us == pytest.approx(9, rel=0.02)
    keys = parse_yaml(links_yaml((within, between)), file="x").values
    assert list(keys)[::3] == ["intra_gbit_per_s", "inter_gbit_per_s"]


def test_messages_of_nccl_tests_have_a_latency_of_their_own() -> None:
    start = Constants().collective_start_s
    times = tuple((2**power, start + 7e-6 + 2**power / 1e10) for power in range(10, 28))
    test = NcclTest(collective="sendrecv", num_ranks=2, num_nodes=2, times=times)
    (report,) = links_of_tests([test], Constants())
    assert report.latency_us == pytest.approx(7, rel=0.02)
    assert report.collective_us is None
    text = links_yaml([report])
    assert "inter_collective_us" not in text
