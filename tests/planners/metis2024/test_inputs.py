import copy
import json
from collections.abc import Mapping
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from amp_ray.clusters.cluster import Cluster
from amp_ray.errors import InputError
from amp_ray.inputs.experiment import Experiment
from amp_ray.planners.metis2024.inputs import (
    BandwidthUnit,
    MetisHost,
    cluster_hostfile,
    cluster_yaml,
    import_inputs,
    metis_cluster,
    metis_cluster_files,
    node_names,
    parse_metis_clusterfile,
    parse_metis_hostfile,
)
from amp_ray.units import GIB
from support.experiments import SMALL, experiment_from, small_experiment
from support.metis import CLUSTERFILE, HOSTFILE
from support.metis_cases import metis_setting

README_BANDWIDTHS = {"inter_bandwidth": 312500000.0, "intra_bandwidth": 5312500000.0}


def clusterfile(change: dict[str, Any] | None = None, *, address: str = "0.0.0.1") -> str:
    """Return a cluster file with keys of one address changed; None takes a key away."""
    values: dict[str, Any] = copy.deepcopy(dict(CLUSTERFILE))
    values[address] |= change or {}
    values[address] = {key: value for key, value in values[address].items() if value is not None}
    return json.dumps(values)


def test_a_cluster_is_built_from_both_files() -> None:
    first, second = metis_cluster(HOSTFILE, parse_metis_clusterfile(clusterfile())).cluster.nodes
    assert (first.name, first.device.name, first.num_slots) == ("0.0.0.1", "A100-80", 2)
    assert (second.name, second.device.name) == ("0.0.0.2", "T4")
    assert (first.intra.bandwidth_bytes_per_s, first.inter.bandwidth_bytes_per_s) == (10e9, 1e9)
    assert first.intra.latency_s < first.inter.latency_s


def test_the_numbers_tell_the_unit_and_it_is_reported() -> None:
    gigabytes = parse_metis_clusterfile(clusterfile())
    text = json.dumps({at: dict(host) | README_BANDWIDTHS for at, host in CLUSTERFILE.items()})
    plain = parse_metis_clusterfile(text, file="c.json")
    assert (gigabytes.unit, plain.unit) == ("GB/s", "bytes/s")
    assert plain.notes == ("c.json: bandwidths are read as bytes/s, found 3.125e+08 to 5.3125e+09",)
    nodes = metis_cluster(HOSTFILE, plain).cluster.nodes
    assert nodes[0].inter.bandwidth_bytes_per_s == 312500000.0


def test_a_unit_that_is_told_needs_no_report() -> None:
    assert parse_metis_clusterfile(clusterfile(), unit="GB/s").notes == ()


@pytest.mark.parametrize(
    ("bandwidth", "unit", "message"),
    [
        (50_000, None, "found 50000; expected GB/s .at most 10000. or bytes/s .at least 1e.06."),
        (312500000, None, "found 3.125e.08; expected .*, here all in GB/s"),
        (312500000, "GB/s", "found 3.125e.08; expected .*, here all in GB/s"),
        (10, "bytes/s", "found 1; expected .*, here all in bytes/s"),
    ],
)
def test_a_bandwidth_in_no_unit_or_in_two_is_refused(
    bandwidth: float, unit: BandwidthUnit | None, message: str
) -> None:
    text = clusterfile({"intra_bandwidth": bandwidth}, address="0.0.0.2")
    with pytest.raises(InputError, match=rf"^c\.json: 0\.0\.0\.[12]\.int\w+_bandwidth: {message}"):
        parse_metis_clusterfile(text, file="c.json", unit=unit)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"memory": None}, "memory: key 'memory' is missing"),
        ({"memory": "80"}, "memory: found '80'; expected a number"),
        ({"memory": 0}, "memory: found 0; expected greater than 0"),
        ({"memory": 16 * 2**30}, "memory: found 17179869184; expected less than or equal to 10000"),
        ({"intra_bandwidth": -1}, "intra_bandwidth: found -1; expected greater than 0"),
        ({"instance_type": ""}, "instance_type: found ''; expected text, not an empty one"),
    ],
)
def test_a_wrong_key_is_led_to_its_place(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=rf"^c\.json: 0\.0\.0\.1\.{message}"):
        parse_metis_clusterfile(clusterfile(change), file="c.json")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", r"^c\.json: no host in it: expected entries such as"),
        ('{"a": 1}', r"^c\.json: a: found 1; expected a mapping"),
        ('{"a": {', r"^c\.json:1: not valid JSON: .* is it cut short\?"),
    ],
)
def test_a_file_without_hosts_is_refused(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_metis_clusterfile(text, file="c.json")


def test_other_keys_are_left_alone() -> None:
    assert parse_metis_clusterfile(clusterfile({"rack": 7})).hosts["0.0.0.1"].memory == 80


def test_an_address_that_the_cluster_file_lacks_is_led_to_its_line() -> None:
    message = r"^hosts:2: found host '0\.0\.0\.9'; c\.json describes 0\.0\.0\.1, 0\.0\.0\.2"
    with pytest.raises(InputError, match=message):
        metis_cluster(
            "0.0.0.1 4\n0.0.0.9 4\n",
            parse_metis_clusterfile(clusterfile(), file="c.json"),
            file="hosts",
        )


def test_a_type_that_the_catalogue_lacks_is_refused() -> None:
    text = clusterfile({"instance_type": "TPUv4"})
    message = r"^c\.json: 0\.0\.0\.1\.instance_type: found 'TPUv4'; the catalogue knows T4, P100, "
    with pytest.raises(InputError, match=message):
        metis_cluster(HOSTFILE, parse_metis_clusterfile(text, file="c.json"))


@pytest.mark.parametrize(
    ("kind", "memory", "name", "gib"),
    [
        ("A100", 80, "A100-80", 79.15),
        ("a100", 40, "A100-40", 39.39),
        ("V100", 16, "V100-16", 15.78),
        ("v100", 32, "V100-32", 31.74),
        ("P100", 15, "P100-16", 15.0),
        ("T4", 80, "T4", 80.0),
        ("H100", 80, "H100", 79.10),
        ("A100-80", 80, "A100-80", 79.15),
    ],
)
def test_a_type_is_the_board_that_is_closest_in_memory(
    kind: str, memory: float, name: str, gib: float
) -> None:
    text = clusterfile({"instance_type": kind, "memory": memory})
    metis = metis_cluster("0.0.0.1 1", parse_metis_clusterfile(text))
    (device,) = metis.cluster.device_types
    assert (device.name, device.memory_bytes) == (name, round(gib * GIB))
    assert (device.nominal_bytes or device.memory_bytes) == memory * GIB
    assert f"0.0.0.1: {kind} with {memory} GiB is read as {name}, of which" in metis.notes[-1]


def test_nodes_of_one_address_get_names_of_their_own() -> None:
    metis = metis_cluster("0.0.0.1 4\n0.0.0.1 4\n", parse_metis_clusterfile(clusterfile()))
    assert [node.name for node in metis.cluster.nodes] == ["0.0.0.1", "0.0.0.1-2"]
    assert "hostfile:2: 0.0.0.1 stands there again; this node is 0.0.0.1-2" in metis.notes


@pytest.mark.parametrize(
    "line", ["0.0.0.1 slots=16", "0.0.0.1 16", "0.0.0.1   slots = 16", "\t0.0.0.1\t16  # fast"]
)
def test_both_forms_say_the_same(line: str) -> None:
    assert parse_metis_hostfile(line) == (MetisHost(address="0.0.0.1", num_slots=16, line=1),)


def test_an_address_may_stand_there_again() -> None:
    hosts = parse_metis_hostfile("# kinds\na 4\n\na slots=4\n")
    assert [(host.address, host.line) for host in hosts] == [("a", 2), ("a", 4)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a 4\nb\n", "^hosts:2: found 'b'; expected 'IP slots=N' or 'IP N'"),
        ("a 4 5", "^hosts:1: found 'a 4 5': expected"),
        ("a slots=0", "^hosts:1: slots must be a positive integer, found '0' for host 'a'"),
        ("a four", "^hosts:1: found 'a four': expected"),
        ("a -4", "^hosts:1: slots must be a positive integer, found '-4' for host 'a'"),
        ("a slots=1.5", "^hosts:1: slots must be a positive integer, found '1.5'"),
        ("-oProxy 4", "^hosts:1: found host '-oProxy': expected"),
        ("", "^hosts: no host found: expected lines like"),
        ("# none\n", "^hosts: no host found"),
    ],
)
def test_another_line_is_led_to_its_place(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_metis_hostfile(text, file="hosts")


@given(st.lists(st.sampled_from(["a", "a-2", "b"]), min_size=1, max_size=6))
def test_names_are_different_and_start_with_the_address(addresses: list[str]) -> None:
    hosts = parse_metis_hostfile("".join(f"{address} 1\n" for address in addresses))
    names = node_names(hosts)
    assert len(set(names)) == len(names)
    assert all(name.startswith(at) for name, at in zip(names, addresses, strict=True))


def test_a_cluster_is_read_back_as_it_was() -> None:
    cluster = metis_setting().cluster
    files = metis_cluster_files(cluster)
    described = parse_metis_clusterfile(files["clusterfile.json"])
    again = metis_cluster(files["hostfile"], described).cluster
    assert [node.device for node in again.nodes] == [node.device for node in cluster.nodes]
    assert [node.num_slots for node in again.nodes] == [2, 2]
    for node, before in zip(again.nodes, cluster.nodes, strict=True):
        assert node.intra.bandwidth_bytes_per_s == before.intra.bandwidth_bytes_per_s
        assert node.inter.bandwidth_bytes_per_s == before.inter.bandwidth_bytes_per_s


def test_units_are_metis_own() -> None:
    files = metis_cluster_files(small_experiment().cluster)
    assert files["hostfile"] == "node0 slots=2\nnode1 slots=2\n"
    node = json.loads(files["clusterfile.json"])["node0"]
    assert node["instance_type"] == "T4"
    assert node["intra_bandwidth"] == 6.25
    assert node["inter_bandwidth"] == 1.25
    assert 14 < node["memory"] < 15


DESCRIBED = """{
"a": {"instance_type": "V100", "inter_bandwidth": 10, "intra_bandwidth": 50, "memory": 16},
"b": {"instance_type": "P100", "inter_bandwidth": 1.2, "intra_bandwidth": 46, "memory": 15}}"""
START, END = SMALL.index("cluster:"), SMALL.index("global_batch_size")


def cluster_of(hostfile: str) -> Cluster:
    """Read a hostfile with the cluster file above."""
    return metis_cluster(hostfile, parse_metis_clusterfile(DESCRIBED)).cluster


def test_an_experiment_with_the_text_has_the_same_cluster() -> None:
    cluster = cluster_of("a slots=4\na slots=4\nb 16\na 2\n")
    text = SMALL[:START] + cluster_yaml(cluster, hostfile="hosts") + SMALL[END:]
    again = experiment_from(text, {"hosts": cluster_hostfile(cluster)}).cluster
    assert again == cluster


def test_equal_nodes_in_a_row_are_one_entry() -> None:
    text = cluster_yaml(cluster_of("a 4\na 4\nb 4"), hostfile="hosts")
    assert [line[:16] for line in text.splitlines()[3:]] == ["    - {count: 2,", "    - {count: 1,"]


FIGURES: Final[Mapping[str, int | None]] = {
    "num_layers": 4,
    "hidden_size": 256,
    "sequence_length": 128,
    "vocab_size": 1024,
    "global_batch_size": 24,
    "num_heads": None,
    "max_tp": None,
    "max_size": None,
}


def imported(figures: Mapping[str, int | None]) -> Experiment:
    """Import the experiment of two A100 and two T4, and load it."""
    written = import_inputs(
        ("hostfile", HOSTFILE),
        ("c.json", clusterfile()),
        None,
        unit=None,
        figures={**FIGURES, **figures},
        names={"name": "it's", "hostfile": "my hosts", "profile_path": None},
    )
    return experiment_from(written.text, {"my hosts": HOSTFILE})


def test_limits_are_passed_on() -> None:
    experiment = imported({"max_tp": 2, "max_size": 4})
    assert experiment.name == "it's"
    assert experiment.limits.max_tp == 2
    assert experiment.limits.micro_batch_sizes == (1, 2, 4)


@pytest.mark.parametrize(
    ("hidden_size", "num_heads", "heads"), [(256, None, 2), (192, None, 3), (256, 8, 8)]
)
def test_heads_have_a_usual_width_unless_told(
    hidden_size: int, num_heads: int | None, heads: int
) -> None:
    experiment = imported({"hidden_size": hidden_size, "num_heads": num_heads})
    assert experiment.model.shape.num_heads == heads
