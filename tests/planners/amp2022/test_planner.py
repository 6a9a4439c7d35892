"""What the published planner takes and refuses; its figures are in `test_published`."""

from dataclasses import replace
from typing import Final

import numpy as np
import pytest

from amp_ray.cost.estimate import Infeasible
from amp_ray.errors import InputError
from amp_ray.inputs.experiment import Experiment
from amp_ray.planners.amp2022.chain import gpt2_chain, work_bounds
from amp_ray.planners.amp2022.planner import Amp2022Planner, Network, planned_bounds
from amp_ray.strategies.candidate import Candidate
from support.bad_input import COLUMNS, EXPERIMENT, HEADER, Files, Refused
from support.bad_input import DESCRIPTION as BAD_DESCRIPTION
from support.checked import as_estimate, grid_of
from support.experiments import experiment_from

GPT2 = gpt2_chain(num_layers=4, hidden_size=8, sequence_length=4, vocab_size=16)
NETWORK = Network(
    node_of_rank=(0, 0, 1, 1), inter_bytes_per_s=(1e9, 1e9), intra_bytes_per_s=(4e9, 4e9)
)


def pipeline(micro_batch_size: int, num_micro_batches: int) -> Candidate:
    """Four stages of one device."""
    return grid_of(pp=4, micro_batch_size=micro_batch_size, num_micro_batches=num_micro_batches)


def test_a_candidate_uses_every_rank_and_bounds_cover_the_list() -> None:
    """Where the formulas are called by hand; a user's strategy is checked before."""
    with pytest.raises(ValueError, match="ranks, the network has 3: every rank needs one device"):
        planned_bounds(pipeline(1, 8), np.ones(10), GPT2, replace(NETWORK, node_of_rank=(0, 0, 1)))
    for bounds in ((1, 10), (0, 9), ()):
        with pytest.raises(ValueError, match="must run from 0 to 10"):
            work_bounds(GPT2, bounds)


PUBLISHED = """\
name: tiny
model: {family: gpt2, num_layers: 3, hidden_size: 8, num_heads: 2, sequence_length: 4,
        vocab_size: 16, layer_list: amp-2022}
cluster:
  nodes:
    - {count: 2, device: T4, slots: 2, intra_gbit_per_s: 32, inter_gbit_per_s: 8}
profile: {source: table, path: times}
global_batch_size: 8
"""
TIMES = "layer,tp,micro_batch_size,forward_s\n" + "".join(
    f"{layer},{tp},1,{1.0 / tp}\n" for tp in (1, 2) for layer in range(9)
)
DESCRIPTION = """\
num_layers: 9
model: tiny
precision: fp16
hardware: none
versions: none
"""
OTHER_NODE = "    - {count: 1, device: T4, slots: 4, intra_gbit_per_s: 32, inter_gbit_per_s: 8}\n"
FILES = {"times/profile.yaml": DESCRIPTION, "times/T4.csv": TIMES}


def published(*replacements: tuple[str, str]) -> Experiment:
    text = PUBLISHED
    for old, new in replacements:
        assert old in text
        text = text.replace(old, new)
    return experiment_from(text, FILES)


def test_more_stages_than_transformer_layers_is_a_result_for_one_micro_batch() -> None:
    result = Amp2022Planner(experiment=published()).plan(pipeline(8, 1))
    assert isinstance(result, Infeasible)
    assert str(result.reason) == "more stages than layers: pp 4, 3 layers with work"


def test_the_parts_of_a_prediction_add_up() -> None:
    result = as_estimate(Amp2022Planner(experiment=published()).plan(pipeline(1, 8)))
    assert result.breakdown is not None
    assert result.breakdown.total_s == pytest.approx(result.iteration_time_s, rel=1e-12)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("profile: {source: table, path: times}\n", "", "a measured profile"),
        (
            "    - {count: 2, device: T4, slots: 2, intra",
            f"{OTHER_NODE}    - {{count: 2, device: T4, slots: 2, intra",
            "same number of slots",
        ),
    ],
)
def test_experiments_beyond_the_published_formulas_are_refused(
    old: str, new: str, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        Amp2022Planner(experiment=published((old, new)))


def test_other_layer_lists_are_refused() -> None:
    files = {**FILES, "times/profile.yaml": DESCRIPTION.replace("9", "6")}
    files["times/T4.csv"] = "".join(
        line for line in TIMES.splitlines(keepends=True) if not line.startswith(("6", "7", "8"))
    )
    text = PUBLISHED.replace(", layer_list: amp-2022", "")
    with pytest.raises(InputError, match="layer_list: amp-2022"):
        Amp2022Planner(experiment=experiment_from(text, files))


def test_the_mean_of_unlike_devices_is_taken_by_their_number() -> None:
    nodes = (
        "    - {count: 1, device: V100-16, slots: 2, intra_gbit_per_s: 32, inter_gbit_per_s: 8}\n"
    )
    text = PUBLISHED.replace("count: 2", "count: 3").replace("profile:", nodes + "profile:")
    files = {**FILES, "times/V100-16.csv": TIMES.replace("1.0\n", "5.0\n")}
    mixed = Amp2022Planner(experiment=experiment_from(text, files))
    candidate = grid_of(dp=8)
    result = as_estimate(mixed.plan(candidate))
    assert result.breakdown is not None
    # Nine layers, three times the forward pass of (3 * 1 s + 1 * 5 s) / 4.
    assert result.breakdown.compute_s == pytest.approx(9 * 3 * 2.0)


def test_the_baseline_says_what_it_needs(refused: Refused) -> None:
    message = refused({"experiment.yaml": EXPERIMENT}, "--cost-model", "amp-2022")
    assert message.startswith("experiment.yaml: cost model amp-2022 needs a measured profile")


def test_the_baseline_refuses_cuts_that_leave_a_stage_idle(refused: Refused) -> None:
    bounds = "0 20 25 56"  # entries 20 to 24 of the published list only pass data on
    files: Files = {
        "experiment.yaml": GENERATOR,
        "strategies.csv": f"{COLUMNS},bounds\n1,3,1,1,{bounds}\n",
    }
    options = ("--strategies", "strategies.csv", "--cost-model", "amp-2022")
    message = refused(files, *options, command="score")
    assert message.startswith("strategies.csv:2: bounds=(0, 20, 25, 56) leave a stage without a w")


def test_the_baseline_refuses_a_model_that_was_not_published(refused: Refused) -> None:
    text = (
        GENERATOR.replace("[12, 0, 0, 0, 0, 12]", "[1, 1]")
        .replace("layer_list: amp-2022", "layer_list: runtime")
        .replace("shipped:amp-2022-transgan", "measured")
    )
    files: Files = {
        "experiment.yaml": text,
        "measured/profile.yaml": BAD_DESCRIPTION.replace("5", "4"),
        "measured/V100-16.csv": HEADER + "".join(f"{layer},1,1,0.001\n" for layer in range(4)),
    }
    message = refused(files, "--cost-model", "amp-2022")
    assert message.startswith("experiment.yaml: depth=(1, 1): the published list is known for 6 s")


GENERATOR: Final = """\
name: generator
model: {family: transgan, hidden_size: 1024, num_heads: 4, depth: [12, 0, 0, 0, 0, 12],
        bottom_width: 9, window_size: 18, layer_list: amp-2022}
cluster:
  nodes:
    - {count: 3, device: V100-16, slots: 1, intra_gbit_per_s: 170, inter_gbit_per_s: 10}
profile: {source: table, path: "shipped:amp-2022-transgan"}
global_batch_size: 3
"""
