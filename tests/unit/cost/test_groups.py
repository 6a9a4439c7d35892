from dataclasses import replace

import numpy as np
import pytest

from amp_ray.cost.collective import Path
from amp_ray.cost.groups import GroupTables, RankKinds, prefix_sums
from amp_ray.cost.layers import LayerCosts
from amp_ray.cost.topology import Rings
from amp_ray.spec.candidate import Candidate, StageOptions
from amp_ray.spec.constants import Constants
from amp_ray.spec.device import Device
from amp_ray.spec.model import Layer, Model
from amp_ray.spec.operator import Gemm
from amp_ray.spec.profile import ANALYTIC
from amp_ray.spec.traits import RuntimeTraits

FAST, SLOW = 0, 1  # device types
RING = Path(bytes_per_s=1.0, step_s=0.0)


@pytest.fixture
def groups(
    device: Device, model: Model, traits: RuntimeTraits, constants: Constants
) -> GroupTables:
    """Two device types; the second one streams at half the rate of the first."""
    costs = LayerCosts(model=model, profile=ANALYTIC, traits=traits, constants=constants)
    slow = replace(device, name="slow", memory_bytes_per_s=device.memory_bytes_per_s / 2)
    return GroupTables(layer_costs=costs, device_types=(device, slow), precision="fp16")


def candidate(**degrees: int) -> Candidate:
    options = StageOptions(tp=degrees.pop("tp", 1), dp=degrees.pop("dp", 1))
    known = {"micro_batch_size": 1, "pp": 1, "num_micro_batches": 4} | degrees
    return Candidate(options=options, **known)


def found(groups: GroupTables, types: list[int], **degrees: int) -> RankKinds:
    plan = candidate(**degrees)
    grid = np.array(types).reshape(plan.pp, plan.dp, plan.tp)
    return groups.kinds(plan, grid, Rings(paths=(RING,), index=(0,) * (plan.pp * plan.dp)))


def test_prefix_sums_start_at_zero() -> None:
    assert prefix_sums(np.array([[1.0, 2.0], [3.0, 4.0]])).tolist() == [[0, 1, 3], [0, 3, 7]]


def test_stages_have_the_times_of_their_own_devices(groups: GroupTables) -> None:
    kinds = found(groups, [FAST, SLOW], pp=2)
    times = kinds.stage_times((0, 3, 4))
    assert times[:, :, 0].tolist() == [[3.0, 2.0], [6.0, 4.0], [0.0, 0.0]]


def test_equal_groups_are_one_kind(groups: GroupTables) -> None:
    kinds = found(groups, [FAST, FAST], dp=2)
    assert kinds.kind.tolist() == [[0, 0]]
    assert len(kinds.tables) == 1


def test_mixed_group_goes_at_the_pace_of_its_slowest_device(groups: GroupTables) -> None:
    mixed = found(groups, [FAST, SLOW], tp=2)
    slow = found(groups, [SLOW, SLOW], tp=2)
    np.testing.assert_array_equal(mixed.tables, slow.tables)


def test_mixed_group_waits_in_every_layer_for_whoever_is_slower_there(
    groups: GroupTables, device: Device, model: Model, block: Layer
) -> None:
    # a device that streams at the full rate, but takes long to multiply
    flops = Gemm(name="g", rows=1, columns=1, inner=1).flops
    multiplying = replace(block, operators=(Gemm(name="g", rows=1, columns=1, inner=1),))
    clumsy = replace(device, name="clumsy", fp16_flops=flops)
    costs = replace(groups.layer_costs, model=replace(model, layers=(multiplying, block)))
    both = replace(groups, layer_costs=costs, device_types=(clumsy, groups.device_types[SLOW]))
    mixed = found(both, [0, 1], tp=2).stage_times((0, 1, 2))[0, :, 0]
    first = found(both, [0, 0], tp=2).stage_times((0, 1, 2))[0, :, 0]
    second = found(both, [1, 1], tp=2).stage_times((0, 1, 2))[0, :, 0]
    assert first[0] > second[0]
    assert second[1] > first[1]
    assert mixed.tolist() == [first[0], second[1]]


def test_partition_rows_take_the_slowest_replica_of_a_stage(groups: GroupTables) -> None:
    # stage 0: fast and slow, stage 1: fast only, stage 2: as stage 0 in another order
    kinds = RankKinds(
        tables=np.array([[[0.0, 1.0], [0.0, 2.0], [0, 0]], [[0.0, 5.0], [0.0, 5.0], [0, 0]]]),
        kind=np.array([[0, 1], [0, 0], [1, 0]]),
        extrapolated=False,
    )
    rows, of_stage = kinds.stage_rows()
    assert rows.tolist() == [[0.0, 10.0], [0.0, 3.0]]
    assert of_stage.tolist() == [0, 1, 0]


def test_candidates_share_tables_that_do_not_depend_on_the_rest(groups: GroupTables) -> None:
    first = found(groups, [FAST, FAST], dp=2)
    again = found(groups, [FAST, FAST], pp=2, num_micro_batches=8)
    other = found(groups, [FAST], micro_batch_size=2)
    assert first.tables.tolist() == again.tables.tolist()
    assert other.tables[0, 0, -1] == 2 * first.tables[0, 0, -1]
