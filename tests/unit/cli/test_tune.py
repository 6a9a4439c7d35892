import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from amp_ray.errors import HostError
from amp_ray.runtime.files import load_experiment
from amp_ray.runtime.study.pool import ReplayPool
from amp_ray.trials.outcome import Unreachable
from support.commands import Ended, Run
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
TRIAL_KEYS = {
    *("number", "strategy", "predicted_s", "outcome", "measured_s", "spread_s"),
    *("peak_memory_bytes", "wall_s", "reason"),
}
FULL = 'mount -t tmpfs -o size="$1" none "$2" && shift 2 && exec "$@"'
READ_ONLY = 'mount --bind "$1" "$1" && mount -o remount,bind,ro "$1" && shift && exec "$@"'

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


def test_the_best_published_strategy_is_found_at_once_and_the_study_settles(
    published: Tune,
) -> None:
    ended = published("--budget", "10", "--json")
    assert ended.code == 0
    trials, best = ended.json["trials"], ended.json["best"]
    assert best["number"] <= 1
    assert best["measured_s"] == 1.2
    assert len(trials) <= 5
    assert (ended.json["ending"], ended.json["certificate"]["holds"]) == ("settled", False)
    assert ended.json["certificate"]["chance_without_surprises"] <= 0.05


def test_json_has_the_keys_of_the_contract(published: Tune, tmp_path: Path) -> None:
    found = published("--budget", "2", "--json").json
    assert (found["schema"], found["study"]) == (1, str(tmp_path / "study"))
    assert [trial["number"] for trial in found["trials"]] == [0, 1]
    assert all(trial.keys() >= TRIAL_KEYS for trial in found["trials"])
    assert found["best"] in found["trials"]
    assert found["calibration"]["constants"]
    assert len(found["ranking"]) == 52


def test_json_goes_into_a_file_and_the_table_to_stdout(published: Tune, tmp_path: Path) -> None:
    ended = published("--budget", "2", "--json", tmp_path / "result.json")
    assert "homogeneous: 2 trials" in ended.out
    record = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))
    assert len(record["trials"]) == 2
    kept = json.loads((tmp_path / "study" / "result.json").read_text(encoding="utf-8"))
    assert kept == record


def test_without_json_stdout_has_the_end_and_stderr_what_happened(
    published: Tune, tmp_path: Path
) -> None:
    ended = published("--budget", "5")
    assert "recommended: tp 1, dp 4, pp 4, micro-batch 1, bounds 0 9 15 21 30" in ended.out
    assert "with 95 % confidence no untested strategy is faster than" in ended.out
    assert ended.out.endswith(f"kept in {tmp_path / 'study'}\n")
    assert ended.err.startswith("replay: outcomes come from ")
    assert "nothing is launched" in ended.err.splitlines()[0]
    assert "trial 1: measured 1.2 s, predicted " in ended.err


@pytest.mark.guest("amp2022")
def test_the_published_order_needs_four_trials(published: Tune) -> None:
    found = published("--budget", "5", "--policy", "amp-2022", "--json").json
    assert found["best"]["number"] == 3
    assert [trial["outcome"] for trial in found["trials"]].count("crashed") == 1


def test_a_random_order_is_that_of_its_seed(
    published: Tune, amp_ray: Run, homogeneous: list[str | Path], tmp_path: Path
) -> None:
    asked = ("--budget", "4", "--policy", "random", "--json", "--seed")
    first = published(*asked, "7").json
    again, other = (
        amp_ray("tune", *homogeneous, "--study", tmp_path / name, *asked, seed).json
        for name, seed in (("again", "7"), ("other", "8"))
    )
    assert strategies(again) == strategies(first)
    assert strategies(other) != strategies(first)


def strategies(found: dict[str, Any]) -> list[dict[str, Any]]:
    return [trial["strategy"] for trial in found["trials"]]


def test_a_calibration_of_a_study_serves_the_next_plan(
    published: Tune, amp_ray: Run, homogeneous: list[str | Path], tmp_path: Path
) -> None:
    assert published("--budget", "3").code == 0
    calibration = tmp_path / "study" / "calibration.json"
    ended = amp_ray("plan", homogeneous[0], "--calibration", calibration, "--json")
    assert ended.code == 0


def test_a_script_runs_the_same_study(repository: Path, tmp_path: Path) -> None:
    table = repository / "amp_ray" / "data" / "tables" / "amp-2022-homogeneous.csv"
    script = repository / "experiments" / "homogeneous.py"
    options = ["--full", "--budget", "2", "--trials", f"replay:{table}", "--json"]
    ended = subprocess.run(
        [sys.executable, script, *options, "--study", tmp_path / "study"],
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
    )
    assert len(json.loads(ended.stdout)["trials"]) == 2


# ------------------------------------------------------------------------- going on


def test_a_study_goes_on_with_a_larger_budget(tune: Tune) -> None:
    tune("--budget", "1")
    ended = tune("--budget", "3", "--policy", "best", "--resume", "--json")
    assert ended.code == 0
    assert [trial["number"] for trial in ended.json["trials"]] == [0, 1, 2]
    assert "resumed: 1 trial is done" in ended.err


def test_the_budget_of_the_experiment_is_the_default(tune: Tune, tmp_path: Path) -> None:
    path = tmp_path / "small.yaml"
    path.write_text(path.read_text() + "trials: {budget: 1}\n", encoding="utf-8")
    assert len(tune("--json").json["trials"]) == 1


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


def test_a_study_is_not_begun_again_over_another(tune: Tune) -> None:
    assert tune("--budget", "1").code == 0
    refused(tune("--budget", "2").without_first_line, "has a study", "--resume", "--study")


def test_nobody_waits_for_a_search_to_hear_that(
    tune: Tune, monkeypatch: pytest.MonkeyPatch
) -> None:
    def search(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr("amp_ray.runtime.study.tuning.study_space", search)
    assert tune("--resume").code == 2


def test_the_study_of_another_experiment_is_refused_with_what_differs(
    tune: Tune, tmp_path: Path
) -> None:
    assert tune("--budget", "1").code == 0
    path = tmp_path / "small.yaml"
    path.write_text(path.read_text().replace("hidden_size: 256", "hidden_size: 512"))
    record(tmp_path)
    ended = tune("--budget", "2", "--resume").without_first_line
    refused(ended, "journal.jsonl:1: the study is one of experiment 'small'", "hidden_size")


def test_another_table_is_another_study(tune: Tune, tmp_path: Path) -> None:
    assert tune("--budget", "1").code == 0
    record(tmp_path, {0: "oom"})
    refused(tune("--budget", "2", "--resume").without_first_line, "table is 'table.csv (")


def test_a_folder_of_something_else_is_left_alone(tune: Tune, tmp_path: Path) -> None:
    (tmp_path / "study").mkdir()
    (tmp_path / "study" / "thesis.tex").write_text("dear", encoding="utf-8")
    refused(tune("--budget", "1"), "has files of something else (thesis.tex)", "--study")


def test_a_file_in_the_place_of_the_folder_is_refused(tune: Tune, tmp_path: Path) -> None:
    (tmp_path / "study").write_text("dear", encoding="utf-8")
    refused(tune("--budget", "1"), str(tmp_path / "study"), "a study cannot be kept here")


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
    ended = tune(*options)
    assert ended.code == 2
    assert word in ended.err


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
    ended = amp_ray("tune", path, "--trials", "local", "--budget", "1", "--study", tmp_path / "s")
    assert ended.code == 3
    assert "no strategy is expected to run: 16 out of memory; closest: tp 2" in ended.err
    assert not (tmp_path / "s").exists()


# ------------------------------------------------------------------------- trials failed


def test_without_a_measurement_the_trials_have_failed(tune: Tune, tmp_path: Path) -> None:
    record(tmp_path, dict.fromkeys(range(16), "failed"))
    ended = tune("--budget", "2", "--json")
    assert ended.code == 4
    assert ended.err.splitlines()[-1] == "amp-ray: no trial was measured"
    assert (ended.json["best"], len(ended.json["trials"])) == (None, 2)


def test_a_dead_host_is_told_before_anything_is_launched(
    amp_ray: Run, dead: Path, tmp_path: Path
) -> None:
    ended = amp_ray("tune", dead, "--budget", "2", "--study", tmp_path / "study")
    assert ended.code == 4
    told = [line for line in ended.err.splitlines() if line]
    assert told[0].startswith("amp-ray: hosts are not fit for trials (amp-ray doctor tells more)")
    assert [line.split(":")[0].strip() for line in told[1:]] == ["dead-a", "dead-b"]
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
    real, calls = ReplayPool.wait, []

    def wait(pool: ReplayPool, timeout_s: float) -> list[Any]:
        calls.append(timeout_s)
        found = real(pool, timeout_s)
        if len(calls) > 1:
            return found
        lost = Unreachable(reason="no answer", host="b", wall_s=0.1)
        return [replace(entry, outcome=lost) for entry in found]

    monkeypatch.setattr(ReplayPool, "wait", wait)
    ended = tune("--budget", "1", "--json")
    assert ended.code == 0
    assert "trial 0: no answer; it runs once more" in ended.err


def test_a_doctor_who_finds_something_has_the_last_word(
    amp_ray: Run, small: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def sick(*_: object) -> None:
        message = "hosts are not fit"
        raise HostError(message)

    monkeypatch.setattr("amp_ray.runtime.doctor.require_ready_hosts", sick)
    ended = amp_ray("tune", small, "--trials", "local", "--budget", "1", "--study", tmp_path / "s")
    assert (ended.code, ended.err) == (4, "amp-ray: hosts are not fit\n")


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
    own = ["unshare", "--user", "--map-root-user", "--mount"]
    if subprocess.run([*own, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine lets us make no user namespace, in which to mount")
    command = [*own, "sh", "-c", shell, "sh", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)


def replay_command(homogeneous: list[str | Path], study: Path) -> list[str | Path]:
    options = ("--policy", "predicted-order", "--budget", "40", "--study", study)
    return [sys.executable, "-m", "amp_ray", "tune", *homogeneous, *options]


@pytest.mark.parametrize(
    ("size", "file", "advice"),
    [
        ("4k", "journal.jsonl", "Make room, and go on with --resume"),
        ("8k", "experiment.yaml", "--resume writes it again"),
        ("32k", "journal.jsonl", "Make room, and go on with --resume"),
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


def test_a_read_only_folder_is_refused_by_name(
    homogeneous: list[str | Path], tmp_path: Path
) -> None:
    command = replay_command(homogeneous, tmp_path / "study")
    ended = in_own_mounts(READ_ONLY, tmp_path, *command)
    assert ended.returncode == 2
    last = ended.stderr.splitlines()[-1]
    assert (
        last == f"amp-ray: {tmp_path / 'study'}: a study cannot be kept here: Read-only file system"
    )


# ------------------------------------------------------------------------- interrupted


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_keeps_everything_and_says_how_to_go_on(
    tune: Tune, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    real = ReplayPool.start

    def start(pool: ReplayPool, task: Any, group: int) -> None:  # noqa: ANN401 - a Task
        real(pool, task, group)
        if task.number == 1:
            os.kill(os.getpid(), number)

    monkeypatch.setattr(ReplayPool, "start", start)
    ended = tune("--budget", "3")
    assert ended.code == 130
    told = [line for line in ended.err.splitlines() if line]
    assert "interrupted: what runs is being ended" in told
    assert f"with --study {tmp_path / 'study'} --resume goes on" in told[-2]
    assert told[-1] == "amp-ray: interrupted"
    monkeypatch.undo()
    assert tune("--budget", "3", "--resume").code == 0
    assert (tmp_path / "study" / "history.csv").read_text().count("\n") == 4
