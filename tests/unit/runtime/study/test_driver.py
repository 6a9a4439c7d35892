import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from amp_ray.errors import AmpRayError, InputError
from amp_ray.runtime.study.driver import Driver, DriverSettings
from amp_ray.runtime.study.pool import Fault, Task
from amp_ray.trials.outcome import CauseKind, Crashed, Measured, Outcome, Unreachable
from support.driving import (
    MemoryLog,
    NotingView,
    ScriptedPool,
    drive,
    make_driver,
    rebuilt,
    resume,
    small_study,
)
from support.replaying import measured, out_of_memory

LOST = Unreachable(reason="host b fell silent", host="b", wall_s=1.0)
FULL = Crashed(
    reason="rank 0 on b: No space left on device; make room on the disk of b",
    kind="disk",
    rank=0,
    host="b",
    lines=(),
    wall_s=1.0,
)
DEAD_ACTOR = Unreachable(reason="the actor of host group 0 died", host="", wall_s=1.0)


def second(_task: Task, _group: int) -> Outcome:
    return measured(1.0)


def interrupt_at(number: int) -> Callable[[Task, int], Outcome]:
    """Answer as usual until Ctrl-C comes while a trial runs."""

    def answer(task: Task, _group: int) -> Outcome:
        if task.number == number and task.attempt == 0:
            raise KeyboardInterrupt
        return measured(1.0)

    return answer


def kinds(log: MemoryLog) -> list[tuple[str, int | None, int | None]]:
    return [(event["event"], event.get("number"), event.get("attempt")) for event in log.events]


# ------------------------------------------------------------------------- the ordinary way


def test_everything_is_written_down_before_it_is_done() -> None:
    happened: list[str] = []
    pool = ScriptedPool(answer=second, happened=happened)
    make_driver(small_study(budget=2), pool, MemoryLog(happened=happened)).run()
    assert happened == [
        "journal: started trial 0-0",
        "start: trial 0-0 on group 0",
        "journal: ended trial 0-0",
        "journal: started trial 1-0",
        "start: trial 1-0 on group 0",
        "journal: ended trial 1-0",
        "close",
        "journal: stopped",
    ]


def test_a_study_goes_on_within_its_budget_until_the_certificate_holds() -> None:
    state = small_study(budget=99, policy="best")
    times = {each.strategy: each.iteration_time_s for each in state.candidates}
    result = drive(state, lambda task, _group: measured(times[task.strategy]))
    assert result.certificate is not None
    assert (result.ending, result.certificate.holds) == ("certificate", True)


def test_attempts_have_names_and_folders_of_their_own() -> None:
    tasks: list[Task] = []

    def answer(task: Task, _group: int) -> Outcome:
        tasks.append(task)
        return LOST if len(tasks) == 1 else measured(1.0)

    drive(small_study(budget=1), answer)
    assert [(task.trial_id, task.folder.name) for task in tasks] == [
        ("study-0000-0", "0000-0"),
        ("study-0000-1", "0000-1"),
    ]


@pytest.mark.parametrize(
    ("settings", "ending"),
    [
        ({"budget": 3}, "budget"),
        ({"budget": 99}, "exhausted"),
        ({"budget": 99, "policy": "best"}, "certificate"),
    ],
)
def test_the_ending_tells_why(settings: dict[str, object], ending: str) -> None:
    log = MemoryLog()
    result = drive(small_study(**settings), second, log)  # type: ignore[arg-type]
    assert result.ending == ending
    assert log.events[-1]["ending"] == ending


def test_groups_run_side_by_side() -> None:
    pool = ScriptedPool(answer=second, num_groups=2)
    result = make_driver(small_study(budget=4), pool).run()
    assert pool.most_running == 2
    assert len(result.state.trials) == 4
    assert "start: trial 1-0 on group 1" in pool.happened


def test_a_surprise_is_told_once() -> None:
    view = NotingView()
    times = iter((1e-6, 1e-6))
    pool = ScriptedPool(answer=lambda _task, _group: measured(next(times)))
    make_driver(small_study(budget=2), pool, view=view).run()
    assert view.lines.count("surprise 0") == 1
    assert view.lines.index("surprise 0") < view.lines.index("started 1 on 0")


def crash(reason: str, rank: int = 0, host: str = "a", kind: CauseKind = "crash") -> Crashed:
    """A crash of one rank."""
    return Crashed(
        reason=f"rank {rank} on {host}: {reason}",
        kind=kind,
        rank=rank,
        host=host,
        lines=(),
        wall_s=1.0,
    )


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (crash("ImportError: no x"), crash("ImportError: no x", rank=3, host="b7")),
        (crash("bus error at 0x7ff01"), crash("bus error at 0x7fe3a")),
        (crash("cannot open /tmp/amp-ray-s-0000-0-ab00/x"), crash("cannot open amp-ray-s-0001/x")),
    ],
)
def test_two_strategies_that_crash_alike_before_anything_is_measured_stop_the_study(
    first: Crashed, then: Crashed
) -> None:
    log, outcomes = MemoryLog(), iter((first, then))
    result = drive(small_study(budget=9), lambda _task, _group: next(outcomes), log)
    assert result.ending == "crashes"
    assert len(result.state.trials) == 2
    assert result.common_failure is not None
    assert result.common_failure.numbers == (0, 1)


@pytest.mark.parametrize(
    "outcomes",
    [
        [crash("tp 4 does not divide 6 heads"), crash("tp 2 does not divide 7 heads")],
        [crash("boom"), crash("boom", kind="start")],
        [crash("the metric never appeared", kind="no-result")] * 2,
        [measured(1.0), crash("boom"), crash("boom")],
        [out_of_memory(), out_of_memory()],
    ],
)
def test_other_failures_do_not_stop_it(outcomes: list[Outcome]) -> None:
    turns = iter(outcomes)
    result = drive(small_study(budget=len(outcomes)), lambda _task, _group: next(turns))
    assert result.ending == "budget"
    assert result.common_failure is None


def test_after_a_mend_both_run_again_and_cost_nothing_more() -> None:
    log = MemoryLog()
    drive(small_study(budget=3), lambda _task, _group: crash("boom"), log)
    before = rebuilt(small_study(budget=3), log)
    assert [(entry.trial.number, entry.attempt) for entry in before.open] == [(0, 0), (1, 0)]
    assert before.leftovers == ()
    log.append({"event": "resumed"})
    result = resume(before, ScriptedPool(answer=second), log)
    assert result.ending == "budget"
    assert [type(trial_record.outcome) for trial_record in result.state.trials] == [Measured] * 3
    assert rebuilt(small_study(budget=3), log).state == result.state


def test_without_a_mend_the_study_goes_on_with_other_strategies() -> None:
    log = MemoryLog()
    drive(small_study(budget=4), lambda _task, _group: crash("boom"), log)
    before = rebuilt(small_study(budget=4), log)
    log.append({"event": "resumed"})
    pool = ScriptedPool(answer=lambda _task, _group: crash("boom"))
    result = resume(before, pool, log, known_failures=before.known_failures)
    assert (result.ending, len(result.state.trials)) == ("budget", 4)


# ----------------------------------------------------------------- faults of this machine


@pytest.mark.parametrize("kind", [AmpRayError, InputError])
def test_a_fault_of_this_machine_stops_the_study_with_the_trial_open(
    kind: type[AmpRayError],
) -> None:
    def answer(task: Task, _group: int) -> Outcome | Fault:
        return Fault(error=kind("disk full. Make room")) if task.number else measured(1.0)

    log, view = MemoryLog(), NotingView()
    pool = ScriptedPool(answer=answer)
    with pytest.raises(kind, match=r"trial 1 .* this machine: disk full\. Make room.*--resume"):
        make_driver(small_study(), pool, log, view).run()
    assert pool.is_closed
    assert log.events[-1]["ending"] == "failed"
    before = rebuilt(small_study(), log)
    assert [entry.trial.number for entry in before.open] == [1]
    assert before.leftovers == ("study-0001-0",)  # nobody knows how far the launcher came
    log.append({"event": "resumed"})
    again = ScriptedPool(answer=second)
    result = resume(before, again, log)
    assert "start: trial 1-1 on group 0" in again.happened
    assert [type(trial_record.outcome) for trial_record in result.state.trials] == [Measured] * 3


def test_a_folder_that_the_journal_does_not_know_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "0000-0").mkdir()
    log, pool = MemoryLog(), ScriptedPool(answer=second)
    settings = DriverSettings(trials_folder=tmp_path, study_id="study")
    Driver(small_study(budget=1), pool, log, NotingView(), settings).run()
    assert "start: trial 0-1 on group 0" in pool.happened
    assert isinstance(rebuilt(small_study(budget=1), log).state.trials[0].outcome, Measured)


# --------------------------------------------------------------------------- lost hosts


def lose(*lost: tuple[int, int], outcome: Outcome = LOST) -> Callable[[Task, int], Outcome]:
    """Lose the host of some (trial, attempt)s, or whatever else comes of it."""
    return lambda task, _group: outcome if (task.number, task.attempt) in lost else measured(1.0)


@pytest.mark.parametrize("outcome", [LOST, FULL])
def test_a_trial_that_a_host_fails_runs_once_more_elsewhere(outcome: Outcome) -> None:
    pool = ScriptedPool(answer=lose((0, 0), outcome=outcome), num_groups=2)
    result = make_driver(small_study(budget=3), pool).run()
    assert "start: trial 0-0 on group 0" in pool.happened
    assert "start: trial 0-1 on group 1" in pool.happened
    assert pool.aside == {0}
    assert all(isinstance(trial_record.outcome, Measured) for trial_record in result.state.trials)
    assert result.ending == "budget"


@pytest.mark.parametrize("outcome", [LOST, FULL])
def test_without_another_group_it_runs_once_more_on_the_same(outcome: Outcome) -> None:
    view = NotingView()
    pool = ScriptedPool(answer=lose((0, 0), outcome=outcome))
    make_driver(small_study(budget=1), pool, view=view).run()
    assert pool.aside == set()
    assert view.lines[:3] == [
        "started 0 on 0",
        "halted 0",
        f"trial 0: {outcome.reason}; it runs once more",
    ]


@pytest.mark.parametrize("outcome", [LOST, FULL])
def test_the_second_loss_is_the_outcome_and_the_group_is_not_used_any_more(
    outcome: Outcome,
) -> None:
    log = MemoryLog()
    pool = ScriptedPool(answer=lose((0, 0), (0, 1), outcome=outcome))
    result = make_driver(small_study(budget=3), pool, log).run()
    assert [trial_record.outcome for trial_record in result.state.trials] == [outcome]
    assert result.ending == "hosts"
    assert kinds(log)[:4] == [
        ("started", 0, 0),
        ("interrupted", 0, 0),
        ("started", 0, 1),
        ("set-aside", None, None),
    ]
    assert rebuilt(small_study(), log).open == ()


def test_a_study_whose_groups_are_all_lost_ends_and_can_be_resumed() -> None:
    log = MemoryLog()
    pool = ScriptedPool(answer=lambda _task, _group: LOST, num_groups=2)
    result = make_driver(small_study(budget=6), pool, log).run()
    assert result.ending == "hosts"
    before = rebuilt(small_study(budget=6), log)
    assert [entry.trial.number for entry in before.open] == [1]
    again = ScriptedPool(answer=second)
    resumed = resume(before, again)
    assert resumed.ending == "budget"
    assert isinstance(resumed.state.trials[1].outcome, Measured)
    assert "start: trial 1-1 on group 0" in again.happened


def test_a_pool_that_gives_its_last_group_up_ends_the_study() -> None:
    """A pool of actors does so by itself; the driver must not wait for ever."""

    def answer(_task: Task, group: int) -> Outcome:
        pool.aside.add(group)
        return DEAD_ACTOR

    pool = ScriptedPool(answer=answer)
    log = MemoryLog()
    assert make_driver(small_study(), pool, log).run().ending == "hosts"
    assert [entry.lost for entry in rebuilt(small_study(), log).open] == [True]


def test_a_group_whose_actor_died_is_used_again() -> None:
    pool = ScriptedPool(
        answer=lambda task, _group: measured(1.0) if task.attempt or task.number else DEAD_ACTOR,
        num_groups=2,
    )
    result = make_driver(small_study(budget=4), pool).run()
    assert pool.aside == set()
    assert result.ending == "budget"
    assert "start: trial 0-1 on group 0" in pool.happened


def test_an_interruption_does_not_count_as_a_loss() -> None:
    log = MemoryLog()
    with pytest.raises(KeyboardInterrupt):
        make_driver(small_study(budget=1), ScriptedPool(answer=interrupt_at(0)), log).run()
    before = rebuilt(small_study(budget=1), log)
    pool = ScriptedPool(answer=lose((0, 1)))
    result = resume(before, pool)
    assert "start: trial 0-2 on group 0" in pool.happened
    assert isinstance(result.state.trials[0].outcome, Measured)


def test_a_loss_before_the_driver_died_counts() -> None:
    def answer(task: Task, _group: int) -> Outcome:
        if task.attempt:
            raise KeyboardInterrupt
        return LOST

    log = MemoryLog()
    with pytest.raises(KeyboardInterrupt):
        make_driver(small_study(budget=1), ScriptedPool(answer=answer), log).run()
    before = rebuilt(small_study(budget=1), log)
    assert before.leftovers == ("study-0000-0",)  # the host may come back with it
    result = resume(before, ScriptedPool(answer=lose((0, 2))))
    assert [trial_record.outcome for trial_record in result.state.trials] == [LOST]


# ---------------------------------------------------------------------- interruptions


def test_ctrl_c_ends_what_runs_and_writes_that_down() -> None:
    log, view = MemoryLog(), NotingView()
    pool = ScriptedPool(answer=interrupt_at(1), num_groups=2, happened=log.happened)
    with pytest.raises(KeyboardInterrupt):
        make_driver(small_study(), pool, log, view).run()
    assert pool.is_closed
    assert log.happened[-4:] == [
        "close",
        "journal: interrupted trial 1-0",
        "journal: interrupted trial 2-0",
        "journal: stopped",
    ]
    assert log.events[-1]["ending"] == "interrupted"
    assert "interrupted: what runs is being ended" in view.lines


def test_what_was_interrupted_runs_again_as_the_next_attempt() -> None:
    log = MemoryLog()
    with pytest.raises(KeyboardInterrupt):
        make_driver(small_study(), ScriptedPool(answer=interrupt_at(1)), log).run()
    before = rebuilt(small_study(), log)
    assert before.leftovers == ()
    pool = ScriptedPool(answer=second)
    log.append({"event": "resumed"})
    result = resume(before, pool, log)
    assert [line for line in pool.happened if line.startswith("start")] == [
        "start: trial 1-1 on group 0",
        "start: trial 2-0 on group 0",
    ]
    assert pool.swept == []
    assert [*result.state.trials] == [*drive(small_study(), second).state.trials]


def test_what_ends_while_the_pool_closes_is_kept() -> None:
    log = MemoryLog()
    pool = ScriptedPool(answer=interrupt_at(0), at_close=second)
    started = make_driver(small_study(), pool, log)
    with pytest.raises(KeyboardInterrupt):
        started.run()
    assert isinstance(rebuilt(small_study(), log).state.trials[0].outcome, Measured)
    assert started.result("interrupted").best_number == 0


def test_attempts_that_do_not_end_in_order_stay_open_and_are_told() -> None:
    @dataclass(kw_only=True)
    class Stuck(ScriptedPool):
        def close(self) -> None:
            super().close()
            self.running.clear()

    log, view = MemoryLog(), NotingView()
    with pytest.raises(KeyboardInterrupt):
        make_driver(small_study(), Stuck(answer=interrupt_at(0)), log, view).run()
    assert "trial 0 did not end in order; --resume cleans up after it" in view.lines
    before = rebuilt(small_study(), log)
    assert before.leftovers == ("study-0000-0",)
    pool = ScriptedPool(answer=second)
    resume(before, pool, view=view)
    assert pool.swept == ["study-0000-0"]
    assert "study-0000-0 has left a process" in view.lines


def test_hosts_are_swept_before_anything_starts() -> None:
    log = MemoryLog()
    started = make_driver(small_study(), ScriptedPool(answer=second), log)
    log.room = 1  # as if the driver died after this event
    with pytest.raises(AmpRayError):
        started.run()
    before = rebuilt(small_study(), log)
    pool = ScriptedPool(answer=second)
    resume(before, pool)
    assert pool.happened[:2] == ["sweep: study-0000-0", "start: trial 0-1 on group 0"]


def test_a_signal_waits_while_an_outcome_is_written() -> None:
    """What has ended must get into the journal, also where Ctrl-C comes at that moment."""
    held: list[str] = []
    log = MemoryLog()

    @contextlib.contextmanager
    def steady() -> Iterator[None]:
        before = len(log.events)
        yield
        held.extend(event["event"] for event in log.events[before:])

    pool = ScriptedPool(answer=second)
    make_driver(small_study(budget=2), pool, log, steady=steady).run()
    assert held == ["started", "ended", "started", "ended"]


# --------------------------------------------------------------------------- the clock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Stop the driver's clock; the test moves it."""
    now = [100.0]
    monkeypatch.setattr("amp_ray.runtime.study.driver.time.monotonic", lambda: now[0])
    return now


def test_the_time_budget_ends_what_runs_and_leaves_it_open(clock: list[float]) -> None:
    def answer(_task: Task, _group: int) -> Outcome:
        clock[0] += 4.0
        return measured(1.0)

    log = MemoryLog()
    pool = ScriptedPool(answer=answer, num_groups=2)
    result = make_driver(small_study(budget=9), pool, log, time_left_s=10.0).run()
    assert result.ending == "time-budget"
    before = rebuilt(small_study(budget=9), log)
    assert (len(before.open), before.leftovers) == (1, ())
    assert before.seconds == 12.0
    last = log.events[-1]
    assert (last["event"], last["ending"], last["seconds"]) == ("stopped", "time-budget", 12.0)
    assert (last["recommendation"]["measured_s"], last["recommendation"]["trial"]) == (1.0, 0)
    assert len(result.state.trials) == 4


def test_the_result_has_what_ended_at_the_last_moment(clock: list[float]) -> None:
    def answer(_task: Task, _group: int) -> Outcome:
        clock[0] += 4.0
        return measured(2.0)

    pool = ScriptedPool(answer=answer, num_groups=2, at_close=second)
    result = make_driver(small_study(budget=9), pool, time_left_s=4.0).run()
    assert result.ending == "time-budget"
    assert result.best_number == 1


def test_nothing_starts_without_time(clock: list[float]) -> None:
    pool = ScriptedPool(answer=second)
    result = make_driver(small_study(), pool, time_left_s=0.0).run()
    assert result.ending == "time-budget"
    assert pool.happened == ["close"]


def test_nobody_waits_beyond_the_time_budget(clock: list[float]) -> None:
    pool = ScriptedPool(answer=second)
    make_driver(small_study(budget=1), pool, time_left_s=0.125).run()
    assert pool.timeouts_s[0] == 0.125


# ------------------------------------------------------------------------- the journal


@pytest.mark.parametrize("room", range(7))
def test_a_journal_that_cannot_be_written_stops_the_study(room: int) -> None:
    log = MemoryLog(room=room)
    pool = ScriptedPool(answer=second, num_groups=2, happened=log.happened)
    started = make_driver(small_study(), pool, log)
    with pytest.raises(AmpRayError, match="No space left on device"):
        started.run()
    assert pool.is_closed
    before = rebuilt(small_study(), log)
    result = resume(before, ScriptedPool(answer=second))
    assert [trial_record.outcome for trial_record in result.state.trials] == [measured(1.0)] * 3


def test_a_second_ctrl_c_is_not_swallowed() -> None:
    @dataclass(kw_only=True)
    class Impatient(ScriptedPool):
        def close(self) -> None:
            raise KeyboardInterrupt

    log = MemoryLog()
    with pytest.raises(KeyboardInterrupt):
        make_driver(small_study(), Impatient(answer=interrupt_at(0)), log).run()
    assert rebuilt(small_study(), log).leftovers == ("study-0000-0",)
