import math
from dataclasses import replace

import numpy as np
import pytest

from amp_ray.cost.estimate import Estimate, Reason
from amp_ray.inputs.experiment import Experiment
from amp_ray.search.ranking import Ranking
from amp_ray.trials.outcome import Outcome
from amp_ray.tuner import knowledge
from amp_ray.tuner.belief import ErrorModel, learn_errors
from amp_ray.tuner.calibrated_predictions import BoundedPredictor
from amp_ray.tuner.knowledge import forecast_errors, learn
from amp_ray.tuner.state import TunerSettings, TunerState, begin
from support.planted import planted_observations
from support.replaying import Answers, crashed, measured, out_of_memory, ran, study


def learnt(state: TunerState, program_scale: float = 1.0) -> ErrorModel:
    """What the forecasts of a study say of errors."""
    return learn_errors(forecast_errors(state, program_scale))


def slower(state: TunerState, index: int, factor: float) -> TunerState:
    """A study after a trial that took so many times what was predicted."""
    outcome = measured(factor * state.candidates[index].iteration_time_s)
    return ran(state, index, outcome, sigma=0.2)


def times(estimates: tuple[Estimate, ...]) -> list[float]:
    """Predicted seconds, in the order of candidates."""
    return [estimate.iteration_time_s for estimate in estimates]


def turned(state: TunerState, before: list[float], after: list[float]) -> list[tuple[int, int]]:
    """Pairs of candidates that nobody has run, apart by more than the error, in a new order."""
    error = state.experiment.constants.time_error
    unrun = set(range(len(before))) - {trial_record.candidate for trial_record in state.trials}
    return [
        (fast, slow)
        for fast in unrun
        for slow in unrun
        if before[slow] > before[fast] * np.exp(error) and after[slow] <= after[fast]
    ]


def test_without_trials_predictions_are_the_uncalibrated_ones(
    state: TunerState, predictor: BoundedPredictor
) -> None:
    known = learn(state, predictor)
    assert known.calibration is None
    assert known.estimates == state.candidates


def test_trials_move_the_predictions_of_all(state: TunerState, predictor: BoundedPredictor) -> None:
    for index in range(5):
        state = slower(state, index, 1.3)
    ratios = np.array(times(learn(state, predictor).estimates)) / times(state.candidates)
    assert (ratios > 1.1).all()


@pytest.mark.parametrize("factor", [0.5, 2.0, 3.0])
def test_one_trial_that_is_off_by_a_lot_moves_all_others_most_of_the_way(
    homogeneous: Experiment, recorded: Answers, predictor: BoundedPredictor, factor: float
) -> None:
    state = study(homogeneous, recorded, TunerSettings(budget=9))
    known = learn(slower(state, 0, factor), predictor)
    moved = np.log(times(known.estimates)) - np.log(times(state.candidates))
    assert moved == pytest.approx(np.full(len(moved), np.log(factor)), rel=0.1)
    assert known.widening == 1.0


@pytest.mark.parametrize("factor", [0.95, 1.05])
def test_one_trial_that_is_off_by_little_moves_others_little(
    homogeneous: Experiment, recorded: Answers, predictor: BoundedPredictor, factor: float
) -> None:
    state = study(homogeneous, recorded, TunerSettings(budget=9))
    known = learn(slower(state, 0, factor), predictor)
    moved = np.log(times(known.estimates)) - np.log(times(state.candidates))
    assert np.abs(moved).max() < abs(np.log(factor))
    scale = np.log(known.experiment.constants.program_scale) / np.log(factor)
    assert 0.0 < scale < 0.5


def test_trials_make_predictions_more_certain(
    state: TunerState, predictor: BoundedPredictor
) -> None:
    before = learn(state, predictor)
    for index in range(6):
        state = slower(state, index, 1.02)
    after = learn(state, predictor)
    assert all(after.sigma(index) < before.sigma(index) for index in range(16))


def test_a_new_predictor_gives_the_same_knowledge(
    state: TunerState, predictor: BoundedPredictor
) -> None:
    state = slower(slower(state, 0, 1.2), 3, 1.1)
    ours, theirs = learn(state, predictor), learn(state, BoundedPredictor())
    assert ours.estimates == theirs.estimates
    assert ours.belief.covariance.tolist() == theirs.belief.covariance.tolist()


@pytest.mark.parametrize("factor", [0.3, 0.6, 1.5, 3.0, 10.0])
@pytest.mark.parametrize("index", [0, 3, 9, 15])
def test_one_trial_turns_no_certain_order_of_plans_that_nobody_has_run(
    state: TunerState, predictor: BoundedPredictor, index: int, factor: float
) -> None:
    before = times(learn(state, predictor).estimates)
    state = slower(state, index, factor)
    assert turned(state, before, times(learn(state, predictor).estimates)) == []


@pytest.mark.parametrize("factor", [0.2, 5.0])
def test_one_odd_trial_among_steady_ones_turns_no_certain_order(
    state: TunerState, predictor: BoundedPredictor, factor: float
) -> None:
    for index in range(4):
        state = slower(state, index, 1.0)
    before = times(learn(state, predictor).estimates)
    state = slower(state, 11, factor)
    assert turned(state, before, times(learn(state, predictor).estimates)) == []


def test_several_trials_together_may_turn_an_order(
    homogeneous: Experiment, recorded: Answers, predictor: BoundedPredictor
) -> None:
    state = study(homogeneous, recorded, TunerSettings(budget=100))
    before = times(state.candidates)
    strategies = [each.strategy for each in state.candidates[:40:2]]
    slow_links = {"intra_efficiency": 0.3}
    for index, trial in enumerate(planted_observations(homogeneous, strategies, slow_links)):
        assert trial.measured_s is not None
        state = ran(state, 2 * index, measured(trial.measured_s))
    assert turned(state, before, times(learn(state, predictor).estimates)) != []


def test_running_out_of_memory_makes_what_needs_more_of_it_doubtful(
    homogeneous: Experiment, recorded: Answers, predictor: BoundedPredictor
) -> None:
    state = study(homogeneous, recorded, TunerSettings(budget=10))
    limit = state.candidates[0].memory_limit_bytes[0]
    by_peak = sorted(
        (max(each.peak_memory_bytes) / limit, index)
        for index, each in enumerate(state.candidates)
        if each.feasible
    )
    fullest = by_peak[-1][1]
    for _, index in by_peak[-5:-1]:
        state = ran(state, index, out_of_memory())
    after = learn(state, predictor)
    assert state.candidates[fullest].feasible
    assert after.estimates[fullest].failure_probability > 0.8
    assert fullest in after.untested()
    assert fullest not in after.expected()
    assert fullest not in after.proposable()


def test_only_failures_leave_times_as_they_were(
    state: TunerState, predictor: BoundedPredictor
) -> None:
    known = learn(ran(ran(state, 0, out_of_memory()), 1, crashed()), predictor)
    assert times(known.estimates) == pytest.approx(times(state.candidates))


@pytest.mark.parametrize("spread_fraction", [0.3, 1.0])
def test_an_unsteady_trial_tells_how_fast_the_machine_is_by_its_own_error(
    state: TunerState, predictor: BoundedPredictor, spread_fraction: float
) -> None:
    first_s = state.candidates[0].iteration_time_s
    steady = learn(ran(state, 0, measured(4.0 * first_s)), predictor)
    outcome = measured(4.0 * first_s, spread_fraction=spread_fraction)
    unsteady = learn(ran(state, 0, outcome), predictor)
    factors = [
        known.estimates[5].iteration_time_s / state.candidates[5].iteration_time_s
        for known in (steady, unsteady)
    ]
    assert 3.0 < factors[1] < factors[0] < 4.0
    assert unsteady.sigma(5) > steady.sigma(5)
    assert unsteady.widening == pytest.approx(1.0, abs=0.1)


def test_a_noisy_trial_counts_less_than_steady_ones(
    state: TunerState, predictor: BoundedPredictor
) -> None:
    for index in range(3):
        state = slower(state, index, 1.3)  # in agreement: they are learnt from
    odd = 1.5 * state.candidates[3].iteration_time_s
    loud = learn(ran(state, 3, measured(odd, spread_fraction=1.5)), predictor)
    quiet = learn(ran(state, 3, measured(odd)), predictor)
    plain_s = learn(state, predictor).estimates[9].iteration_time_s
    assert abs(np.log(loud.estimates[9].iteration_time_s / plain_s)) < abs(
        np.log(quiet.estimates[9].iteration_time_s / plain_s)
    )


def test_what_runs_is_untested_and_not_proposable(
    state: TunerState, predictor: BoundedPredictor
) -> None:
    known = learn(ran(state, 2, None), predictor)
    assert 2 in known.untested()
    assert 2 not in known.proposable()


def test_what_cannot_be_launched_is_never_proposed(
    small: Experiment, ranking: Ranking, predictor: BoundedPredictor
) -> None:
    first, *rest = ranking.results
    assert isinstance(first, Estimate)
    state = begin(small, [replace(first, launchable=False), *rest], TunerSettings(budget=3))
    known = learn(state, predictor)
    assert 0 not in known.proposable()
    assert 0 not in known.untested()


def test_what_is_expected_to_fail_is_doubtful_unless_it_must_fail(
    small: Experiment, ranking: Ranking, predictor: BoundedPredictor
) -> None:
    one, two, *rest = ranking.results
    assert isinstance(one, Estimate)
    assert isinstance(two, Estimate)
    why = (Reason(kind="out of memory", detail=""),)
    perhaps = replace(one, reasons=why, failure_probability=0.8)
    surely = replace(two, reasons=why, failure_probability=1.0)
    state = begin(small, [perhaps, surely, *rest], TunerSettings(budget=3))
    known = learn(state, predictor)
    doubtful = set(known.untested()) - set(known.expected())
    assert [state.candidates[index].strategy for index in doubtful] == [one.strategy]
    assert len(known.proposable()) == len(rest)


def test_candidates_far_behind_share_a_cautious_guess(
    state: TunerState, predictor: BoundedPredictor, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = slower(slower(state, 0, 1.3), 1, 1.2)
    exact = learn(state, predictor)
    monkeypatch.setattr(knowledge, "MOST_JUDGED", 4)
    rough = learn(state, predictor)
    assert len(rough.belief.indices) == 6
    assert rough.sigma(15) == max(rough.sigma(index) for index in rough.belief.indices)
    assert len(rough.estimates) == 16
    near = [index for index in rough.belief.indices if index > 1]
    scale = min(rough.estimates[p].iteration_time_s / times(state.candidates)[p] for p in near)
    assert rough.estimates[15].iteration_time_s == pytest.approx(
        scale * state.candidates[15].iteration_time_s
    )
    assert exact.chances(exact.untested()).any_below(1.0) <= 1.0


# ------------------------------------------------------------------------- errors of forecasts


SIGMA = 0.1


def told(state: TunerState, outcome: Outcome, *, repeats: int | None = None) -> TunerState:
    """A study after one more trial that was predicted to take 1 s."""
    index = len(state.trials) % 16
    return ran(state, index, outcome, predicted_s=1.0, sigma=SIGMA, repeats=repeats)


def off_by(sigmas: float) -> Outcome:
    """A measurement so many sigmas above its prediction."""
    return measured(math.exp(sigmas * SIGMA))


def test_before_any_trial_errors_are_as_large_as_the_model_says(state: TunerState) -> None:
    assert learnt(state).scale == pytest.approx(1.0, rel=0.01)


def test_forecasts_that_come_true_make_surprises_unlikely(state: TunerState) -> None:
    before = learnt(state).surprise_fraction
    for _ in range(8):
        state = told(state, off_by(0.5))
    assert learnt(state).surprise_fraction < before / 2


def test_forecasts_that_all_fail_widen_the_errors(state: TunerState) -> None:
    for sigmas in (2.0, -2.5, 2.2, -1.8, 2.4, -2.2):
        state = told(state, off_by(sigmas))
    assert 1.5 < learnt(state).scale < 2.5


def test_one_forecast_far_off_is_a_surprise_and_no_wider_error(state: TunerState) -> None:
    for sigmas in (0.5, -1.0, 0.8, -0.3, 1.1, -0.6):
        state = told(state, off_by(sigmas))
    before, after = learnt(state), learnt(told(state, off_by(-6.0)))
    assert after.scale < 1.2 * before.scale
    assert after.surprise_fraction > 3 * before.surprise_fraction
    assert after.surprised
    assert not before.surprised


def test_the_width_of_surprises_is_learnt(state: TunerState) -> None:
    near, far = (learnt(told(state, off_by(sigmas))) for sigmas in (-5.0, -15.0))
    assert near.surprise_sigma < far.surprise_sigma


def test_a_common_factor_that_nobody_could_know_is_no_error_of_later_predictions(
    state: TunerState,
) -> None:
    slow = ran(state, 0, measured(2.0 * state.candidates[0].iteration_time_s), sigma=SIGMA)
    assert learnt(slow).surprised
    assert not learnt(slow, 2.0).surprised
    assert learnt(told(slow, off_by(9.0)), 2.0).surprised


def test_repeats_and_failures_play_no_part(state: TunerState) -> None:
    before = learnt(state)
    state = told(state, out_of_memory())
    after = learnt(told(state, off_by(9.0), repeats=0))
    assert after.weights.tolist() == before.weights.tolist()


def test_a_forecast_without_error_is_left_out(state: TunerState) -> None:
    sure = ran(state, 0, measured(2.0), predicted_s=1.0, sigma=0.0)
    assert not learnt(sure).surprised


def test_forecasts_beyond_all_bounds_still_give_probabilities(state: TunerState) -> None:
    for sigmas in (200.0, -200.0, 0.0):
        state = told(state, off_by(sigmas))
    errors = learnt(state)
    assert errors.weights.sum() == pytest.approx(1.0)
    assert ((errors.shares > 0.0) & (errors.shares < 1.0)).all()
