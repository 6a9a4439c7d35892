from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from amp_ray.clusters.constants import Constants
from amp_ray.cost.kernels import PartRows, earliest_starts, part_starts
from amp_ray.cost.memory import LayerMemory, MemoryModel, _largest_within, in_flight
from amp_ray.cost.roofline import Rank
from amp_ray.cost.weights import Weights
from amp_ray.models.model import Layer, Model
from amp_ray.models.operator import Elementwise
from amp_ray.runtimes.traits import RuntimeTraits, find_optimizer
from amp_ray.strategies.candidate import Candidate, StageOptions
from amp_ray.strategies.recompute import Recompute, RecomputeKind
from amp_ray.strategies.zero import Zero

BLOCK_BYTES = 100.0
"""What one sample of a block keeps, and what crosses a boundary: 50 elements of 2 bytes."""

PARAMETERS_BYTES = 400.0
"""Weights and gradients of a block: 100 parameters of 2 + 2 bytes."""


@pytest.fixture
def layers(model: Model, rank: Rank, traits: RuntimeTraits) -> LayerMemory:
    return LayerMemory(model=model, rank=rank, traits=traits)


def memory_of(
    layers: LayerMemory, constants: Constants, again: RecomputeKind = "none", **degrees: int
) -> MemoryModel:
    """Return the memory of a candidate that trains with plain SGD."""
    weights = Weights(model=layers.model, tp=layers.rank.tp)
    candidate = Candidate(
        micro_batch_size=layers.rank.micro_batch_size,
        options=StageOptions(
            tp=layers.rank.tp,
            dp=degrees.get("dp", 1),
            recompute=Recompute(kind=again, layers=degrees.get("num_again")),
            zero=Zero(stage=degrees.get("zero_stage", 0)),
        ),
        pp=degrees.get("pp", 1),
        num_micro_batches=degrees.get("num_micro_batches", 8),
    )
    return MemoryModel.of(candidate, layers, weights, find_optimizer("sgd"), constants)


def peaks(memory: MemoryModel, bounds: tuple[int, ...]) -> tuple[float, ...]:
    """Return the peak of every stage."""
    return tuple(memory.peak(stage, *ends) for stage, ends in enumerate(pairwise(bounds)))


def test_a_stage_holds_one_micro_batch_for_itself_and_each_stage_behind_it() -> None:
    assert [in_flight(stage, 4, 16) for stage in range(4)] == [4, 3, 2, 1]
    assert [in_flight(stage, 4, 2) for stage in range(4)] == [2, 2, 2, 1]


def test_interleaved_stages_run_further_ahead() -> None:
    # chunks ahead: 2 x 3 + 4 = 10, and one being computed, of half a stage each
    assert in_flight(0, 4, 16, virtual_stages=2) == 5.5
    assert in_flight(3, 4, 16, virtual_stages=2) == 2.5
    assert in_flight(0, 4, 3, virtual_stages=2) == 3


def test_block_keeps_what_it_saves_or_with_recompute_its_input(
    layers: LayerMemory, block: Layer
) -> None:
    (work,) = block.elementwise
    heavy = replace(block, operators=(replace(work, saved_elements=400),))
    assert layers.kept_bytes(heavy, "none") == 800.0
    assert layers.kept_bytes(heavy, "full") == BLOCK_BYTES
    assert layers.kept_bytes(replace(heavy, kind="head"), "full") == 800.0


def test_selective_recompute_keeps_what_enters_the_attention_core(
    layers: LayerMemory, block: Layer
) -> None:
    (work,) = block.elementwise
    core = (
        replace(work, saved_elements=30, core="input"),
        replace(work, saved_elements=500, core="inner"),
    )
    attention = replace(block, operators=(work, *core))
    all_bytes = layers.kept_bytes(attention, "none")
    assert layers.kept_bytes(attention, "selective") == all_bytes - 1000.0
    assert layers.temporary_bytes(attention, "selective") == 3 * 1000.0


def test_part_of_a_stage_is_computed_again(layers: LayerMemory, constants: Constants) -> None:
    (work,) = layers.model.layers[0].elementwise
    heavy = replace(layers.model.layers[0], operators=(replace(work, saved_elements=400),))
    heavier = replace(layers, model=replace(layers.model, layers=(heavy,) * 4))
    part = memory_of(heavier, constants, "full", pp=2, num_again=1)
    first, last = peaks(part, (0, 2, 4))
    # states 800, temporaries of the block that is not computed again 3 x 800
    # first: 2 in flight of an input and all of a block, 2 to send from; last: 1, and 2 that arrive
    assert first == 800 + 2400 + 2 * (BLOCK_BYTES + 800) + 2 * BLOCK_BYTES
    assert last == 800 + 2400 + (BLOCK_BYTES + 800) + 2 * BLOCK_BYTES
    whole, enough = (
        memory_of(heavier, constants, "full", pp=2),
        memory_of(heavier, constants, "full", pp=2, num_again=2),
    )
    assert peaks(enough, (0, 2, 4)) == peaks(whole, (0, 2, 4))


def test_micro_batch_precision_and_tp_scale_what_is_kept(layers: LayerMemory, block: Layer) -> None:
    rank = replace(layers.rank, micro_batch_size=3, precision="fp32", tp=2)
    (work,) = block.elementwise
    sharded = replace(block, operators=(replace(work, sharded=True),))
    scaled = replace(layers, rank=rank)
    assert scaled.kept_bytes(block, "none") == 600.0
    assert scaled.kept_bytes(sharded, "none") == 300.0


def test_running_layer_needs_three_of_its_largest_tensors(
    layers: LayerMemory, block: Layer
) -> None:
    assert layers.temporary_bytes(block, "none") == 3 * BLOCK_BYTES


def test_layer_that_is_computed_again_needs_all_that_it_saves(
    layers: LayerMemory, block: Layer
) -> None:
    (work,) = block.elementwise
    many = replace(block, operators=(work,) * 7)
    assert layers.temporary_bytes(many, "full") == 7 * BLOCK_BYTES


def test_logits_and_their_copies_live_at_the_end(layers: LayerMemory, block: Layer) -> None:
    loss = Elementwise(name="loss", forward_elements=0, backward_elements=0, logits=100)
    head = replace(block, kind="head", operators=(loss,))
    two = replace(layers, rank=replace(layers.rank, tp=2))
    assert layers.temporary_bytes(head, "none") == 1400.0  # 14 bytes per logit
    assert two.temporary_bytes(head, "none") == 700.0


def test_one_stage_adds_up(layers: LayerMemory, constants: Constants) -> None:
    # four blocks: states 1600, kept 400, temporaries 300
    assert peaks(memory_of(layers, constants), (0, 4)) == (2300.0,)


def test_stages_keep_micro_batches_in_flight_and_buffers(
    layers: LayerMemory, constants: Constants
) -> None:
    first, last = peaks(memory_of(layers, constants, pp=2), (0, 2, 4))
    # states 800, temporaries 300; first: 2 in flight of 200, 2 buffers to send from
    assert first == 800 + 300 + 2 * 200 + 2 * BLOCK_BYTES
    # last: 1 in flight, a buffer to compute from and one that is arriving
    assert last == 800 + 300 + 200 + 2 * BLOCK_BYTES


def test_masks_take_room_in_every_buffer(
    layers: LayerMemory, constants: Constants, traits: RuntimeTraits
) -> None:
    plain = peaks(memory_of(layers, constants, pp=2), (0, 2, 4))
    with_mask = replace(layers, traits=replace(traits, mask_bytes=7.0))
    masked = peaks(memory_of(with_mask, constants, pp=2), (0, 2, 4))
    assert [b - a for a, b in zip(plain, masked, strict=True)] == [14.0, 14.0]


def test_recompute_keeps_inputs_and_two_buffers_at_each_end(
    layers: LayerMemory, constants: Constants
) -> None:
    found = peaks(memory_of(layers, constants, "full", pp=4), (0, 1, 2, 3, 4))
    # states 400, working set 100; checkpoints 4, 3, 2, 1; buffers at one end, both, both, one
    assert found == (400 + 100 + 600, 400 + 100 + 700, 400 + 100 + 600, 400 + 100 + 300)


def test_states_follow_precision_and_optimizer(
    layers: LayerMemory, constants: Constants, traits: RuntimeTraits
) -> None:
    mixed = replace(layers, traits=replace(traits, master_bytes_per_parameter=8.0))
    adam = find_optimizer("adam")
    expected = {"fp16": 4 + 8 + 8, "bf16": 8 + 8 + 8, "fp32": 8 + 8}
    for precision, num_bytes in expected.items():
        rank = replace(layers.rank, precision=precision)  # type: ignore[arg-type]
        sgd = memory_of(replace(mixed, rank=rank), constants)
        with_adam = replace(sgd, optimizer=adam)
        rest = peaks(sgd, (0, 4))[0] - 400 * (num_bytes - 8)
        assert peaks(with_adam, (0, 4))[0] == pytest.approx(rest + 400 * num_bytes)


def test_sharded_states_are_divided_by_dp(
    layers: LayerMemory, constants: Constants, traits: RuntimeTraits
) -> None:
    mixed = replace(layers, traits=replace(traits, master_bytes_per_parameter=8.0))
    whole = peaks(memory_of(mixed, constants, dp=4), (0, 4))[0]
    sharded = peaks(memory_of(mixed, constants, dp=4, zero_stage=1), (0, 4))[0]
    assert whole - sharded == 400 * 6


def test_bucket_is_needed_only_with_replicas_and_up_to_its_size(
    layers: LayerMemory, constants: Constants, traits: RuntimeTraits
) -> None:
    bucket = replace(traits, bucket_bytes_per_element=6.0, bucket_elements=100.0)
    with_bucket = replace(layers, traits=bucket)
    alone = peaks(memory_of(with_bucket, constants), (0, 4))[0]
    two = peaks(memory_of(with_bucket, constants, dp=2), (0, 4))[0]
    assert two - alone == 600.0
    single = replace(with_bucket, rank=replace(layers.rank, precision="fp32"))
    difference = (
        peaks(memory_of(single, constants, dp=2), (0, 4))[0]
        - peaks(memory_of(single, constants), (0, 4))[0]
    )
    assert difference == 1200.0


def test_step_and_bucket_do_not_live_at_the_same_time(
    layers: LayerMemory, constants: Constants, traits: RuntimeTraits
) -> None:
    both = replace(traits, bucket_bytes_per_element=6.0, step_bytes_per_parameter=8.0)
    plain = peaks(memory_of(layers, constants, dp=2), (0, 4))[0]
    found = peaks(memory_of(replace(layers, traits=both), constants, dp=2), (0, 4))[0]
    assert found - plain == 8.0 * 400


def test_context_and_allocator_come_on_top(
    layers: LayerMemory, constants: Constants, traits: RuntimeTraits
) -> None:
    real = replace(traits, context_bytes=1000.0, allocator_factor=1.5)
    scaled = replace(constants, context_scale=2.0, allocator_scale=2.0)
    peak = peaks(memory_of(replace(layers, traits=real), scaled), (0, 4))
    assert peak == (2000.0 + 1600.0 + 3.0 * 700.0,)


def test_tied_weight_counts_once_within_a_stage(
    layers: LayerMemory, constants: Constants, block: Layer, model: Model
) -> None:
    holder = replace(block, tied_parameters=60)
    tied = replace(layers, model=replace(model, layers=(holder, block, block, holder)))
    plain = peaks(memory_of(layers, constants), (0, 4))[0]
    assert peaks(memory_of(tied, constants), (0, 4))[0] == plain - 60 * 4


def test_earliest_start_is_where_a_stage_still_fits(
    layers: LayerMemory, constants: Constants
) -> None:
    # n blocks need 500 n + 300, 200 more where something enters, 100 where something leaves
    memory = memory_of(layers, constants)
    assert memory.earliest_starts(np.array([1400.0])).tolist() == [[0, 0, 0, 2, 3]]
    assert memory.earliest_starts(np.array([99.0])).tolist() == [[0, 1, 2, 3, 4]]


def test_start_behind_a_large_boundary_is_passed_over(
    layers: LayerMemory, constants: Constants, block: Layer, model: Model
) -> None:
    # 10 kB cross the boundary after layer 2: only a stage that does not start there fits
    wide = replace(block, output_elements=5000.0)
    chain = replace(layers, model=replace(model, layers=(block, block, wide, block)))
    starts = memory_of(chain, constants).earliest_starts(np.array([3000.0]))
    assert starts[0].tolist() == [0, 0, 0, 3, 0]


def test_a_device_may_have_a_context_of_its_own(layers: LayerMemory, constants: Constants) -> None:
    traits = replace(layers.traits, context_bytes=500.0)
    gpu = peaks(memory_of(replace(layers, traits=traits), constants), (0, 4))
    cpu_rank = replace(layers.rank, device=replace(layers.rank.device, context_bytes=300))
    cpu = peaks(memory_of(replace(layers, traits=traits, rank=cpu_rank), constants), (0, 4))
    assert gpu[0] - cpu[0] == pytest.approx(200.0)


def test_a_bucket_without_a_replica_takes_memory_too(
    layers: LayerMemory, constants: Constants
) -> None:
    traits = replace(layers.traits, bucket_bytes_per_element=1e6)
    plain = peaks(memory_of(replace(layers, traits=traits), constants), (0, 4))
    alone = replace(traits, buckets_alone=True)
    assert peaks(memory_of(replace(layers, traits=alone), constants), (0, 4)) > plain


@pytest.mark.parametrize("seed", range(40))
def test_stages_one_after_another_start_as_early_as_each_alone(seed: int) -> None:
    chance = np.random.default_rng(seed)
    num_layers, pp = 12, 6
    layers, plain = chance.uniform(0.2, 1.0, (2, 4, num_layers + 1))
    for rows in (layers, plain):
        rows[:2] = np.cumsum(rows[:2], axis=1)
    plain[0] = layers[0]
    counts = np.concatenate(([0], np.cumsum(chance.integers(0, 2, num_layers))))
    stages = chance.uniform(0.5, 1.0, (pp, 9))
    stages[:, 1:4] = np.sort(chance.uniform(0.0, 4.0, (3, pp)))[:, ::-1].T
    stages[:, [0, 4, 5, 6, 7, 8]] = stages[0, [0, 4, 5, 6, 7, 8]]
    stages[4] = chance.uniform(0.5, 1.0, 9)  # needs more of some, and less of others
    limits = np.full(pp, chance.uniform(4.0, 40.0))
    tied = np.array([0.0, num_layers - 1.0, 0.3])
    rows = PartRows(
        layers=layers,
        plain=plain,
        layers_most=_largest_within(layers[2, :-1]),
        plain_most=_largest_within(plain[2, :-1]),
        block_counts=counts,
        first_with=np.searchsorted(counts, np.arange(counts[-1] + 1)),
    )
    whole = earliest_starts(layers, stages, tied, limits)
    parts = part_starts(2, rows, stages, stages, tied, limits)
    for stage in range(pp):
        own = slice(stage, stage + 1)
        alone = earliest_starts(layers, stages[own], tied, limits[own])
        assert whole[own].tolist() == alone.tolist()
        alone = part_starts(2, rows, stages[own], stages[own], tied, limits[own])
        assert parts[own].tolist() == alone.tolist()
    assert (whole < np.arange(num_layers + 1)).any()
