import numpy as np
import pytest

from amp_ray.partition.arrays import frozen_integers, frozen_times


def test_frozen_times_cannot_be_written() -> None:
    times = frozen_times("x", [1.0, 2.0], 1)
    with pytest.raises(ValueError, match="read-only"):
        times[0] = 3.0


def test_the_given_array_stays_writable_and_apart() -> None:
    given = np.array([1.0, 2.0])
    times = frozen_times("x", given, 1)
    given[0] = 9.0
    assert times[0] == 1.0


def test_a_frozen_array_is_not_copied_again() -> None:
    times = frozen_times("x", [1.0, 2.0], 1)
    assert frozen_times("x", times, 1) is times


@pytest.mark.parametrize("wrong", [np.nan, -1.0, np.inf])
def test_refuses_what_is_no_time(wrong: float) -> None:
    with pytest.raises(ValueError, match=r"x\[1, 0\] is .*: times must be finite"):
        frozen_times("x", [[1.0], [wrong]], 2)


def test_refuses_other_dimensions() -> None:
    with pytest.raises(ValueError, match=r"x has shape \(2,\), expected 2 dimension"):
        frozen_times("x", [1.0, 2.0], 2)


def test_refuses_fractions_where_integers_belong() -> None:
    with pytest.raises(ValueError, match="x holds values of type float64, expected integers"):
        frozen_integers("x", [1.5], 1, smallest=0)


def test_refuses_an_integer_that_is_too_small() -> None:
    with pytest.raises(ValueError, match=r"x\[1\] is -2, expected at least -1"):
        frozen_integers("x", [-1, -2], 1, smallest=-1)


def test_an_array_without_values_has_nothing_wrong() -> None:
    assert frozen_integers("x", [], 1, smallest=3).size == 0
