from dataclasses import replace
from unittest.mock import Mock, patch

import numpy as np
import pytest

from amp_ray.cost.estimate import Reason
from amp_ray.inputs.experiment import Experiment
from amp_ray.search.ranking import Ranking
from amp_ray.tuner.calibrated_predictions import BoundedPredictor
from amp_ray.tuner.certificate import Certificate, certify
from amp_ray.tuner.knowledge import Knowledge, learn
from amp_ray.tuner.policy import next_trials
from amp_ray.tuner.state import TunerSettings, TunerState, begin, record, start
from support.checked import as_estimate, required
from support.replaying import crashed, measured, play
from support.worlds import error_model


def tell(state: TunerState, predictor: BoundedPredictor, factor: float = 1.0) -> TunerState:
    """A study after one more trial that took so many times what was predicted."""
    (trial,) = next_trials(state, 1, predictor)
    outcome = measured(factor * trial.predicted_s)
    return record(start(state, trial), trial.number, outcome)


def certificate(state: TunerState, knowledge: Knowledge) -> Certificate:
    """The certificate of a study with a measurement."""
    return required(certify(state, knowledge))


def test_nothing_is_certified_before_anything_is_measured(
    state: TunerState, predictor: BoundedPredictor
) -> None:
    assert certify(state, learn(state, predictor)) is None


def test_one_trial_among_close_ones_certifies_nothing(
    state: TunerState, predictor: BoundedPredictor
) -> None:
    state = tell(state, predictor)
    found = certificate(state, learn(state, predictor))
    assert not found.holds
    assert found.bound_s < found.best_s
    assert found.gain_fraction == pytest.approx(found.best_s / found.bound_s - 1)
    assert found.num_untested == 15


def test_the_sentence_says_what_is_certain_or_how_likely_the_opposite_is(
    state: TunerState, predictor: BoundedPredictor
) -> None:
    state = tell(state, predictor)
    known = learn(state, predictor)
    found = certificate(state, known)
    best = f"the best measured takes {found.best_s:.4g} s"
    assert found.text == (
        "not settled yet: a strategy that is more than 5 % faster may still exist "
        f"(up to {100 * found.chance:.2g} % likely); {best}; more trials help: --budget"
    )
    sure = replace(
        known,
        belief=replace(known.belief, covariance=1e-6 * np.eye(16)),
        errors=error_model(),
    )
    found = certificate(state, sure)
    assert found.text == (
        f"with 95 % confidence no untested strategy is faster than {found.bound_s:.4g} s; {best}"
    )


def test_trials_of_a_second_population_are_named(
    state: TunerState, predictor: BoundedPredictor
) -> None:
    state = tell(state, predictor)
    knowledge = learn(state, predictor)
    assert knowledge.calibration is not None
    (trial,) = knowledge.calibration.trials
    slow = replace(knowledge.calibration, trials=(replace(trial, tells_time=False),))
    text = certificate(state, replace(knowledge, calibration=slow)).text
    assert "no constant was fitted to 1 trial of a second population" in text


def test_the_bound_agrees_with_the_chance(state: TunerState, predictor: BoundedPredictor) -> None:
    for factor in (1.0, 1.3, 0.9):
        state = tell(state, predictor, factor)
        found = certificate(state, learn(state, predictor))
        limit_s = found.best_s / 1.05
        assert found.holds == (found.chance <= 0.05)
        assert (found.bound_s >= limit_s * 0.9999) or not found.holds


def test_more_confidence_asks_for_more(state: TunerState, predictor: BoundedPredictor) -> None:
    state = tell(tell(state, predictor), predictor)
    known = learn(state, predictor)
    sure = replace(state, settings=replace(state.settings, confidence_fraction=0.999))
    little, much = certificate(state, known), certificate(sure, known)
    assert much.bound_s < little.bound_s


def test_forecasts_that_failed_lower_the_bound(
    state: TunerState, predictor: BoundedPredictor
) -> None:
    known = learn(tell(tell(state, predictor), predictor), predictor)
    good, bad = (
        certificate(state, replace(known, errors=error_model(scale))) for scale in (1.0, 2.0)
    )
    assert bad.bound_s < good.bound_s


def test_surprises_lower_the_bound_and_what_is_certain(
    state: TunerState, predictor: BoundedPredictor
) -> None:
    known = learn(tell(tell(state, predictor), predictor), predictor)
    without, some = (
        certificate(state, replace(known, errors=error_model(share=share))) for share in (0.0, 0.05)
    )
    assert without.chance == without.chance_without_surprises == some.chance_without_surprises
    assert some.chance > without.chance
    assert some.bound_s < without.bound_s
    assert (some.surprise_fraction, some.surprise_sigma) == pytest.approx((0.05, 0.35))


@pytest.mark.parametrize(
    ("budget", "share", "within_reach", "settled"),
    [(100, 0.05, True, False), (3, 0.05, False, True), (3, 0.2, False, False)],
)
def test_trials_go_on_for_surprises_that_were_seen_or_that_the_budget_can_rule_out(
    state: TunerState,
    predictor: BoundedPredictor,
    budget: int,
    share: float,
    *,
    within_reach: bool,
    settled: bool,
) -> None:
    state = tell(replace(state, settings=replace(state.settings, budget=budget)), predictor)
    known = learn(state, predictor)
    known = replace(
        known,
        belief=replace(known.belief, covariance=1e-6 * np.eye(16)),
        errors=error_model(share=share),
    )
    found = certificate(state, known)
    assert (found.holds, found.within_reach, found.settled) == (False, within_reach, settled)


@pytest.mark.parametrize("share", [0.1, 0.3, 0.9])
def test_trials_are_pointless_only_far_below_the_allowed_doubt(
    share: float, state: TunerState, predictor: BoundedPredictor
) -> None:
    """The chance of strategies that are expected to run is set to a share of the doubt."""
    state = tell(state, predictor)
    knowledge = learn(state, predictor)
    chances = Mock(spec=knowledge.chances([]), bound_s=lambda best_s, _doubt: best_s)
    chances.any_below.return_value = 0.5
    chances.worth_trials().any_below.return_value = share * (1 - state.settings.confidence_fraction)
    chances.without_surprises().any_below.return_value = 0.0
    with (
        patch.object(Knowledge, "chances", lambda _self, _indices: chances),
        patch("amp_ray.tuner.certificate._chance_at_end", return_value=1.0),
    ):
        latest = certificate(state, knowledge)
    assert (latest.holds, latest.settled) == (False, share < 0.2)


def test_a_fast_strategy_that_may_fail_counts_with_its_chance_to_finish(
    small: Experiment, ranking: Ranking, predictor: BoundedPredictor
) -> None:
    found = []
    last = as_estimate(ranking.results[-1])
    why = (Reason(kind="out of memory", detail=""),)
    for chance in (0.5, 0.9, 1.0):
        doubtful = replace(
            last,
            reasons=why,
            failure_probability=chance,
            iteration_time_s=0.5 * last.iteration_time_s,
        )
        state = begin(small, [*ranking.results[:-1], doubtful], TunerSettings(budget=100))
        known = learn(tell(state, predictor), predictor)
        # The verdict is the calibrated model's; here it is set, to see what it does.
        index = state.index_of[last.strategy]
        estimates = list(known.estimates)
        estimates[index] = replace(
            estimates[index], reasons=why, failure_probability=chance, iteration_time_s=0.01
        )
        latest = certificate(state, replace(known, estimates=tuple(estimates)))
        found.append(latest.chance)
    assert found[0] > found[1] > found[2]


def test_trials_are_pointless_where_only_what_is_expected_to_fail_might_gain(
    small: Experiment, ranking: Ranking, predictor: BoundedPredictor
) -> None:
    state = begin(small, [ranking.results[0], ranking.results[15]], TunerSettings(budget=100))
    state = tell(state, predictor)
    known = learn(state, predictor)
    why = (Reason(kind="out of memory", detail=""),)
    first, second = known.estimates
    doubtful = replace(second, reasons=why, failure_probability=0.5, iteration_time_s=0.01)
    found = certificate(state, replace(known, estimates=(first, doubtful)))
    assert (found.holds, found.settled) == (False, True)


def test_a_strategy_that_crashed_is_named_and_not_counted(
    state: TunerState, predictor: BoundedPredictor
) -> None:
    state = tell(state, predictor)
    (trial,) = next_trials(state, 1, predictor)
    state = record(start(state, trial), trial.number, crashed())
    found = certificate(state, learn(state, predictor))
    assert found.num_untested == 14
    assert "; 1 strategy failed; " in found.text


def test_when_everything_was_run_there_is_nothing_left_to_doubt(
    small: Experiment, ranking: Ranking, predictor: BoundedPredictor
) -> None:
    state = begin(small, ranking.results, TunerSettings(budget=100, policy="predicted-order"))
    played = play(state, lambda _strategy, number: measured(1.0 + number), predictor=predictor)
    found = required(played.certificate)
    assert (found.holds, found.bound_s, found.gain_fraction) == (True, 1.0, 0.0)
    assert found.text == "every feasible strategy was tried; the best measured takes 1 s"
