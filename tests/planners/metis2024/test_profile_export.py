import json
from dataclasses import replace

import numpy as np
import pytest

from amp_ray.cost.model import CostModel
from amp_ray.inputs.published_profile import PublishedProfile
from amp_ray.planners.metis2024.profile import parse_metis_profile
from amp_ray.planners.metis2024.profile_export import metis_files, publish
from amp_ray.strategies.strategy import Strategy
from support.checked import grid_of
from support.experiments import SMALL, experiment_from, small_experiment
from support.metis import metis_profile_files

DESCRIPTION = "num_layers: 9\nmodel: m\nprecision: fp16\nhardware: h\nversions: v\n"
TABLE = "layer,tp,micro_batch_size,forward_s,backward_s\n" + "".join(
    f"{layer},1,{size},{size}e-3,{2 * size}e-3\n" for layer in range(9) for size in (1, 3)
)


def measured() -> PublishedProfile:
    """Export a profile of our own, measured at two sizes of which Metis asks for one."""
    text = SMALL + "profile: {source: table, path: m}\n"
    files = {"m/profile.yaml": DESCRIPTION, "m/T4.csv": TABLE}
    return publish(experiment_from(text, files))


def test_files_are_read_back_as_they_were() -> None:
    published = parse_metis_profile(metis_profile_files(), folder="p")
    again = parse_metis_profile(metis_files(published, model_name="tiny"), folder="q")
    assert list(again.entries) == list(published.entries)
    for key, entry in published.entries.items():
        other = again.entries[key]
        assert other.layer_s == pytest.approx(entry.layer_s)
        assert other.layer_memory_bytes == pytest.approx(entry.layer_memory_bytes)
        assert other.layer_parameter_bytes == pytest.approx(entry.layer_parameter_bytes)
        assert other.rest_s == pytest.approx(entry.rest_s)
        assert (other.optimizer_s, other.batch_generator_s) == pytest.approx(
            (entry.optimizer_s, entry.batch_generator_s)
        )


def test_a_whole_that_is_not_known_is_not_written() -> None:
    files = metis_profile_files(kinds=("T4",), tps=(1,), sizes=(1,))
    document = json.loads(files["DeviceType.T4_tp1_bs1.json"])
    del document["execution_time"]["forward_backward_time_ms"]
    published = parse_metis_profile({"T4_tp1_bs1.json": json.dumps(document)}, folder="p")
    written = json.loads(metis_files(published, model_name="x")["DeviceType.T4_tp1_bs1.json"])
    assert "forward_backward_time_ms" not in written["execution_time"]


def test_only_measured_sizes_of_a_measured_profile_are_written() -> None:
    published = measured()
    assert list(published.entries) == [("T4", 1, 1)]


def test_measured_times_are_written_as_they_are() -> None:
    entry = measured().entries["T4", 1, 1]
    assert entry.num_layers == 8
    assert entry.layer_s[1:-1] == pytest.approx(np.full(6, 3e-3), rel=0.03)
    assert entry.layer_s[-1] == pytest.approx(6e-3, rel=0.03), "norm and head"
    assert entry.rest_s is not None
    assert 1e-3 < entry.rest_s < 2e-3, "the loss, and 1 ms of the host"


def test_an_analytic_profile_has_every_power_of_two() -> None:
    published = publish(small_experiment(), sizes=(1, 4))
    assert list(published.entries) == [("T4", tp, size) for tp in (1, 2) for size in (1, 4)]


def test_the_whole_is_what_the_cost_model_says_of_one_micro_batch() -> None:
    experiment = small_experiment()
    candidate = grid_of(dp=4, micro_batch_size=2)
    estimate = CostModel(experiment=experiment).estimate(Strategy.uniform(candidate, (0, 9)))
    assert estimate.breakdown is not None
    entry = publish(experiment).entries["T4", 1, 2]
    assert entry.forward_backward_s == pytest.approx(estimate.breakdown.compute_s)
    assert entry.optimizer_s == pytest.approx(estimate.breakdown.optimizer_s)


def test_parameters_are_whole_and_memory_is_a_ranks() -> None:
    experiment = small_experiment()
    published = publish(experiment)
    one, two = published.entries["T4", 1, 1], published.entries["T4", 2, 1]
    held = sum(layer.num_parameters for layer in experiment.model.layers)
    assert one.layer_parameter_bytes.sum() == two.layer_parameter_bytes.sum() == 2 * held
    assert (two.layer_memory_bytes < one.layer_memory_bytes).all()
    assert (one.layer_memory_bytes > one.layer_parameter_bytes).all()


def test_sizes_that_were_never_measured_leave_nothing() -> None:
    text = SMALL + "profile: {source: table, path: m}\n"
    experiment = experiment_from(text, {"m/profile.yaml": DESCRIPTION, "m/T4.csv": TABLE})
    with pytest.raises(ValueError, match=r"profile m has none of the micro-batch sizes \[2\]"):
        publish(experiment, sizes=(2,))


def test_boards_that_differ_in_memory_only_are_refused() -> None:
    node = "    - {count: 2, device: T4, slots: 2, intra_gbit_per_s: 50, inter_gbit_per_s: 10}\n"
    two = node.replace("T4", "A100-40") + node.replace("T4", "A100-80")
    with pytest.raises(ValueError, match="does not tell A100-40, A100-80 apart"):
        publish(small_experiment((node, two)))


def test_a_model_with_a_gap_between_its_blocks_is_refused() -> None:
    experiment = small_experiment()
    layers = experiment.model.layers
    gap = replace(experiment.model, layers=(*layers[:2], layers[-2], *layers[2:]))
    with pytest.raises(ValueError, match="gpt2 has others in between or lacks an end"):
        publish(replace(experiment, model=gap))
