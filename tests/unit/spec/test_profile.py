import numpy as np
import pytest

from amp_ray.errors import InputError
from amp_ray.spec.catalogue import find_device
from amp_ray.spec.profile import ANALYTIC, Anchor, Profile


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
