from dataclasses import replace

import numpy as np
import pytest

from amp_ray.clusters.cluster import Cluster
from amp_ray.clusters.constants import Constants
from amp_ray.clusters.device import Device
from amp_ray.cost.collective import Path
from amp_ray.cost.layers import LayerCosts
from amp_ray.cost.stages import PlacedStages, StageTimes, TimeTables, prefix_sums
from amp_ray.cost.topology import Rings, Topology
from amp_ray.inputs.profile import ANALYTIC
from amp_ray.models.model import Layer, Model
from amp_ray.models.operator import Gemm
from amp_ray.runtimes.traits import RuntimeTraits
from amp_ray.strategies.candidate import StageOptions

FAST, ALSO_FAST, SLOW, ALSO_SLOW = range(4)  # devices
RING = Path(bytes_per_s=1.0, step_s=0.0)


@pytest.fixture
def tables(
    device: Device, cluster: Cluster, model: Model, traits: RuntimeTraits, constants: Constants
) -> TimeTables:
    """Two devices of either type; those of the second one stream at half the rate of the first."""
    costs = LayerCosts(model=model, profile=ANALYTIC, traits=traits, constants=constants)
    slow = replace(device, name="slow", memory_bytes_per_s=device.memory_bytes_per_s / 2)
    return TimeTables(
        layer_costs=costs,
        topology=Topology(cluster=of_types(cluster, device, slow), constants=constants),
        precision="fp16",
    )


def of_types(cluster: Cluster, first: Device, second: Device) -> Cluster:
    """Give the two nodes a device each."""
    one, other = cluster.nodes
    return Cluster(nodes=(replace(one, device=first), replace(other, device=second)))


def found(tables: TimeTables, *stages: list[list[int]], samples: int = 1) -> StageTimes:
    """Return the times of stages, each given by the devices of its data-parallel ranks."""
    placed = PlacedStages(
        options=[StageOptions(tp=len(rows[0]), dp=len(rows)) for rows in stages],
        devices=np.concatenate([np.array(rows) for rows in stages], axis=None),
        shares=[(samples,) * len(rows) for rows in stages],
        num_micro_batches=4,
    )
    types = placed.types(tables.topology.cluster)
    return tables.times(placed, types, Rings(paths=(RING,), index=(0,) * len(placed.groups)))


def test_prefix_sums_start_at_zero() -> None:
    assert prefix_sums(np.array([[1.0, 2.0], [3.0, 4.0]])).tolist() == [[0, 1, 3], [0, 3, 7]]


def test_stages_have_the_times_of_their_own_devices(tables: TimeTables) -> None:
    times = found(tables, [[FAST]], [[SLOW]]).at((0, 3, 4))
    assert times[:, :, 0].tolist() == [[3.0, 2.0], [6.0, 4.0], [0.0, 0.0]]


def test_equal_groups_are_one_kind(tables: TimeTables) -> None:
    times = found(tables, [[FAST], [ALSO_FAST]])
    assert times.kind.tolist() == [0, 0]
    assert len(times.tables) == 1


def test_mixed_group_goes_at_the_pace_of_its_slowest_device(tables: TimeTables) -> None:
    mixed = found(tables, [[FAST, SLOW]])
    slow = found(tables, [[SLOW, ALSO_SLOW]])
    np.testing.assert_array_equal(mixed.tables, slow.tables)


def test_mixed_group_waits_in_every_layer_for_whoever_is_slower_there(
    tables: TimeTables, device: Device, cluster: Cluster, model: Model, block: Layer
) -> None:
    # a device that streams at the full rate, but takes long to multiply
    flops = Gemm(name="g", rows=1, columns=1, inner=1).flops
    multiplying = replace(block, operators=(Gemm(name="g", rows=1, columns=1, inner=1),))
    clumsy = replace(device, name="clumsy", fp16_flops=flops)
    costs = replace(tables.layer_costs, model=replace(model, layers=(multiplying, block)))
    slow = tables.topology.cluster.nodes[1].device
    topology = replace(tables.topology, cluster=of_types(cluster, clumsy, slow))
    both = replace(tables, layer_costs=costs, topology=topology)
    mixed, first, second = (
        found(both, [group]).at((0, 2))[0, 0, 0] for group in ([0, 2], [0, 1], [2, 3])
    )
    assert mixed > max(first, second)


def test_partition_rows_take_the_slowest_replica_of_a_stage() -> None:
    # stage 0: fast and slow, stage 1: fast only, stage 2: as stage 0 in another order
    stages = PlacedStages(
        options=(StageOptions(tp=1, dp=2),) * 3,
        devices=np.concatenate(list(np.arange(6).reshape(3, 2, 1)), axis=None),
        shares=((1, 1),) * 3,
        num_micro_batches=1,
    )
    tables = np.array([[[0.0, 1.0], [0.0, 2.0], [0, 0]], [[0.0, 5.0], [0.0, 5.0], [0, 0]]])
    times = StageTimes(
        stages=stages,
        tables=tables,
        plain=tables,
        kind=np.array([0, 1, 0, 0, 1, 0]),
        block_counts=np.array([0, 1]),
        extrapolated=False,
    )
    rows, of_stage = times.rows()
    assert rows.tolist() == [[0.0, 10.0], [0.0, 3.0]]
    assert of_stage.tolist() == [0, 1, 0]


def test_tables_are_shared_by_what_does_not_matter_to_a_layer(tables: TimeTables) -> None:
    first = found(tables, [[FAST], [ALSO_FAST]])
    again = found(tables, [[FAST]], [[ALSO_FAST]])
    other = found(tables, [[FAST]], samples=2)
    assert first.tables.tolist() == again.tables.tolist()
    assert other.tables[0, 0, -1] == 2 * first.tables[0, 0, -1]


def test_ranks_of_one_part_of_the_samples_wait_for_the_slowest(tables: TimeTables) -> None:
    stages = PlacedStages(
        options=(StageOptions(tp=1, dp=2), StageOptions(tp=1, dp=1)),
        devices=np.concatenate([np.array([[FAST], [SLOW]]), np.array([[ALSO_FAST]])], axis=None),
        shares=((1, 1), (2,)),
        num_micro_batches=1,
    )
    rings = Rings(paths=(RING,), index=(0, 0, 0))
    times = tables.times(stages, stages.types(tables.topology.cluster), rings).at((0, 2, 4))
    assert stages.parts.tolist() == [0, 0, 0]
    assert times[0].tolist() == [[4.0], [4.0]]


def test_parts_end_where_every_stage_has_a_border() -> None:
    stages = PlacedStages(
        options=(StageOptions(tp=1, dp=2), StageOptions(tp=1, dp=4)),
        devices=np.concatenate([np.arange(2)[:, None], np.arange(2, 6)[:, None]], axis=None),
        shares=((2, 2), (1, 1, 1, 1)),
        num_micro_batches=1,
    )
    assert stages.parts.tolist() == [0, 1, 0, 0, 1, 1]
    assert replace(stages, one_part=True).num_parts == 1
