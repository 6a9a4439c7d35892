import json
from typing import Any

import pytest

from amp_ray.errors import InputError
from amp_ray.inputs.slice_table import SliceTable, parse_slice_table

POINT = {"forward_mean": 1.0, "backward_mean": 2}
TABLE: dict[str, Any] = {
    "batch": 2,
    "tokens": 16,
    "granularity": 8,
    "stages": 2,
    "points": {"1_8_0": POINT, "1_8_8": {**POINT, "update_mean": 3.0, "memory_mb": 5}},
}


def read(**changes: object) -> SliceTable:
    return parse_slice_table(json.dumps(TABLE | changes), file="table.json")


def test_points_keep_their_figures() -> None:
    table = read(speeds=[1.0, 2], memory_cap_mb=None)
    assert table.points.places.tolist() == [[1, 8, 0], [1, 8, 8]]
    assert table.points.times_s.tolist() == [[1.0, 2.0], [1.0, 2.0]]
    assert (table.factors, table.memory_cap_mb, table.fitted) == ((1.0, 2.0), None, False)


def test_no_points_at_all_are_no_mistake() -> None:
    assert len(read(points={}).points.places) == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"granularity": 0}, "granularity: found 0; expected greater than or equal to 1"),
        ({"tokens": 1.5}, "tokens: found 1.5; expected an integer"),
        ({"stages": None}, "stages: found nothing"),
        ({"points": {"1_8": POINT}}, r"points\.1_8: malformed key; expected SEQUENCES_TOKENS"),
        ({"points": {"1_0_0": POINT}}, r"points\.1_0_0: malformed key"),
        ({"points": {"1_8_-8": POINT}}, r"points\.1_8_-8: malformed key"),
        ({"points": {"1_8_8": POINT}}, "points: no point without context"),
        (
            {"points": {"1_8_0": {**POINT, "forward_mean": -1}}},
            r"points\.1_8_0\.forward_mean: found -1; expected a number from 0",
        ),
        (
            {"points": {"1_8_0": {"forward_mean": 1}}},
            r"points\.1_8_0\.backward_mean: found nothing; expected a number",
        ),
        (
            {"points": {"1_8_0": {**POINT, "backward_mean": True}}},
            r"points\.1_8_0\.backward_mean: found true; expected a number",
        ),
        ({"memory_cap_mb": 9}, r"points\.1_8_0\.memory_mb: found nothing; expected a number"),
        ({"speeds": [1.0]}, "speeds: found 1 factors for 2 stages"),
        ({"speeds": [1.0, 0]}, r"speeds\.1: found 0; expected greater than 0"),
        ({"tokens": 10**8}, "granularity: found 8: 2 x 12500000 granules have"),
        (
            {"communication": {"tokens": [8, 4], "seconds": [1, 2]}},
            "communication: expected ascending tokens and as many seconds",
        ),
        ({"batches": 1}, "batches: unknown key 'batches'; did you mean 'batch'"),
    ],
)
def test_a_mistake_is_led_to_its_key(changes: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=f"table.json: {message}"):
        read(**changes)
