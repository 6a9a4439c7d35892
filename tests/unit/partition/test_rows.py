import numpy as np
import pytest

from amp_ray.partition import rows
from amp_ray.partition.rows import distinct_rows, first_of_each, radix, repeated


def test_weights_tell_all_digits_apart() -> None:
    weights = radix([3, 2, 4])
    codes = [int(np.array(digits) @ weights) for digits in np.ndindex(3, 2, 4)]
    assert sorted(codes) == list(range(24))


def test_indices_are_repeated_and_counted() -> None:
    index, offset = repeated(np.array([2, 0, 3]))
    assert index.tolist() == [0, 0, 2, 2, 2]
    assert offset.tolist() == [0, 1, 0, 1, 2]


@pytest.mark.parametrize("table_size", [0, 100])
def test_the_first_of_each_code_is_found(monkeypatch: pytest.MonkeyPatch, table_size: int) -> None:
    monkeypatch.setattr(rows, "TABLE_SIZE", table_size)
    assert first_of_each(np.array([4, 2, 4, 2, 7]), 8).tolist() == [1, 0, 4]


@pytest.mark.parametrize("table_size", [0, 100])
def test_equal_rows_get_one_number(monkeypatch: pytest.MonkeyPatch, table_size: int) -> None:
    monkeypatch.setattr(rows, "TABLE_SIZE", table_size)
    first, number = distinct_rows([np.array([3, -1, 3, 3]), np.array([0, 0, 1, 0])])
    assert number.tolist() == [1, 0, 2, 1]
    assert first.tolist() == [1, 0, 2]


def test_rows_whose_code_does_not_fit_are_numbered_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rows, "MOST_CODES", 2)
    first, number = distinct_rows([np.array([5, 9, 5]), np.array([7, 7, 7]), np.array([0, 4, 4])])
    assert number.tolist() == [0, 2, 1]
    assert first.tolist() == [0, 2, 1]
