import json
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import amp_ray.runtime.ray
from amp_ray.cli import studies
from amp_ray.errors import AmpRayError, InputError
from amp_ray.inputs.experiment import Experiment
from amp_ray.redaction import NOT_KEPT
from amp_ray.runtime.files import load_experiment, with_calibration
from amp_ray.runtime.ray.address import RayUnavailableError
from amp_ray.runtime.study.pool import RunnerPool
from amp_ray.runtime.study.result import StudyResult
from amp_ray.runtime.study.space import TuneOptions
from amp_ray.runtime.study.tuning import Tuning, begin_state, prepare, study_header, with_secrets
from amp_ray.trials.outcome import Crashed, Measured, Outcome
from support.driving import NotingView, ScriptedPool
from support.experiments import small_experiment
from support.recorded import table_text, write_experiment
from support.replaying import measured

Make = Callable[..., Tuning]


@pytest.fixture
def replayed(tmp_path: Path) -> Make:
    """Prepare a study of the small experiment that a table answers."""

    def make(cells: dict[int, str] | None = None, **options: Any) -> Tuning:  # noqa: ANN401
        experiment = load_experiment(write_experiment(tmp_path))
        table = tmp_path / "table.csv"
        table.write_text(table_text(experiment, cells), encoding="utf-8")
        given = {"table": table, "budget": 3, "policy": "predicted-order", **options}
        return prepare(experiment, TuneOptions(backend="replay", **given), no_progress)

    return make


def no_progress(_done: int, _total: int) -> None:
    """Nobody watches."""


def run(tuning: Tuning, folder: Path, *, resume: bool = False) -> tuple[StudyResult, list[str]]:
    view = NotingView()
    return tuning.run(folder, view, resume=resume), view.lines


def events(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "journal.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["body"] for line in lines]


def kinds(folder: Path) -> list[str]:
    return [event["event"] for event in events(folder)]


# ------------------------------------------------------------------------- preparing


def test_the_state_begins_with_what_was_asked_for(replayed: Make) -> None:
    tuning = replayed(budget=7, policy="random", seed=5)
    state = begin_state(tuning.experiment, tuning.space, tuning.options)
    assert (state.settings.budget, state.settings.policy, state.settings.seed) == (7, "random", 5)
    assert len(state.candidates) == 16
    assert len(state.trials) == 0


def test_the_header_tells_what_has_to_stay_the_same(replayed: Make) -> None:
    tuning = replayed(policy="predicted-order", seed=2)
    header = study_header(tuning.experiment, tuning.options)
    assert header.pop("fingerprint")["model"]["family"] == "gpt2"
    table = header.pop("table")
    assert table.startswith("table.csv (")
    assert header == {
        "event": "study",
        "experiment": "small",
        "global_batch_size": 8,
        "backend": "replay",
        "policy": "predicted-order",
        "seed": 2,
        "steps": tuning.experiment.trials.num_steps,
        "warmup_steps": tuning.experiment.trials.num_warmup_steps,
    }


def test_a_changed_table_is_another_one(replayed: Make) -> None:
    first, second = replayed(), None
    before = study_header(first.experiment, first.options)["table"]
    second = replayed({3: "oom"})
    assert study_header(second.experiment, second.options)["table"] != before


def test_trials_run_where_it_was_asked_for() -> None:
    experiment = small_experiment()
    tuning = prepare(experiment, TuneOptions(backend="local", budget=1), no_progress)
    assert (experiment.trials.backend, tuning.experiment.trials.backend) == ("ssh", "local")


def groups(num_groups: int) -> Experiment:
    """Return the small experiment on so many pairs of hosts."""
    experiment = small_experiment()
    names = tuple((f"a{number}", f"b{number}") for number in range(num_groups))
    return replace(experiment, host_groups=names)


@pytest.mark.parametrize(("concurrency", "used"), [(None, 3), (2, 2), (1, 1)])
def test_as_many_groups_are_used_as_asked_for(concurrency: int | None, used: int) -> None:
    options = TuneOptions(backend="local", budget=1, concurrency=concurrency)
    tuning = prepare(groups(3), options, no_progress)
    with tuning._pool() as pool:  # noqa: SLF001 - what it is made of decides where trials run
        assert isinstance(pool, RunnerPool)
        assert len(pool.free()) == used


def without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a Ray that is installed and cannot be used."""
    fake = ModuleType("amp_ray.runtime.ray.actors")

    def connect(_address: str | None, *, num_cpus: int) -> None:
        del num_cpus
        message = "no Ray"
        raise RayUnavailableError(message)

    fake.connect = connect  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, fake.__name__, fake)
    monkeypatch.setattr(amp_ray.runtime.ray, "actors", fake, raising=False)
    monkeypatch.setattr("amp_ray.runtime.study.tuning.find_spec", lambda _name: object())
    monkeypatch.setattr("amp_ray.runtime.study.tuning.require_ray", lambda _what: None)


def test_threads_hold_the_hosts_where_ray_cannot_be_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    without_ray(monkeypatch)
    monkeypatch.setenv("RAY_ADDRESS", "head:1")
    tuning = prepare(groups(1), TuneOptions(backend="local", budget=1), no_progress)
    with tuning._pool() as pool:  # noqa: SLF001
        assert isinstance(pool, RunnerPool)
    assert caplog.messages == ["no Ray. Threads of this process hold the hosts instead"]


def test_ray_actors_that_are_asked_for_are_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    without_ray(monkeypatch)
    options = TuneOptions(backend="local", budget=1, pool="ray")
    tuning = prepare(groups(1), options, no_progress)
    with pytest.raises(RayUnavailableError, match="no Ray"), tuning._pool():  # noqa: SLF001
        pass


def test_a_table_answers_as_many_at_once_as_asked_for(replayed: Make) -> None:
    with replayed(concurrency=4)._pool() as pool:  # noqa: SLF001
        assert len(pool.free()) == 4


# ------------------------------------------------------------------------- a study from end to end


def test_what_a_study_measured_can_be_replayed(replayed: Make, tmp_path: Path) -> None:
    first, _ = run(replayed(), tmp_path / "first")
    experiment = load_experiment(tmp_path / "small.yaml")
    options = TuneOptions(backend="replay", table=tmp_path / "first" / "measured.csv", budget=9)
    second, _ = run(prepare(experiment, options, no_progress), tmp_path / "second")
    assert len(second.state.trials) == 4  # three strategies, and the winner a second time
    assert second.knowledge.status.best_s == first.knowledge.status.best_s


def test_the_calibration_of_a_study_is_one_for_planning(replayed: Make, tmp_path: Path) -> None:
    tuning = replayed()
    result, _ = run(tuning, tmp_path / "study")
    file = tmp_path / "study" / "calibration.json"
    calibrated = with_calibration(tuning.experiment, file, transfer=False)
    assert calibrated.constants == result.knowledge.experiment.constants


def test_without_an_experiment_file_there_is_no_copy(tmp_path: Path) -> None:
    experiment = small_experiment()
    table = tmp_path / "table.csv"
    table.write_text(table_text(experiment), encoding="utf-8")
    options = TuneOptions(backend="replay", table=table, budget=1)
    run(prepare(experiment, options, no_progress), tmp_path / "study")
    assert not (tmp_path / "study" / "experiment.yaml").exists()


# ------------------------------------------------------------------------- going on


def test_a_larger_budget_goes_on_where_the_study_stopped(replayed: Make, tmp_path: Path) -> None:
    folder = tmp_path / "study"
    whole, _ = run(replayed(budget=5), tmp_path / "whole")
    run(replayed(budget=2), folder)
    result, lines = run(replayed(budget=5), folder, resume=True)
    assert lines[0] == "resumed: 2 trials are done"
    assert kinds(folder).count("started") == 5
    assert [trial_record.trial.strategy for trial_record in result.state.trials] == [
        trial_record.trial.strategy for trial_record in whole.state.trials
    ]
    resumed = next(event for event in events(folder) if event["event"] == "resumed")
    assert resumed["budget"] == 5


def test_nothing_is_left_to_do(replayed: Make, tmp_path: Path) -> None:
    run(replayed(budget=2), tmp_path / "study")
    result, lines = run(replayed(budget=2), tmp_path / "study", resume=True)
    assert lines == ["resumed: 2 trials are done"]
    assert result.ending == "budget"


def test_a_torn_end_of_the_journal_is_dropped_with_a_word(replayed: Make, tmp_path: Path) -> None:
    folder = tmp_path / "study"
    run(replayed(budget=2), folder)
    path = folder / "journal.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-2]) + lines[-2][:20])
    result, trial_record = run(replayed(budget=2), folder, resume=True)
    assert trial_record[0].startswith(f"{path}: dropped ")
    assert trial_record[1] == "resumed: 1 trial is done, 1 runs again"
    assert [trial_record.outcome is not None for trial_record in result.state.trials] == [
        True,
        True,
    ]


def test_the_time_budget_counts_all_drivers(replayed: Make, tmp_path: Path) -> None:
    folder = tmp_path / "study"
    run(replayed(budget=2), folder)
    spent_s = events(folder)[-1]["seconds"]
    result, _ = run(replayed(budget=5, time_budget_s=spent_s), folder, resume=True)
    assert (result.ending, len(result.state.trials)) == ("time-budget", 2)


KILLED = """
import os, signal, sys
from pathlib import Path
from amp_ray.runtime.files import load_experiment
from amp_ray.runtime.study.space import TuneOptions
from amp_ray.runtime.study.tuning import prepare
from support.driving import NotingView, ScriptedPool

class Killing(NotingView):
    def ended(self, told, surprise):
        if told.trial.number == 1:
            os.kill(os.getpid(), signal.SIGKILL)

folder = Path(sys.argv[1])
options = TuneOptions(
    backend="replay", table=folder / "table.csv", budget=3, policy="predicted-order"
)
tuning = prepare(load_experiment(folder / "small.yaml"), options, lambda done, total: None)
tuning.run(folder / "study", Killing(), resume=False)
"""


def test_a_driver_that_was_killed_is_named_and_nothing_is_lost(
    replayed: Make, tmp_path: Path
) -> None:
    tuning = replayed()
    ended = subprocess.run([sys.executable, "-c", KILLED, tmp_path], check=False, timeout=600)
    assert ended.returncode == -signal.SIGKILL
    result, lines = run(tuning, tmp_path / "study", resume=True)
    assert lines[0].startswith("the study was driven by process ")
    assert lines[0].endswith(", which has died")
    assert lines[1] == "resumed: 2 trials are done"
    assert kinds(tmp_path / "study").count("ended") == len(result.state.trials) == 3


# ------------------------------------------------------------------------- what goes wrong


class Failing(NotingView):
    """Fails as the first trial ends."""

    def __init__(self, error: BaseException) -> None:
        """Take what it raises."""
        super().__init__()
        self._error = error

    def ended(self, trial_record: object, surprise: object) -> None:  # noqa: ARG002
        """Fail."""
        raise self._error


@pytest.mark.parametrize(
    ("error", "ending"), [(KeyboardInterrupt(), "interrupted"), (AmpRayError("no more"), "failed")]
)
def test_what_was_reached_is_written_whatever_ends_the_study(
    replayed: Make, tmp_path: Path, error: BaseException, ending: str
) -> None:
    folder = tmp_path / "study"
    with pytest.raises(type(error)):
        replayed().run(folder, Failing(error), resume=False)
    record = json.loads((folder / "result.json").read_text())
    assert (record["ending"], len(record["trials"])) == (ending, 1)
    assert record["best"]["number"] == 0
    assert events(folder)[-1]["ending"] == ending


def test_results_are_written_again_from_the_journal(replayed: Make, tmp_path: Path) -> None:
    folder = tmp_path / "study"
    run(replayed(), folder)
    kept = {name: (folder / name).read_bytes() for name in ("history.csv", "measured.csv")}
    for name in kept:
        (folder / name).unlink()
    run(replayed(), folder, resume=True)
    assert {name: (folder / name).read_bytes() for name in kept} == kept


# ------------------------------------------------------------------------- programs, secrets


PROGRAM = """
trials:
  backend: local
  environment: {HF_TOKEN: "hunter2, # 3", NCCL_DEBUG: WARN}
  program: {argv: ["{python}", train.py], files: [train.py], metric: helper}
"""


def programmed(folder: Path, text: str = PROGRAM, source: str = "print(1)") -> Tuning:
    """Prepare a study of a user's own program."""
    path = write_experiment(folder)
    path.write_text(path.read_text(encoding="utf-8") + text, encoding="utf-8")
    (folder / "train.py").write_text(source, encoding="utf-8")
    options = TuneOptions(backend="local", budget=2, policy="predicted-order")
    return prepare(load_experiment(path), options, no_progress)


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Callable[[Outcome], None]:
    """Let trials come out as asked for, without hosts."""

    def come_out(outcome: Outcome) -> None:
        monkeypatch.setattr(
            "amp_ray.runtime.study.tuning.RunnerPool",
            lambda _factory, _num: ScriptedPool(answer=lambda _task, _group: outcome),
        )

    return come_out


CRASH = Crashed(reason="boom", kind="crash", rank=0, host="", lines=(), wall_s=1.0)


def test_a_study_is_not_resumed_with_another_program(
    scripted: Callable[[Outcome], None], tmp_path: Path
) -> None:
    folder = tmp_path / "study"
    scripted(measured(1.0))
    run(programmed(tmp_path), folder)
    run(programmed(tmp_path), folder, resume=True)
    with pytest.raises(InputError, match=r"program.files.train.py is '\w+' in the study, '\w+'"):
        run(programmed(tmp_path, source="print(2)"), folder, resume=True)
    for old, new in (("WARN", "INFO"), ("train.py]", "train.py, '2']"), ("HF_TOKEN", "HF_KEY")):
        with pytest.raises(InputError, match="the program has changed since"):
            run(programmed(tmp_path, PROGRAM.replace(old, new, 1)), folder, resume=True)
    assert kinds(folder).count("started") == 2


def test_a_program_that_crashed_is_mended_and_both_trials_run_again(
    scripted: Callable[[Outcome], None], tmp_path: Path
) -> None:
    folder = tmp_path / "study"
    scripted(CRASH)
    assert run(programmed(tmp_path), folder)[0].ending == "crashes"
    scripted(measured(1.0))
    result, lines = run(programmed(tmp_path, source="print(2)"), folder, resume=True)
    assert lines[0].startswith("the program has changed, and nothing was measured with it")
    assert lines[1] == "resumed: 0 trials are done, 2 run again"
    assert [type(trial_record.outcome) for trial_record in result.state.trials] == [
        Measured,
        Measured,
    ]
    with pytest.raises(InputError, match="the program has changed since"):
        run(programmed(tmp_path), folder, resume=True)


def test_a_salvaged_study_sweeps_what_its_journal_does_not_know_and_goes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder, tuning = tmp_path / "study", programmed(tmp_path)
    pools = [ScriptedPool(answer=lambda _task, _group: measured(1.0)) for _ in range(2)]
    turns = iter(pools)
    monkeypatch.setattr("amp_ray.runtime.study.tuning.RunnerPool", lambda _make, _num: next(turns))
    run(tuning, folder)
    path = folder / "journal.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    (folder / "trials" / "0000-0").mkdir()
    (folder / "trials" / "0001-0").mkdir()
    path.write_bytes(b"".join([*lines[:3], lines[3].replace(b"started", b"Started"), *lines[4:]]))
    with pytest.raises(InputError, match=r"journal\.jsonl:4: .*--resume --salvage"):
        run(tuning, folder, resume=True)
    salvaging = replace(tuning, options=replace(tuning.options, salvage=True))
    result, lines_seen = run(salvaging, folder, resume=True)
    assert lines_seen[1] == "resumed: 1 trial is done"
    assert [name[-6:] for name in pools[1].swept] == ["0000-0", "0001-0"]
    assert "start: trial 1-1 on group 0" in pools[1].happened
    assert len(result.state.trials) == 2


def test_the_end_of_a_study_whose_trials_crash_alike_says_what_to_mend(
    scripted: Callable[[Outcome], None], tmp_path: Path
) -> None:
    scripted(CRASH)
    result, _ = run(programmed(tmp_path), tmp_path / "study")
    with pytest.raises(AmpRayError) as error:
        studies._show(result, tmp_path / "study", None)  # noqa: SLF001 - no hosts needed
    message = str(error.value)
    assert "trials 0 and 1 crashed in the same way, and nothing was measured: boom." in message
    assert f"--study {tmp_path / 'study'} --resume runs both again" in message


def test_no_file_of_a_study_has_a_secret(
    scripted: Callable[[Outcome], None], tmp_path: Path
) -> None:
    folder = tmp_path / "study"
    scripted(measured(1.0))
    run(programmed(tmp_path), folder)
    texts = [path.read_text(encoding="utf-8") for path in folder.iterdir() if path.is_file()]
    assert not [text for text in texts if "hunter2" in text]
    kept = load_experiment(folder / "experiment.yaml").trials
    assert kept.environment == {"HF_TOKEN": NOT_KEPT, "NCCL_DEBUG": "WARN"}


def test_a_secret_is_cut_out_of_whatever_stands_in_the_file(
    scripted: Callable[[Outcome], None], tmp_path: Path
) -> None:
    scripted(measured(1.0))
    block = PROGRAM.replace(
        '{HF_TOKEN: "hunter2, # 3", NCCL_DEBUG: WARN}', "\n    HF_TOKEN: >-\n      hunter2"
    )
    tuning = programmed(tmp_path, block)
    run(tuning, tmp_path / "study")
    copy = tmp_path / "study" / "experiment.yaml"
    assert "hunter2" not in copy.read_text(encoding="utf-8")
    kept = load_experiment(copy)
    assert kept.model == tuning.experiment.model
    assert kept.trials.environment == {"HF_TOKEN": NOT_KEPT}


def test_a_value_that_was_not_kept_comes_from_the_environment(tmp_path: Path) -> None:
    text = PROGRAM.replace("hunter2, # 3", NOT_KEPT)
    path = write_experiment(tmp_path)
    small = path.read_text(encoding="utf-8")
    path.write_text(small + text, encoding="utf-8")
    filled = with_secrets(load_experiment(path), {"HF_TOKEN": "given"}).trials.environment
    assert filled == {"HF_TOKEN": "given", "NCCL_DEBUG": "WARN"}
    with pytest.raises(
        InputError, match=r"environment\.HF_TOKEN: .* set HF_TOKEN for this command"
    ):
        with_secrets(load_experiment(path), {})
    argument = text.replace("train.py]", f"--x-token, '{NOT_KEPT}']", 1)
    path.write_text(small + argument, encoding="utf-8")
    with pytest.raises(InputError, match=r"program\.argv\.2: its value was not kept"):
        with_secrets(load_experiment(path), {"HF_TOKEN": "given"})


def test_another_value_of_a_secret_is_the_same_program(
    scripted: Callable[[Outcome], None], tmp_path: Path
) -> None:
    scripted(measured(1.0))
    text = PROGRAM.replace("train.py]", "train.py, --wandb-token, hunter4]", 1)
    run(programmed(tmp_path, text), tmp_path / "study")
    assert "hunter" not in (tmp_path / "study" / "journal.jsonl").read_text(encoding="utf-8")
    other = programmed(tmp_path, text.replace("hunter", "another"))
    run(other, tmp_path / "study", resume=True)
    with pytest.raises(InputError, match="the program has changed"):
        run(programmed(tmp_path, text.replace("WARN", "INFO")), tmp_path / "study", resume=True)
