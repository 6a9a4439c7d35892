import json

import numpy as np
import pytest

from amp_ray.inputs.slice_table import SliceTable, parse_slice_table
from amp_ray.partition.slices import SliceSolution, SliceTables, solve_slices
from amp_ray.planners.terapipe2021.planner import (
    MODELS,
    SETTINGS,
    find_slices,
    grid_of,
    terapipe_grid,
)
from support.slice_oracle import is_partition, random_tables


def solved(tables: SliceTables, num_stages: int, least_step_s: float) -> SliceSolution:
    answer = find_slices(grid_of(tables), num_stages, least_step_s=least_step_s)
    assert answer is not None
    return answer


@pytest.mark.parametrize("kind", ["smooth", "noisy", "clustered"])
@pytest.mark.parametrize("seed", range(4))
def test_a_search_that_skips_nothing_equals_the_exact_one(kind: str, seed: int) -> None:
    tables = random_tables(np.random.default_rng(seed), kind, 3, 6).merged()
    ours = solve_slices(tables, (1.0, 7.0))
    assert isinstance(ours, SliceSolution)
    theirs = solved(tables, 8, 0.0)
    assert is_partition(theirs.slices, tables)
    assert theirs.value_s >= ours.value_s * (1 - 1e-12)
    assert theirs.value_s == pytest.approx(ours.value_s, rel=0.05)


def test_skipping_to_the_next_time_in_the_table_may_cost_much_more_than_the_step() -> None:
    # The bound that admits one granule at a time is 5 us above one that does not, the next far off.
    forward_s = np.array([[1.0, 1.0 + 5e-6, 1.9]])
    tables = SliceTables(forward_s=forward_s, backward_s=np.zeros((1, 3)))
    exact = solve_slices(tables, (1.0, 9.0))
    assert isinstance(exact, SliceSolution)
    assert exact.slices == ((1, (1, 1)),)
    answer = find_slices(grid_of(tables), 10)
    assert answer is not None
    assert answer.value_s == pytest.approx(19.0)
    assert exact.value_s == pytest.approx(11.0, rel=1e-4)


def test_nothing_that_runs_is_none() -> None:
    tables = SliceTables(forward_s=np.full((1, 3), np.inf), backward_s=np.zeros((1, 3)))
    assert find_slices(grid_of(tables), 2) is None


def table(*, added_s: float = 0.0, per_context_s: float = 0.1) -> SliceTable:
    record = {
        "batch": 2,
        "tokens": 16,
        "granularity": 8,
        "stages": 2,
        "context": "fitted",
        "communication": {"tokens": [1, 1000], "seconds": [0.001, 1.0]},
        "points": {
            f"{b}_{s}_{c}": {
                "forward_mean": 1.0 * b * s,
                "backward_mean": 2.0 * b * s + per_context_s * c + (added_s if c else 0.0),
            }
            for b in (1, 2)
            for s in (8, 16)
            for c in (0, 8, 16)
        },
    }
    return parse_slice_table(json.dumps(record), file="table")


def test_messages_are_looked_up_at_the_wrong_number_of_tokens() -> None:
    wrong, right = terapipe_grid(table()), terapipe_grid(table(), repaired=True)
    for place, tokens in (((0, 0, 0), 0), ((1, 1, 0), 0), ((1, 0, 0), (16 + 8) - 2 * 8)):
        # A message there and back, a millisecond per token.
        assert wrong[place] - right[place] == pytest.approx(2 * 0.001 * tokens)
    assert right[0, 1, 1] == np.inf


def test_its_fit_changes_what_was_measured_without_context() -> None:
    own = table(added_s=5.0, per_context_s=0.0)
    assert terapipe_grid(own)[0, 0, 0] == pytest.approx(24.0 + 5.0 + 2 * 0.008)


def test_published_settings_are_divided_as_they_say() -> None:
    assert len(SETTINGS) == 22
    for setting in SETTINGS:
        model = MODELS[setting.model]
        assert setting.layers_per_stage * setting.pp == model.num_layers
        assert setting.batch <= model.most_sequences
        assert setting.tp * setting.pp * setting.dp <= 8 * setting.num_nodes
