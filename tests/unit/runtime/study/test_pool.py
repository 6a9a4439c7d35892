import errno
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from amp_ray.errors import HostError, InputError, InterruptedTrialError, Where
from amp_ray.runtime.study import pool as pool_module
from amp_ray.runtime.study.pool import (
    Fault,
    ReplayRunner,
    RunnerLostError,
    RunnerPool,
    Task,
    sweep_lines,
)
from amp_ray.runtime.threads import directly
from amp_ray.trials.outcome import Outcome, Unreachable
from support.driving import PLAIN_STRATEGY, task_of
from support.replaying import crashed, measured

GUARD_S = 600.0

ERRORS: dict[str, Exception] = {}
"""What goes wrong, by the trial's id."""
DONE = measured(1.0)
task = partial(task_of, folder=Path("unused"))


class Scripted:
    """A runner that does what the trial's id says."""

    def __init__(self, group: int) -> None:
        """Take the number of the group."""
        self.group = group
        self.closed = False
        self.go = threading.Event()
        self.stop = threading.Event()

    def run(self, task: Task) -> Outcome:
        if task.trial_id == "host":
            message = "no route"
            raise HostError(message)
        if task.trial_id in ERRORS:
            raise ERRORS[task.trial_id]
        if task.trial_id == "deaf":
            assert self.go.wait(GUARD_S)
        if task.trial_id == "slow":
            assert self.stop.wait(GUARD_S)
            raise InterruptedTrialError
        if task.trial_id == "wait":
            assert self.go.wait(GUARD_S)
        return DONE

    def interrupt(self) -> None:
        self.stop.set()

    def sweep(self, trial_ids: Sequence[str]) -> list[str]:
        if "wait" in trial_ids:
            assert self.go.wait(GUARD_S)
        if self.group:
            message = f"group {self.group} is down"
            raise HostError(message)
        return [f"{trial_id} stays" for trial_id in trial_ids]

    def close(self) -> None:
        self.closed = True


class Runners:
    def __init__(self) -> None:
        """Nothing is made yet."""
        self.made: dict[int, Scripted] = {}

    def __call__(self, group: int) -> Scripted:
        self.made[group] = Scripted(group)
        return self.made[group]


@pytest.fixture
def runners() -> Runners:
    return Runners()


@pytest.fixture
def pool(runners: Runners) -> Iterator[RunnerPool]:
    pool = RunnerPool(runners, 2)
    yield pool
    pool.close()


def test_a_trial_occupies_its_group_until_it_is_told(pool: RunnerPool) -> None:
    pool.start(task("any"), 1)
    assert pool.free() == (0,)
    (finished,) = pool.wait(GUARD_S)
    assert (finished.task.trial_id, finished.outcome, finished.group) == ("any", DONE, 1)
    assert pool.free() == (0, 1)


def test_groups_run_side_by_side(pool: RunnerPool, runners: Runners) -> None:
    pool.start(task("wait"), 0)
    pool.start(task("any"), 1)
    assert [finished.group for finished in pool.wait(GUARD_S)] == [1]
    runners.made[0].go.set()
    assert [finished.group for finished in pool.wait(GUARD_S)] == [0]


def test_a_host_that_cannot_be_used_is_unreachable(pool: RunnerPool) -> None:
    pool.start(task("host"), 0)
    (finished,) = pool.wait(GUARD_S)
    assert isinstance(finished.outcome, Unreachable)
    assert finished.outcome.reason == "no route"


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (RuntimeError("oops"), "RuntimeError: oops. Run it again with -v"),
        (RecursionError("deep"), "RecursionError: deep"),
        (OverflowError("big"), "OverflowError: big"),
        (
            OSError(errno.ENOSPC, "No space left on device", "/s/trials/0-0/launch.json"),
            "No space left on device: /s/trials/0-0/launch.json. Make room",
        ),
        (FileExistsError(errno.EEXIST, "File exists", "/s/0-0"), "File exists: /s/0-0. Move it"),
        (InputError("no such host", where=Where(file="x.yaml", line=3)), "x.yaml:3: no such host"),
    ],
)
def test_what_goes_wrong_on_this_machine_says_nothing_of_the_strategy(
    pool: RunnerPool, error: Exception, text: str
) -> None:
    ERRORS["here"] = error
    pool.start(task("here"), 0)
    (finished,) = pool.wait(GUARD_S)
    assert isinstance(finished.outcome, Fault)
    assert str(finished.outcome.error).startswith(text)


def test_a_group_that_cannot_be_swept_has_a_line(runners: Runners) -> None:
    runner = runners(0)
    runner.sweep = lambda _ids: [str(1 // 0)]  # type: ignore[method-assign, assignment]
    (line,) = sweep_lines(runner, ["x"])
    assert line.startswith("ZeroDivisionError")


def test_nothing_to_tell_is_told_after_the_time(pool: RunnerPool) -> None:
    assert pool.wait(0.01) == []


def test_closing_interrupts_what_runs_and_tells_it_without_an_outcome(
    pool: RunnerPool, runners: Runners
) -> None:
    pool.start(task("slow"), 0)
    pool.close()
    (finished,) = pool.wait(0.0)
    assert finished.outcome is None
    assert all(runner.closed for runner in runners.made.values())


def test_a_group_that_is_set_aside_is_not_free(pool: RunnerPool) -> None:
    pool.set_aside(0)
    assert pool.free() == (1,)


def test_every_group_sweeps_and_one_that_is_down_has_a_line(pool: RunnerPool) -> None:
    assert pool.sweep(["x", "y"]) == ["x stays", "y stays", "group 1 is down"]


def test_a_group_that_is_not_swept_in_time_has_a_line(
    pool: RunnerPool, runners: Runners, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "SWEEP_TIMEOUT_S", 0.01)
    runners.made[1].group = 0
    runners.made[1].go.set()
    assert pool.sweep(["wait"])[0] == "host group 0 was not swept in 0.01 s"
    runners.made[0].go.set()


def test_a_group_whose_runner_is_lost_is_set_aside(
    pool: RunnerPool, caplog: pytest.LogCaptureFixture
) -> None:
    ERRORS["lost"] = RunnerLostError("its actor died")
    pool.start(task("lost"), 0)
    (finished,) = pool.wait(GUARD_S)
    assert isinstance(finished.outcome, Unreachable)
    assert (finished.outcome.reason, finished.outcome.host) == ("its actor died", "")
    assert pool.free() == (1,)
    assert caplog.messages == ["host group 0 is set aside: its actor died"]


def test_a_runner_that_cannot_be_made_is_the_error_itself_and_the_others_are_closed(
    runners: Runners,
) -> None:
    def make(group: int) -> Scripted:
        if group == 1:
            message = "no file"
            raise InputError(message)
        return runners(group)

    with pytest.raises(InputError, match=r"^no file$"):
        RunnerPool(make, 3)
    assert sorted(runners.made) == [0, 2]
    assert all(runner.closed for runner in runners.made.values())


def test_closing_waits_for_nothing_that_does_not_end(
    pool: RunnerPool, runners: Runners, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "CLOSE_TIMEOUT_S", 0.5)
    before = threading.enumerate()
    pool.start(task("any"), 0)
    for thread in threading.enumerate():
        if thread not in before:
            thread.join(GUARD_S)
    pool.start(task("deaf"), 1)
    pool.close()
    assert [finished.group for finished in pool.wait(0.0)] == [0]
    pool.close()
    assert pool.wait(0.0) == []
    runners.made[1].go.set()


def test_recorded_answers_are_there_at_once() -> None:
    other = replace(PLAIN_STRATEGY, num_micro_batches=2)
    runner = ReplayRunner({PLAIN_STRATEGY: measured(0.5), other: crashed()})
    pool = RunnerPool(lambda _group: runner, 2, begin=directly)
    pool.start(task("0"), 1)
    pool.start(task("1", number=1, strategy=other), 0)
    assert pool.free() == ()
    assert [(ended.outcome, ended.group) for ended in pool.wait(0.0)] == [
        (measured(0.5), 1),
        (crashed(), 0),
    ]
    assert pool.free() == (0, 1)
    assert pool.sweep(["a", "b"]) == []
    pool.start(task("0"), 0)
    pool.close()
    assert [ended.outcome for ended in pool.wait(0.0)] == [measured(0.5)]
