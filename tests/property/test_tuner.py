"""Properties of every study, whatever the outcomes of its trials."""

import functools
from collections.abc import Callable

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from amp_ray.inputs.experiment import Experiment
from amp_ray.runtime.ray.searching import ALONE, search_candidates
from amp_ray.search.amp_ray_planner import AmpRayPlanner
from amp_ray.search.ranking import Ranking
from amp_ray.search.space import candidates_of
from amp_ray.strategies.strategy import Strategy
from amp_ray.trials.outcome import Crashed, Measured, Outcome, TimedOut, Unreachable, blames_host
from amp_ray.tuner.calibrated_predictions import BoundedPredictor
from amp_ray.tuner.certificate import certify
from amp_ray.tuner.knowledge import learn
from amp_ray.tuner.policy import next_trials
from amp_ray.tuner.state import (
    POLICIES,
    TunerSettings,
    TunerState,
    begin,
    record,
    start,
)
from support.examples import examples
from support.experiments import small_experiment
from support.replaying import crashed, measured, out_of_memory, play, ran

FAILURES = (
    out_of_memory(),
    crashed(),
    TimedOut(reason="too slow", timeout_s=1.0, lines=(), wall_s=1.0),
    Unreachable(reason="no answer", host="a", wall_s=1.0),
    Crashed(reason="no room", kind="disk", rank=None, host="a", lines=(), wall_s=1.0),
)

OUTCOMES = st.one_of(
    st.builds(
        lambda factor, spread: measured(factor, spread_fraction=spread),
        st.floats(0.3, 3.0),
        st.sampled_from([0.0, 0.02, 0.3]),
    ),
    st.sampled_from(FAILURES),
)
"""Possible outcomes of a trial; a measured time is a multiple of the prediction."""


@functools.cache
def _small() -> tuple[Experiment, Ranking, BoundedPredictor]:
    """Return the small experiment, planned once, and a predictor that caches predictions."""
    experiment = small_experiment()
    planner = AmpRayPlanner(experiment=experiment)
    ranking = search_candidates(planner, candidates_of(experiment), workers=ALONE)
    return experiment, ranking, BoundedPredictor()


def _settings() -> st.SearchStrategy[TunerSettings]:
    """Draw the settings of a study."""
    return st.builds(
        TunerSettings,
        budget=st.integers(0, 20),
        policy=st.sampled_from(POLICIES),
        seed=st.integers(0, 3),
        tolerance_fraction=st.sampled_from([0.01, 0.05, 0.2]),
        confidence_fraction=st.sampled_from([0.6, 0.95, 0.999]),
        max_repeats=st.integers(0, 2),
    )


def _study(how: TunerSettings) -> TunerState:
    """Return a new study of the small experiment."""
    experiment, ranking, _ = _small()
    first = begin(experiment, ranking.results, TunerSettings(budget=1))
    order = [each.strategy for each in reversed(first.candidates)]
    return begin(experiment, ranking.results, how, order if how.policy == "amp-2022" else None)


def _answers(state: TunerState, drawn: list[Outcome]) -> Callable[[Strategy, int], Outcome]:
    """Return outcomes by trial number; drawn times are multiples of the predicted time."""

    def answer(strategy: Strategy, number: int) -> Outcome:
        """Return the outcome of one trial."""
        outcome = drawn[number % len(drawn)]
        if not isinstance(outcome, Measured):
            return outcome
        time_s = state.candidates[state.index_of[strategy]].iteration_time_s
        factor = outcome.measured_s
        return measured(factor * time_s, spread_fraction=outcome.spread_s / factor)

    return answer


@given(_settings(), st.lists(OUTCOMES, min_size=1, max_size=20), st.integers(1, 4))
@examples(10)
def test_every_study_keeps_its_rules(
    how: TunerSettings, drawn: list[Outcome], num_groups: int
) -> None:
    state, predictor = _study(how), _small()[2]
    played = play(state, _answers(state, drawn), num_groups=num_groups, predictor=predictor)
    trials = [trial_record.trial for trial_record in played.state.trials]
    assert len(trials) <= how.budget
    assert played.state.running == ()
    assert [trial.number for trial in trials] == list(range(len(trials)))
    first = [
        trial_record for trial_record in played.state.trials if trial_record.trial.repeats is None
    ]
    final = [
        trial_record.candidate for trial_record in first if not blames_host(trial_record.outcome)
    ]
    assert len(set(final)) == len(final)
    for trial_record in played.state.trials:
        repeated = trial_record.trial.repeats
        if repeated is not None:
            assert how.policy == "best"
            assert played.state.trials[repeated].candidate == trial_record.candidate
            assert isinstance(played.state.trials[repeated].outcome, Measured)
    counts = [trial_record.candidate for trial_record in played.state.trials]
    assert all(counts.count(place) <= how.max_repeats + 2 for place in set(counts))


@given(_settings(), st.lists(OUTCOMES, min_size=1, max_size=12))
@examples(10)
def test_a_certificate_is_consistent_with_itself(how: TunerSettings, drawn: list[Outcome]) -> None:
    state, predictor = _study(how), _small()[2]
    played = play(state, _answers(state, drawn), predictor=predictor)
    found = certify(played.state, played.knowledge)
    if found is None:
        assert not any(
            isinstance(trial_record.outcome, Measured) and trial_record.outcome.tells_time
            for trial_record in played.state.trials
        )
        return
    assert 0.0 < found.bound_s <= found.best_s
    assert found.gain_fraction >= 0.0
    assert found.settled or not found.holds
    limit_s = found.best_s / (1.0 + how.tolerance_fraction)
    if found.holds:
        assert found.bound_s >= limit_s * (1 - 1e-3)
    else:
        assert found.bound_s <= limit_s * (1 + 1e-3)


@given(
    _settings(),
    st.lists(OUTCOMES, min_size=1, max_size=12),
    st.integers(0, 2**16),
    st.integers(1, 3),
)
@examples(5)
def test_a_study_rebuilt_from_its_records_goes_on_in_the_same_way(
    how: TunerSettings, drawn: list[Outcome], cut: int, num_groups: int
) -> None:
    state, predictor = _study(how), _small()[2]
    answer = _answers(state, drawn)
    played = play(state, answer, num_groups=num_groups, predictor=predictor)
    upto = cut % (len(played.state.trials) + 1)
    rebuilt, original = _study(how), _study(how)
    for trial_record in played.state.trials[:upto]:
        rebuilt = start(rebuilt, trial_record.trial)
    for trial_record in reversed(played.state.trials[:upto]):
        assert trial_record.outcome is not None
        rebuilt = record(rebuilt, trial_record.trial.number, trial_record.outcome)
    for trial_record in played.state.trials[:upto]:
        assert trial_record.outcome is not None
        original = record(
            start(original, trial_record.trial), trial_record.trial.number, trial_record.outcome
        )
    assert rebuilt == original
    fresh = next_trials(rebuilt, num_groups, BoundedPredictor())
    assert fresh == next_trials(original, num_groups, predictor)


@given(st.integers(0, 15), st.floats(0.1, 10.0))
@examples(10)
def test_one_trial_turns_no_certain_order(place: int, factor: float) -> None:
    state, predictor = _study(TunerSettings(budget=5)), _small()[2]
    estimate = state.candidates[place]
    state = ran(state, place, measured(factor * estimate.iteration_time_s))
    unrun = [other for other in range(16) if other != place]
    before = np.array([state.candidates[other].iteration_time_s for other in unrun])
    known = learn(state, predictor)
    after = np.array([known.estimates[other].iteration_time_s for other in unrun])
    apart = before[None, :] > before[:, None] * np.exp(state.experiment.constants.time_error)
    assert (after[None, :] > after[:, None])[apart].all()
