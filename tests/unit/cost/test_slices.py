from dataclasses import replace

import numpy as np
import pytest

from amp_ray.cost.model import CostModel, SliceCosts
from amp_ray.cost.samples import (
    covers_slices,
    largest_share,
    measured_s,
    slice_model,
    slice_places,
)
from amp_ray.cost.stages import PlacedStages
from amp_ray.errors import InputError
from amp_ray.inputs.experiment import Experiment
from amp_ray.inputs.profile import Anchor, Profile
from amp_ray.inputs.slice_table import SlicePoints
from amp_ray.runtimes.traits import NO_SLICES
from amp_ray.strategies.strategy import Strategy, TokenSlices
from support.checked import grid_of
from support.experiments import LONG, experiment_from

TEXT = LONG + "global_batch_size: 4\n"
BOUNDS = (0, 3, 5, 8, 11)


@pytest.fixture(scope="module")
def experiment() -> Experiment:
    return experiment_from(TEXT)


def strategy(token_slices: TokenSlices = (), *, size: int = 2, pp: int = 4) -> Strategy:
    candidate = grid_of(dp=4 // pp, micro_batch_size=size, pp=pp, num_micro_batches=pp // size)
    plan = Strategy.uniform(candidate, BOUNDS if pp == 4 else (0, 6, 11))
    return replace(plan, token_slices=token_slices)


def slice_costs(experiment: Experiment) -> SliceCosts:
    stages = PlacedStages.of_strategy(strategy())
    return SliceCosts(whole=CostModel(experiment=experiment), stages=stages)


def test_a_micro_batch_as_one_slice_takes_what_it_takes_whole(experiment: Experiment) -> None:
    model = CostModel(experiment=experiment)
    whole, sliced = (model.estimate(strategy(slices)) for slices in ((), ((2, (8192,)),)))
    assert sliced.iteration_time_s == pytest.approx(whole.iteration_time_s, rel=1e-9)
    assert sliced.breakdown is not None
    assert sliced.breakdown.optimizer_s > 0


def test_slices_fill_a_pipeline_that_starves_and_save_memory(experiment: Experiment) -> None:
    model = CostModel(experiment=experiment)
    slices = ((4, (2048, 2048, 2048, 2048)),)
    whole, sliced = (model.estimate(strategy(each, size=4)) for each in ((), slices))
    assert whole.breakdown is not None
    assert sliced.breakdown is not None
    assert sliced.breakdown.bubble_s < 0.5 * whole.breakdown.bubble_s
    assert sliced.breakdown.compute_s > whole.breakdown.compute_s
    two, cut = (model.estimate(strategy(each, size=1)) for each in ((), ((1, (2048,) * 4),)))
    assert cut.peak_memory_bytes[0] < two.peak_memory_bytes[0]


def test_costs_that_whole_and_cut_micro_batches_share_give_what_each_takes(
    experiment: Experiment,
) -> None:
    plans = [strategy(slices, size=4) for slices in ((), ((4, (2048,) * 4),), ())]
    model = CostModel(experiment=experiment)
    costs = model.stage_costs(PlacedStages.of_strategy(plans[0]))
    for plan in plans:
        assert model.estimate_from(costs, plan) == CostModel(experiment=experiment).estimate(plan)


def test_later_slices_take_longer(experiment: Experiment) -> None:
    slices = slice_costs(experiment)
    times = [slices.seconds(BOUNDS, (2, 1024, context))[0][:2].sum() for context in (0, 2048, 7168)]
    assert times == sorted(times)
    assert times[0] < times[2]


def test_what_the_profile_measured_corrects_slices(experiment: Experiment) -> None:
    slices = slice_costs(experiment)
    alone = slices.seconds(BOUNDS, (2, 8192, 0))
    assert alone[0] == pytest.approx(
        slices.whole.seconds(slices.stages, BOUNDS)[0]
        + np.array([1, 0, 0])[:, None, None] * experiment.constants.host_s_per_micro_batch
    )


def test_a_runtime_that_passes_on_whole_micro_batches_cannot_launch_them() -> None:
    model = CostModel(experiment=experiment_from(TEXT.replace("torch", "deepspeed")))
    estimate = model.with_columns(model.estimate(strategy(((2, (4096, 4096)),))))
    assert not estimate.launchable
    assert NO_SLICES in estimate.warnings


def test_models_without_tokens_have_no_slices(experiment: Experiment) -> None:
    pictures = replace(experiment.model, shape=replace(experiment.model.shape, vocab_size=0))
    with pytest.raises(InputError, match="no sequence to cut into token slices"):
        slice_model(pictures, experiment.traits, tokens=8, context=0)


def test_places_and_shares_count_tokens_of_all_sequences() -> None:
    slices: TokenSlices = ((1, (6, 2)), (3, (4, 4)))
    assert slice_places(slices) == [(1, 6, 0), (1, 2, 6), (3, 4, 0), (3, 4, 4)]
    assert largest_share(slices) == 12 / 32


TIMES_S = {"embedding": 0.004, "block": 0.1, "norm": 0.002, "head": 0.006}
"""Of whole sequences, forward; a backward pass takes twice as long."""


def block_s(sequences: int, tokens: int, context: int) -> float:
    return 1e-3 + sequences * (1e-5 * tokens + 2e-6 * context + 3e-10 * tokens * context)


def profiled(experiment: Experiment, *, device: str = "A100-80") -> Experiment:
    """Give an experiment a profile of two sizes of micro-batches, with slices."""
    layers = experiment.model.layers
    whole = np.array([TIMES_S.get(layer.kind, 0.003) for layer in layers])
    table = {
        (1, size): Anchor(forward_s=size * whole, backward_s=2 * size * whole) for size in (1, 2)
    }
    places = [
        (sequences, tokens, context)
        for sequences in (1, 2)
        for tokens in range(1024, 8193, 1024)
        for context in (0, 2048, 4096)
        if tokens + context <= 8192
    ]
    forward_s = np.array([block_s(*place) for place in places])
    points = SlicePoints(
        places=np.array(places),
        times_s=np.stack([forward_s, 2 * forward_s], axis=1),
        memory_mb=np.full(len(places), np.nan),
    )
    profile = Profile(source="measured", tables={"A100-80": table}, slices={(device, 1): points})
    return replace(experiment, profile=profile)


def test_slices_have_to_be_measured_on_every_device_at_every_degree(
    experiment: Experiment,
) -> None:
    profile = profiled(experiment).profile
    assert covers_slices(profile, ["A100-80"], [1])
    assert not covers_slices(profile, ["A100-80"], [1, 2])
    assert not covers_slices(profile, ["A100-80", "V100-16"], [1])


@pytest.mark.parametrize("place", [(1, 1024, 0), (2, 8192, 0), (1, 1024, 7168), (2, 2048, 1024)])
def test_measured_slices_are_what_passes_take(
    experiment: Experiment, place: tuple[int, int, int]
) -> None:
    given = profiled(experiment)
    found, _ = slice_costs(given).seconds(BOUNDS, place)
    host_s = given.constants.host_s_per_micro_batch
    # The second stage has two blocks.
    assert found[0, 1, 0] == pytest.approx(2 * block_s(*place) + host_s, rel=1e-6)
    assert found[1, 1, 0] >= 4 * block_s(*place)
    # The first one the embedding as well, which takes its part of what sequences take.
    embedding_s = TIMES_S["embedding"] * place[0] * place[1] / 8192
    assert found[0, 0, 0] == pytest.approx(2 * block_s(*place) + embedding_s + host_s, rel=1e-6)


def test_slices_of_another_device_leave_them_counted(experiment: Experiment) -> None:
    others = profiled(experiment, device="T4")
    none = replace(others, profile=replace(others.profile, slices={}))
    measured, counted, expected = (
        slice_costs(given).seconds(BOUNDS, (1, 1024, 7168))[0].tolist()
        for given in (profiled(experiment), others, none)
    )
    assert counted == expected
    assert measured != counted


def test_lengths_between_and_beyond_the_measured_ones_are_estimated(
    experiment: Experiment,
) -> None:
    points = profiled(experiment).profile.slices["A100-80", 1]
    halfway = (block_s(1, 1024, 0) + block_s(1, 2048, 0)) / 2
    assert measured_s(points, 0, (1, 1536, 0)) == pytest.approx(halfway)
    assert measured_s(points, 0, (1, 100, 0)) == pytest.approx(block_s(1, 1024, 0))
    assert measured_s(points, 0, (1, 16384, 0)) == pytest.approx(2 * block_s(1, 8192, 0))
