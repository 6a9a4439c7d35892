import logging
import threading
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from amp_ray.errors import AmpRayError, InputError, InterruptedTrialError
from amp_ray.runtime.ray import actor_pool
from amp_ray.runtime.ray.actor_pool import ActorLostError, ActorPool, ThreadActors
from amp_ray.runtime.ray.address import RayUnavailableError
from amp_ray.runtime.ray.trial_worker import Hello
from amp_ray.runtime.study.pool import Fault, Finished, Pool, Task
from amp_ray.strategies.candidate import Candidate
from amp_ray.strategies.strategy import StageOptions, Strategy
from amp_ray.trials.outcome import Outcome, TimedOut, Unreachable

STRATEGY = Strategy.uniform(
    Candidate(micro_batch_size=1, options=StageOptions(tp=1, dp=1), pp=1, num_micro_batches=1),
    (0, 2),
)
OUTCOME = TimedOut(reason="test", timeout_s=1.0, lines=(), wall_s=1.0)
HANG_GUARD_S = 60.0
NEVER = object()
"""Result of a call that does not end."""


class FakeRunner:
    """Runs trials at once, but for one that waits to be interrupted."""

    def __init__(self) -> None:
        """Begin with nothing done."""
        self.done: list[str] = []
        self.interrupted = threading.Event()

    def run(self, task: Task) -> Outcome:
        self.done.append(f"run {task.trial_id}")
        if task.trial_id == "long":
            assert self.interrupted.wait(HANG_GUARD_S)
            raise InterruptedTrialError
        return OUTCOME

    def interrupt(self) -> None:
        self.interrupted.set()

    def sweep(self, trial_ids: Sequence[str]) -> list[str]:
        self.done.append(f"sweep {' '.join(trial_ids)}")
        return [f"{trial_id} stays" for trial_id in trial_ids]

    def close(self) -> None:
        self.done.append("close")


class FakeActors:
    """Actors whose results are laid down before; a call is its number in `calls`."""

    def __init__(self, **results: list[Any]) -> None:
        """Take the results of every method, in the order of the calls."""
        self.results = {"open": [], "run": [], "sweep": [], **results}
        self.calls: list[tuple[Any, ...]] = []
        self.answers: dict[int, Any] = {}
        self.begun: list[int] = []
        self.ended: list[int] = []
        self.is_lost = False
        self.runners: dict[int, FakeRunner] = {}

    def begin(self, group: int) -> None:
        self.begun.append(group)

    def call(self, group: int, method: str, *arguments: object) -> int:
        number = len(self.calls)
        self.calls.append((group, method, *arguments))
        laid_down = self.results.get(method)
        default = Hello.here() if method == "open" else None
        self.answers[number] = laid_down.pop(0) if laid_down else default
        return number

    def ready(self, calls: Iterable[Any], timeout_s: float) -> list[Any]:
        del timeout_s
        if self.is_lost:
            message = "the Ray cluster is lost"
            raise RayUnavailableError(message)
        return [call for call in calls if self.answers[call] is not NEVER]

    def result(self, call: Any) -> Any:  # noqa: ANN401
        answer = self.answers[call]
        if isinstance(answer, ActorLostError | RayUnavailableError | ZeroDivisionError):
            raise answer
        return answer

    def end(self, group: int) -> None:
        self.ended.append(group)

    def substitute(self) -> ThreadActors:
        return ThreadActors(lambda group: self.runners.setdefault(group, FakeRunner()))

    def methods(self) -> list[tuple[int, str]]:
        return [(group, method) for group, method, *_ in self.calls]


def task(folder: Path = Path("study/t")) -> Task:
    return Task(number=4, attempt=0, trial_id="trial-4", strategy=STRATEGY, folder=folder)


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give up soon."""
    for name in ("SWEEP_TIMEOUT_S", "CLOSE_TIMEOUT_S"):
        monkeypatch.setattr(actor_pool, name, 0.01)


def test_actors_start_side_by_side() -> None:
    actors = FakeActors()
    pool: Pool = ActorPool(actors, 3)
    assert actors.begun == [0, 1, 2]
    assert pool.free() == (0, 1, 2)


def test_an_attempt_is_over_once(tmp_path: Path) -> None:
    pool = ActorPool(FakeActors(run=[OUTCOME]), 2)
    pool.start(task(tmp_path / "t"), 1)
    assert pool.free() == (0,)
    (finished,) = pool.wait(1.0)
    assert (finished.task, finished.group, finished.outcome) == (task(tmp_path / "t"), 1, OUTCOME)
    assert (pool.free(), pool.wait(1.0)) == ((0, 1), [])


def test_an_actor_is_told_the_absolute_folder() -> None:
    actors = FakeActors(run=[OUTCOME])
    pool = ActorPool(actors, 1)
    pool.start(task(), 0)
    assert actors.calls[-1][2].folder == Path.cwd() / "study" / "t"
    assert pool.wait(1.0)[0].task == task()


def test_an_interrupted_attempt_has_no_outcome() -> None:
    pool = ActorPool(FakeActors(run=[None]), 1)
    pool.start(task(), 0)
    assert pool.wait(1.0)[0].outcome is None


def test_a_group_that_is_set_aside_is_not_free() -> None:
    pool = ActorPool(FakeActors(), 2)
    pool.set_aside(0)
    assert pool.free() == (1,)


def test_a_dead_actor_is_replaced_once_by_one_that_sweeps() -> None:
    actors = FakeActors(run=[ActorLostError("its node died"), ActorLostError("again")])
    pool = ActorPool(actors, 1)
    pool.start(task(), 0)
    outcome = pool.wait(1.0)[0].outcome
    assert isinstance(outcome, Unreachable)
    assert outcome.reason == "the actor of host group 0 died: its node died"
    assert (actors.begun, actors.ended, pool.free()) == ([0, 0], [0], (0,))
    assert actors.calls[-1] == (0, "open", ("trial-4",))
    pool.start(task(), 0)
    assert isinstance(pool.wait(1.0)[0].outcome, Unreachable)
    assert (actors.begun, pool.free()) == ([0, 0], ())


@pytest.mark.parametrize("opened", [NEVER, InputError("no file"), ActorLostError("dead")])
def test_a_group_whose_actor_cannot_be_replaced_is_set_aside(
    opened: object, caplog: pytest.LogCaptureFixture
) -> None:
    results = [Hello.here(), *[opened] * 1000]
    actors = FakeActors(run=[ActorLostError("died")], open=results)
    pool = ActorPool(actors, 1, start_timeout_s=0.05)
    pool.start(task(), 0)
    assert isinstance(pool.wait(1.0)[0].outcome, Unreachable)
    assert pool.free() == ()
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert caplog.messages[0].startswith("host group 0 is set aside: ")


def test_a_mistake_of_ours_is_no_crash_of_the_strategy() -> None:
    pool = ActorPool(FakeActors(run=[ZeroDivisionError("oh")]), 1)
    pool.start(task(), 0)
    outcome = pool.wait(1.0)[0].outcome
    assert isinstance(outcome, Fault)
    assert str(outcome.error).startswith("ZeroDivisionError: oh")
    assert pool.free() == (0,)


def test_an_actor_that_does_not_start_is_told_and_all_are_ended() -> None:
    actors = FakeActors(open=[Hello.here(), NEVER])
    with pytest.raises(AmpRayError, match=r"host groups \[1\] have not started in 0\.01 s"):
        ActorPool(actors, 2, start_timeout_s=0.01)
    assert actors.ended == [0, 1]


def test_wrong_input_is_raised_as_it_is_and_all_are_ended() -> None:
    actors = FakeActors(open=[InputError("no file")])
    with pytest.raises(InputError, match=r"^no file$"):
        ActorPool(actors, 2)
    assert actors.ended == [0, 1]


def test_another_version_on_a_node_is_refused() -> None:
    actors = FakeActors(open=[Hello(version="0.0.1", pid=1, host="node7")])
    with pytest.raises(AmpRayError, match="node7 has amp-ray"):
        ActorPool(actors, 1)


def test_every_group_sweeps_or_says_why_not() -> None:
    sweeps = [["a stays"], ActorLostError("dead"), NEVER]
    pool = ActorPool(FakeActors(sweep=sweeps), 3)
    assert pool.sweep(("a",)) == [
        "a stays",
        "host group 1 was not swept: dead",
        "host group 2 was not swept in 0.01 s",
    ]


def test_closing_interrupts_what_runs_and_ends_all() -> None:
    actors = FakeActors(run=[NEVER])
    pool = ActorPool(actors, 2)
    pool.start(task(), 1)
    pool.close()
    assert actors.methods()[3:] == [(1, "interrupt"), (0, "close"), (1, "close")]
    assert actors.ended == [0, 1]
    pool.close()
    assert actors.ended == [0, 1]


def test_what_ends_while_closing_is_told_afterwards(tmp_path: Path) -> None:
    actors = FakeActors(run=[OUTCOME, None, NEVER, ActorLostError("gone")])
    pool = ActorPool(actors, 4)
    for group in range(4):
        pool.start(task(tmp_path / str(group)), group)
    pool.close()
    found = {finished.group: finished.outcome for finished in pool.wait(0.0)}
    assert isinstance(found.pop(3), Unreachable)
    assert found == {0: OUTCOME, 1: None}
    assert actors.begun == [0, 1, 2, 3]
    assert pool.wait(0.0) == []


def wait(pool: ActorPool) -> Finished:
    """Wait for one attempt to end."""
    for _ in range(int(HANG_GUARD_S)):
        if finished := pool.wait(1.0):
            return finished[0]
    pytest.fail("nothing has ended")


def test_where_ray_is_lost_threads_sweep_and_go_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    actors = FakeActors(run=[NEVER])
    pool = ActorPool(actors, 2)
    pool.start(task(tmp_path), 1)
    actors.is_lost = True
    (lost,) = pool.wait(1.0)
    assert isinstance(lost.outcome, Unreachable)
    assert (lost.outcome.reason, lost.outcome.host) == ("the Ray cluster is lost", "")
    assert caplog.messages == [
        "the Ray cluster is lost. Threads of this process hold the hosts from now on"
    ]
    assert pool.free() == (0, 1)
    pool.start(task(tmp_path), 1)
    assert wait(pool).outcome == OUTCOME
    assert pool.sweep(("a",)) == ["a stays", "a stays"]
    pool.start(replace(task(tmp_path), trial_id="long"), 0)
    pool.close()
    assert pool.wait(0.0)[0].outcome is None
    assert actors.runners[1].done == ["sweep trial-4", "run trial-4", "sweep a", "close"]
    assert actors.runners[0].done == ["sweep a", "run long", "close"]


def test_an_actor_that_dies_with_ray_is_lost_with_it(tmp_path: Path) -> None:
    actors = FakeActors(run=[RayUnavailableError("raylet died"), NEVER])
    pool = ActorPool(actors, 2)
    for group in range(2):
        pool.start(task(tmp_path), group)
    finished = pool.wait(1.0)
    assert [entry.group for entry in finished] == [0, 1]
    assert {type(entry.outcome) for entry in finished} == {Unreachable}
    assert pool.free() == (0, 1)
    pool.close()


def test_a_pool_that_is_closed_after_ray_is_lost_waits_for_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    actors = FakeActors(run=[NEVER])
    pool = ActorPool(actors, 1)
    pool.start(task(tmp_path), 0)
    actors.is_lost = True
    pool.close()
    assert caplog.messages == ["the Ray cluster is lost. What runs on hosts ends by its lease"]
    assert pool.wait(0.0) == []
