"""A study can be resumed from a journal that is cut anywhere: no trial is lost or repeated."""

import itertools
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from amp_ray.errors import AmpRayError
from amp_ray.runtime.study.pool import Task
from amp_ray.trials.outcome import Measured, Outcome, TimedOut, Unreachable
from amp_ray.tuner.calibrated_predictions import BoundedPredictor
from amp_ray.tuner.state import POLICIES, TunerState
from support.driving import MemoryLog, ScriptedPool, make_driver, rebuilt, resume, small_study
from support.examples import examples
from support.replaying import crashed, measured, out_of_memory

PREDICTOR = BoundedPredictor()
LOST = Unreachable(reason="no answer", host="b", wall_s=1.0)
TIMES = st.builds(
    lambda time_s, spread: measured(time_s, spread_fraction=spread),
    st.floats(0.1, 10.0),
    st.sampled_from([0.0, 0.05]),
)
FAILURES = (
    out_of_memory(),
    crashed(),
    TimedOut(reason="too slow", timeout_s=1.0, lines=(), wall_s=1.0),
    LOST,
)
OUTCOMES = st.one_of(TIMES, st.sampled_from(FAILURES))
ANSWERS = st.lists(OUTCOMES, min_size=1, max_size=8)
FOLLOWED = [policy for policy in POLICIES if policy != "amp-2022"]
STUDIES = st.builds(
    lambda budget, policy: small_study(budget=budget, policy=policy),
    st.integers(1, 6),
    st.sampled_from(FOLLOWED),
)


@pytest.fixture(autouse=True, scope="module")
def remembered() -> Iterator[None]:
    """Let all drivers share a cache of predictions: this saves time and changes nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("amp_ray.runtime.study.driver.BoundedPredictor", lambda: PREDICTOR)
        yield


def run(
    state: TunerState, outcomes: Sequence[Outcome], num_groups: int, room: int | None = None
) -> MemoryLog:
    """Drive a study until its end, or until its driver dies after some events."""
    turns = itertools.cycle(outcomes)
    log = MemoryLog(room=room)
    pool = ScriptedPool(answer=lambda _task, _group: next(turns), num_groups=num_groups)
    try:
        make_driver(state, pool, log).run()
    except AmpRayError:
        assert room is not None
    return log


def go_on(state: TunerState, log: MemoryLog, outcomes: Sequence[Outcome], groups: int) -> None:
    """Resume a study from its journal."""
    before = rebuilt(state, log)
    turns = itertools.cycle(outcomes)
    pool = ScriptedPool(answer=lambda _task, _group: next(turns), num_groups=groups)
    log.room = None
    log.append({"event": "resumed"})
    resume(before, pool, log)


def ended(log: MemoryLog) -> dict[int, dict[str, object]]:
    """Return the ``ended`` event of each trial; check that no trial has two."""
    ends = [event for event in log.events if event["event"] == "ended"]
    found = {event["number"]: event for event in ends}
    assert len(found) == len(ends), "a trial ended twice"
    return found


@examples(10)
@given(STUDIES, ANSWERS, st.integers(1, 3))
def test_replaying_the_journal_gives_the_state(
    state: TunerState, outcomes: list[Outcome], num_groups: int
) -> None:
    log = MemoryLog()
    turns = itertools.cycle(outcomes)
    pool = ScriptedPool(answer=lambda _task, _group: next(turns), num_groups=num_groups)
    driver = make_driver(state, pool, log)
    result = driver.run()
    found = rebuilt(state, log)
    assert found.state == result.state == driver.state
    assert {entry.trial.number for entry in found.open} == {
        trial.number for trial in result.state.running
    }


@examples(7)
@given(STUDIES, ANSWERS, st.integers(1, 3), st.integers(1, 3), st.integers(0, 999))
def test_a_study_cut_anywhere_loses_no_end_and_repeats_none(
    state: TunerState, outcomes: list[Outcome], before: int, after: int, place: int
) -> None:
    whole = run(state, outcomes, before)
    cut = place % (len(whole.events) + 1)
    log = MemoryLog(events=whole.events[:cut])
    known = ended(log)
    begun = {event["number"] for event in log.events if event["event"] == "started"}
    found = rebuilt(state, log)
    assert {
        trial_record.trial.number for trial_record in found.state.trials if trial_record.outcome
    } == set(known)
    assert {entry.trial.number for entry in found.open} == begun - set(known)
    go_on(state, log, outcomes, after)
    assert {number: ended(log)[number] for number in known} == known
    for event in log.events[cut:]:
        assert event["event"] != "started" or event["number"] not in known
    check_nothing_measured_is_tried_as_new(log)


def check_nothing_measured_is_tried_as_new(log: MemoryLog) -> None:
    """Check that a measured strategy is not tried again; after a lost host, it may be, once."""
    strategies: dict[int, str] = {}
    measured_: set[str] = set()
    for event in log.events:
        if event["event"] == "started":
            strategy = strategies[event["number"]] = str(event["strategy"])
            is_new = event["attempt"] == 0 and event["repeats"] is None
            assert not (is_new and strategy in measured_)
        elif event["event"] == "ended" and event["outcome"] == "measured":
            measured_.add(strategies[event["number"]])


@examples(6)
@given(STUDIES, st.lists(TIMES, min_size=1, max_size=4), st.lists(st.integers(0, 9), max_size=4))
def test_a_driver_that_dies_again_and_again_comes_to_the_same_end(
    state: TunerState, times: list[Measured], deaths: list[int]
) -> None:
    """Here, a strategy's time depends on nothing else, as with recorded measurements."""

    def answer(task: Task, _group: int) -> Outcome:
        return times[state.index_of[task.strategy] % len(times)]

    whole = make_driver(state, ScriptedPool(answer=answer)).run()
    log = MemoryLog()
    for room in [*deaths, None]:
        found = rebuilt(state, log)
        log.room = None if room is None else len(log.events) + room
        try:
            if log.events:
                log.append({"event": "resumed"})
            result = resume(found, ScriptedPool(answer=answer), log)
        except AmpRayError:
            continue
        assert result.state == whole.state
        assert result.ending == whole.ending
        assert result.certificate == whole.certificate
