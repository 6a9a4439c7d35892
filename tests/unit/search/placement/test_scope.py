from typing import Any

import pytest

from amp_ray.search.placement.nodes import Scope


def test_a_scope_is_whole_as_long_as_nothing_is_left_out() -> None:
    assert Scope(max_options=1).is_whole
    assert Scope(max_options=1, ends=True).is_whole


@pytest.mark.parametrize(
    "left_out", [{"parts": "even"}, {"parts": "row"}, {"pure": True}, {"pairs": False}]
)
def test_a_scope_is_not_whole_otherwise(left_out: dict[str, Any]) -> None:
    assert not Scope(max_options=1, **left_out).is_whole
