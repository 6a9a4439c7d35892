"""The commands of studies: tune and show; and that everything names the same best strategy."""

import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pytest
from rich.console import Console

import amp_ray as amp
from amp_ray.report.page import study_record
from amp_ray.report.strategy_text import plan_text, strategy_text
from amp_ray.runtime.files import load_experiment
from amp_ray.runtime.study import reading
from amp_ray.runtime.study.pool import RunnerPool
from amp_ray.runtime.study.reading import read_study
from amp_ray.trials.outcome import Unreachable
from amp_ray.tuner.state import Policy
from support.checked import check_ended
from support.commands import Ended, Run
from support.programs import python
from support.recorded import table_text, write_experiment

DEAD_HOSTS = """\
Host dead-*
  HostName 127.0.0.1
  Port 1
  User ada
"""
OVER_SSH = (
    ("cluster:\n", "cluster:\n  hostfile: hostfile\n"),
    (
        "global_batch_size: 8\n",
        "global_batch_size: 8\ntrials: {ssh: {config: ssh_config, use_agent: false}}\n",
    ),
)
FULL = 'mount -t tmpfs -o size="$1" none "$2" && shift 2 && exec "$@"'

Tune = Callable[..., Ended]


@pytest.fixture
def homogeneous(repository: Path) -> list[str | Path]:
    """Arguments that replay the published trials."""
    table = repository / "amp_ray" / "data" / "tables" / "amp-2022-homogeneous.csv"
    return [repository / "experiments" / "homogeneous.yaml", "--trials", f"replay:{table}"]


@pytest.fixture
def published(amp_ray: Run, homogeneous: list[str | Path], tmp_path: Path) -> Tune:
    """Replay the published trials, in a folder of the test's own."""

    def tune(*arguments: str | Path) -> Ended:
        ended: Ended = amp_ray("tune", *homogeneous, "--study", tmp_path / "study", *arguments)
        return ended

    return tune


@pytest.fixture
def tune(amp_ray: Run, tmp_path: Path) -> Tune:
    """Replay recorded trials of the small experiment, in a folder of the test's own."""
    write_experiment(tmp_path)
    record(tmp_path)

    def run(*arguments: str | Path) -> Ended:
        table = tmp_path / "table.csv"
        fixed = (tmp_path / "small.yaml", "--trials", f"replay:{table}")
        ended: Ended = amp_ray("tune", *fixed, "--study", tmp_path / "study", *arguments)
        return ended

    return run


def record(folder: Path, cells: dict[int, str] | None = None) -> None:
    """Write what came of all strategies of the small experiment, by position."""
    text = table_text(load_experiment(folder / "small.yaml"), cells)
    (folder / "table.csv").write_text(text, encoding="utf-8")


@pytest.fixture
def dead(tmp_path: Path) -> Path:
    """An experiment on hosts that do not answer."""
    (tmp_path / "hostfile").write_text("dead-a slots=2\ndead-b slots=2\n", encoding="utf-8")
    (tmp_path / "ssh_config").write_text(DEAD_HOSTS, encoding="utf-8")
    return write_experiment(tmp_path, *OVER_SSH)


# ------------------------------------------------------------------------- the published trials


def test_a_script_runs_the_same_study(repository: Path, tmp_path: Path) -> None:
    table = repository / "amp_ray" / "data" / "tables" / "amp-2022-homogeneous.csv"
    script = repository / "experiments" / "homogeneous.py"
    options = ["--full", "--budget", "2", "--trials", f"replay:{table}", "--json"]
    ended = python(script, *options, "--study", tmp_path / "study")
    assert len(json.loads(ended.stdout)["trials"]) == 2


# ------------------------------------------------------------------------- going on


def test_the_study_is_kept_in_a_folder_of_the_experiment_s_name(
    amp_ray: Run, tune: Tune, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    del tune
    monkeypatch.chdir(tmp_path)
    ended = amp_ray("tune", "small.yaml", "--trials", "replay:table.csv", "--budget", "1", "--json")
    assert ended.json["study"] == "small-study"
    assert (tmp_path / "small-study" / "journal.jsonl").is_file()


# ------------------------------------------------------------------------- bad input


def refused(ended: Ended, *words: str) -> None:
    """Expect one message with these words, and the code of bad input."""
    assert ended.code == 2
    assert ended.out == ""
    message = ended.err.rstrip("\n").removeprefix("amp-ray: ")
    assert "\n" not in message
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--budget", "0"), ("a budget of 0 trials measures nothing", "amp-ray plan")),
        (("--budget", "1", "--workers", "2"), ("a table is scored in this process",)),
        (("--budget", "1", "--address", "127.0.0.1:1"), ("a table is scored in this process",)),
        (("--budget", "1", "--calibration", "none.json"), ("none.json",)),
        (("--resume",), ("has no study to go on with", "leave --resume out", "by --study")),
    ],
)
def test_what_cannot_be_done_is_refused_before_anything_is_kept(
    tune: Tune, tmp_path: Path, options: tuple[str, ...], words: tuple[str, ...]
) -> None:
    refused(tune(*options), *words)
    assert not (tmp_path / "study").exists()


def test_nobody_waits_for_a_search_to_hear_that(
    tune: Tune, monkeypatch: pytest.MonkeyPatch
) -> None:
    def search(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr("amp_ray.runtime.study.tuning.study_space", search)
    assert tune("--resume").code == 2


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (("--trials", "replay:", "--budget", "1"), "none of ssh, local, replay:TABLE.csv"),
        (("--trials", "cloud", "--budget", "1"), "none of ssh, local, replay:TABLE.csv"),
        (("--trials", "replay:none.csv", "--budget", "1"), "none.csv"),
        (("--budget", "-1"), "--budget"),
        (("--budget", "many"), "--budget"),
        (("--time-budget", "0"), "--time-budget"),
        (("--concurrency", "0"), "--concurrency"),
        (("--policy", "luck"), "--policy"),
        (("--pool", "swimming"), "--pool"),
        (("--seed", "-1"), "--seed"),
    ],
)
def test_options_out_of_range_are_refused(tune: Tune, options: tuple[str, ...], word: str) -> None:
    check_ended(tune(*options), 2, word)


def test_a_table_with_two_runs_of_a_strategy_answers(tune: Tune, tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines, lines[1]]) + "\n", encoding="utf-8")
    assert tune("--budget", "1").code == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ((), ("cluster.hostfile", "--trials local")),
        (
            ("--trials", "local", "--concurrency", "2"),
            ("--concurrency 2: the hosts make 1 group", "trials.host_groups"),
        ),
        (
            ("--trials", "local", "--address", "ray://head:10001/x"),
            ("is no address of a Ray cluster", "host:port"),
        ),
    ],
)
def test_trials_that_no_host_can_run_are_refused(
    amp_ray: Run, small: Path, tmp_path: Path, options: tuple[str, ...], words: tuple[str, ...]
) -> None:
    ended = amp_ray("tune", small, "--budget", "1", "--study", tmp_path / "study", *options)
    refused(ended, *words)
    assert not (tmp_path / "study").exists()


# ------------------------------------------------------------------------- nothing feasible


def test_without_a_feasible_strategy_nothing_is_launched(amp_ray: Run, tmp_path: Path) -> None:
    path = write_experiment(tmp_path, ("slots: 2,", "slots: 2, memory_gib: 0.001,"))
    check_ended(
        amp_ray("tune", path, "--trials", "local", "--budget", "1", "--study", tmp_path / "s"),
        3,
        "no strategy is expected to run: 16 out of memory; closest: tp 2",
    )
    assert not (tmp_path / "s").exists()


# ------------------------------------------------------------------------- trials failed


@pytest.mark.parametrize(
    ("cells", "cause"),
    [
        (dict.fromkeys(range(16), "failed"), "No trial succeeded: 2 crashed (for example recorded"),
        (dict.fromkeys(range(16), "oom"), "No trial succeeded: 2 ran out of memory (for example"),
        ({0: "oom"} | dict.fromkeys(range(1, 16), "failed"), "1 crashed (recorded as failed"),
    ],
)
def test_without_a_measurement_every_output_says_why_and_recommends_nothing(
    amp_ray: Run, tune: Tune, tmp_path: Path, cells: dict[int, str], cause: str
) -> None:
    record(tmp_path, cells)
    study = tmp_path / "study"
    ended = tune("--budget", "2", "--json", tmp_path / "result.json")
    assert ended.code == 4
    assert ended.err.splitlines()[-1].startswith("amp-ray: no trial was measured; the logs")
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["best"], result["recommendation"], len(result["trials"])) == (None, None, 2)
    shown = amp_ray("show", study)
    assert amp_ray("show", study, "--json").json["recommendation"] is None
    for text in (ended.out, shown.out):
        assert cause in " ".join(text.split())
        assert "recommended" not in text
    page = study_record(read_study(study), source=str(study))
    assert cause in page["lead"]
    assert (page["best"], page["commands"]) == (None, [])
    export = ("export", study, "--to", "deepspeed", "-o", tmp_path / "job")
    refused_export = amp_ray(*export)
    assert refused_export.code == 4
    assert cause in refused_export.err
    assert amp_ray(*export, "--position", "1").code == 0


def test_a_dead_host_is_told_before_anything_is_launched(
    amp_ray: Run, dead: Path, tmp_path: Path
) -> None:
    ended = amp_ray("tune", dead, "--budget", "2", "--study", tmp_path / "study")
    assert ended.code == 4
    lines = [line for line in ended.err.splitlines() if line]
    assert lines[0].startswith("amp-ray: hosts are not fit for trials (amp-ray doctor tells more)")
    assert [line.split(":")[0].strip() for line in lines[1:]] == ["dead-a", "dead-b"]
    assert not (tmp_path / "study").exists()


def test_a_study_whose_hosts_are_dead_stops_and_can_go_on(
    amp_ray: Run, dead: Path, tmp_path: Path
) -> None:
    options = ("--no-doctor", "--pool", "threads", "--study", tmp_path / "study", "--json")
    ended = amp_ray("tune", dead, "--budget", "4", *options)
    assert ended.code == 4
    assert ended.json["ending"] == "hosts"
    [trial] = ended.json["trials"]
    assert trial["outcome"] == "unreachable"
    assert "trial 0: unreachable: dead-a: " in ended.err
    last = ended.err.splitlines()[-1]
    assert "amp-ray doctor tells why" in last
    assert f"--study {tmp_path / 'study'} --resume goes on" in last


def test_one_measurement_is_a_success_though_hosts_were_lost(
    tune: Tune, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = RunnerPool.wait, []

    def wait(pool: RunnerPool, timeout_s: float) -> list[Any]:
        calls.append(timeout_s)
        results = real(pool, timeout_s)
        if len(calls) > 1:
            return results
        lost = Unreachable(reason="no answer", host="b", wall_s=0.1)
        return [replace(entry, outcome=lost) for entry in results]

    monkeypatch.setattr(RunnerPool, "wait", wait)
    check_ended(tune("--budget", "1", "--json"), 0, "trial 0: no answer; it runs once more")


def test_a_cluster_that_does_not_answer_is_no_bad_input(
    amp_ray: Run, small: Path, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    options = ("--trials", "local", "--budget", "1", "--study", tmp_path / "study")
    ended = amp_ray("tune", small, *options, "--address", address)
    assert ended.code == 4
    assert ended.err.startswith(f"amp-ray: no Ray cluster at {address}: ")
    assert not (tmp_path / "study").exists()


# ------------------------------------------------------------------------- disks


def in_own_mounts(shell: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a shell where it may mount."""
    unshare = ["unshare", "--user", "--map-root-user", "--mount"]
    if subprocess.run([*unshare, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine lets us make no user namespace, in which to mount")
    command = [*unshare, "sh", "-c", shell, "sh", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)


def replay_command(homogeneous: list[str | Path], study: Path) -> list[str | Path]:
    options = ("--policy", "predicted-order", "--budget", "40", "--study", study)
    return [sys.executable, "-m", "amp_ray", "tune", *homogeneous, *options]


@pytest.mark.parametrize(
    ("size", "file", "advice"),
    [
        ("4k", "journal.jsonl", "Make room, and go on with --resume"),
        ("8k", "experiment.yaml", "--resume writes it again"),
        ("16k", "journal.jsonl", "Make room, and go on with --resume"),
    ],
)
def test_a_full_disk_ends_the_study_with_the_file_and_what_to_do(
    homogeneous: list[str | Path], tmp_path: Path, size: str, file: str, advice: str
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    command = replay_command(homogeneous, disk / "study")
    ended = in_own_mounts(FULL, size, disk, *command)
    assert ended.returncode == 4, ended.stderr
    last = ended.stderr.splitlines()[-1]
    assert last.startswith(f"amp-ray: {disk / 'study' / file}: cannot be written: No space left")
    assert advice in last


# ------------------------------------------------------------------------- interrupted


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_keeps_everything_and_says_how_to_go_on(
    tune: Tune, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    real = RunnerPool.start

    def start(pool: RunnerPool, task: Any, group: int) -> None:  # noqa: ANN401 - a Task
        real(pool, task, group)
        if task.number == 1:
            os.kill(os.getpid(), number)

    monkeypatch.setattr(RunnerPool, "start", start)
    ended = tune("--budget", "3")
    assert ended.code == 130
    lines = [line for line in ended.err.splitlines() if line]
    assert "interrupted: what runs is being ended" in lines
    assert f"with --study {tmp_path / 'study'} --resume goes on" in lines[-2]
    assert lines[-1] == "amp-ray: interrupted"
    monkeypatch.undo()
    ended = tune("--budget", "3", "--resume", "--json")
    assert ended.code == 0
    assert [trial["number"] for trial in ended.json["trials"]] == [0, 1, 2]
    assert "resumed: " in ended.err


# ------------------------------------------------------------------------- show


TABLE = "tp,pp,dp,micro_batch_size,measured_s\n1,1,4,1,oom\n1,2,2,1,0.06\n2,1,2,1,0.05\n"


def with_journal(folder: Path, monkeypatch: pytest.MonkeyPatch, *trials: dict[str, Any]) -> None:
    """Make a study whose journal tells of trials."""
    bodies: list[dict[str, Any]] = [{"event": "study", "study": "0a", "experiment": "x"}]
    strategy = {"tp": 1, "pp": 1, "dp": 4, "micro_batch_size": 1}
    launch = {"attempt": 0, "trial_id": "x", "sigma": 0.1, "chosen": "it is next"}
    outcome = {"outcome": "measured", "spread_s": 0.0, "step_time_s": [], "num_warmup_steps": 0}
    outcome |= {"peak_memory_bytes": [], "wall_s": 1.0}
    for number, ended in enumerate(trials):
        repeats = ended.pop("repeats", None)
        named = {"number": number, "repeats": repeats, "strategy": strategy, "predicted_s": 0.4}
        bodies.append({"event": "started", **launch, **named})
        bodies.append({"event": "ended", "number": number, "attempt": 0, **outcome, **ended})
    monkeypatch.setattr(reading, "parse", lambda *_, **__: SimpleNamespace(bodies=bodies))
    (folder / "journal.jsonl").touch()


@pytest.fixture
def study(amp_ray: Run, small: Path, tmp_path: Path) -> Path:
    """Return the folder of a study that has ended; the experiment has a change."""
    table, folder = tmp_path / "table.csv", tmp_path / "study"
    table.write_text(TABLE, encoding="utf-8")
    options = ("--set", "model.num_heads=4", "--trials", f"replay:{table}", "--budget", "3")
    assert amp_ray("tune", small, *options, "--study", folder).code == 0
    return folder


def test_a_study_is_read_with_the_changes_of_its_experiment(study: Path) -> None:
    assert read_study(study).experiment.model.shape.num_heads == 4
    assert read_study(study, ("model.num_heads=2",)).experiment.model.shape.num_heads == 2


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


def test_a_link_that_leads_out_of_a_study_is_not_read(amp_ray: Run, study: Path) -> None:
    outside = study.parent / "elsewhere.json"
    (study / "result.json").rename(outside)
    (study / "result.json").symlink_to(outside)
    check_ended(
        amp_ray("export", study, "--to", "csv"), 2, "result.json: a link out of the study's folder"
    )
    (study / "journal.jsonl").rename(study.parent / "journal")
    (study / "journal.jsonl").symlink_to(study.parent / "journal")
    assert amp_ray("show", study).code == 2


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
    check_ended(amp_ray("show", tmp_path), 2, str(tmp_path / "journal.jsonl"))


# ------------------------------------------------------------------------- one answer


DEGREES: Final = [(tp, 4 // tp, size) for tp in (1, 2, 4) for size in (1, 2)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A study: what every strategy takes against its prediction, and what is recommended."""

    factors: tuple[float | str, ...]  # by the order of `DEGREES`; or why it failed
    spread_fraction: float = 0.02
    budget: int = 3
    policy: Policy = "predicted-order"
    rests_on: str = "measured"


QUIET: Final = Case(factors=(1.0,) * 6)
CASES: Final = {
    "quiet": QUIET,
    "tied": Case(factors=(1.0, 1.0, 1.0, 1.0, 1.0, 1.0), budget=6),
    "predicted winner refuted": Case(factors=(4.0, 4.0, 4.0, 1.0, 1.0, 1.0), budget=4),
    "all slower and noisy": Case(
        factors=(4.4, 3.9, 4.1, 4.6, 4.0, 3.7),
        spread_fraction=0.6,
        policy="best",
        rests_on="posterior",
    ),
    "some failed": Case(factors=("failed", "oom", "failed", 1.0, 1.0, 1.0), budget=6),
    "not enough trials": Case(factors=(1.0,) * 6, budget=1),
    "a confirmed prediction": Case(
        factors=(1.0,) * 6, budget=2, policy="random", rests_on="predicted"
    ),
}


def run_study(case: Case, small: Path, folder: Path) -> amp.Study:
    """Replay a study whose outcomes are multiples of what is predicted."""
    grid = [dict(zip(("tp", "dp", "micro_batch_size"), values, strict=True)) for values in DEGREES]
    scores = amp.score(small, [{**degrees, "pp": 1} for degrees in grid])
    rows = ["tp,pp,dp,micro_batch_size,measured_s,spread_s"]
    for (tp, dp, size), factor, score in zip(DEGREES, case.factors, scores, strict=True):
        outcome: tuple[object, object] = (factor, "")
        if not isinstance(factor, str):
            assert score.iteration_time_s is not None
            time_s = factor * score.iteration_time_s
            outcome = time_s, case.spread_fraction * time_s
        rows.append(",".join(map(str, (tp, 1, dp, size, *outcome))))
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
    assert page["lead"].startswith(f"Use {plan_text(strategy)}: ")
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
    run_study(QUIET, small, folder)
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
    assert page["lead"].startswith(f"Use {plan_text(strategy)}: ")
    assert page["figures"][0][0] == "measured per iteration"
    target = tmp_path / "job"
    assert named(strategy) in amp_ray("export", folder, "--to", "deepspeed", "-o", target).out
