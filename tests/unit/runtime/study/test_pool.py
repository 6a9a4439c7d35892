import errno
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from amp_ray.errors import HostError, InputError, InterruptedTrialError, Where
from amp_ray.runtime.ray.actor_pool import ActorPool, thread_pool
from amp_ray.runtime.study.pool import Fault, Task, sweep_lines
from amp_ray.strategies.candidate import Candidate
from amp_ray.strategies.strategy import StageOptions, Strategy
from amp_ray.trials.outcome import Measured, Outcome, Unreachable

GUARD_S = 60.0

ERRORS: dict[str, Exception] = {}
"""What goes wrong, by the trial's id."""

STRATEGY = Strategy.uniform(
    Candidate(micro_batch_size=1, options=StageOptions(tp=1, dp=1), pp=1, num_micro_batches=1),
    (0, 1),
)
DONE = Measured(
    measured_s=1.0,
    mean_s=1.0,
    spread_s=0.0,
    step_time_s=(1.0,),
    num_warmup_steps=0,
    peak_memory_bytes=(),
    wall_s=0.0,
)


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
        if task.trial_id == "slow":
            assert self.stop.wait(GUARD_S)
            raise InterruptedTrialError
        if task.trial_id == "wait":
            assert self.go.wait(GUARD_S)
        return DONE

    def interrupt(self) -> None:
        self.stop.set()

    def sweep(self, trial_ids: Sequence[str]) -> list[str]:
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
def pool(runners: Runners) -> Iterator[ActorPool]:
    pool = thread_pool(runners, 2)
    yield pool
    pool.close()


def task(trial_id: str) -> Task:
    return Task(
        number=0, attempt=0, trial_id=trial_id, strategy=STRATEGY, folder=Path("unused") / trial_id
    )


def test_a_trial_occupies_its_group_until_it_is_told(pool: ActorPool) -> None:
    pool.start(task("any"), 1)
    assert pool.free() == (0,)
    (finished,) = pool.wait(GUARD_S)
    assert (finished.task.trial_id, finished.outcome, finished.group) == ("any", DONE, 1)
    assert pool.free() == (0, 1)


def test_groups_run_side_by_side(pool: ActorPool, runners: Runners) -> None:
    pool.start(task("wait"), 0)
    pool.start(task("any"), 1)
    assert [finished.group for finished in pool.wait(GUARD_S)] == [1]
    runners.made[0].go.set()
    assert [finished.group for finished in pool.wait(GUARD_S)] == [0]


def test_a_host_that_cannot_be_used_is_unreachable(pool: ActorPool) -> None:
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
    pool: ActorPool, error: Exception, text: str
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


def test_nothing_to_tell_is_told_after_the_time(pool: ActorPool) -> None:
    assert pool.wait(0.01) == []


def test_closing_interrupts_what_runs_and_tells_it_without_an_outcome(
    pool: ActorPool, runners: Runners
) -> None:
    pool.start(task("slow"), 0)
    pool.close()
    (finished,) = pool.wait(0.0)
    assert finished.outcome is None
    assert all(runner.closed for runner in runners.made.values())


def test_a_group_that_is_set_aside_is_not_free(pool: ActorPool) -> None:
    pool.set_aside(0)
    assert pool.free() == (1,)


def test_every_group_sweeps_and_one_that_is_down_has_a_line(pool: ActorPool) -> None:
    assert pool.sweep(["x", "y"]) == ["x stays", "y stays", "group 1 is down"]
