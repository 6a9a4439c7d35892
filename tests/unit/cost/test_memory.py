import pickle
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from amp_ray.clusters.constants import Constants
from amp_ray.cost.kernels.stages import PartRows, earliest_starts, part_starts
from amp_ray.cost.memory import LayerMemory, MemoryModel, _largest_within
from amp_ray.cost.roofline import Rank
from amp_ray.cost.weights import Weights
from amp_ray.models.model import Layer, Model
from amp_ray.models.operator import Elementwise, Gemm
from amp_ray.runtimes.traits import RUNTIMES, RuntimeTraits, find_optimizer
from amp_ray.strategies.recompute import Recompute, RecomputeKind
from amp_ray.strategies.zero import Zero
from amp_ray.units import Precision
from support.checked import grid_of
from support.mixed_cluster import mixed_candidate, mixed_cost_model

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
    candidate = grid_of(
        tp=layers.rank.tp,
        dp=degrees.get("dp", 1),
        recompute=Recompute(kind=again, layers=degrees.get("num_again")),
        zero=Zero(stage=degrees.get("zero_stage", 0)),
        micro_batch_size=layers.rank.micro_batch_size,
        pp=degrees.get("pp", 1),
        num_micro_batches=degrees.get("num_micro_batches", 8),
    )
    weights = Weights(model=layers.model, tp=layers.rank.tp)
    return MemoryModel.of(candidate, layers, weights, find_optimizer("sgd"), constants)


Peaks = Callable[..., tuple[float, ...]]


@pytest.fixture
def peaks(layers: LayerMemory, constants: Constants) -> Peaks:
    """Return the peak of every stage, under changes to the plain rank, runtime and candidate."""

    def change(
        bounds: tuple[int, ...] = (0, 4),
        again: RecomputeKind = "none",
        *,
        rank: dict[str, object] | None = None,
        model: Model = layers.model,
        degrees: dict[str, int] | None = None,
        fields: dict[str, object] | None = None,
        **traits: object,
    ) -> tuple[float, ...]:
        changed = replace(
            layers,
            model=model,
            rank=replace(layers.rank, **(rank or {})),  # type: ignore[arg-type]
            traits=replace(layers.traits, **traits),  # type: ignore[arg-type]
        )
        pp = len(bounds) - 1
        memory = memory_of(changed, constants, again, pp=pp, **(degrees or {}))
        memory = replace(memory, **(fields or {}))  # type: ignore[arg-type]
        return tuple(memory.peak(stage, *ends) for stage, ends in enumerate(pairwise(bounds)))

    return change


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


def test_part_of_a_stage_is_computed_again(model: Model, block: Layer, peaks: Peaks) -> None:
    (work,) = block.elementwise
    heavy = replace(block, operators=(replace(work, saved_elements=400),))
    heavier = replace(model, layers=(heavy,) * 4)

    def stages(num_again: int | None) -> tuple[float, ...]:
        degrees = {} if num_again is None else {"num_again": num_again}
        return peaks((0, 2, 4), "full", model=heavier, degrees=degrees)

    # states 800, temporaries of the block that is not computed again 3 x 800
    # first: 2 in flight of an input and all of a block, 2 to send from; last: 1, and 2 that arrive
    assert stages(1) == (
        800 + 2400 + 2 * (BLOCK_BYTES + 800) + 2 * BLOCK_BYTES,
        800 + 2400 + (BLOCK_BYTES + 800) + 2 * BLOCK_BYTES,
    )
    assert stages(2) == stages(None)


@pytest.mark.parametrize(("saved_elements", "spares"), [(75, False), (400, True)])
def test_a_block_is_worth_recomputing_alone_if_it_saves_more_than_a_buffer(
    saved_elements: int, *, spares: bool, layers: LayerMemory, block: Layer, constants: Constants
) -> None:
    (work,) = block.elementwise
    heavy = replace(block, operators=(replace(work, saved_elements=saved_elements),))
    model = replace(layers.model, layers=(heavy,) * 4)
    # The last stage has one micro-batch in flight. Recomputing its last block takes a second buffer
    # of 100 bytes for what enters, and saves 2 bytes per element less the 100 bytes of its input.
    traits = replace(layers.traits, bucket_bytes_per_element=6.0, bucket_elements=100.0)
    changed = replace(layers, model=model, traits=traits)
    memory = memory_of(changed, constants, "full", pp=2, dp=2, num_again=1)
    assert memory.spares_by_block == spares


def test_micro_batch_precision_and_tp_scale_what_is_kept(layers: LayerMemory, block: Layer) -> None:
    rank = replace(layers.rank, micro_batch_size=3, precision="fp32", tp=2)
    (work,) = block.elementwise
    sharded = replace(block, operators=(replace(work, sharded=True),))
    scaled = replace(layers, rank=rank)
    assert scaled.kept_bytes(block, "none") == 600.0
    assert scaled.kept_bytes(sharded, "none") == 300.0


def test_a_running_layer_needs_three_of_its_largest_tensors_or_all_that_it_saves(
    layers: LayerMemory, block: Layer
) -> None:
    (work,) = block.elementwise
    many = replace(block, operators=(work,) * 7)
    assert layers.temporary_bytes(many, "none") == 3 * BLOCK_BYTES
    assert layers.temporary_bytes(many, "full") == 7 * BLOCK_BYTES


def test_logits_and_their_copies_live_at_the_end(layers: LayerMemory, block: Layer) -> None:
    loss = Elementwise(name="loss", forward_elements=0, backward_elements=0, logits=100)
    head = replace(block, kind="head", operators=(loss,))
    two = replace(layers, rank=replace(layers.rank, tp=2))
    assert layers.temporary_bytes(head, "none") == 1400.0  # 14 bytes per logit
    assert two.temporary_bytes(head, "none") == 700.0


def test_stages_keep_micro_batches_in_flight_and_buffers(peaks: Peaks) -> None:
    # four blocks: states 1600, kept 400, temporaries 300
    assert peaks() == (2300.0,)
    # states 800, temporaries 300; first: 2 in flight of 200, 2 buffers to send from
    # last: 1 in flight, a buffer to compute from and one that is arriving
    two = (800 + 300 + 2 * 200 + 2 * BLOCK_BYTES, 800 + 300 + 200 + 2 * BLOCK_BYTES)
    assert peaks((0, 2, 4)) == two
    # masks take room in every buffer
    assert peaks((0, 2, 4), mask_bytes=7.0) == (two[0] + 14, two[1] + 14)
    # states 400, working set 100; checkpoints 4, 3, 2, 1; buffers at one end, both, both, one
    again = (400 + 100 + 600, 400 + 100 + 700, 400 + 100 + 600, 400 + 100 + 300)
    assert peaks((0, 1, 2, 3, 4), "full") == again


@pytest.mark.parametrize(("precision", "num_bytes"), [("fp16", 20), ("bf16", 24), ("fp32", 16)])
def test_states_follow_precision_and_optimizer(
    precision: str, num_bytes: int, peaks: Peaks
) -> None:
    changes = {"rank": {"precision": precision}, "master_bytes_per_parameter": 8.0}
    (sgd,), (adam,) = (
        peaks(**changes),
        peaks(**changes, fields={"optimizer": find_optimizer("adam")}),
    )
    assert adam - sgd == 400 * 8
    working_bytes = (4 if precision == "fp32" else 2) * 350 * 1.0
    assert adam == 400 * num_bytes + working_bytes


def test_sharded_states_are_divided_by_dp(peaks: Peaks) -> None:
    whole, sharded = (
        peaks(master_bytes_per_parameter=8.0, degrees={"dp": 4, "zero_stage": stage})[0]
        for stage in (0, 1)
    )
    assert whole - sharded == 400 * 6


@pytest.mark.parametrize(("precision", "bucket_bytes"), [("fp16", 600.0), ("fp32", 1200.0)])
def test_bucket_is_needed_with_replicas_and_up_to_its_size(
    precision: str, bucket_bytes: float, peaks: Peaks
) -> None:
    bucket = {"bucket_bytes_per_element": 6.0, "bucket_elements": 100.0}
    alone, two, by_itself = (
        peaks(rank={"precision": precision}, degrees={"dp": dp}, buckets_alone=buckets, **bucket)[0]
        for dp, buckets in ((1, False), (2, False), (1, True))
    )
    assert two - alone == by_itself - alone == bucket_bytes


def test_step_and_bucket_do_not_live_at_the_same_time(peaks: Peaks) -> None:
    both = {"bucket_bytes_per_element": 6.0, "step_bytes_per_parameter": 8.0}
    plain, found = (peaks(degrees={"dp": 2}, **traits)[0] for traits in ({}, both))
    during = 700.0  # activations and temporary tensors, none of which live in the step
    assert found - plain == max(during + 6.0 * 400, 8.0 * 400) - during
    traits = {**both, "step_bytes_per_parameter": 3.0}
    assert peaks(degrees={"dp": 2}, **traits)[0] - plain == 6.0 * 400


def test_context_and_allocator_come_on_top(peaks: Peaks, constants: Constants, rank: Rank) -> None:
    scaled = replace(constants, context_scale=2.0, allocator_scale=2.0)
    found = peaks(fields={"constants": scaled}, context_bytes=1000.0, allocator_factor=1.5)
    assert found == (2000.0 + 1600.0 + 3.0 * 700.0,)
    # a device may have a context of its own
    cpu = {"device": replace(rank.device, context_bytes=300)}
    (gpu_bytes,), (cpu_bytes,) = peaks(context_bytes=500.0), peaks(context_bytes=500.0, rank=cpu)
    assert gpu_bytes - cpu_bytes == pytest.approx(200.0)


def test_tied_weight_counts_once_within_a_stage(peaks: Peaks, block: Layer, model: Model) -> None:
    holder = replace(block, tied_parameters=60)
    tied = replace(model, layers=(holder, block, block, holder))
    assert peaks(model=tied)[0] == peaks()[0] - 60 * 4


def test_earliest_start_is_where_a_stage_still_fits(
    layers: LayerMemory, constants: Constants
) -> None:
    # n blocks need 500 n + 300, 200 more where something enters, 100 where something leaves
    memory = memory_of(layers, constants)
    for limit, anywhere, from_first in (
        (1400.0, [0, 0, 0, 2, 3], [0, 0, 0, 3, 4]),
        (2300.0, [0, 0, 0, 0, 0], [0, 0, 0, 0, 0]),
        (99.0, [0, 1, 2, 3, 4], [0, 1, 2, 3, 4]),
    ):
        limits = np.array([limit])
        assert memory.earliest_starts(limits, from_first=False).tolist() == [anywhere]
        assert memory.earliest_starts(limits).tolist() == [from_first]


def test_start_behind_a_large_boundary_is_passed_over(
    layers: LayerMemory, constants: Constants, block: Layer, model: Model
) -> None:
    # 10 kB cross the boundary after layer 2: only a stage that does not start there fits
    wide = replace(block, output_elements=5000.0)
    chain = replace(layers, model=replace(model, layers=(block, block, wide, block)))
    starts = memory_of(chain, constants).earliest_starts(np.array([3000.0]), from_first=False)
    assert starts[0].tolist() == [0, 0, 0, 3, 0]


@pytest.mark.parametrize("num_again", [None, 1])
def test_first_stage_fits_without_what_enters_later_ones(
    layers: LayerMemory, constants: Constants, block: Layer, model: Model, num_again: int | None
) -> None:
    # 10 kB cross the boundary after layer 1, where the first stage of a plan cannot start
    wide = replace(block, output_elements=5000.0)
    chain = replace(layers, model=replace(model, layers=(wide, block, block, block)))
    memory, limits = memory_of(chain, constants), np.array([3000.0])
    starts = memory.earliest_starts(limits, num_again, from_first=False)
    assert starts[0].tolist() == [0, 1, 0, 2, 2]
    assert memory.earliest_starts(limits, num_again)[0].tolist() == [0, 1, 0, 0, 0]


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
    sent = pickle.loads(pickle.dumps(rows))  # noqa: S301 - to a worker
    assert (part_starts(2, sent, stages, stages, tied, limits) == parts).all()
    for stage in range(pp):
        own = slice(stage, stage + 1)
        alone = earliest_starts(layers, stages[own], tied, limits[own])
        assert whole[own].tolist() == alone.tolist()
        alone = part_starts(2, rows, stages[own], stages[own], tied, limits[own])
        assert parts[own].tolist() == alone.tolist()
    assert (whole < np.arange(num_layers + 1)).any()


def test_an_unused_gradient_of_each_shape_of_weights_stays(
    layers: LayerMemory, model: Model, block: Layer
) -> None:
    up = Gemm(name="up", rows=1, columns=40, inner=10, shard="columns", bias=40)
    same, router = replace(up, name="gate"), replace(up, columns=4, keeps_precision=True)
    activations = replace(up, columns=7, has_weight=False)
    whole = replace(up, columns=3, shard="none")  # on every rank
    dense = replace(block, operators=(up, same, router, activations, whole))
    head = replace(block, kind="head", operators=(replace(up, columns=60),))
    traits = replace(layers.traits, fused_accumulation=True, unused_gradients=True)
    of_both = replace(
        layers,
        model=replace(model, layers=(dense, dense, head)),
        rank=replace(layers.rank, tp=2),
        traits=traits,
    )
    assert of_both.unused_gradients_bytes == (2 * (400 / 2 + 30), 2 * 600 / 2)
    unfused = replace(of_both, traits=replace(traits, fused_accumulation=False))
    assert unfused.unused_gradients_bytes == (0.0, 0.0)


def test_unused_gradients_are_kept_where_the_layers_are(peaks: Peaks) -> None:
    bounds, added = (0, 2, 4), {"unused_bytes": (30.0, 5.0)}
    plain, more = peaks(bounds), peaks(bounds, fields=added)
    assert np.subtract(more, plain).tolist() == [30.0, 35.0]
    assert peaks(bounds, fields=added, degrees={"dp": 2, "zero_stage": 3}) == peaks(
        bounds, degrees={"dp": 2, "zero_stage": 3}
    )


def test_activations_of_offloaded_blocks_wait_in_the_hosts_memory(
    layers: LayerMemory, block: Layer, peaks: Peaks
) -> None:
    bounds = (0, 4)
    (kept, less), (most, _) = (
        peaks(bounds, offloads_activations=True, offloaded_blocks=number)
        + peaks(bounds, offloads_activations=True, offloaded_blocks=number + 1)
        for number in (0, 4)
    )
    assert kept == less  # one block's are on their way
    assert kept - most == 3 * layers.kept_bytes(block, "none")
    offloads = replace(layers.traits, offloads_activations=True, offloaded_blocks=2)
    assert offloads.why_no_grid(1, 1) is None
    assert "without a pipeline" in (offloads.why_no_grid(1, 2) or "")


def test_inputs_of_divided_experts_stay_whole_where_tokens_are_divided(
    layers: LayerMemory, block: Layer
) -> None:
    first = Gemm(
        name="experts-in", rows=1, columns=10, inner=30, saved_elements=40.0, is_expert=True
    )
    divided = replace(layers, rank=replace(layers.rank, tp=2, sequence_parallel=True))
    for sharded, kept in ((False, 80.0), (True, 40.0)):
        operators = (replace(first, saved_sharded=sharded),)
        assert divided.kept_bytes(replace(block, operators=operators), "none") == kept


def test_single_precision_shards_are_weights_where_they_are_rounded_when_gathered(
    layers: LayerMemory, constants: Constants
) -> None:
    traits = replace(
        layers.traits, rounds_gathered=True, frees_gradients=True, accumulates_fp16_in_fp32=True
    )
    rounds = replace(layers, traits=replace(traits, master_bytes_per_parameter=4.0))
    memory = memory_of(rounds, constants, dp=4, zero_stage=3)
    bytes_of = {part: memory.only(part).peak(0, 0, 4) for part in ("weights", "gradients")}
    assert bytes_of == {"weights": 400.0, "gradients": 400.0}


def test_a_single_rank_keeps_narrow_weights_where_the_runtime_can_run_without_shards(
    layers: LayerMemory, constants: Constants
) -> None:
    traits = replace(layers.traits, rounds_gathered=True, master_bytes_per_parameter=4.0)
    states = []
    for least in (0, 3):
        shards = replace(traits, min_zero_stage=least, max_zero_stage=3, max_pipeline_zero_stage=3)
        rounds = replace(layers, traits=shards)
        memory = memory_of(rounds, constants, dp=1, zero_stage=3)
        states.append(sum(memory.only(part).peak(0, 0, 4) for part in ("weights", "optimizer")))
    assert states[0] - states[1] == 400 * 2


@pytest.mark.parametrize(
    ("precision", "stage", "num_micro_batches", "num_bytes"),
    [
        ("fp16", 2, 2, 4.0),
        ("fp16", 2, 1, 2.0),
        ("bf16", 2, 2, 4.0),
        ("fp32", 2, 2, 8.0),
        ("fp16", 3, 2, 2.0),
        ("bf16", 3, 2, 4.0),
    ],
)
def test_sharded_gradients_of_deepspeed_are_those_counted_in_a_run(
    layers: LayerMemory,
    constants: Constants,
    precision: Precision,
    stage: int,
    num_micro_batches: int,
    num_bytes: float,
) -> None:
    rank = replace(layers.rank, precision=precision)
    deepspeed = replace(layers, traits=RUNTIMES["deepspeed"], rank=rank)
    memory = memory_of(deepspeed, constants, num_micro_batches=num_micro_batches, zero_stage=stage)
    assert memory.only("gradients").peak(0, 0, 4) == num_bytes * 400


@pytest.mark.parametrize("scale", [0.004, 0.02, 0.06, 1.0])
def test_starts_on_mixed_devices_are_those_with_the_memory_of_each_stage(scale: float) -> None:
    cost_model = mixed_cost_model(slow_gib=4.0)
    memory = cost_model.costs(mixed_candidate()).memory
    (model,) = {model for needs in memory.needs for model, _ in needs}
    limits = np.array([scale * device.memory_bytes for ((_, device),) in memory.needs])
    assert len(set(limits.tolist())) == 2
    starts = model.earliest_starts(limits)
    assert memory.earliest_starts(scale).tolist() == starts.tolist()
    boundless = np.where(np.arange(len(limits)) % 2, np.inf, limits)
    assert model.earliest_starts(boundless)[::2].tolist() == starts[::2].tolist()
    assert not model.earliest_starts(boundless)[1::2].any()
