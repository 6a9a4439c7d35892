import json
from typing import Any

import numpy as np
import pytest

from amp_ray.cost.samples import context_costs, non_negative
from amp_ray.inputs.slice_table import parse_slice_table
from amp_ray.partition.slices import SliceTables, packed_index
from amp_ray.search.token_slices import Granules, slice_tables

GRANULARITY, TOKENS, BATCH = 8, 64, 3


def measured_s(sequences: int, size: int, context: int) -> float:
    """Return what a layer takes, without any regularity at no context."""
    alone = 1e-3 + 1e-5 * sequences * size * (1 + 0.3 * np.sin(7 * sequences + size))
    return float(alone + 1e-6 * sequences * context + 1e-7 * sequences * size * context)


def points(**changes: object) -> dict[str, Any]:
    sizes = range(GRANULARITY, TOKENS + 1, GRANULARITY)
    places = [(b, s, 0) for b in range(1, BATCH + 1) for s in sizes]
    places += [(b, s, c) for b in range(1, BATCH + 1) for s in (16, 32) for c in (16, 32)]
    found: dict[str, Any] = {
        f"{b}_{s}_{c}": {
            "forward_mean": measured_s(b, s, c),
            "backward_mean": 2 * measured_s(b, s, c),
        }
        for b, s, c in places
    }
    return found | changes


def tables(**changes: object) -> SliceTables:
    record: dict[str, Any] = {
        "batch": BATCH,
        "tokens": TOKENS,
        "granularity": GRANULARITY,
        "stages": 4,
        "context": "fitted",
        "points": points(),
    }
    return slice_tables(parse_slice_table(json.dumps(record | changes), file="table"))


def cell(size: int, context: int) -> int:
    return packed_index((size + context) // GRANULARITY, size // GRANULARITY)


def test_what_was_measured_without_context_is_kept_exactly() -> None:
    found = tables()
    for sequences in range(1, BATCH + 1):
        for size in range(GRANULARITY, TOKENS + 1, GRANULARITY):
            time_s = found.forward_s[sequences - 1, cell(size, 0)]
            assert time_s == measured_s(sequences, size, 0)


def test_context_that_follows_the_model_is_found() -> None:
    found = tables()
    assert found.backward_s[2, cell(24, 40)] == pytest.approx(2 * measured_s(3, 24, 40), rel=1e-9)


def test_noise_makes_no_context_cheaper_than_none() -> None:
    rng = np.random.default_rng(0)
    noisy = points()
    for key, point in noisy.items():
        if not key.endswith("_0"):
            point["forward_mean"] = measured_s(*map(int, key.split("_"))) * rng.uniform(0.1, 0.9)
    found = tables(points=noisy)
    for size in (8, 16, 32):
        row = [found.forward_s[0, cell(size, context)] for context in range(0, TOKENS - size, 8)]
        assert row == sorted(row)


def test_messages_take_the_time_of_all_their_tokens() -> None:
    talk = {"tokens": [1, 1000], "seconds": [0.0, 999.0]}
    alone, found = tables(), tables(communication=talk, layers=2)
    for sequences in range(1, BATCH + 1):
        for size, context in ((8, 0), (24, 16), (64, 0)):
            at = sequences - 1, cell(size, context)
            message_s = sequences * size - 1
            assert found.forward_s[at] == 2 * alone.forward_s[at] + message_s
            assert found.backward_s[at] == 2 * alone.backward_s[at] + message_s


def test_a_size_that_was_not_measured_cannot_run() -> None:
    fewer = points()
    del fewer["2_24_0"]
    found = tables(points=fewer)
    assert found.forward_s[1, cell(24, 8)] == np.inf
    assert np.isfinite(found.forward_s[1, cell(16, 8)])
    assert np.isfinite(found.forward_s[1, cell(32, 8)])


def test_what_ran_out_of_memory_with_context_takes_larger_slices_with_it() -> None:
    fewer = points()
    del fewer["2_32_32"]
    found = tables(points=fewer)
    assert found.forward_s[1, cell(32, 32)] == found.forward_s[2, cell(32, 32)] == np.inf
    assert np.isfinite(found.forward_s[1, cell(32, 24)])
    assert np.isfinite(found.forward_s[0, cell(32, 32)])


def test_the_last_slice_takes_what_the_granularity_leaves() -> None:
    granules = Granules(tokens=62, granularity=8)
    assert granules.count == 8
    assert granules.in_tokens(((1, (3, 5)),)) == ((1, (24, 38)),)
    found = tables(tokens=62)
    time_s = found.forward_s[0, packed_index(8, 2)]  # 14 tokens after 48
    assert found.forward_s[0, packed_index(7, 1)] < time_s < found.forward_s[0, packed_index(8, 3)]


def test_points_are_taken_as_they_are_without_a_fit() -> None:
    dense = {
        f"{b}_{s}_{c}": {
            "forward_mean": 1.0 * b + s,
            "backward_mean": 1.0 * c,
            "memory_mb": 1.0 * s,
        }
        for b in range(1, BATCH + 1)
        for c in range(0, TOKENS, 8)
        for s in range(8, TOKENS - c + 1, 8)
    }
    del dense["1_16_24"]
    beyond = {"9_8_0": dense["1_8_0"], "1_64_8": dense["1_8_0"], "1_12_0": dense["1_8_0"]}
    found = tables(points=dense | beyond, context="measured", memory_cap_mb=40)
    assert found.forward_s[1, cell(24, 8)] == 26.0
    assert found.backward_s[1, cell(24, 8)] == 8.0
    assert found.forward_s[0, cell(16, 24)] == np.inf
    assert np.isfinite(found.forward_s[0, cell(40, 0)])
    assert found.forward_s[0, cell(48, 0)] == np.inf
    assert np.isinf(found.forward_s).sum() == 1 + BATCH * (3 + 2 + 1)


def test_coefficients_are_those_of_all_non_negative_ones() -> None:
    rng = np.random.default_rng(3)
    for _ in range(50):
        columns, target = rng.random((6, 2)), rng.normal(size=6)
        found = non_negative(columns, target)
        grid = [(x, y) for x in np.linspace(0, 3, 61) for y in np.linspace(0, 3, 61)]
        best = min(float(((columns @ each - target) ** 2).sum()) for each in map(np.array, grid))
        assert min(found) >= 0
        assert ((columns @ np.array(found) - target) ** 2).sum() <= best + 1e-12


def test_without_context_in_the_measurement_context_is_free() -> None:
    alone = {key: point for key, point in points().items() if key.endswith("_0")}
    table = {"batch": 3, "tokens": 64, "granularity": 8, "stages": 1, "points": alone}
    assert context_costs(parse_slice_table(json.dumps(table), file="t").points, 0) == (0.0, 0.0)
