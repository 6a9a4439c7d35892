"""The state of a study, from its journal alone."""

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from amp_ray.runtime.study import reading
from amp_ray.runtime.study.reading import read_study
from support.commands import Run

TABLE = "tp,pp,dp,micro_batch_size,measured_s\n1,1,4,1,oom\n1,2,2,1,0.06\n2,1,2,1,0.05\n"


def with_journal(folder: Path, monkeypatch: pytest.MonkeyPatch, *told: dict[str, Any]) -> None:
    """Make a study whose journal tells of trials."""
    bodies: list[dict[str, Any]] = [{"event": "study", "study": "0a", "experiment": "x"}]
    strategy = {"tp": 1, "pp": 1, "dp": 4, "micro_batch_size": 1}
    launch = {"attempt": 0, "trial_id": "x", "sigma": 0.1, "chosen": "it is next"}
    outcome = {"outcome": "measured", "spread_s": 0.0, "step_time_s": [], "num_warmup_steps": 0}
    outcome |= {"peak_memory_bytes": [], "wall_s": 1.0}
    for number, ended in enumerate(told):
        repeats = ended.pop("repeats", None)
        named = {"number": number, "repeats": repeats, "strategy": strategy, "predicted_s": 0.4}
        bodies.append({"event": "started", **launch, **named})
        bodies.append({"event": "ended", "number": number, "attempt": 0, **outcome, **ended})
    monkeypatch.setattr(reading, "parse", lambda *_, **__: SimpleNamespace(bodies=bodies))
    (folder / "journal.jsonl").touch()


@pytest.fixture
def study(amp_ray: Run, small: Path, tmp_path: Path) -> Path:
    """Return the folder of a study that has ended."""
    table, folder = tmp_path / "table.csv", tmp_path / "study"
    table.write_text(TABLE, encoding="utf-8")
    trials = f"replay:{table}"
    assert amp_ray("tune", small, "--trials", trials, "--budget", "3", "--study", folder).code == 0
    return folder


def test_a_study_that_has_ended(amp_ray: Run, study: Path) -> None:
    state = amp_ray("show", study, "--json").json
    outcomes = [trial["outcome"] for trial in state["trials"]]
    assert set(outcomes) == {"measured", "oom"}
    assert state["trials"][state["best"]]["measured_s"] == min(
        trial["measured_s"] for trial in state["trials"] if trial["measured_s"]
    )
    assert state["ending"] is not None
    assert not any(trial["running"] for trial in state["trials"])
    out = amp_ray("show", study, columns="80").out
    assert max(map(len, out.splitlines())) <= 80
    assert "recommended: tp " in out
    assert "it ended: " in out


def test_the_best_is_the_one_with_the_least_mean(
    amp_ray: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for `tune`: a trial that was fast once and slow when it was repeated is not the best."""
    times: tuple[dict[str, Any], ...] = (
        {"measured_s": 0.5},
        {"measured_s": 0.55},
        {"measured_s": 0.7, "repeats": 0},
    )
    with_journal(tmp_path, monkeypatch, *times)
    state = amp_ray("show", tmp_path, "--json").json
    assert (state["best"], state["best_s"]) == (1, 0.55)
    out = amp_ray("show", tmp_path, columns="100").out
    assert "best so far 0.55 s, trial 1" in out
    assert "repeats 0" in out


def test_means_decide_and_unsteady_trials_do_not(
    amp_ray: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first two are of an older version, which wrote no mean."""
    with_journal(
        tmp_path,
        monkeypatch,
        {"measured_s": 0.3, "spread_s": 0.2, "step_time_s": [0.2, 0.4], "num_warmup_steps": 0},
        {"measured_s": 0.5, "spread_s": 0.0, "step_time_s": [9.0, *[0.5] * 9, 1.5]}
        | {"num_warmup_steps": 1},
        {"measured_s": 0.55, "mean_s": 0.56, "spread_s": 0.0, "warnings": ["trend"]},
    )
    state = amp_ray("show", tmp_path, "--json").json
    assert (state["best"], state["best_s"]) == (2, 0.56)
    assert [trial["warnings"] for trial in state["trials"]] == [
        ["unsteady"],
        ["periodic"],
        ["trend"],
    ]
    assert state["trials"][1]["mean_s"] == pytest.approx(0.6)
    out = amp_ray("show", tmp_path, columns="200").out
    assert "best so far 0.56 s, trial 2" in out
    assert "periodic: rare slow steps, median 0.5 s, mean 0.6 s" in out
    unsteady = next(line for line in out.splitlines() if line.split()[:1] == ["0"])
    assert unsteady.split()[:4] == ["0", "0.4", "0.3", "-"]


def test_a_study_is_compared_by_its_best_trial(amp_ray: Run, study: Path) -> None:
    assert amp_ray("diff", study, study / "result.json").out == "no difference\n"


def test_a_link_that_leads_out_of_a_study_is_not_read(amp_ray: Run, study: Path) -> None:
    outside = study.parent / "elsewhere.json"
    (study / "result.json").rename(outside)
    (study / "result.json").symlink_to(outside)
    ended = amp_ray("export", study, "--to", "csv")
    assert ended.code == 2
    assert "result.json: a link out of the study's folder" in ended.err
    (study / "journal.jsonl").rename(study.parent / "journal")
    (study / "journal.jsonl").symlink_to(study.parent / "journal")
    assert amp_ray("show", study).code == 2


def test_a_study_that_runs(amp_ray: Run, study: Path) -> None:
    journal = study / "journal.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(lines[:4]) + lines[4][:20])  # the driver is about to write
    state = amp_ray("show", study, "--json").json
    assert state["ending"] is None
    assert [trial["running"] for trial in state["trials"]] == [False, True]
    assert ": runs" in amp_ray("show", study).out


def test_it_follows_until_the_study_ends(amp_ray: Run, study: Path) -> None:
    journal = study / "journal.jsonl"
    whole = journal.read_bytes()
    journal.write_bytes(b"".join(whole.splitlines(keepends=True)[:2]))
    threading.Timer(0.5, lambda: journal.write_bytes(whole)).start()
    out = amp_ray("show", study, "--follow").out
    assert out.count("trial  predicted") == 2
    assert "it ended: " in out


@pytest.mark.parametrize("content", [None, b"", b"something else\n"])
def test_what_is_no_study_is_refused(amp_ray: Run, tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "journal.jsonl").write_bytes(content)
    ended = amp_ray("show", tmp_path)
    assert ended.code == 2
    assert str(tmp_path / "journal.jsonl") in ended.err


def test_a_study_of_a_changed_file_is_read_with_its_changes(
    amp_ray: Run, small: Path, tmp_path: Path
) -> None:
    table, folder = tmp_path / "table.csv", tmp_path / "study"
    table.write_text(TABLE, encoding="utf-8")
    options = ("--trials", f"replay:{table}", "--budget", "1", "--study", folder)
    ended = amp_ray("tune", small, "--set", "model.num_heads=4", *options)
    assert ended.code in {0, 4}
    experiment = read_study(folder).experiment
    assert experiment.model.shape.num_heads == 4
    assert read_study(folder, ("model.num_heads=2",)).experiment.model.shape.num_heads == 2
