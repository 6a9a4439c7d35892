from dataclasses import replace

import numpy as np
import pytest

from amp_ray.cost.instructions import Instruction, Schedule
from amp_ray.cost.kernels import simulate_overlapped, simulate_sliced
from amp_ray.cost.memory import in_flight
from amp_ray.cost.model import NO_SLICES, CostModel
from amp_ray.cost.schedule import time_instructions
from amp_ray.cost.slices import largest_share, slice_model, slice_places
from amp_ray.cost.stages import PlacedStages
from amp_ray.errors import InputError
from amp_ray.spec.candidate import Candidate, StageOptions
from amp_ray.spec.experiment import Experiment
from amp_ray.spec.strategy import Strategy, TokenSlices
from support.experiments import experiment_from

TEXT = """\
name: long
model: {family: llama, num_layers: 8, hidden_size: 4096, num_heads: 32, sequence_length: 8192,
        vocab_size: 32000}
cluster:
  nodes: [{count: 1, device: A100-80, slots: 4, intra_gbit_per_s: 2400, inter_gbit_per_s: 100}]
runtime: torch
global_batch_size: 4
"""
BOUNDS = (0, 3, 5, 8, 11)


@pytest.fixture(scope="module")
def experiment() -> Experiment:
    return experiment_from(TEXT)


def strategy(token_slices: TokenSlices = (), *, size: int = 2, pp: int = 4) -> Strategy:
    candidate = Candidate(
        micro_batch_size=size,
        options=StageOptions(tp=1, dp=4 // pp),
        pp=pp,
        num_micro_batches=pp // size,
    )
    plan = Strategy.uniform(candidate, BOUNDS if pp == 4 else (0, 6, 11))
    return replace(plan, token_slices=token_slices)


@pytest.mark.parametrize("seed", range(12))
def test_the_simulation_equals_timing_the_instructions_one_by_one(seed: int) -> None:
    rng = np.random.default_rng(seed)
    pp, slices, micro_batches = (int(number) for number in rng.integers(1, 6, 3))
    passes_s, sends_s = rng.random((2, pp, slices)), rng.random((2, max(0, pp - 1), slices))

    def seconds(instruction: Instruction) -> float:
        piece = instruction.token_slice or 0
        way = 0 if "F" in instruction.kind.replace("SEND_", "").replace("RECV_", "") else 1
        if instruction.kind in {"F", "B"}:
            return float(passes_s[way, instruction.stage, piece])
        if instruction.peer is None:
            return 0.0
        return float(sends_s[way, min(instruction.stage, instruction.peer), piece])

    orders = Schedule(pp=pp, num_slices=(slices,) * micro_batches).lists()
    timed = time_instructions(orders, seconds)
    expected = max(each.end_s for order in timed for each in order)
    assert simulate_sliced(passes_s, sends_s, micro_batches) == pytest.approx(expected, rel=1e-12)


def test_one_slice_is_plain_1f1b() -> None:
    rng = np.random.default_rng(0)
    passes_s, sends_s = rng.random((2, 4, 1)), rng.random((2, 3, 1))
    plain = simulate_overlapped(passes_s[:, :, 0].copy(), sends_s[:, :, 0].copy(), 7)
    assert simulate_sliced(passes_s, sends_s, 7) == plain


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


def test_later_slices_take_longer(experiment: Experiment) -> None:
    model = CostModel(experiment=experiment)
    stages = PlacedStages.of_strategy(strategy())
    times = [
        model.slice_seconds(stages, BOUNDS, (2, 1024, context))[0][:2].sum()
        for context in (0, 2048, 7168)
    ]
    assert times == sorted(times)
    assert times[0] < times[2]


def test_what_the_profile_measured_corrects_slices(experiment: Experiment) -> None:
    model = CostModel(experiment=experiment)
    own = PlacedStages.of_strategy(strategy())
    alone = model.slice_seconds(own, BOUNDS, (2, 8192, 0))
    assert alone[0] == pytest.approx(
        model.seconds(own, BOUNDS)[0]
        + np.array([1, 0, 0])[:, None, None] * experiment.constants.host_s_per_micro_batch
    )


def test_a_runtime_that_passes_on_whole_micro_batches_cannot_launch_them() -> None:
    estimate = CostModel(experiment=experiment_from(TEXT.replace("torch", "deepspeed"))).estimate(
        strategy(((2, (4096, 4096)),))
    )
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


def test_a_stage_holds_a_whole_micro_batch_and_a_slice_per_stage_behind_it() -> None:
    assert in_flight(0, 4, 16, slice_share=0.25) == 1.75
    assert in_flight(3, 4, 16, slice_share=0.25) == 1.0
    assert in_flight(0, 4, 1, slice_share=0.25) == 1.0
