from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from amp_ray.clusters.cluster import Cluster
from amp_ray.clusters.constants import Constants
from amp_ray.cost.collective import NO_RING
from amp_ray.cost.stages import PlacedStages, StageTimes
from amp_ray.cost.step_end import (
    Beside,
    DataPaths,
    StepEnd,
    StepEndModel,
    StepEnds,
    tied_pairs,
)
from amp_ray.cost.topology import Topology
from amp_ray.cost.weights import Weights
from amp_ray.models.model import Layer, Model
from amp_ray.runtimes.traits import RuntimeTraits, find_optimizer
from amp_ray.strategies.candidate import StageOptions
from amp_ray.strategies.zero import NO_ZERO, Zero


@pytest.fixture
def step_end(cluster: Cluster, traits: RuntimeTraits, constants: Constants) -> StepEndModel:
    """Two nodes of two devices; rings run at 800 B/s inside and 100 B/s between."""
    return StepEndModel(
        topology=Topology(cluster=cluster, constants=constants),
        traits=traits,
        constants=constants,
        precision="fp16",
        optimizer=find_optimizer("sgd"),
    )


End = Callable[..., StepEnd]


@pytest.fixture
def end(step_end: StepEndModel, model: Model) -> End:
    """Return the step end of stages, each given by the devices of its tensor-parallel groups."""

    def of(
        *devices: list[list[int]],
        bounds: tuple[int, ...] = (0, 4),
        zero: Zero = NO_ZERO,
        chain: Model = model,
        fields: dict[str, object] | None = None,
        **traits: object,
    ) -> StepEnd:
        stages = PlacedStages(
            options=[StageOptions(tp=len(rows[0]), dp=len(rows), zero=zero) for rows in devices],
            devices=np.concatenate([np.array(rows) for rows in devices], axis=None),
            shares=[(1,) * len(rows) for rows in devices],
            num_micro_batches=1,
        )
        changed = replace(step_end, **(fields or {}))  # type: ignore[arg-type]
        changed = replace(changed, traits=replace(changed.traits, **traits))  # type: ignore[arg-type]
        kinds = changed.topology.type_of_device
        return StepEnds(
            model=changed,
            stages=stages,
            times=layer_times(stages, chain),
            types=[frozenset(kinds[grid.ravel()].tolist()) for grid in stages.grids],
            weights=lambda tp: Weights(model=chain, tp=tp),
        ).at(bounds)

    return of


def layer_times(stages: PlacedStages, model: Model) -> StageTimes:
    """Every layer takes 1 s forward and 2 s backward on every rank."""
    prefix = np.arange(model.num_layers + 1.0) * np.array([1.0, 2.0, 0.0])[:, None]
    return StageTimes(
        stages=stages,
        tables=prefix[None],
        plain=prefix[None],
        kind=np.zeros(len(stages.samples), dtype=np.int64),
        block_counts=np.array(model.block_counts),
        extrapolated=False,
    )


ALONE = [[0]]
NEAR = [[0], [1]]  # two replicas in a node
FAR = [[0], [2]]  # two replicas on two nodes
OTHER = [[1], [3]]


def test_alone_a_rank_only_updates(end: End) -> None:
    # 400 parameters; SGD reads the gradient and reads and writes the weight: 12 bytes
    assert end(ALONE) == StepEnd(gradient_sync_s=0.0, optimizer_s=4.8)


def test_gradients_go_around_rings_that_share_the_interface(end: End) -> None:
    assert end(NEAR).gradient_sync_s == pytest.approx(800 / (1000 / 1.25))
    assert end(FAR).gradient_sync_s == pytest.approx(800 / 100)
    # two stages, two replicas on different nodes: two rings leave each node
    assert end(FAR, OTHER, bounds=(0, 2, 4)).gradient_sync_s == pytest.approx(400 / 50)
    # one stage, tp 2: half of the parameters each
    assert end([[0, 1], [2, 3]]).gradient_sync_s == pytest.approx(400 / 50)


def test_longest_stage_counts(end: End) -> None:
    result = end(NEAR, [[2], [3]], bounds=(0, 1, 4))
    assert result.gradient_sync_s == pytest.approx(600 / 800)
    assert result.optimizer_s == pytest.approx(3.6)


@pytest.mark.parametrize(
    ("precision", "width", "num_bytes"),
    [("fp16", None, 2), ("bf16", None, 4), ("fp32", None, 4), ("fp32", 2.0, 4), ("fp16", 4.0, 4)],
)
def test_gradients_have_the_width_in_which_they_were_added_up(
    precision: str, width: float | None, num_bytes: int, end: End
) -> None:
    result = end(FAR, fields={"precision": precision}, gradient_bytes_per_parameter=width)
    assert result.gradient_sync_s == pytest.approx(400 * num_bytes / 100)


def test_flat_buckets_are_filled_and_emptied(end: End) -> None:
    half = end(FAR, bucket_traffic_bytes_per_parameter=5.0)
    assert half.gradient_sync_s == pytest.approx(8.0 + 2.0)
    single = end(FAR, fields={"precision": "fp32"}, bucket_traffic_bytes_per_parameter=5.0)
    assert single.gradient_sync_s == pytest.approx(16.0 + 4.0)
    # without a replica only where the runtime uses them all the same
    alone, bucketed = (
        end(ALONE, bucket_traffic_bytes_per_parameter=8.0, buckets_alone=buckets).gradient_sync_s
        for buckets in (False, True)
    )
    # 400 parameters of 8 bytes; the update takes 4.8 s for 12 bytes of each.
    assert (alone, bucketed) == pytest.approx((0.0, 4.8 * 8 / 12))


def test_sharded_optimizer_updates_a_share_and_gathers_the_weights(end: End) -> None:
    sharded = end(FAR, zero=Zero(stage=1))
    assert sharded.optimizer_s == pytest.approx(2.4)
    assert sharded.gradient_sync_s == pytest.approx(8.0 + 4.0)
    # scattered gradients take half of an all-reduce
    scattered = end(FAR, zero=Zero(stage=1), scatters_gradients=True)
    assert scattered.gradient_sync_s == pytest.approx(4.0 + 4.0)


@pytest.mark.parametrize(
    ("name", "precision", "num_bytes"),
    [("sgd", "fp16", 12 + 30), ("adam", "fp16", 28 + 30), ("adamw", "fp32", 28 + 4)],
)
def test_optimizer_touches_its_moments_and_the_runtime_the_rest(
    name: str, precision: str, num_bytes: int, end: End
) -> None:
    fields = {"optimizer": find_optimizer(name), "precision": precision}
    stepping = end(ALONE, fields=fields, step_traffic_bytes_per_parameter=30.0)
    assert stepping.optimizer_s == pytest.approx(0.4 * num_bytes)


def test_device_with_the_slowest_memory_counts(
    step_end: StepEndModel, cluster: Cluster, end: End
) -> None:
    slow = replace(cluster.nodes[1].device, name="slow", memory_bytes_per_s=500)
    nodes = (cluster.nodes[0], replace(cluster.nodes[1], device=slow))
    topology = replace(step_end.topology, cluster=replace(cluster, nodes=nodes))
    assert end(FAR, fields={"topology": topology}).optimizer_s == pytest.approx(9.6)


@pytest.mark.parametrize(
    ("stages", "bounds", "expected_s"),
    [
        (([[0]], [[1]]), (0, 3, 4), 0.0),
        (([[0]], [[1]]), (0, 2, 4), 100 / 800),
        (([[0]], [[2]]), (0, 2, 4), 100 / 100),
        # layer 2 is in the second of three stages, in the same node as the first one
        (([[0]], [[1]], [[2]]), (0, 2, 3, 4), 100 / 800),
        # gradients around 800 B/s (400 bytes), then two pairs share 100 B/s
        (([[0], [1]], [[2], [3]]), (0, 2, 4), 400 / 800 + 100 / 50),
        # both ranks of the second stage meet the one of the first: 50 bytes each share 100 B/s
        (([[0]], [[2, 3]]), (0, 2, 4), 50 / 50),
    ],
)
def test_stages_that_share_a_weight_add_its_gradients(
    stages: tuple[list[list[int]], ...],
    bounds: tuple[int, ...],
    expected_s: float,
    model: Model,
    block: Layer,
    end: End,
) -> None:
    """The first and the third of four layers hold one weight of 50 parameters."""
    holder = replace(block, tied_parameters=50)
    tied = replace(model, layers=(holder, block, holder, block))
    assert end(*stages, bounds=bounds, chain=tied).gradient_sync_s == pytest.approx(expected_s)


def test_without_a_tied_weight_the_end_of_a_step_is_a_line(step_end: StepEndModel) -> None:
    options = StageOptions(tp=1, dp=2, zero=Zero(stage=1))
    device = step_end.topology.cluster.nodes[0].device
    rings = step_end.topology.rings([[0, 2]]).paths
    fixed_s, s_per_parameter = step_end.line(options, 1, rings, device)
    paths = DataPaths(shards=rings, copies=(NO_RING,), device=device)
    for parameters in (1.0, 400.0, 1e6):
        seconds = step_end.sync_s(parameters, options, paths, Beside(pp=1))
        seconds += step_end.optimizer_s(parameters, 2, device)
        assert fixed_s + s_per_parameter * parameters == pytest.approx(seconds)


TAKEN = 0.5
"""Share of the computation that a collective takes on a device of one multiprocessor."""


def test_sharded_gradients_are_reduced_beside_the_backward_pass_of_every_micro_batch(
    end: End,
) -> None:
    result = end(FAR, zero=Zero(stage=2))
    # 200 of 400 bytes of four layers: 1 s each beside 2 s, the last one alone; 4 s of weights
    assert result.gradient_sync_s == pytest.approx(3 * TAKEN + 1.0 + 4.0)
    assert result.optimizer_s == pytest.approx(2.4)


KEPT = Zero(stage=3, keeps_weights=True)


@pytest.mark.parametrize(
    ("stages", "bounds", "zero", "expected_s"),
    [
        # forward 1 s at first, then 1 s beside 1 s; backward 1, 2, 2 and 1 s beside 2 s, then 1 s
        ((FAR,), (0, 4), Zero(stage=3), 1.0 + 3 * TAKEN + 6 * TAKEN + 1.0),
        # weights stay: only gradients in the backward pass
        ((FAR,), (0, 4), KEPT, 1.0 + 3 * TAKEN + 3 * TAKEN + 1.0),
        # groups inside nodes gather there, 1/8 s, and add their shards up between: gradients the
        # same, and 2 s more between nodes at half the interface's rate
        (
            ([[0], [1], [2], [3]],),
            (0, 4),
            Zero(stage=3, shard_ranks=2),
            0.125 + 3 * 0.125 * TAKEN + TAKEN * (0.125 + 2 * 2.25 + 2.125) + 2.125,
        ),
        # a pipeline gathers and reduces once: half of the parameters, 4 s of gradients, 4 s of
        # weights, two rings at each interface
        ((FAR, OTHER), (0, 2, 4), KEPT, 2 * 200 / 50),
    ],
)
def test_sharded_weights_are_gathered_for_every_pass_but_in_a_pipeline(
    stages: tuple[list[list[int]], ...],
    bounds: tuple[int, ...],
    zero: Zero,
    expected_s: float,
    end: End,
) -> None:
    assert end(*stages, bounds=bounds, zero=zero).gradient_sync_s == pytest.approx(expected_s)


@pytest.mark.parametrize(("bucket", "seen_s"), [(100.0, 8 * TAKEN), (300.0, 6.0)])
def test_what_the_last_pass_does_not_hide_is_seen(bucket: float, seen_s: float, end: End) -> None:
    result = end(FAR, overlaps_gradient_sync=True, bucket_elements=bucket)
    # 8 s beside 8 s: the last bucket, or what it took from the pass
    assert result.gradient_sync_s == pytest.approx(seen_s)


def test_stages_behind_the_first_have_more_to_hide_behind(end: End) -> None:
    result = end(FAR, OTHER, bounds=(0, 2, 4), overlaps_gradient_sync=True, bucket_elements=1.0)
    # 8 s each: beside 4 s in the first stage; beside 8 s in the second
    assert result.gradient_sync_s == pytest.approx(4.0)


def test_every_bucket_of_gradients_has_a_start_and_a_latency(
    step_end: StepEndModel, end: End
) -> None:
    """With 400 parameters and buckets of 100, one and four more of what a message takes."""
    slow = {"constants": replace(step_end.constants, collective_start_s=1.0)}
    once, five = (
        end(FAR, fields=slow, bucket_elements=size).gradient_sync_s for size in (1e12, 100.0)
    )
    assert five - once == pytest.approx(4.0)


def test_sharded_gradients_may_be_reduced_at_once_after_the_passes(
    step_end: StepEndModel, end: End
) -> None:
    slow = {"constants": replace(step_end.constants, collective_start_s=1.0)}
    traits = {"overlaps_gradient_sync": True, "bucket_elements": 100.0}
    beside, at_once = (
        end(FAR, zero=Zero(stage=1), fields=slow, reduces_sharded_at_once=flag, **traits)
        for flag in (False, True)
    )
    after = end(FAR, zero=Zero(stage=1), fields=slow, bucket_elements=1e12)
    assert at_once.gradient_sync_s == pytest.approx(after.gradient_sync_s)
    assert beside.gradient_sync_s < at_once.gradient_sync_s
    whole = (end(FAR, reduces_sharded_at_once=flag, **traits) for flag in (False, True))
    assert len(set(whole)) == 1  # without ZeRO there is no difference


def test_the_host_copies_every_slice_of_gathered_weights(end: End) -> None:
    zero = Zero(stage=1)
    plain, sliced = (end(FAR, zero=zero, gather_slice_s=each) for each in (0.0, 0.5))
    # four layers of one weight, each in two slices
    assert sliced.gradient_sync_s == pytest.approx(plain.gradient_sync_s + 4 * 2 * 0.5)
    assert sliced.optimizer_s == plain.optimizer_s
    assert end(FAR, gather_slice_s=0.5) == end(FAR)


@pytest.mark.parametrize("first", [(1, 1), (2, 1), (4, 2), (1, 4)])
@pytest.mark.parametrize("last", [(1, 1), (2, 2), (1, 4), (6, 2)])
def test_ranks_of_a_tied_weight_meet_those_with_the_same_part(
    first: tuple[int, int], last: tuple[int, int]
) -> None:
    """Stages of other dp and tp: every rank has partners, whose parts of the weight overlap."""
    grids = [np.arange(dp * tp).reshape(dp, tp) for dp, tp in (first, last)]
    pairs = tied_pairs(*grids)
    for ranks, grid in zip(pairs.T, grids, strict=True):
        assert set(ranks) == set(grid.ravel())
    for one, other in pairs % [first[1], last[1]] / [first[1], last[1]]:
        assert one < other + 1 / last[1]
        assert other < one + 1 / first[1]
