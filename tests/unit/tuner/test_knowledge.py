from dataclasses import replace

import numpy as np
import pytest

from amp_ray.cost.estimate import Estimate, Reason
from amp_ray.inputs.experiment import Experiment
from amp_ray.search.ranking import Ranking
from amp_ray.tuner import knowledge
from amp_ray.tuner.calibrated_predictions import BoundedPredictor
from amp_ray.tuner.knowledge import learn
from amp_ray.tuner.state import TunerSettings, TunerState, begin
from support.planted import planted_observations
from support.replaying import Answers, crashed, measured, out_of_memory, ran, study


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
    assert known.experiment.constants.program_scale == 1.0


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
        state = slower(state, index, 1.0)
    odd = 1.5 * state.candidates[3].iteration_time_s
    loud = learn(ran(state, 3, measured(odd, spread_fraction=1.5)), predictor)
    quiet = learn(ran(state, 3, measured(odd)), predictor)
    plain_s = state.candidates[9].iteration_time_s
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
