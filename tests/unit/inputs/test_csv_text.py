import pytest

from amp_ray.errors import InputError, Where
from amp_ray.inputs.csv_text import is_count, read_count, read_rows, read_seconds

WHERE = Where(file="x.csv", line=3, key="tp")


def test_rows_come_with_their_lines_and_without_blank_ones() -> None:
    rows = [(where.line, row) for where, row in read_rows("a, b \n\n , \n1,2\n", "x.csv")]
    assert rows == [(1, ["a", "b"]), (4, ["1", "2"])]


def test_a_quote_that_stays_open_is_refused_with_its_line() -> None:
    with pytest.raises(InputError, match=r"^x\.csv:2: not valid CSV"):
        list(read_rows('a\n"b\n', "x.csv"))


@pytest.mark.parametrize("cell", ["", "-1", "1.0", "1_0", "٣", "1e3", "1000000000"])
def test_a_count_is_plain_digits_of_a_plausible_size(cell: str) -> None:
    assert not is_count(cell, 0)


def test_a_count_is_read_with_spaces_around_it() -> None:
    assert read_count(" 12 ", WHERE) == 12


def test_a_count_below_the_lowest_is_refused_with_its_place() -> None:
    with pytest.raises(InputError, match=r"^x\.csv:3: tp: found '0'; expected an integer of at l"):
        read_count("0", WHERE)


def test_a_missing_cell_is_no_count() -> None:
    with pytest.raises(InputError, match="found ''"):
        read_count(None, WHERE)


@pytest.mark.parametrize(("cell", "seconds"), [("0", 0.0), (" 1e-3 ", 1e-3), ("2.5", 2.5)])
def test_seconds_are_read(cell: str, seconds: float) -> None:
    assert read_seconds(cell) == seconds


@pytest.mark.parametrize("cell", [None, "", "nan", "inf", "-1e-9", "1_0", "1 s"])
def test_what_is_no_time_reads_as_none(cell: str | None) -> None:
    assert read_seconds(cell) is None
