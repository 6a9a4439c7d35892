from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from amp_ray.errors import InputError
from amp_ray.runtime.study import events as study_events
from amp_ray.runtime.study.events import Rebuilt, rebuild
from amp_ray.runtime.study.pool import Task
from amp_ray.strategies.candidate import Candidate
from amp_ray.strategies.strategy import StageOptions, Strategy
from amp_ray.trials.outcome import Outcome, Unreachable
from amp_ray.tuner.state import Trial
from support.driving import small_study
from support.replaying import crashed, measured, out_of_memory

STATE = small_study()
CLUSTER = STATE.experiment.cluster
LOST = Unreachable(reason="no answer", host="b", wall_s=1.0)

Event = Mapping[str, Any]


def task(number: int, attempt: int = 0) -> Task:
    strategy = STATE.candidates[number].strategy
    name = f"study-{number}-{attempt}"
    return Task(
        number=number, attempt=attempt, trial_id=name, strategy=strategy, folder=Path("unused")
    )


def trial(number: int) -> Trial:
    return Trial(
        number=number,
        strategy=STATE.candidates[number].strategy,
        predicted_s=0.1 + 0.2,
        sigma=1 / 3,
        repeats=0 if number else None,
        reason="it seems good",
    )


def started(number: int, attempt: int = 0, seconds: float = 0.0) -> Event:
    return study_events.started(trial(number), task(number, attempt), 1, CLUSTER, seconds)


def ended(number: int, outcome: Outcome, attempt: int = 0, seconds: float = 0.0) -> Event:
    return study_events.ended(task(number, attempt), outcome, seconds)


def interrupted(number: int, attempt: int = 0, seconds: float = 0.0) -> Event:
    return study_events.interrupted(task(number, attempt), seconds)


def lost(number: int, attempt: int = 0) -> Event:
    return study_events.interrupted(task(number, attempt), 0.0, unreachable="no answer")


def replay(*events: Event, program: object = None) -> Rebuilt:
    header = {"event": "study", "study": "0a", "program": program}
    return rebuild(STATE, (header, *events), file="journal.jsonl")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"measured_s": 1e400}, "is inf; expected a finite number"),
        ({"measured_s": 1e10}, "a time is not between 0 and 1e\\+09 s"),
        ({"measured_s": -1.0}, "a time is not between"),
        ({"measured_s": 0.0}, "a time is not between"),
        ({"measured_s": "soon"}, "is soon; expected a valid number"),
        ({"step_time_s": [1.0, float("nan")]}, "step_time_s is .*expected a finite number"),
        ({"peak_memory_bytes": [10**400]}, "a peak of memory is not between"),
        ({"peak_memory_bytes": 3}, "peak_memory_bytes is 3; expected a valid tuple"),
        ({"wall_s": float("inf")}, "wall_s is inf; expected a finite number"),
        ({"seconds": float("inf")}, "seconds: found inf; expected a finite number"),
        ({"seconds": 10**400}, "seconds: found"),
        ({"seconds": -1}, "seconds: found -1; expected greater than or equal to 0"),
        ({"number": []}, r"number: found \[\]; expected an integer"),
        ({"number": True}, "number: found true; expected an integer"),
        ({"attempt": None}, "attempt: found nothing; expected an integer"),
    ],
)
def test_figures_that_nothing_can_have_are_told_by_line(
    changes: dict[str, Any], message: str
) -> None:
    event = {**ended(0, measured(1.0)), **changes}
    with pytest.raises(InputError, match=rf"^journal\.jsonl:3: .*{message}"):
        replay(started(0), event)


@pytest.mark.parametrize("changes", [{"predicted_s": float("nan")}, {"sigma": -1}, {"strategy": 3}])
def test_a_trial_that_nobody_can_have_decided_on_is_told_by_line(changes: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"^journal\.jsonl:2: "):
        replay({**started(0), **changes})


BEFORE = {"argv": ["train.py"], "files": {"train.py": "aa"}}
AFTER = {"argv": ["train.py"], "files": {"train.py": "bb"}}
RESUMED = {"event": "resumed", "program": AFTER}


def with_program(*events: Event) -> Rebuilt:
    return replay(*events, program=BEFORE)


@pytest.mark.parametrize("outcome", [measured(1.0), out_of_memory()])
def test_times_of_two_programs_are_not_mixed(outcome: Outcome) -> None:
    found = with_program(started(0), ended(0, outcome))
    assert found.check_program(BEFORE, file="j") is None
    trial_record = (
        r"^j: the program has changed .*program.files.train.py is 'aa' in the study, 'bb' here"
    )
    with pytest.raises(InputError, match=trial_record):
        found.check_program(AFTER, file="j")


def test_a_program_that_has_told_nothing_may_be_mended() -> None:
    found = with_program(started(0), ended(0, crashed()))
    assert "'aa' in the study, 'bb' here" in (found.check_program(AFTER, file="j") or "")


def test_what_counts_is_the_program_that_ran_last() -> None:
    found = with_program(RESUMED, started(0), ended(0, measured(1.0)))
    assert found.check_program(AFTER, file="j") is None
    with pytest.raises(InputError, match="the program has changed"):
        found.check_program(BEFORE, file="j")


def test_a_study_of_an_older_version_tells_no_program() -> None:
    found = replay(started(0), ended(0, measured(1.0)))
    assert found.check_program(AFTER, file="j") is None


def test_a_trial_without_an_end_is_open_and_may_have_left_something() -> None:
    found = replay(started(0), started(1), ended(0, measured(1.0)))
    (entry,) = found.open
    assert (entry.trial, entry.attempt, entry.lost) == (trial(1), 0, False)
    assert found.leftovers == ("study-1-0",)
    assert found.state.trials[1].outcome is None


def test_an_attempt_that_was_ended_in_order_has_left_nothing() -> None:
    found = replay(started(0), interrupted(0))
    assert [entry.attempt for entry in found.open] == [0]
    assert found.leftovers == ()


def test_every_attempt_of_a_dead_driver_may_have_left_something() -> None:
    found = replay(started(0), started(0, 1), started(0, 2), ended(0, measured(1.0), 2))
    assert found.open == ()
    assert found.leftovers == ("study-0-0", "study-0-1")


def test_an_unreachable_host_may_still_have_something() -> None:
    found = replay(started(0), lost(0), started(0, 1), ended(0, LOST, 1))
    assert found.leftovers == ("study-0-0", "study-0-1")


def test_a_lost_host_is_remembered_over_attempts() -> None:
    found = replay(started(0), lost(0), started(0, 1), interrupted(0, 1), started(0, 2))
    assert [(entry.attempt, entry.lost) for entry in found.open] == [(2, True)]


def test_wall_time_of_all_drivers_is_added() -> None:
    resumed = {"event": "resumed"}
    first = (started(0, seconds=1.0), interrupted(0, seconds=5.0))
    second = (resumed, started(0, 1, seconds=2.0), ended(0, measured(1.0), 1, seconds=7.0))
    assert replay(*first).seconds == 5.0
    assert replay(*first, *second).seconds == 12.0
    assert replay(*first, resumed, resumed).seconds == 5.0


SET_ASIDE = {"event": "set-aside", "group": 1, "reason": "lost"}


def test_events_of_no_consequence_are_passed_over() -> None:
    found = replay({**SET_ASIDE, "more": 1}, {"event": "from a later version"})
    assert found.state == STATE


def test_a_second_end_changes_nothing() -> None:
    found = replay(started(0), ended(0, measured(1.0)), ended(0, out_of_memory()))
    assert found.state.trials[0].outcome == measured(1.0)


OTHER = Strategy.uniform(
    Candidate(micro_batch_size=1, options=StageOptions(tp=1, dp=1), pp=4, num_micro_batches=8),
    (0, 1, 2, 3, 9),
)


ALIKE = {"event": "stopped", "ending": "crashes", "alike": {"numbers": [4], "sign": "x"}}


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ((ended(0, measured(1.0)),), r"jsonl:2: attempt 0 at trial 0 is over \(ended\) and did no"),
        ((started(0), interrupted(0, 1)), r"jsonl:3: attempt 1 at trial 0 is over \(interrupted"),
        ((started(0), interrupted(0), interrupted(0)), "jsonl:4: attempt 0 at trial 0 is over"),
        ((started(1),), "jsonl:2: trial 1 begins again and is not open"),
        ((started(0), ended(0, LOST), started(0, 1)), "jsonl:4: trial 0 begins again and is not"),
        (({"event": "started"},), "jsonl:2: .*key 'number' is missing"),
        (({},), "jsonl:2: the event has no name under 'event'"),
        (({"event": ["started"]},), "jsonl:2: the event has no name under 'event'"),
        (({**started(0), "attempt": None},), "jsonl:2: attempt: found nothing; expected an integ"),
        (({**started(0), "trial_id": "../x"},), "jsonl:2: trial_id: found '../x'; expected"),
        (({**started(0), "repeats": 7},), "jsonl:2: trial 0 repeats trial 7, a later one"),
        ((ALIKE,), "jsonl:2: trial 4 is to run again and has not ended"),
        (({**ALIKE, "alike": {"numbers": 3, "sign": "x"}},), "jsonl:2: alike.numbers: found 3"),
        ((started(0), {**ended(0, LOST), "outcome": "odd"}), "jsonl:3: outcome must be one of"),
        ((started(0), {**ended(0, LOST), "outcome": []}), "jsonl:3: outcome must be one of"),
        (({"event": "resumed", "seconds": []},), "jsonl:2: seconds: found"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_line(
    events: tuple[Event, ...], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        replay(*events)


def test_a_strategy_that_is_none_to_choose_from_says_what_may_have_changed() -> None:
    strange = replace(trial(0), strategy=OTHER)
    event = study_events.started(strange, task(0), 0, CLUSTER, 0.0)
    with pytest.raises(InputError, match=r"none of the 16 to choose from now: the search's limits"):
        replay(event)


def test_a_strategy_on_other_hosts_is_refused_with_its_line() -> None:
    event = {**started(0)}
    event["strategy"] = {**event["strategy"], "placement": [["elsewhere", 0]] * 4}
    with pytest.raises(InputError, match=r"journal\.jsonl:2: .*elsewhere"):
        replay(event)
