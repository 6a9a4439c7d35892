import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from amp_ray.errors import InputError, InterruptedTrialError
from amp_ray.runtime.ray.actors import actor_pool
from amp_ray.runtime.study.pool import Finished, Runner, RunnerPool, Task
from amp_ray.trials.outcome import Measured, Outcome, Unreachable
from support.driving import task_of
from support.replaying import measured
from support.waiting import HANG_GUARD_S, wait_for

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("cluster", "sent_by_value")]


@dataclass(kw_only=True)
class FakeRunner:
    """A runner whose behaviour depends on the trial's name; it writes a file for each call."""

    group: int
    folder: Path
    interrupted: threading.Event = field(default_factory=threading.Event)

    def run(self, task: Task) -> Outcome:
        self.note(f"started-{task.trial_id}-{self.group}")
        what = task.trial_id.partition("-")[0]
        if what == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "meet":
            wait_for(lambda: len(list(self.folder.glob("started-meet-*"))) == 2)
        if what == "wait":
            assert self.interrupted.wait(HANG_GUARD_S)
            time.sleep(0.3)
            self.note("clean")
            raise InterruptedTrialError(task.trial_id)
        task.folder.mkdir()
        (task.folder / "log").write_text(os.environ.get("OMP_NUM_THREADS", "unset"))
        return measured(0.2)

    def interrupt(self) -> None:
        self.interrupted.set()

    def sweep(self, trial_ids: Sequence[str]) -> list[str]:
        self.note(f"swept-{'-'.join(trial_ids)}-{self.group}")
        return [f"{self.group} {trial_id}" for trial_id in trial_ids]

    def close(self) -> None:
        self.note(f"closed-{self.group}")

    def note(self, text: str) -> None:
        (self.folder / text).touch()


@dataclass(frozen=True, kw_only=True)
class MakeFake:
    folder: Path
    refused: int | None = None

    def __call__(self, group: int) -> Runner:
        if group == self.refused:
            message = f"group {group} is wrong"
            raise InputError(message)
        return FakeRunner(group=group, folder=self.folder)


@contextmanager
def pool_of(num_groups: int, folder: Path) -> Iterator[RunnerPool]:
    pool = actor_pool(MakeFake(folder=folder), num_groups)
    try:
        yield pool
    finally:
        pool.close()


def task(what: str, number: int, folder: Path) -> Task:
    return task_of(f"{what}-{number}", folder, number)


def wait(pool: RunnerPool, num: int = 1) -> list[Finished]:
    """Wait for some attempts to end."""
    finished: list[Finished] = []
    deadline = time.monotonic() + HANG_GUARD_S
    while len(finished) < num:
        assert time.monotonic() < deadline
        finished += pool.wait(1.0)
    return finished


def test_two_groups_run_side_by_side(tmp_path: Path) -> None:
    with pool_of(2, tmp_path) as pool:
        pool.start(task("meet", 0, tmp_path), 0)
        assert pool.free() == (1,)
        pool.start(task("meet", 1, tmp_path), 1)
        assert pool.free() == ()
        finished = wait(pool, 2)
    assert sorted(entry.group for entry in finished) == [0, 1]
    assert all(isinstance(entry.outcome, Measured) for entry in finished)


def test_closing_interrupts_and_waits_until_it_is_clean(tmp_path: Path) -> None:
    with pool_of(1, tmp_path) as pool:
        pool.start(task("wait", 0, tmp_path), 0)
        while not list(tmp_path.glob("started-*")):
            assert pool.wait(0.05) == []
    assert (tmp_path / "clean").exists()
    assert (tmp_path / "closed-0").exists()


def test_a_dead_actor_is_unreachable_once_and_then_set_aside(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pool_of(2, tmp_path) as pool:
        pool.start(task("die", 0, tmp_path), 1)
        (first,) = wait(pool)
        assert isinstance(first.outcome, Unreachable)
        assert "the actor of host group 1 died" in first.outcome.reason
        assert (tmp_path / "swept-die-0-1").exists()
        assert pool.free() == (0, 1)
        pool.start(task("fine", 1, tmp_path), 1)
        assert isinstance(wait(pool)[0].outcome, Measured)
        pool.start(task("die", 2, tmp_path), 1)
        assert isinstance(wait(pool)[0].outcome, Unreachable)
        assert pool.free() == (0,)
        lines = sorted(pool.sweep(["a", "b"]))
        assert lines[:2] == ["0 a", "0 b"]
        assert lines[2].startswith("the actor of host group 1 died: ")
    assert capsys.readouterr().out == ""  # Ray is silent where results are printed


def test_trials_inherit_the_drivers_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    with pool_of(1, tmp_path) as pool:
        pool.start(task("fine", 0, tmp_path), 0)
        wait(pool)
    assert (tmp_path / "fine-0" / "log").read_text() == "7"
