import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., Any]

PLAN_KEYS = {
    "schema",
    "experiment",
    "cost_model",
    "num_candidates",
    "num_feasible",
    "search_s",
    "lower_bound_s",
    "ranking",
}


def test_json_alone_on_stdout_has_the_keys_of_the_contract(amp_ray: Run, small: Path) -> None:
    ended = amp_ray("plan", small, "--json")
    assert ended.code == 0
    assert ended.err == ""
    assert ended.json.keys() >= PLAN_KEYS
    assert ended.json["schema"] == 1
    assert ended.json["num_candidates"] == 16


def test_json_into_a_file_leaves_stdout_empty(amp_ray: Run, small: Path, tmp_path: Path) -> None:
    target = tmp_path / "plan.json"
    ended = amp_ray("plan", small, "--json", target)
    assert ended.out == ""
    assert json.loads(target.read_text(encoding="utf-8"))["experiment"] == "small"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plan.json", "small.yaml"]


def test_top_limits_the_rows(amp_ray: Run, small: Path) -> None:
    assert len(amp_ray("plan", small, "--top", "3", "--json").json["ranking"]) == 3


def test_all_lists_every_candidate(amp_ray: Run, small: Path) -> None:
    small.write_text(small.read_text().replace("num_heads: 8", "num_heads: 1"), encoding="utf-8")
    plan = amp_ray("plan", small, "--all", "--json").json
    assert len(plan["ranking"]) == plan["num_candidates"] == 16
    assert [row["feasible"] for row in plan["ranking"]] == [True] * 9 + [False] * 7


def test_the_table_names_columns_and_the_rest(amp_ray: Run, small: Path) -> None:
    out = amp_ray("plan", small, "--top", "2").out
    for word in ("s/iter", "compute", "bubble", "p2p", "sync", "optim", "peak/limit", "bounds"):
        assert word in out
    assert "14 more feasible strategies" in out


def test_in_a_narrow_terminal_the_answer_stays_and_the_breakdown_goes(
    amp_ray: Run, small: Path
) -> None:
    whole = amp_ray("plan", small).out
    narrow = amp_ray("plan", small, columns="80").out
    assert max(map(len, narrow.splitlines())) <= 80
    assert ("bounds" in narrow, "bubble" in narrow, "bubble" in whole) == (True, False, True)
    wide = amp_ray("plan", small, "--wide", columns="80").out
    assert ("bounds" in wide, "bubble" in wide) == (True, True)


def test_no_feasible_strategy_counts_every_reason(amp_ray: Run, small: Path) -> None:
    text = small.read_text().replace("slots: 2,", "slots: 2, memory_gib: 1,")
    small.write_text(text.replace("num_heads: 8", "num_heads: 1"), encoding="utf-8")
    ended = amp_ray("plan", small)
    assert ended.code == 3
    assert "no feasible strategy: 9 out of memory, 7 tp does not divide" in ended.err
    assert "; closest: tp 1, pp 4, dp 1, micro-batch size 1, bounds 0 2 " in ended.err
    assert " GiB of 1.00 (T4)\n" in ended.err


@pytest.mark.parametrize("space", ["uniform", "placement", "heterogeneous"])
def test_no_feasible_strategy_names_the_closest_in_every_space(
    amp_ray: Run, small: Path, space: str
) -> None:
    text = small.read_text().replace("slots: 2,", "slots: 2, memory_gib: 1,")
    small.write_text(f"{text}search: {{space: {space}}}\n", encoding="utf-8")
    ended = amp_ray("plan", small)
    assert ended.code == 3
    assert "; closest: tp 2, pp 2, dp 1, micro-batch size 1, bounds 0 4 9: stage " in ended.err


def test_safe_ties_come_first_in_json_too(
    amp_ray: Run, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = small.read_text().replace("slots: 2,", "slots: 2, memory_gib: 2.85,")
    small.write_text(text, encoding="utf-8")

    def ties(risky_probability: float) -> list[dict[str, Any]]:
        monkeypatch.setattr("amp_ray.search.ranking.RISKY_PROBABILITY", risky_probability)
        rows: list[dict[str, Any]] = amp_ray("plan", small, "--all", "--json").json["ranking"]
        assert [row["position"] for row in rows] == list(range(1, len(rows) + 1))
        fastest_s = min(row["iteration_time_s"] for row in rows)
        return [row for row in rows if row["iteration_time_s"] <= fastest_s * 1.06]

    by_time = ties(1.0)
    assert by_time == sorted(by_time, key=lambda row: row["iteration_time_s"])
    limit = by_time[1]["failure_probability"]  # the second fastest is just risky
    safe = [row for row in by_time if row["failure_probability"] < limit]
    assert by_time != safe + [row for row in by_time if row not in safe]
    risky = [row for row in by_time if row not in safe]
    assert [row["strategy"] for row in ties(limit)] == [row["strategy"] for row in safe + risky]


def test_a_json_result_never_overwrites_an_experiment(amp_ray: Run, small: Path) -> None:
    before = small.read_text(encoding="utf-8")
    ended = amp_ray("plan", small, "--json", small)
    assert ended.code == 2
    assert "not written over an input file" in ended.err
    assert small.read_text(encoding="utf-8") == before


def test_the_published_planner_is_selectable(amp_ray: Run) -> None:
    experiment = Path(__file__).parents[3] / "experiments" / "homogeneous.yaml"
    plan = amp_ray("plan", experiment, "--all", "--cost-model", "amp-2022", "--json").json
    assert plan["cost_model"] == "amp-2022"
    assert plan["num_candidates"] == 53
    assert plan["ranking"][0]["iteration_time_s"] == pytest.approx(1.2443, abs=5e-5)


def test_the_same_answer_for_any_hash_seed_and_repetition(amp_ray: Run, small: Path) -> None:
    first, second = (amp_ray("plan", small, "--all", "--json").json for _ in range(2))
    first.pop("search_s")
    second.pop("search_s")
    assert first == second


def test_unknown_commands_and_options_are_bad_input(amp_ray: Run, small: Path) -> None:
    assert amp_ray("plna", small).code == 2
    assert amp_ray("plan", small, "--tpo", "3").code == 2
    assert amp_ray("plan").code == 2


def test_interrupting_ends_with_130(
    amp_ray: Run, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(sys.modules["amp_ray.cli.plan"], "plan_experiment", interrupted)
    assert amp_ray("plan", small).code == 130


def test_a_calibration_is_refused_where_there_are_no_constants(
    amp_ray: Run, small: Path, tmp_path: Path
) -> None:
    ended = amp_ray(
        "plan", small, "--cost-model", "amp-2022", "--calibration", tmp_path / "any.json"
    )
    assert ended.code == 2
    assert "amp-2022 has none" in ended.err


def mixed(path: Path, space: str, *more: str) -> Path:
    """Make the second of two nodes slower."""
    text = path.read_text(encoding="utf-8")
    [node] = [line for line in text.splitlines() if "count: 2, device: T4" in line]
    pair = "\n".join(
        node.replace("count: 2, device: T4", f"count: 1, device: {device}")
        for device in ("T4", "V100-16")
    )
    path.write_text(
        text.replace(node, pair) + "".join([f"search: {{space: {space}}}\n", *more]),
        encoding="utf-8",
    )
    return path


@pytest.mark.parametrize("more", ["", ", idle_devices: false"])
def test_a_free_placement_is_never_worse_and_says_where(
    amp_ray: Run, small: Path, more: str
) -> None:
    uniform = amp_ray("plan", mixed(small, "uniform"), "--json").json["ranking"][0]
    text = small.read_text(encoding="utf-8").replace("space: uniform", f"space: placement{more}")
    small.write_text(text, encoding="utf-8")
    placed = amp_ray("plan", small, "--json").json["ranking"][0]
    assert placed["iteration_time_s"] <= uniform["iteration_time_s"]
    devices = set(map(tuple, placed["strategy"]["placement"]))
    everything = {("node0", 0), ("node0", 1), ("node1", 0), ("node1", 1)}
    assert devices == everything if more else devices < everything
    assert placed["launchable"]


def test_stages_with_their_own_devices_are_told_whole(amp_ray: Run, small: Path) -> None:
    plan = amp_ray("plan", mixed(small, "heterogeneous"), "--json").json
    assert plan["num_candidates"] == 4  # batches of 8 samples
    for row in plan["ranking"]:
        assert row["feasible"]
        assert row["lower_bound_s"] <= row["iteration_time_s"] * (1 + 1e-9)
        stages = row["strategy"].get("stages", [])
        size = row["strategy"]["micro_batch_size"]
        assert all(sum(stage["shares"]) == size for stage in stages)
        assert row["launchable"] == (not stages)
    placed = amp_ray("plan", small, "--launchable", "--json").json["ranking"][0]
    assert plan["ranking"][0]["iteration_time_s"] <= placed["iteration_time_s"]


def test_only_what_can_be_launched(amp_ray: Run, small: Path) -> None:
    plan = amp_ray("plan", mixed(small, "heterogeneous"), "--launchable", "--json").json
    assert plan["num_candidates"] == 16 + 1  # all of the grids, and one that may be the fastest
    assert all(row["strategy"]["tp"] and row["launchable"] for row in plan["ranking"])
    strategies = [json.dumps(row["strategy"]) for row in plan["ranking"]]
    assert len(set(strategies)) == len(strategies)


def test_slow_devices_may_stay_idle_in_what_is_launched(amp_ray: Run, small: Path) -> None:
    slow = "{name: slow, memory_gib: 16, memory_gbyte_per_s: 3, fp16_tflops: 0.01}"
    text = mixed(small, "heterogeneous").read_text(encoding="utf-8")
    small.write_text(text.replace("device: T4", f"device: {slow}"), encoding="utf-8")
    best = amp_ray("plan", small, "--launchable", "--json").json["ranking"][0]
    assert {node for node, _ in best["strategy"]["placement"]} == {"node1"}
    assert best["launchable"]
