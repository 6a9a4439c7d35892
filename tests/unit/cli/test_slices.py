import json
from pathlib import Path
from typing import Any

import pytest

from support.commands import Run
from support.experiments import LONG


def table(tmp_path: Path, **changes: object) -> Path:
    record = {
        "batch": 2,
        "tokens": 10,
        "granularity": 4,
        "stages": 4,
        "points": {
            f"{b}_{s}_{c}": {"forward_mean": b * s, "backward_mean": 2 * b * s, "memory_mb": b * s}
            for b in (1, 2)
            for s, c in ((4, 0), (4, 4), (2, 8), (8, 0), (6, 4), (10, 0))
        },
    }
    path = tmp_path / "table.json"
    path.write_text(json.dumps(record | changes), encoding="utf-8")
    return path


def test_people_see_equal_slices_together(amp_ray: Run, tmp_path: Path) -> None:
    shown = amp_ray("slices", "--table", table(tmp_path)).out
    assert "96 s, the best there is" in shown
    assert "2x4 2" in shown


@pytest.mark.parametrize(
    "changes",
    [
        {"points": {}},
        {"memory_cap_mb": 1.0},
        {"points": {"3_4_0": {"forward_mean": 1, "backward_mean": 1}}},
    ],
)
def test_nothing_that_fits_ends_with_3(
    amp_ray: Run, tmp_path: Path, changes: dict[str, Any]
) -> None:
    ended = amp_ray("slices", "--table", table(tmp_path, **changes))
    assert ended.code == 3
    assert "no feasible slices: no slices that can run make up 2 sequence(s)" in ended.err


def test_a_mistake_ends_with_2_and_its_key(amp_ray: Run, tmp_path: Path) -> None:
    ended = amp_ray("slices", "--table", table(tmp_path, granularity=0))
    assert ended.code == 2
    assert "table.json: granularity: found 0" in ended.err


EXPERIMENT = LONG + "global_batch_size: 1\nsearch: {min_tp: 1, max_tp: 1}\n"


def test_slices_are_shown_where_a_plainer_strategy_comes_first(
    amp_ray: Run, tmp_path: Path
) -> None:
    text = LONG.replace("8192", "1024") + "global_batch_size: 4\nsearch: {max_dp: 1, max_tp: 1}\n"
    (tmp_path / "short.yaml").write_text(text, encoding="utf-8")
    result = amp_ray("slices", tmp_path / "short.yaml", "--json").json
    plan = amp_ray("plan", tmp_path / "short.yaml", "--set", "search.token_slices=true", "--json")
    first = plan.json["ranking"][0]
    assert "token_slices" not in first["strategy"]
    assert result["row"]["position"] > 1
    assert result["time_s"] == plan.json["fastest_s"] < first["iteration_time_s"]
    assert len(result["slices"][0]["tokens"]) > 1


@pytest.mark.parametrize("space", ["placement", "heterogeneous"])
def test_other_spaces_are_refused(amp_ray: Run, tmp_path: Path, space: str) -> None:
    path = tmp_path / "long.yaml"
    path.write_text(EXPERIMENT.replace("min_tp: 1", f"space: {space}"), encoding="utf-8")
    ended = amp_ray("slices", path)
    assert ended.code == 2
    assert f"search.space: found {space}; token slices are planned in space uniform" in ended.err
    path.write_text(
        EXPERIMENT.replace("min_tp: 1", f"space: {space}, token_slices: true"), encoding="utf-8"
    )
    ended = amp_ray("plan", path)
    assert ended.code == 2
    assert "search.token_slices: token slices are planned in space uniform" in ended.err


def test_either_an_experiment_or_a_table_is_needed(amp_ray: Run) -> None:
    ended = amp_ray("slices")
    assert ended.code == 2
    assert "give an experiment file, with --set or without, or --table FILE" in ended.err
