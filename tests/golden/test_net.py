"""Some cases of the net; `make net` compares them all."""

import pytest

from net.__main__ import changes
from net.coverage import missing
from net.running import answer
from net.table import Case, Listed, read_table

TABLE = read_table()


@pytest.mark.parametrize(
    "case", [case for case in TABLE.cases if case.name in TABLE.fast], ids=lambda case: case.name
)
def test_the_answer_is_the_recorded_one(case: Case) -> None:
    assert list(changes(case, answer(case))) == []


@pytest.mark.parametrize("listed", TABLE.listed, ids=lambda listed: listed.name)
def test_cases_cover_what_the_package_lists(listed: Listed) -> None:
    assert missing(listed, TABLE.cases) == ()
