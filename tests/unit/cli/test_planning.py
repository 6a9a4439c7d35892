"""The commands that launch nothing: plan, score, explain, sweep and calibrate.

What they answer to many experiments is recorded in the net.
"""

import csv
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import pytest
from rich.progress import Progress

from amp_ray.cli.options import SearchProgress
from amp_ray.cost.estimate import Estimate
from amp_ray.errors import InputError
from amp_ray.runtime.ray.searching import Workers
from amp_ray.runtime.variants import combinations_of
from amp_ray.search.amp_ray_planner import AmpRayPlanner
from amp_ray.search.planner import BUILT_IN, make_planner, planner_names
from amp_ray.search.space import uniform_candidates
from support.commands import Run
from support.experiments import LONG, SMALL, small_experiment
from support.planted import planted_observations, small_strategies

AMP = pytest.mark.guest("amp2022")


# ------------------------------------------------------------------------- plan


def test_set_plans_as_the_changed_file(amp_ray: Run, small: Path) -> None:
    changed = small.with_name("changed.yaml")
    text = small.read_text(encoding="utf-8").replace("num_heads: 8", "num_heads: 4")
    changed.write_text(text.replace("recompute: none", "recompute: full"), encoding="utf-8")
    options = ("--set", "model.num_heads=4", "--set", "recompute=full")
    by_option = amp_ray("plan", small, *options, "--json").json
    assert by_option["ranking"] == amp_ray("plan", changed, "--json").json["ranking"]


def test_batches_that_the_devices_divide_are_planned_within_the_tolerance(
    amp_ray: Run, small: Path
) -> None:
    three = ("--set", "cluster.nodes.0.count=3", "--set", "global_batch_size=32", "--all", "--json")
    exact = amp_ray("plan", small, *three).json["ranking"]
    rows = amp_ray("plan", small, *three, "--set", "search.batch_tolerance=0.1").json["ranking"]
    plans = [row["strategy"] for row in rows]
    samples = [plan["micro_batch_size"] * plan["dp"] * plan["num_micro_batches"] for plan in plans]
    assert set(samples) == {30, 32}
    assert samples.count(32) == len(exact)
    warned = ["global_batch_size 30 instead of 32" in row["warnings"] for row in rows]
    assert warned == [number == 30 for number in samples]
    per_sample_s = [
        row["iteration_time_s"] / number for row, number in zip(rows, samples, strict=True)
    ]
    assert per_sample_s[0] <= min(per_sample_s) * 1.06


def test_where_nothing_fits_the_message_says_what_recompute_would_do(
    amp_ray: Run, small: Path
) -> None:
    words = (
        *("model.num_layers=8", "model.hidden_size=1024", "model.num_heads=16"),
        *("model.sequence_length=4096", "cluster.nodes.0.count=1", "cluster.nodes.0.memory_gib=8"),
        *("search.min_tp=2", "search.micro_batch_sizes=[8]"),
    )
    large = [word for change in words for word in ("--set", change)]
    ended = amp_ray("plan", small, *large)
    assert ended.code == 3
    assert "with 'recompute: auto' some fit, such as tp 2, pp 1, dp 1" in ended.err
    ended = amp_ray("plan", small, *large, "--set", "recompute=auto")
    assert ended.code == 0
    assert "recompute full" in ended.out


def test_safe_ties_come_first_in_json_too(
    amp_ray: Run, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_host = ("--set", "constants.host_s_per_iteration=0.015")  # so that strategies are near
    options = ("--set", "cluster.nodes.0.memory_gib=2.85", *slow_host, "--all", "--json")

    def ties(risky_probability: float) -> list[dict[str, Any]]:
        monkeypatch.setattr("amp_ray.search.ranking.RISKY_PROBABILITY", risky_probability)
        rows: list[dict[str, Any]] = amp_ray("plan", small, *options).json["ranking"]
        assert [row["position"] for row in rows] == list(range(1, len(rows) + 1))
        fastest_s = min(row["iteration_time_s"] for row in rows)
        return [row for row in rows if row["iteration_time_s"] <= fastest_s * 1.06]

    by_time = ties(1.0)
    assert by_time == sorted(by_time, key=lambda row: row["iteration_time_s"])
    limit = by_time[1]["failure_probability"]  # the second fastest is just risky
    safe = [row for row in by_time if row["failure_probability"] < limit]
    risky = [row for row in by_time if row not in safe]
    assert by_time != safe + risky
    assert [row["strategy"] for row in ties(limit)] == [row["strategy"] for row in safe + risky]


def test_unknown_commands_and_options_are_bad_input(amp_ray: Run, small: Path) -> None:
    assert amp_ray("plna", small).code == 2
    assert amp_ray("plan", small, "--tpo", "3").code == 2
    assert amp_ray("plan").code == 2


def test_interrupting_ends_with_130(
    amp_ray: Run, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(sys.modules["amp_ray.api.functions"], "plan_experiment", interrupted)
    assert amp_ray("plan", small).code == 130


def test_after_a_loss_the_plan_says_what_moves(amp_ray: Run, small: Path, tmp_path: Path) -> None:
    before = tmp_path / "before.json"
    amp_ray("plan", small, "--json", before)
    out = amp_ray("plan", small, "--without", "node0", "--from", before).out
    assert "the best strategy moves" in out
    # Of hosts that the file no longer names, too
    small.write_text(small.read_text().replace("count: 2", "count: 1"), encoding="utf-8")
    ended = amp_ray("plan", small, "--from", before, "--json")
    assert ended.json["ranking"][0]["moves"]["moved_bytes"] > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "search.spac=uniform"], "--set search.spac=uniform: search.spac: unknown key"),
        (["--transfer-calibration"], "--calibration FILE"),
        (["--objective", "cost"], "objective 'cost' needs"),
        (["--only", "tp,width"], "--only: found 'width'; expected some of tp, pp"),
        (["--without", "nodeX"], "--without nodeX: the hosts are node0, node1"),
        (["--without", "node0", "--without", "node1"], "--without leaves no host"),
        (["--from", "missing.json"], "missing.json: no such file"),
        (["--from", "wrong.json"], "wrong.json"),
        (["--from", "other.json"], "a strategy for 3 layers; the model has 9"),
        pytest.param(
            ["--from", "other.json", "--cost-model", "amp-2022"], "--from compares plans", marks=AMP
        ),
        pytest.param(
            ["--cost-model", "amp-2022", "--calibration", "x.json"], "amp-2022 has none", marks=AMP
        ),
        *(
            (["--workers", text], f"{text!r} is neither auto nor a number of workers from 0")
            for text in ("-1", "two", "1.5", "")
        ),
    ],
)
def test_wrong_options_of_plan_are_refused(
    amp_ray: Run, small: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    (tmp_path / "wrong.json").write_text('{"ranking": [{"strategy": 7}]}', encoding="utf-8")
    strategy = {"tp": 1, "dp": 1, "bounds": [0, 3], "micro_batch_size": 1, "num_micro_batches": 8}
    (tmp_path / "other.json").write_text(json.dumps(strategy), encoding="utf-8")
    paths = [str(tmp_path / word) if word.endswith(".json") else word for word in arguments]
    ended = amp_ray("plan", small, *paths)
    assert ended.code == 2
    assert message in ended.err


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ((), Workers()),
        (("--workers", "auto"), Workers()),
        (("--workers", "3"), Workers(num=3)),
        (("--workers", "0"), Workers(num=0)),
        (("--address", "head:6379"), Workers(address="head:6379")),
        (("--workers", "2", "--address", "auto"), Workers(num=2, address="auto")),
    ],
)
def test_options_say_who_searches(
    amp_ray: Run,
    small: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: tuple[str, ...],
    expected: Workers,
) -> None:
    seen: list[Workers] = []

    def planned(*_: object, workers: Workers, **__: object) -> None:
        seen.append(workers)
        message = "far enough"
        raise InputError(message)

    monkeypatch.setattr(sys.modules["amp_ray.api.functions"], "plan_experiment", planned)
    assert amp_ray("plan", small, *options).code == 2
    assert seen == [expected]


def test_the_progress_of_a_search_names_the_fastest_strategy_so_far() -> None:
    bar = Progress(disable=True)
    progress = SearchProgress(bar)
    planner = AmpRayPlanner(experiment=small_experiment())
    best = planner.plan(uniform_candidates(planner.experiment)[0])
    assert isinstance(best, Estimate)
    progress(3, 16)
    progress.leading(replace(best, iteration_time_s=0.25, lower_bound_s=0.125))
    assert (bar.tasks[0].completed, bar.tasks[0].total) == (3, 16)
    assert bar.tasks[0].description == "searching, best 0.25 s (at least 0.125 s)"
    progress.leading(replace(best, iteration_time_s=0.2, lower_bound_s=None))
    assert bar.tasks[0].description == "searching, best 0.2 s"


# ------------------------------------------------------------------------- score


@pytest.fixture
def strategies(tmp_path: Path) -> Path:
    """Three strategies, two of them with cuts."""
    path = tmp_path / "mine.csv"
    rows = "2,2,1,2,0 4 9\n1,4,1,1,\n1,1,4,2,0 9\n"
    path.write_text(f"tp,pp,dp,micro_batch_size,bounds\n{rows}", encoding="utf-8")
    return path


def test_stages_may_differ_and_devices_stay_idle(amp_ray: Run, small: Path, tmp_path: Path) -> None:
    record = {
        "micro_batch_size": 4,
        "num_micro_batches": 2,
        "stages": [
            {"layers": [0, 4], "tp": 1, "dp": 2, "shares": [1, 3]},
            {"layers": [4, 9], "tp": 1, "dp": 1, "shares": [4]},
        ],
        "placement": [["node0", 0], ["node1", 1], ["node1", 0]],
    }
    path = tmp_path / "mine.json"
    path.write_text(json.dumps([record]), encoding="utf-8")
    [row] = amp_ray("score", small, "--strategies", path, "--json").json["rows"]
    assert (row["feasible"], row["launchable"]) == (True, False)
    assert [stage["shares"] for stage in row["strategy"]["stages"]] == [[1, 3], [4]]
    for cost_model in ("amp-2022", "metis-2024"):
        options = ("--strategies", path, "--cost-model", cost_model)
        assert amp_ray("score", small, *options).code == 2


def test_slices_of_other_sequences_are_refused(amp_ray: Run, tmp_path: Path) -> None:
    experiment, path = tmp_path / "long.yaml", tmp_path / "plan.json"
    experiment.write_text(f"{LONG}global_batch_size: 1\n", encoding="utf-8")
    slices = {"bounds": [0, 3, 5, 7, 11], "token_slices": [[1, [4096]]]}
    sizes = {"micro_batch_size": 1, "num_micro_batches": 1}
    record = {"tp": 1, "pp": 4, "dp": 1, **sizes, **slices}
    path.write_text(json.dumps([record]), encoding="utf-8")
    ended = amp_ray("score", experiment, "--strategies", path)
    assert ended.code == 2
    assert "token_slices: found slices of 4096 tokens together; the experiment's" in ended.err


# ------------------------------------------------------------------------- planners by name


@pytest.fixture
def installed(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a package with a planner, as an installer leaves it on the path."""
    about = tmp_path / "rule_of_thumb-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: rule-of-thumb\nVersion: 1.0\n")
    entry = "[amp_ray.planners]\nrule-of-thumb = rule_of_thumb:RuleOfThumb\n"
    (about / "entry_points.txt").write_text(entry)
    package = repository / "tests" / "lib" / "planner_package"
    monkeypatch.setattr(sys, "path", [str(tmp_path), str(package), *sys.path])


def test_an_unknown_planner_is_refused(installed: None, amp_ray: Run, small: Path) -> None:
    with pytest.raises(InputError, match=r"no planner has the name 'best'.*rule-of-thumb"):
        make_planner(small_experiment(), "best")
    ended = amp_ray("plan", small, "--cost-model", "best")
    assert ended.code == 2
    assert "rule-of-thumb" in ended.err
    for command in (("plan",), ("sweep", "--set", "global_batch_size=8,16")):
        ended = amp_ray(command[0], small, *command[1:], "--set", "search.planner=best")
        assert ended.code == 2
        assert "search.planner: no planner has the name 'best'; known: amp-ray" in ended.err


def test_another_package_adds_a_planner(
    installed: None, amp_ray: Run, small: Path, strategies: Path
) -> None:
    assert planner_names() == (*BUILT_IN, "rule-of-thumb")
    ended = amp_ray("plan", small, "--cost-model", "rule-of-thumb", "--json")
    assert (ended.code, ended.json["cost_model"]) == (0, "rule-of-thumb")
    exact = amp_ray("plan", small, "--json").json
    [first, *_] = ended.json["ranking"]
    assert first["strategy"]["tp"] == max(row["strategy"]["tp"] for row in exact["ranking"])
    assert first["iteration_time_s"] >= exact["ranking"][0]["iteration_time_s"]
    assert first["memory_bytes"] is not None
    ours, theirs = (
        amp_ray("score", small, "--strategies", strategies, "--cost-model", name, "--json").json
        for name in ("amp-ray", "rule-of-thumb")
    )
    assert ours == theirs


def test_the_experiment_names_its_planner_and_the_command_line_wins(
    installed: None, amp_ray: Run, small: Path
) -> None:
    text = small.read_text(encoding="utf-8")
    text = text.replace("idle_devices: false", "planner: rule-of-thumb")
    small.write_text(text, encoding="utf-8")
    for options, name in (((), "rule-of-thumb"), (("--cost-model", "amp-ray"), "amp-ray")):
        assert amp_ray("plan", small, "--json", *options).json["cost_model"] == name
    swept = amp_ray("sweep", small, "--json", "--set", "global_batch_size=8,16").json
    assert swept["cost_model"] == "rule-of-thumb"


# ------------------------------------------------------------------------- explain


def test_stages_and_parts_are_those_of_the_plan(amp_ray: Run, small: Path) -> None:
    record = amp_ray("explain", small, "--no-advice", "--json").json
    plan = amp_ray("plan", small, "--json").json["ranking"]
    assert (record["row"], record["other"]["row"]) == (plan[0], plan[1])
    bounds = plan[0]["strategy"]["bounds"]
    assert [tuple(stage["layers"]) for stage in record["stages"]] == list(pairwise(bounds))
    peaks = [stage["peak_memory_bytes"] for stage in record["stages"]]
    assert peaks == plan[0]["peak_memory_bytes"]
    seconds = record["other"]["difference_s"]
    total_s = seconds.pop("iteration_time")
    assert total_s == pytest.approx(plan[1]["iteration_time_s"] - plan[0]["iteration_time_s"])
    assert sum(seconds.values()) == pytest.approx(total_s)
    fourth = amp_ray("explain", small, "--position", "4", "--no-advice", "--json").json
    assert (fourth["row"]["position"], fourth["other"]["row"]["position"]) == (4, 1)
    assert fourth["other"]["difference_s"]["iteration_time"] <= 0


def test_advice_is_what_planning_with_the_change_gives(amp_ray: Run, small: Path) -> None:
    record = amp_ray("explain", small, "--json").json
    advice = record["advice"]
    speedups = [change["speedup"] for change in advice if change["speedup"] is not None]
    assert speedups == sorted(speedups, reverse=True)
    assert {change["what"] for change in advice} >= {
        "twice the batch",
        "twice the rate between nodes",
        "half more memory on every device",
        "one more node of 2 x T4",
        "recompute full",
    }

    def samples_per_s(row: dict[str, Any]) -> float:
        plan = row["strategy"]
        samples: int = plan["micro_batch_size"] * plan["num_micro_batches"] * plan["dp"]
        return samples / float(row["iteration_time_s"])

    for change in advice:
        options = [word for key in change["set"] for word in ("--set", key)]
        row = amp_ray("plan", small, *options, "--json").json["ranking"][0]
        assert change["row"] == row
        ratio = samples_per_s(row) / samples_per_s(record["row"])
        assert change["speedup"] == pytest.approx(ratio)


def test_a_position_beyond_the_ranking_is_refused(amp_ray: Run, small: Path) -> None:
    ended = amp_ray("explain", small, "--position", "99")
    assert ended.code == 2
    assert "the ranking has 16 feasible strategies" in ended.err


def test_an_explanation_reads_at_80_columns(amp_ray: Run, small: Path) -> None:
    out = amp_ray("explain", small, columns="80").out
    assert max(map(len, out.splitlines())) <= 80
    for text in ("where the time goes: ", "bottleneck: stage", "fullest: stage", "takes"):
        assert text in out
    assert re.search(r"of its memory, of that \w+ \d+%", " ".join(out.split()))


# ------------------------------------------------------------------------- sweep


def test_every_point_of_a_sweep_is_the_plan_of_the_changed_file(amp_ray: Run, small: Path) -> None:
    sweep = amp_ray("sweep", small, "--set", "recompute=none,full", "--json").json
    assert [point["set"] for point in sweep["points"]] == [["recompute=none"], ["recompute=full"]]
    for point in sweep["points"]:
        plan = amp_ray("plan", small, "--set", *point["set"], "--json").json
        assert (point["row"], point["num_devices"]) == (plan["ranking"][0], 4)
    assert sweep["knee"] is None
    out = amp_ray("sweep", small, "--set", "recompute=none,full", columns="80").out
    assert max(map(len, out.splitlines())) <= 80


def test_the_knee_is_where_more_devices_bring_little(amp_ray: Run, small: Path) -> None:
    sizes = "cluster.nodes.0.count=1,2,4,8"
    sweep = amp_ray("sweep", small, "--set", sizes, "--json").json
    knee = sweep["knee"]
    assert knee is not None
    rates = [point["samples_per_s"] for point in sweep["points"]]
    gains = [after / before - 1 for before, after in pairwise(rates)]
    assert all(gain >= 0.5 for gain in gains[:knee])
    assert gains[knee] < 0.5
    out = amp_ray("sweep", small, "--set", sizes).out
    assert f"*{2 * 2**knee} " in out
    shares = [point["linear_fraction"] for point in sweep["points"]]
    assert shares == pytest.approx([rate / rates[0] / 2**n for n, rate in enumerate(rates)])
    assert "of linear" in out
    assert "added devices bring less than half" in out


def test_a_value_that_does_not_fit_is_a_row_with_its_reason(amp_ray: Run, small: Path) -> None:
    ended = amp_ray("sweep", small, "--set", "global_batch_size=16,x", "--json")
    assert ended.code == 2
    assert "--set global_batch_size=x: global_batch_size: found 'x'" in ended.err
    good, bad = ended.json["points"]
    assert (good["reason"], bad["row"]) == (None, None)
    assert "--set global_batch_size=x" in bad["reason"]


@pytest.mark.parametrize(
    ("sets", "code", "message"),
    [
        ("recompte=none,full", 2, "did you mean 'recompute'?"),
        ("cluster.nodes.0.memory_gib=0.001", 3, ""),
    ],
)
def test_a_sweep_without_any_plan_has_the_exit_code(
    amp_ray: Run, small: Path, sets: str, code: int, message: str
) -> None:
    ended = amp_ray("sweep", small, "--set", sets)
    assert ended.code == code
    assert message in ended.err


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (["recompute"], "expected KEY=VALUE,VALUE"),
        (["recompute="], "expected KEY=VALUE,VALUE"),
        (["=none"], "expected KEY=VALUE,VALUE"),
        (["a=1,2", "a=3"], "key 'a' is set twice"),
        (["a=" + ",".join(map(str, range(40))), "b=" + ",".join(map(str, range(40)))], "1,600"),
        (["a=[1"], "not valid YAML"),
    ],
)
def test_sets_that_mean_nothing_are_refused(sets: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        combinations_of(sets)


def test_values_are_read_as_themselves_again() -> None:
    (text,), (number,), (word,) = combinations_of(['a="8",8,true_'])
    assert (text, number, word) == ('a="8"', "a=8", "a=true_")


# ------------------------------------------------------------------------- calibrate


COLUMNS: Final = ("tp", "pp", "dp", "micro_batch_size", "bounds", "measured_s")
PLANTED: Final = {"host_scale": 1.4, "nic_efficiency": 0.8}


def planted_rows() -> list[list[str]]:
    """Return measurements of the small experiment on a slower cluster."""
    experiment = small_experiment()
    trials = planted_observations(experiment, small_strategies(experiment), PLANTED)
    rows = []
    for trial in trials:
        plan = trial.strategy
        degrees = map(str, (plan.tp, plan.pp, plan.dp, plan.micro_batch_size))
        rows.append([*degrees, " ".join(map(str, plan.bounds)), f"{trial.measured_s:.9f}"])
    return rows


def write(path: Path, rows: Sequence[Sequence[str]], columns: Sequence[str] = COLUMNS) -> Path:
    """Write a measurements file."""
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([columns, *rows])
    return path


@pytest.fixture
def measurements(tmp_path: Path) -> Path:
    """A file of good measurements."""
    return write(tmp_path / "measured.csv", planted_rows())


@pytest.fixture
def calibration(amp_ray: Run, small: Path, measurements: Path, tmp_path: Path) -> Path:
    """A calibration of the small experiment, whose table and JSON are as they should be."""
    path = tmp_path / "calibration.json"
    options = ("--measurements", measurements, "-o", path)
    shown = amp_ray("calibrate", small, *options)
    assert shown.code == 0, shown.err
    for part in ("host_scale", "ratio", "prior sigma", "left out", "leave-one-out", "16 timed"):
        assert part in shown.out
    ended = amp_ray("calibrate", small, *options, "--json")
    assert ended.json == json.loads(path.read_text(encoding="utf-8"))
    assert ended.json["schema"] == 1
    return path


def test_predictions_with_a_calibration_are_nearer_to_what_was_measured(
    amp_ray: Run, small: Path, measurements: Path, calibration: Path
) -> None:
    errors = []
    for more in ((), ("--calibration", calibration)):
        rows = amp_ray("score", small, "--strategies", measurements, *more, "--json").json["rows"]
        measured = [float(row[-1]) for row in planted_rows()]
        pairs = zip(rows, measured, strict=True)
        errors.append(sum(abs(row["iteration_time_s"] / seconds - 1) for row, seconds in pairs))
    assert errors[1] < 0.3 * errors[0]


@pytest.mark.parametrize("command", ["plan", "score"])
def test_a_calibration_of_another_model_is_refused(
    amp_ray: Run, tmp_path: Path, measurements: Path, calibration: Path, command: str
) -> None:
    other = tmp_path / "other.yaml"
    other.write_text(SMALL.replace("vocab_size: 1024", "vocab_size: 2048"), encoding="utf-8")
    options = ("--strategies", measurements) if command == "score" else ()
    ended = amp_ray(command, other, *options, "--calibration", calibration)
    assert ended.code == 2
    assert "model.vocab_size is 1024 in the calibration, 2048 here" in ended.err
    options = (*options, "--calibration", calibration, "--transfer-calibration")
    assert amp_ray(command, other, *options).code == 0


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (["1", "1", "4", "1", "0 9", "-1"], "measured.csv:2: measured_s: found '-1'"),
        (["1", "1", "4", "1", "0 9", "0"], "measured.csv:2: measured_s: found '0'"),
        (["1", "1", "4", "1", "0 9", "crash"], "'crash'; expected seconds, from 1e-06 to"),
        (["1", "1", "4", "1", "", ""], "measured.csv:2: nothing was measured"),
        (["1", "1", "8", "1", "", "1"], "measured.csv:2: tp 1 x pp 1 x dp 8 = 8 devices"),
        (["1", "1", "4", "3", "", "1"], "micro_batch_size 3 = 12 does not divide"),
    ],
)
def test_bad_measurements_are_refused_with_their_line(
    amp_ray: Run, small: Path, tmp_path: Path, row: list[str], message: str
) -> None:
    path = write(tmp_path / "measured.csv", [row])
    ended = amp_ray("calibrate", small, "--measurements", path, "-o", tmp_path / "c.json")
    assert ended.code == 2
    assert message in ended.err
    assert not (tmp_path / "c.json").exists()


@pytest.mark.parametrize(
    ("constants", "message"),
    [
        ("host_scale,nic_efficiency,message_scale", "3 constants"),
        ("warp", "found warp"),
        ("profile_scale", "profile_scale is not identified"),
    ],
)
def test_constants_that_cannot_be_fitted_are_refused(
    amp_ray: Run, small: Path, tmp_path: Path, constants: str, message: str
) -> None:
    path = write(tmp_path / "measured.csv", planted_rows()[:2])
    options = ("--measurements", path, "-o", tmp_path / "c.json", "--constants", constants)
    ended = amp_ray("calibrate", small, *options)
    assert ended.code == 2
    assert message in ended.err


def test_the_planner_chooses_cuts_that_a_measurement_leaves_out(
    amp_ray: Run, small: Path, tmp_path: Path
) -> None:
    rows = [["1", "2", "2", "1", "0.05"], ["1", "2", "2", "2", "failed"]]
    path = write(tmp_path / "measured.csv", rows, [name for name in COLUMNS if name != "bounds"])
    ended = amp_ray("calibrate", small, "--measurements", path, "-o", tmp_path / "c.json", "--json")
    assert ended.code == 0
    assert len(ended.json["trials"][0]["strategy"]["bounds"]) == 3
