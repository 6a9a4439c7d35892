import numpy as np
import pytest

from amp_ray.planners.metis2024.group_table import Shares, group_shares
from amp_ray.planners.metis2024.groups import GroupSpace, MetisLimits
from amp_ray.planners.metis2024.plan import MetisPlan
from support.metis import metis_profile_files
from support.metis_cases import metis_setting


def space_of(hostfile: str, **limits: int) -> GroupSpace:
    """Return the groups of a hostfile of A100 (0.0.0.1) and T4 (0.0.0.2)."""
    return GroupSpace(setting=metis_setting(hostfile=hostfile), limits=MetisLimits(**limits))


def shares_of(space: GroupSpace, num_samples: int) -> Shares:
    """Share samples out over every group."""
    return group_shares(space, np.arange(len(space.variants.edge)), num_samples)


@pytest.mark.parametrize("num_samples", [1, 2, 3, 4, 6, 8, 12, 24])
@pytest.mark.parametrize(
    "hostfile", ["0.0.0.1 4\n0.0.0.2 4\n", "0.0.0.1 3\n0.0.0.2 2\n", "0.0.0.1 1\n0.0.0.2 5\n"]
)
def test_whole_clusters_share_as_a_plan_does(hostfile: str, num_samples: int) -> None:
    space = space_of(hostfile)
    setting = metis_setting(hostfile=hostfile, global_batch_size=num_samples)
    shares, variants = shares_of(space, num_samples), space.variants
    num_devices = int(space.counts.sum())
    whole = np.flatnonzero(space.graph.size[variants.edge] == num_devices)
    assert whole.size
    for variant in whole:
        order = tuple(space.kinds[kind] for kind in variants.kinds[variant])
        dp, tp = int(variants.dp[variant]), int(variants.tp[variant])
        plan = MetisPlan(
            type_order=order,
            group_sizes=(num_devices,),
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


def test_one_type_shares_evenly_or_not_at_all() -> None:
    space = space_of("0.0.0.1 4\n")
    shares = shares_of(space, 6)
    assert sorted({int(dp) for dp in space.variants.dp[shares.valid]}) == [1, 2, 3]
    assert (shares.more[shares.valid, 0] * space.variants.dp[shares.valid] == 6).all()


def test_a_limit_counts_rounded_down() -> None:
    space = space_of("0.0.0.1 2\n0.0.0.2 2\n", max_size=1)
    shares, variants = shares_of(space, 7), space.variants
    assert (7 // variants.dp[shares.valid] == 1).all()
    assert shares.valid.any()


def test_a_type_that_was_not_measured_shares_nothing() -> None:
    files = metis_profile_files()
    del files["DeviceType.T4_tp2_bs1.json"]
    setting = metis_setting(files)
    space = GroupSpace(setting=setting, limits=MetisLimits())
    shares = shares_of(space, 4)
    mixed_tp2 = space.variants.mixed & (space.variants.tp == 2)
    first_is_a100 = space.variants.kinds[:, 0] == 0
    only_a100 = first_is_a100 & (space.variants.replicas[:, 1] == 0)
    assert not shares.valid[mixed_tp2 & ~only_a100].any()


def test_samples_that_rounding_could_move_are_shared_as_a_plan_does() -> None:
    # A100 : T4 = 3 : 1, so 8 samples of one each are 6 and 2 to the last bit or not.
    space = space_of("0.0.0.1 1\n0.0.0.2 1\n")
    shares = shares_of(space, 8)
    mixed = np.flatnonzero(space.variants.mixed & (space.variants.tp == 1))
    assert {tuple(sorted(shares.more[variant])) for variant in mixed} == {(2, 6)}
