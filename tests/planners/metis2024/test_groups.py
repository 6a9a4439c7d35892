import numpy as np
import pytest

from amp_ray.planners.metis2024.groups import GroupSpace, MetisLimits
from amp_ray.planners.metis2024.plan import MetisPlan, MetisSetting, bytes_per_s
from support.metis_cases import metis_setting

UNEVEN = "0.0.0.1 slots=2\n0.0.0.2 slots=3\n"


def space_of(hostfile: str | None = None, **limits: int) -> GroupSpace:
    """Return the groups of two A100 and two T4, or of another hostfile."""
    setting = metis_setting() if hostfile is None else metis_setting(hostfile=hostfile)
    return GroupSpace(setting=setting, limits=MetisLimits(**limits))


def types_of(space: GroupSpace, variant: int) -> tuple[str, ...]:
    """Return the device types of a group, device by device."""
    starts = np.pad(space.variants.ends, ((0, 0), (1, 0)))[variant]
    return tuple(
        space.kinds[kind]
        for kind, start, end in zip(
            space.variants.kinds[variant], starts, space.variants.ends[variant], strict=False
        )
        for _ in range(end - start)
    )


def every_variant(space: GroupSpace) -> range:
    """Return all variants."""
    return range(len(space.variants.edge))


def found(space: GroupSpace, types: str, tp: int) -> int:
    """Return the first variant of some types, written as initials."""
    return next(
        variant
        for variant in every_variant(space)
        if "".join(kind[0] for kind in types_of(space, variant)) == types
        and space.variants.tp[variant] == tp
    )


def test_devices_are_counted_by_type() -> None:
    space = space_of("0.0.0.2 slots=2\n0.0.0.1 slots=3\n")
    assert space.kinds == ("A100", "T4")
    assert space.counts.tolist() == [3, 2]


def test_only_measured_and_allowed_degrees_are_looked_at() -> None:
    assert space_of().tps == (1, 2)
    assert space_of(max_tp=1).tps == (1,)


def test_every_tp_that_divides_a_group_is_a_variant() -> None:
    space = space_of()
    variants = space.variants
    assert (variants.dp * variants.tp == space.graph.size[variants.edge]).all()
    assert sorted(variants.tp[variants.ends[:, -1] == 4].tolist()) == [1, 1, 2, 2]


def test_a_mixed_group_may_have_either_type_first() -> None:
    space = space_of()
    mixed = {types_of(space, variant) for variant in np.flatnonzero(space.variants.mixed).tolist()}
    assert mixed >= {("A100", "T4"), ("T4", "A100"), ("A100", "A100", "T4", "T4")}


def test_an_index_belongs_to_the_piece_with_its_first_device() -> None:
    space = space_of("0.0.0.1 slots=1\n0.0.0.2 slots=3\n")
    variant = found(space, "ATTT", 2)
    assert space.variants.replicas[variant].tolist() == [1, 1]
    assert space.variants.reach(np.array([variant])).tolist() == [[2, 4]]


def test_an_index_over_two_types_has_the_smaller_memory() -> None:
    space = space_of("0.0.0.1 slots=1\n0.0.0.2 slots=3\n")
    variant = found(space, "ATTT", 2)
    assert [space.kinds[kind] for kind in space.scarcest(np.array([variant]))[0]] == ["T4", "T4"]
    assert space.scarcest(np.array([found(space, "ATTT", 1)])).tolist() == [[0, 1]]


def test_groups_weigh_what_their_devices_do_whatever_their_order() -> None:
    space = space_of("0.0.0.1 slots=1\n0.0.0.2 slots=3\n")
    rows = np.array([found(space, "TTTA", 1), found(space, "A", 1)])
    assert space.weight(rows, np.array([10.0, 1.0])).tolist() == [13.0, 10.0]


def test_ranks_count_from_the_first_stage() -> None:
    space = space_of()
    for variant in every_variant(space):
        size = int(space.graph.size[space.variants.edge[variant]])
        is_last = space.graph.from_state[space.variants.edge[variant]] == 0
        assert (space.variants.first_rank[variant] + size == 4) == is_last


def plans_of(setting: MetisSetting, num_devices: int) -> list[MetisPlan]:
    """Return plans of one or two stages, every tp of 1 and 2 that divides a stage."""
    sizes = [(num_devices,), *((size, num_devices - size) for size in range(1, num_devices))]
    return [
        MetisPlan(
            type_order=order,
            group_sizes=groups,
            degrees=tuple((size // tp, tp) for size in groups),
            num_micro_batches=1,
            bounds=(0, 2, 4) if len(groups) > 1 else (0, 4),
        )
        for order in (("A100", "T4"), ("T4", "A100"))
        for groups in sizes
        for tp in (1, 2)
        if all(size % tp == 0 for size in groups)
    ]


@pytest.mark.parametrize("hostfile", [None, UNEVEN, "0.0.0.1 slots=3\n0.0.0.2 slots=1\n"])
def test_rates_are_those_of_a_plan_by_itself(hostfile: str | None) -> None:
    space = space_of(hostfile)
    setting, variants = space.setting, space.variants
    num_devices = int(space.counts.sum())
    keys = {
        (int(variants.first_rank[variant]), types_of(space, variant), int(variants.tp[variant])): (
            variant
        )
        for variant in every_variant(space)
    }
    for plan in plans_of(setting, num_devices):
        types = setting.stage_types(plan)
        stages = [
            keys[first, types[stage], plan.degrees[stage][1]]
            for stage, first in enumerate(plan.first_rank[:-1])
        ]
        for stage, variant in enumerate(stages):
            (dp, tp), first = plan.degrees[stage], plan.first_rank[stage]
            groups = [[first + index + step * dp for step in range(tp)] for index in range(dp)]
            expected = min(bytes_per_s(setting, plan, group) for group in groups)
            assert space.gradient_rate[variant] == expected
        if len(stages) > 1:
            label = space.labels[stages[1:]]
            rate = space.transfer_rate(np.array(stages[:1]), label)
            assert rate.tolist() == [bytes_per_s(setting, plan, list(range(num_devices)))]


def test_nodes_of_one_type_each_are_plain() -> None:
    assert space_of().is_plain
    assert not space_of("0.0.0.1 slots=2\n0.0.0.2 slots=3\n").is_plain
