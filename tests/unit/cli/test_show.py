"""The state of a study, from its journal alone."""

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from amp_ray.runtime.study import watching
from amp_ray.runtime.study.reading import read_study

Run = Callable[..., Any]

TABLE = "tp,pp,dp,micro_batch_size,measured_s\n1,1,4,1,oom\n1,2,2,1,0.06\n2,1,2,1,0.05\n"


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
    assert "best so far" in out
    assert "it ended: " in out


def test_the_best_is_the_one_with_the_least_mean(
    amp_ray: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for `tune`: a trial that was fast once and slow when it was repeated is not the best."""
    bodies: list[dict[str, Any]] = [{"event": "study", "experiment": "x"}]
    strategy = {"tp": 1, "pp": 1, "dp": 4, "micro_batch_size": 1}
    for number, (measured_s, repeats) in enumerate([(0.5, None), (0.55, None), (0.7, 0)]):
        named = {"number": number, "repeats": repeats, "strategy": strategy, "predicted_s": 0.4}
        bodies.append({"event": "started", **named})
        ended = {"number": number, "outcome": "measured", "measured_s": measured_s}
        bodies.append({"event": "ended", **ended})
    monkeypatch.setattr(watching, "parse", lambda *_, **__: SimpleNamespace(bodies=bodies))
    (tmp_path / "journal.jsonl").touch()
    state = amp_ray("show", tmp_path, "--json").json
    assert (state["best"], state["best_s"]) == (1, 0.55)
    out = amp_ray("show", tmp_path, columns="100").out
    assert "best so far 0.55 s, trial 1" in out
    assert "repeats 0" in out


def test_a_study_is_compared_by_its_best_trial(amp_ray: Run, study: Path) -> None:
    assert amp_ray("diff", study, study / "result.json").out == "no difference\n"


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
