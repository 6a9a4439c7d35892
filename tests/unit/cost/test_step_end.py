from dataclasses import replace

import numpy as np
import pytest

from amp_ray.clusters.cluster import Cluster
from amp_ray.clusters.constants import Constants
from amp_ray.cost.collective import NO_RING
from amp_ray.cost.stages import PlacedStages, StageTimes
from amp_ray.cost.step_end import Beside, DataPaths, StepEnd, StepEndModel, StepEnds
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


def found(
    step_end: StepEndModel,
    model: Model,
    devices: list[list[list[int]]],
    bounds: tuple[int, ...],
    zero: Zero = NO_ZERO,
) -> StepEnd:
    stages = PlacedStages(
        options=[StageOptions(tp=len(rows[0]), dp=len(rows), zero=zero) for rows in devices],
        devices=np.concatenate([np.array(rows) for rows in devices], axis=None),
        shares=[(1,) * len(rows) for rows in devices],
        num_micro_batches=1,
    )
    kinds = step_end.topology.type_of_device
    ends = StepEnds(
        model=step_end,
        stages=stages,
        times=layer_times(stages, model),
        types=[frozenset(kinds[grid.ravel()].tolist()) for grid in stages.grids],
        weights=lambda tp: Weights(model=model, tp=tp),
    )
    return ends.at(bounds)


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


def test_alone_a_rank_only_updates(step_end: StepEndModel, model: Model) -> None:
    result = found(step_end, model, [[[0]]], (0, 4))
    # 400 parameters; SGD reads the gradient and reads and writes the weight: 12 bytes
    assert result == StepEnd(gradient_sync_s=0.0, optimizer_s=4.8)


def test_gradients_go_around_their_ring(step_end: StepEndModel, model: Model) -> None:
    inside = found(step_end, model, [[[0], [1]]], (0, 4))
    between = found(step_end, model, [[[0], [2]]], (0, 4))
    assert inside.gradient_sync_s == pytest.approx(800 / (1000 / 1.25))
    assert between.gradient_sync_s == pytest.approx(800 / 100)


def test_rings_of_all_stages_and_ranks_share_the_interface(
    step_end: StepEndModel, model: Model
) -> None:
    # two stages, two replicas on different nodes: two rings leave each node
    result = found(step_end, model, [[[0], [2]], [[1], [3]]], (0, 2, 4))
    assert result.gradient_sync_s == pytest.approx(400 / 50)
    # one stage, tp 2: half of the parameters each
    result = found(step_end, model, [[[0, 1], [2, 3]]], (0, 4))
    assert result.gradient_sync_s == pytest.approx(400 / 50)


def test_longest_stage_counts(step_end: StepEndModel, model: Model) -> None:
    result = found(step_end, model, [[[0], [1]], [[2], [3]]], (0, 1, 4))
    assert result.gradient_sync_s == pytest.approx(600 / 800)
    assert result.optimizer_s == pytest.approx(3.6)


@pytest.mark.parametrize(
    ("precision", "given", "num_bytes"),
    [("fp16", None, 2), ("bf16", None, 4), ("fp32", None, 4), ("fp32", 2.0, 4), ("fp16", 4.0, 4)],
)
def test_gradients_have_the_width_in_which_they_were_added_up(
    precision: str, given: float | None, num_bytes: int, step_end: StepEndModel, model: Model
) -> None:
    traits = replace(step_end.traits, gradient_bytes_per_parameter=given)
    wide = replace(step_end, precision=precision, traits=traits)  # type: ignore[arg-type]
    result = found(wide, model, [[[0], [2]]], (0, 4))
    assert result.gradient_sync_s == pytest.approx(400 * num_bytes / 100)


def test_flat_buckets_are_filled_and_emptied(step_end: StepEndModel, model: Model) -> None:
    copying = replace(
        step_end, traits=replace(step_end.traits, bucket_traffic_bytes_per_parameter=5.0)
    )
    assert found(copying, model, [[[0], [2]]], (0, 4)).gradient_sync_s == pytest.approx(8.0 + 2.0)
    single = replace(copying, precision="fp32")
    assert found(single, model, [[[0], [2]]], (0, 4)).gradient_sync_s == pytest.approx(16.0 + 4.0)


def test_sharded_optimizer_updates_a_share_and_gathers_the_weights(
    step_end: StepEndModel, model: Model
) -> None:
    sharded = found(step_end, model, [[[0], [2]]], (0, 4), Zero(stage=1))
    assert sharded.optimizer_s == pytest.approx(2.4)
    assert sharded.gradient_sync_s == pytest.approx(8.0 + 4.0)


@pytest.mark.parametrize(
    ("name", "precision", "num_bytes"),
    [("sgd", "fp16", 12 + 30), ("adam", "fp16", 28 + 30), ("adamw", "fp32", 28 + 4)],
)
def test_optimizer_touches_its_moments_and_the_runtime_the_rest(
    name: str, precision: str, num_bytes: int, step_end: StepEndModel, model: Model
) -> None:
    stepping = replace(
        step_end,
        optimizer=find_optimizer(name),
        precision=precision,  # type: ignore[arg-type]
        traits=replace(step_end.traits, step_traffic_bytes_per_parameter=30.0),
    )
    assert found(stepping, model, [[[0]]], (0, 4)).optimizer_s == pytest.approx(0.4 * num_bytes)


def test_device_with_the_slowest_memory_counts(
    step_end: StepEndModel, model: Model, cluster: Cluster
) -> None:
    slow = replace(cluster.nodes[1].device, name="slow", memory_bytes_per_s=500)
    nodes = (cluster.nodes[0], replace(cluster.nodes[1], device=slow))
    topology = replace(step_end.topology, cluster=replace(cluster, nodes=nodes))
    mixed = replace(step_end, topology=topology)
    assert found(mixed, model, [[[0], [2]]], (0, 4)).optimizer_s == pytest.approx(9.6)


@pytest.fixture
def tied(model: Model, block: Layer) -> Model:
    """The first and the third of four layers hold one weight of 50 parameters."""
    holder = replace(block, tied_parameters=50)
    return replace(model, layers=(holder, block, holder, block))


def test_stages_that_share_a_weight_add_its_gradients(step_end: StepEndModel, tied: Model) -> None:
    together = found(step_end, tied, [[[0]], [[1]]], (0, 3, 4))
    assert together.gradient_sync_s == 0.0
    inside = found(step_end, tied, [[[0]], [[1]]], (0, 2, 4))
    assert inside.gradient_sync_s == pytest.approx(100 / 800)
    between = found(step_end, tied, [[[0]], [[2]]], (0, 2, 4))
    assert between.gradient_sync_s == pytest.approx(100 / 100)


def test_a_weight_is_shared_with_the_stage_that_holds_it_not_with_the_last(
    step_end: StepEndModel, tied: Model
) -> None:
    # layer 2 is in the second of three stages, in the same node as the first one
    result = found(step_end, tied, [[[0]], [[1]], [[2]]], (0, 2, 3, 4))
    assert result.gradient_sync_s == pytest.approx(100 / 800)


def test_pairs_that_share_a_weight_share_the_interface(step_end: StepEndModel, tied: Model) -> None:
    result = found(step_end, tied, [[[0], [1]], [[2], [3]]], (0, 2, 4))
    # gradients around 800 B/s (400 bytes), then two pairs share 100 B/s
    assert result.gradient_sync_s == pytest.approx(400 / 800 + 100 / 50)


def test_stages_of_different_tp_share_a_weight_slice_by_slice(
    step_end: StepEndModel, tied: Model
) -> None:
    result = found(step_end, tied, [[[0]], [[2, 3]]], (0, 2, 4))
    # both ranks of the second stage meet the one of the first: 50 bytes each share 100 B/s
    assert result.gradient_sync_s == pytest.approx(50 / 50)


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


def test_gradients_may_go_through_the_buckets_without_a_replica(
    step_end: StepEndModel, model: Model
) -> None:
    bucketed = replace(step_end.traits, bucket_traffic_bytes_per_parameter=8.0)
    assert found(replace(step_end, traits=bucketed), model, [[[0]]], (0, 4)).gradient_sync_s == 0.0
    alone = replace(bucketed, buckets_alone=True)
    result = found(replace(step_end, traits=alone), model, [[[0]]], (0, 4))
    # 400 parameters of 8 bytes; the update takes 4.8 s for 12 bytes of each.
    assert result.gradient_sync_s == pytest.approx(4.8 * 8 / 12)


TAKEN = 0.5
"""Share of the computation that a collective takes on a device of one multiprocessor."""


def test_sharded_gradients_are_reduced_beside_the_backward_pass_of_every_micro_batch(
    step_end: StepEndModel, model: Model
) -> None:
    result = found(step_end, model, [[[0], [2]]], (0, 4), Zero(stage=2))
    # 200 of 400 bytes of four layers: 1 s each beside 2 s, the last one alone; 4 s of weights
    assert result.gradient_sync_s == pytest.approx(3 * TAKEN + 1.0 + 4.0)
    assert result.optimizer_s == pytest.approx(2.4)


@pytest.mark.parametrize(
    ("zero", "expected_s"),
    [
        # forward 1 s at first, then 1 s beside 1 s; backward 1, 2, 2 and 1 s beside 2 s, then 1 s
        (Zero(stage=3), 1.0 + 3 * TAKEN + 6 * TAKEN + 1.0),
        # weights stay: only gradients in the backward pass
        (Zero(stage=3, keeps_weights=True), 1.0 + 3 * TAKEN + 3 * TAKEN + 1.0),
    ],
)
def test_sharded_weights_are_gathered_for_every_pass(
    zero: Zero, expected_s: float, step_end: StepEndModel, model: Model
) -> None:
    result = found(step_end, model, [[[0], [2]]], (0, 4), zero)
    assert result.gradient_sync_s == pytest.approx(expected_s)


def test_groups_inside_nodes_gather_there_and_add_their_shards_up_between(
    step_end: StepEndModel, model: Model
) -> None:
    grid = [[[0], [1], [2], [3]]]
    result = found(step_end, model, grid, (0, 4), Zero(stage=3, shard_ranks=2))
    # gathers of 1/8 s; gradients the same, and 2 s more between nodes at half the interface's rate
    forward_s = 0.125 + 3 * 0.125 * TAKEN
    backward_s = TAKEN * (0.125 + 2 * 2.25 + 2.125) + 2.125
    assert result.gradient_sync_s == pytest.approx(forward_s + backward_s)


def test_a_pipeline_gathers_and_reduces_once(step_end: StepEndModel, model: Model) -> None:
    kept = Zero(stage=3, keeps_weights=True)
    result = found(step_end, model, [[[0], [2]], [[1], [3]]], (0, 2, 4), kept)
    # half of the parameters: 4 s of gradients, 4 s of weights, two rings at each interface
    assert result.gradient_sync_s == pytest.approx(2 * 200 / 50)


@pytest.mark.parametrize(("bucket", "left_s"), [(100.0, 8 * TAKEN), (300.0, 6.0)])
def test_what_the_last_pass_does_not_hide_is_left(
    bucket: float, left_s: float, step_end: StepEndModel, model: Model
) -> None:
    traits = replace(step_end.traits, overlaps_gradient_sync=True, bucket_elements=bucket)
    result = found(replace(step_end, traits=traits), model, [[[0], [2]]], (0, 4))
    # 8 s beside 8 s: the last bucket, or what it took from the pass
    assert result.gradient_sync_s == pytest.approx(left_s)


def test_stages_behind_the_first_have_more_to_hide_behind(
    step_end: StepEndModel, model: Model
) -> None:
    traits = replace(step_end.traits, overlaps_gradient_sync=True, bucket_elements=1.0)
    hiding = replace(step_end, traits=traits)
    result = found(hiding, model, [[[0], [2]], [[1], [3]]], (0, 2, 4))
    # 8 s each: beside 4 s in the first stage; beside 8 s in the second
    assert result.gradient_sync_s == pytest.approx(4.0)


def test_scattered_gradients_take_half_of_an_all_reduce(
    step_end: StepEndModel, model: Model
) -> None:
    scattering = replace(step_end, traits=replace(step_end.traits, scatters_gradients=True))
    result = found(scattering, model, [[[0], [2]]], (0, 4), Zero(stage=1))
    assert result.gradient_sync_s == pytest.approx(4.0 + 4.0)


def test_every_bucket_of_gradients_has_a_start_and_a_latency(
    step_end: StepEndModel, model: Model
) -> None:
    """With 400 parameters and buckets of 100, one and four more of what a message takes."""
    slow = replace(step_end, constants=replace(step_end.constants, collective_start_s=1.0))
    once, five = (
        found(
            replace(slow, traits=replace(slow.traits, bucket_elements=size)),
            model,
            [[[0], [2]]],
            (0, 4),
        ).gradient_sync_s
        for size in (1e12, 100.0)
    )
    assert five - once == pytest.approx(4.0)
