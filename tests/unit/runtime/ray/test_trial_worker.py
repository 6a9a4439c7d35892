import os
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from amp_ray import __version__
from amp_ray.errors import AmpRayError, HostError, InputError, InterruptedTrialError
from amp_ray.runtime.ray.actors import Hello, Home, TrialWorker
from amp_ray.runtime.study.pool import Runner, Task
from amp_ray.strategies.candidate import Candidate
from amp_ray.strategies.strategy import StageOptions, Strategy
from amp_ray.trials.outcome import Outcome, TimedOut

HANG_GUARD_S = 300.0
STRATEGY = Strategy.uniform(
    Candidate(micro_batch_size=1, options=StageOptions(tp=1, dp=1), pp=1, num_micro_batches=1),
    (0, 2),
)
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


def worker_with(runner: Runner) -> TrialWorker:
    return TrialWorker(lambda _group: runner, 0, Home.of_this_process())


def task(folder: Path, trial_id: str = "short") -> Task:
    return Task(number=0, attempt=0, trial_id=trial_id, strategy=STRATEGY, folder=folder / "t")


def opened(runner: Runner) -> TrialWorker:
    worker = worker_with(runner)
    assert isinstance(worker.open(), Hello)
    return worker


def test_at_home_a_trial_writes_into_the_drivers_folder(runner: FakeRunner, tmp_path: Path) -> None:
    assert opened(runner).run(task(tmp_path)) == OUTCOME
    assert runner.folders == [tmp_path / "t"]


def test_a_running_trial_is_interrupted_and_waited_for(runner: FakeRunner, tmp_path: Path) -> None:
    worker, outcomes = opened(runner), list[object]()
    thread = threading.Thread(target=lambda: outcomes.append(worker.run(task(tmp_path, "long"))))
    thread.start()
    assert runner.running.wait(HANG_GUARD_S)
    worker.interrupt()
    thread.join(HANG_GUARD_S)
    assert outcomes == [None]


def test_an_error_in_making_the_runner_is_returned_as_it_is() -> None:
    error = InputError("wrong")

    def refuse(_group: int) -> Runner:
        raise error

    worker = TrialWorker(refuse, 0, Home.of_this_process())
    assert worker.open() is error
    worker.close()


def test_sweeping_and_closing_reach_the_runner(runner: FakeRunner) -> None:
    worker = opened(runner)
    assert worker.sweep(("unreachable",)) == ["no route"]
    assert runner.swept == ["unreachable"]
    worker.close()
    assert runner.closed


def test_at_home_a_worker_sees_what_the_driver_sees(
    runner: FakeRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    worker = worker_with(runner)
    monkeypatch.chdir("/")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    worker.open()
    assert Path.cwd() == tmp_path
    assert os.environ["OMP_NUM_THREADS"] == "3"
    assert "CUDA_VISIBLE_DEVICES" not in os.environ


def test_a_process_tells_who_it_is() -> None:
    hello = Hello.here()
    assert (hello.pid, hello.version) == (os.getpid(), __version__)
    hello.check_version()


def test_another_version_is_refused() -> None:
    with pytest.raises(AmpRayError, match=r"node7 has amp-ray 0\.0\.1 and this machine"):
        Hello(version="0.0.1", pid=1, host="node7").check_version()
