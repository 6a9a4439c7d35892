import numpy as np
import pytest

from amp_ray.clusters.device import find_device
from amp_ray.errors import InputError
from amp_ray.inputs.profile import ANALYTIC, Anchor, Profile
from amp_ray.inputs.published_profile import PublishedEntry, PublishedProfile


def anchor(*seconds: float) -> Anchor:
    return Anchor(forward_s=np.array(seconds))


def test_an_analytic_profile_has_no_anchors_anywhere() -> None:
    assert ANALYTIC.anchors(find_device("H100"), 8) == {}
    assert not ANALYTIC.is_measured


def test_anchors_are_those_of_the_device_and_tp_by_size() -> None:
    table = {(1, 1): anchor(1.0), (2, 1): anchor(2.0), (2, 4): anchor(3.0)}
    profile = Profile(source="profile x", tables={"T4": table})
    assert profile.anchors(find_device("T4"), 2) == {1: table[2, 1], 4: table[2, 4]}


def test_a_device_that_was_not_measured_is_refused() -> None:
    profile = Profile(source="profile x", tables={"T4": {(1, 1): anchor(1.0)}})
    with pytest.raises(InputError, match="profile x has no times for device 'H100', only for T4"):
        profile.anchors(find_device("H100"), 1)


def test_a_tp_that_was_not_measured_is_refused() -> None:
    profile = Profile(source="profile x", tables={"T4": {(2, 1): anchor(1.0), (1, 1): anchor(1.0)}})
    with pytest.raises(InputError, match="no times at tp 4 for device 'T4', only at tp 1, 2; meas"):
        profile.anchors(find_device("T4"), 4)


@pytest.mark.parametrize("seconds", [-1.0, np.nan, np.inf])
def test_times_that_cannot_be_are_refused(seconds: float) -> None:
    with pytest.raises(
        ValueError, match=r"must be finite and not negative, found \[(-1.0|nan|inf)"
    ):
        Anchor(forward_s=np.array([1.0]), backward_s=np.array([1.0, seconds]))


def test_times_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="read-only"):
        anchor(1.0).forward_s[0] = 2.0


def published(*tps: int) -> Profile:
    """Return a profile of a T4 at these degrees that another planner published."""
    one = np.array([1.0])
    entry = PublishedEntry(
        layer_s=one,
        layer_memory_bytes=one,
        layer_parameter_bytes=one,
        forward_backward_s=None,
        optimizer_s=0.0,
        batch_generator_s=0.0,
    )
    return Profile(
        source="profile x",
        tables={"T4": {(tp, 1): anchor(1.0) for tp in tps}},
        includes_all_reduces=True,
        published=PublishedProfile(source="x", entries={("T4", tp, 1): entry for tp in tps}),
    )


def test_a_degree_that_nobody_published_is_a_gap() -> None:
    assert published(1, 2).gap([find_device("T4")], 2) is None
    assert published(1, 2).gap([find_device("T4")], 4) == "tp 4 on T4"
    assert published(1, 2).gap([find_device("T4"), find_device("H100")], 1) == "tp 1 on H100"


def test_times_with_all_reduces_need_tp_1_beside_them() -> None:
    assert published(2, 4).gap([find_device("T4")], 2) == "tp 1 on T4"


def test_our_own_profiles_have_no_gaps_since_they_can_be_measured() -> None:
    profile = Profile(source="profile x", tables={"T4": {(1, 1): anchor(1.0)}})
    assert profile.gap([find_device("T4")], 2) is None
    assert ANALYTIC.gap([find_device("T4")], 2) is None
