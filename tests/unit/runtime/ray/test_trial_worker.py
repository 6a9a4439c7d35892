import os
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from amp_ray import __version__
from amp_ray.errors import AmpRayError, HostError, InputError, InterruptedTrialError
from amp_ray.runtime.ray.actors import TrialWorker, check_opened
from amp_ray.runtime.study.pool import Runner, Task
from amp_ray.trials.outcome import Outcome, TimedOut
from support.driving import task_of
from support.waiting import HANG_GUARD_S

OUTCOME = TimedOut(reason="test", timeout_s=1.0, lines=(), wall_s=1.0)


class FakeRunner:
    """Writes a file; waits to be interrupted if the trial's name says so."""

    def __init__(self) -> None:
        """Begin with nothing done."""
        self.swept: list[str] = []
        self.folders: list[Path] = []
        self.running = threading.Event()
        self.interrupted = threading.Event()
        self.closed = False

    def run(self, task: Task) -> Outcome:
        self.folders.append(task.folder)
        (task.folder / "logs").mkdir(parents=True)
        (task.folder / "logs" / "0").write_bytes(b"\xff")
        self.running.set()
        if task.trial_id == "long":
            assert self.interrupted.wait(HANG_GUARD_S)
            raise InterruptedTrialError
        return OUTCOME

    def interrupt(self) -> None:
        self.interrupted.set()

    def sweep(self, trial_ids: Sequence[str]) -> list[str]:
        self.swept += trial_ids
        if "unreachable" in trial_ids:
            message = "no route"
            raise HostError(message)
        return []

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def runner() -> FakeRunner:
    return FakeRunner()


def opened(runner: Runner) -> TrialWorker:
    worker = TrialWorker(lambda _group: runner, 0)
    check_opened(worker.open(str(Path.cwd()), {}))
    return worker


def test_at_home_a_trial_writes_into_the_drivers_folder(runner: FakeRunner, tmp_path: Path) -> None:
    assert opened(runner).run(task_of("t", tmp_path)) == OUTCOME
    assert runner.folders == [tmp_path / "t"]


def test_a_running_trial_is_interrupted_and_waited_for(runner: FakeRunner, tmp_path: Path) -> None:
    worker, outcomes = opened(runner), list[object]()
    thread = threading.Thread(target=lambda: outcomes.append(worker.run(task_of("long", tmp_path))))
    thread.start()
    assert runner.running.wait(HANG_GUARD_S)
    worker.interrupt()
    thread.join(HANG_GUARD_S)
    assert outcomes == [None]


def test_an_error_in_making_the_runner_is_returned_as_it_is() -> None:
    error = InputError("wrong")

    def refuse(_group: int) -> Runner:
        raise error

    worker = TrialWorker(refuse, 0)
    assert worker.open(str(Path.cwd()), {}) is error
    with pytest.raises(InputError, match="wrong"):
        check_opened(error)
    worker.close()


def test_sweeping_and_closing_reach_the_runner(runner: FakeRunner) -> None:
    worker = opened(runner)
    assert worker.sweep(("unreachable",)) == ["no route"]
    assert runner.swept == ["unreachable"]
    worker.close()
    assert runner.closed


def test_a_worker_takes_over_the_drivers_folder_and_variables(
    runner: FakeRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir("/")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    worker = TrialWorker(lambda _group: runner, 0)
    assert worker.open(str(tmp_path), {"OMP_NUM_THREADS": "3"}) == __version__
    assert Path.cwd() == tmp_path
    assert os.environ["OMP_NUM_THREADS"] == "3"
    assert "CUDA_VISIBLE_DEVICES" not in os.environ


def test_another_version_is_refused() -> None:
    with pytest.raises(AmpRayError, match=r" has amp-ray 0\.0\.1 and this machine"):
        check_opened("0.0.1")
