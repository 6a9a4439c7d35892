"""Tables of all device groups against the formulas of single plans."""

from itertools import product

import numpy as np
import pytest

from amp_ray.planners.metis2024.groups import GroupSpace, MetisLimits, group_shares
from amp_ray.planners.metis2024.plan import MetisPlan, bytes_per_s
from support.metis_cases import metis_setting

UNEVEN = "0.0.0.1 slots=2\n0.0.0.2 slots=3\n"


def space_of(hostfile: str) -> GroupSpace:
    """Return the groups of a hostfile of A100 (0.0.0.1) and T4 (0.0.0.2)."""
    return GroupSpace(setting=metis_setting(hostfile=hostfile), limits=MetisLimits())


def types_of(space: GroupSpace, variant: int) -> tuple[str, ...]:
    """Return the device types of a group, device by device."""
    sizes = np.diff(space.variants.ends[variant], prepend=0)
    pieces = zip(space.variants.kinds[variant], sizes, strict=True)
    return tuple(space.kinds[kind] for kind, size in pieces for _ in range(size))


@pytest.mark.parametrize("num_samples", [1, 2, 3, 4, 6, 8, 12, 24])
@pytest.mark.parametrize(
    "hostfile", ["0.0.0.1 4\n0.0.0.2 4\n", "0.0.0.1 3\n0.0.0.2 2\n", "0.0.0.1 1\n0.0.0.2 5\n"]
)
def test_whole_clusters_share_as_a_plan_does(hostfile: str, num_samples: int) -> None:
    space = space_of(hostfile)
    setting = metis_setting(hostfile=hostfile, global_batch_size=num_samples)
    variants, num_devices = space.variants, int(space.counts.sum())
    shares = group_shares(space, np.arange(len(variants.edge)), num_samples)
    whole = np.flatnonzero(space.graph.size[variants.edge] == num_devices)
    assert whole.size
    for variant in whole:
        dp, tp = int(variants.dp[variant]), int(variants.tp[variant])
        plan = MetisPlan(
            type_order=tuple(space.kinds[kind] for kind in variants.kinds[variant]),
            degrees=((dp, tp),),
            num_micro_batches=1,
            bounds=(0, 4),
        )
        ranks = setting.data_ranks(plan, 0)
        assert ranks is not None
        samples = [rank.samples for rank in ranks]
        assert shares.valid[variant] == (min(samples) > 0 and dp <= num_samples)
        begins = 0
        for piece, count in enumerate(variants.replicas[variant]):
            if count and shares.valid[variant]:
                assert shares.more[variant, piece] == samples[begins]
                assert shares.less[variant, piece] == samples[begins + count - 1]
            begins += count


@pytest.mark.parametrize(
    "hostfile", ["0.0.0.1 2\n0.0.0.2 2\n", UNEVEN, "0.0.0.1 slots=3\n0.0.0.2 slots=1\n"]
)
def test_rates_are_those_of_a_plan_by_itself(hostfile: str) -> None:
    space = space_of(hostfile)
    setting, variants = space.setting, space.variants
    assert space.is_plain == (hostfile == "0.0.0.1 2\n0.0.0.2 2\n")
    num_devices = int(space.counts.sum())
    keys = {
        (int(first_rank), types_of(space, variant), int(variants.tp[variant])): variant
        for variant, first_rank in enumerate(variants.first_rank)
    }
    divided = [(num_devices,), *((size, num_devices - size) for size in range(1, num_devices))]
    for order, sizes, tp in product((("A100", "T4"), ("T4", "A100")), divided, (1, 2)):
        if any(size % tp for size in sizes):
            continue
        plan = MetisPlan(
            type_order=order,
            degrees=tuple((size // tp, tp) for size in sizes),
            num_micro_batches=1,
            bounds=(0, 2, 4)[-len(sizes) - 1 :],
        )
        types = setting.stage_types(plan)
        stages = [keys[first, types[stage], tp] for stage, first in enumerate(plan.first_rank[:-1])]
        for variant, (dp, _), first in zip(stages, plan.degrees, plan.first_rank, strict=False):
            groups = [[first + index + step * dp for step in range(tp)] for index in range(dp)]
            expected = min(bytes_per_s(setting, plan, group) for group in groups)
            assert space.gradient_rate[variant] == expected
        if len(stages) > 1:
            rate = space.transfer_rate(np.array(stages[:1]), space.labels[stages[1:]])
            assert rate.tolist() == [bytes_per_s(setting, plan, list(range(num_devices)))]


def test_only_measured_and_allowed_degrees_are_variants() -> None:
    space = space_of(UNEVEN)
    assert space.tps == (1, 2)
    assert (space.variants.dp * space.variants.tp == space.graph.size[space.variants.edge]).all()
    limited = GroupSpace(setting=space.setting, limits=MetisLimits(max_tp=1))
    assert set(limited.variants.tp.tolist()) == {1}


def test_an_index_over_two_types_belongs_to_the_first_and_has_the_smaller_memory() -> None:
    space = space_of("0.0.0.1 slots=1\n0.0.0.2 slots=3\n")
    variants = space.variants
    four = [
        variant
        for variant in np.flatnonzero(variants.tp == 2).tolist()
        if types_of(space, variant) == ("A100", "T4", "T4", "T4")
    ]
    assert variants.replicas[four].tolist() == [[1, 1]]
    assert variants.reach(np.array(four)).tolist() == [[2, 4]]
    assert space.scarcest(np.array(four)).tolist() == [[1, 1]]
