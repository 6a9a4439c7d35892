"""Everything that tells of a study names the same strategy."""

import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest
from rich.console import Console

import amp_ray as amp
from amp_ray.report.page import study_record
from amp_ray.report.strategy_text import strategy_text
from amp_ray.runtime.study.reading import read_study
from amp_ray.tuner.state import Policy
from support.commands import Run

DEGREES: Final = [(tp, 4 // tp, size) for tp in (1, 2, 4) for size in (1, 2)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A study: what every strategy takes against its prediction, and what is recommended."""

    factors: tuple[float | str, ...]  # by the order of `DEGREES`; or why it failed
    spread_fraction: float = 0.02
    budget: int = 3
    policy: Policy = "predicted-order"
    rests_on: str = "measured"


CASES: Final = {
    "quiet": Case(factors=(1.0,) * 6),
    "tied": Case(factors=(1.0, 1.0, 1.0, 1.0, 1.0, 1.0), budget=6),
    "predicted winner refuted": Case(factors=(4.0, 4.0, 4.0, 1.0, 1.0, 1.0), budget=4),
    "all slower and noisy": Case(
        factors=(4.4, 3.9, 4.1, 4.6, 4.0, 3.7),
        spread_fraction=0.6,
        policy="best",
        rests_on="posterior",
    ),
    "all failed": Case(factors=("oom",) * 6, budget=2, rests_on="predicted"),
    "some failed": Case(factors=("failed", "oom", "failed", 1.0, 1.0, 1.0), budget=6),
    "not enough trials": Case(factors=(1.0,) * 6, budget=1),
    "a confirmed prediction": Case(
        factors=(1.0,) * 6, budget=2, policy="random", rests_on="predicted"
    ),
}


def run_study(case: Case, small: Path, folder: Path) -> amp.Study:
    """Replay a study whose outcomes are multiples of what is predicted."""
    grid = [dict(zip(("tp", "dp", "micro_batch_size"), each, strict=True)) for each in DEGREES]
    scores = amp.score(small, [{**each, "pp": 1} for each in grid])
    rows = ["tp,pp,dp,micro_batch_size,measured_s,spread_s"]
    for (tp, dp, size), factor, score in zip(DEGREES, case.factors, scores, strict=True):
        told: tuple[object, object] = (factor, "")
        if not isinstance(factor, str):
            time_s = factor * score.iteration_time_s  # type: ignore[union-attr]
            told = time_s, case.spread_fraction * time_s
        rows.append(",".join(map(str, (tp, 1, dp, size, *told))))
    table = folder.with_suffix(".csv")
    table.write_text("\n".join(rows) + "\n", encoding="utf-8")
    seed = 2  # of policy ``random``: it draws slow ones first
    return amp.tune(
        small, replay=table, study=folder, budget=case.budget, policy=case.policy, seed=seed
    )


def named(strategy: dict[str, Any]) -> str:
    return f"tp {strategy['tp']}, pp {strategy['pp']}, dp {strategy['dp']}, micro-batch size"


def text_of(study: amp.Study) -> str:
    console = Console(record=True, file=io.StringIO(), width=300)
    console.print(study.drawn())
    return console.export_text()


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_all_readers_name_the_same_strategy(
    amp_ray: Run, small: Path, tmp_path: Path, case: Case
) -> None:
    folder = tmp_path / "study"
    study = run_study(case, small, folder)
    result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    answer = result["recommendation"]
    strategy, name = answer["strategy"], strategy_text(answer["strategy"])
    assert answer["rests_on"] == case.rests_on
    # the results themselves
    assert result == study.to_json()
    assert result["ranking"][0]["strategy"] == strategy
    assert result["ranking"][0]["iteration_time_s"] == pytest.approx(answer["time_s"])
    assert result["ranking"][0]["feasible"]
    is_measured = case.rests_on != "predicted"
    assert (result["best"] is not None) == is_measured
    assert result["best"] is None or result["best"]["strategy"] == strategy
    experiment = study.experiment
    assert study.best is not None
    assert strategy == amp.score(experiment, [study.best]).to_json()["rows"][0]["strategy"]
    # consoles
    assert f"recommended: {name}\n" in "".join(
        f"{line.rstrip()}\n" for line in text_of(study).splitlines()
    )
    shown = amp_ray("show", folder, "--json").json
    assert shown["recommendation"]["strategy"] == strategy
    assert (shown["best"] is not None) == is_measured
    assert shown["best"] is None or shown["trials"][shown["best"]]["strategy"] == strategy
    assert shown["best_s"] == (answer["time_s"] if is_measured else None)
    assert f"recommended: {name}\n" in amp_ray("show", folder, columns="300").out
    # the page
    page = study_record(read_study(folder), source=str(folder))
    assert page["names"][page["best"]["id"]] == page["names"][page["rows"][0]["id"]] == name
    tiles = dict(page["figures"])
    assert tiles["plan"] == name
    first = next(text for tile, text in page["figures"] if tile.endswith("per iteration"))
    assert first.startswith(f"{answer['time_s']:.4g} s (")
    assert page["best"]["iteration_time_s"] == pytest.approx(answer["time_s"])
    assert f"recommended: {name}" in page["notes"]
    ties = [tie["strategy"] for tie in answer["ties"]]
    assert [row["tied"] for row in page["rows"]] == [
        row["strategy"] in ties for row in result["ranking"]
    ]
    # what is handed over
    target = tmp_path / "job"
    assert named(strategy) in amp_ray("export", folder, "--to", "deepspeed", "-o", target).out


def test_a_study_of_an_older_version_has_one_answer_too(
    amp_ray: Run, small: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "study"
    run_study(CASES["quiet"], small, folder)
    path = folder / "result.json"
    result = json.loads(path.read_text(encoding="utf-8"))
    for key in ("rests_on", "time_s", "interval_s"):
        del result["recommendation"][key]
    result["ranking"] = result["ranking"][::-1]
    for row in result["ranking"]:
        del row["measured_s"], row["predicted_s"]
    path.write_text(json.dumps(result), encoding="utf-8")
    strategy = result["recommendation"]["strategy"]
    page = study_record(read_study(folder), source=str(folder))
    assert page["figures"][0] == ("plan", strategy_text(strategy))
    assert page["figures"][1][0] == "measured per iteration"
    target = tmp_path / "job"
    assert named(strategy) in amp_ray("export", folder, "--to", "deepspeed", "-o", target).out
