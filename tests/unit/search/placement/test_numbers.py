import numpy as np
import pytest

from amp_ray.search.placement import numbers
from amp_ray.search.placement.numbers import first_of_each, numbered, radix, repeated


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
    monkeypatch.setattr(numbers, "TABLE_SIZE", table_size)
    assert first_of_each(np.array([4, 2, 4, 2, 7]), 8).tolist() == [1, 0, 4]


@pytest.mark.parametrize("table_size", [0, 100])
def test_equal_rows_get_one_number(monkeypatch: pytest.MonkeyPatch, table_size: int) -> None:
    monkeypatch.setattr(numbers, "TABLE_SIZE", table_size)
    rows, number = numbered(np.array([1, 0, 1, 1]), np.array([2, 2, 2, 0]))
    assert rows[number].tolist() == [[1, 2], [0, 2], [1, 2], [1, 0]]
    assert len(rows) == 3
