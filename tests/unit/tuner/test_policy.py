import math
from dataclasses import replace

import numpy as np
import pytest

from amp_ray.cost.estimate import Estimate, Reason
from amp_ray.inputs.experiment import Experiment
from amp_ray.search.ranking import Ranking
from amp_ray.strategies.strategy import Strategy
from amp_ray.trials.outcome import Outcome, Unreachable
from amp_ray.tuner.belief import Belief
from amp_ray.tuner.calibrated_predictions import BoundedPredictor
from amp_ray.tuner.knowledge import learn
from amp_ray.tuner.policy import expected_gain, explore, next_trials, to_repeat
from amp_ray.tuner.state import Trial, TunerSettings, TunerState, begin, record, start
from amp_ray.tuner.trial_status import Figure, TrialStatus
from support.replaying import measured, out_of_memory, play
from support.worlds import error_model

UNREACHABLE = Unreachable(reason="no answer", host="a", wall_s=1.0)


def start_all(state: TunerState, trials: tuple[Trial, ...]) -> TunerState:
    """A study with these trials running."""
    for trial in trials:
        state = start(state, trial)
    return state


def with_settings(state: TunerState, **changed: object) -> TunerState:
    """A study that is led in another way."""
    return replace(state, settings=replace(state.settings, **changed))  # type: ignore[arg-type]


def as_predicted(state: TunerState) -> dict[Strategy, float]:
    """What the uncalibrated model says."""
    return {each.strategy: each.iteration_time_s for each in state.candidates}


def test_the_first_trial_is_the_best_predicted(
    state: TunerState, predictor: BoundedPredictor
) -> None:
    (trial,) = next_trials(state, 1, predictor)
    assert trial.strategy == state.candidates[0].strategy
    assert trial.predicted_s == state.candidates[0].iteration_time_s
    assert trial.sigma > state.experiment.constants.time_error
    assert (trial.number, trial.repeats) == (0, None)
    assert trial.reason == "best predicted of 16 feasible strategies"


def test_the_same_study_gives_the_same_trials(state: TunerState) -> None:
    state = record(start_all(state, next_trials(state, 3, BoundedPredictor())), 1, measured(0.3))
    assert next_trials(state, 3, BoundedPredictor()) == next_trials(state, 3, BoundedPredictor())


def test_knowledge_that_is_there_already_is_used(
    state: TunerState, predictor: BoundedPredictor
) -> None:
    known = learn(state, predictor)
    assert next_trials(state, 3, predictor, known) == next_trials(state, 3, predictor)


def test_no_free_group_no_trial(state: TunerState, predictor: BoundedPredictor) -> None:
    assert next_trials(state, 0, predictor) == ()


def test_a_strategy_whose_host_was_unreachable_is_tried_again(
    state: TunerState, predictor: BoundedPredictor
) -> None:
    (first,) = next_trials(state, 1, predictor)
    state = record(start(state, first), 0, UNREACHABLE)
    (second,) = next_trials(state, 1, predictor)
    assert second.strategy == first.strategy
    assert second.number == 1


def test_what_the_model_finds_infeasible_is_not_run(
    small: Experiment, ranking: Ranking, predictor: BoundedPredictor
) -> None:
    first, *rest = ranking.results
    assert isinstance(first, Estimate)
    why = (Reason(kind="tp does not divide the attention heads", detail=""),)
    state = begin(
        small,
        [replace(first, reasons=why, launchable=False, failure_probability=1.0), *rest],
        TunerSettings(budget=100, tolerance_fraction=0.01, confidence_fraction=0.999),
    )
    played = play(state, lambda _strategy, _number: measured(1.0), predictor=predictor)
    assert played.found_at(first.strategy) is None


@pytest.mark.parametrize(("budget", "holds"), [(100, True), (8, False)])
def test_a_study_ends_with_a_certificate_or_when_its_budget_cannot_rule_surprises_out(
    state: TunerState, predictor: BoundedPredictor, budget: int, *, holds: bool
) -> None:
    state = with_settings(state, budget=budget)
    times = as_predicted(state)
    played = play(state, lambda strategy, _: measured(times[strategy]), predictor=predictor)
    assert played.certificate is not None
    assert played.certificate.settled
    assert played.certificate.holds == holds
    assert played.num_trials < min(budget, 16)


def test_other_policies_do_not_stop_early(state: TunerState, predictor: BoundedPredictor) -> None:
    state = with_settings(state, policy="predicted-order")
    times = as_predicted(state)
    played = play(state, lambda strategy, _: measured(times[strategy]), predictor=predictor)
    assert [trial_record.candidate for trial_record in played.state.trials] == list(range(16))


def test_random_order_depends_on_the_seed_alone(
    state: TunerState, predictor: BoundedPredictor
) -> None:
    orders = [
        [trial.strategy for trial in next_trials(with_settings(state, **how), 16, predictor)]
        for how in (
            {"policy": "random", "seed": 1},
            {"policy": "random", "seed": 1},
            {"policy": "random", "seed": 2},
        )
    ]
    assert orders[0] == orders[1]
    assert orders[0] != orders[2]
    assert set(orders[0]) == set(orders[2])


def test_the_published_planner_runs_what_it_does_not_know_to_fail(
    small: Experiment, ranking: Ranking, predictor: BoundedPredictor
) -> None:
    first, second, *rest = ranking.results
    assert isinstance(first, Estimate)
    assert isinstance(second, Estimate)
    why = (Reason(kind="out of memory", detail=""),)
    failing = replace(first, reasons=why, failure_probability=0.99)
    state = begin(
        small,
        [failing, second, *rest],
        TunerSettings(budget=2, policy="amp-2022"),
        [second.strategy, failing.strategy],
    )
    trials = next_trials(state, 2, predictor)
    assert [trial.strategy for trial in trials] == [second.strategy, failing.strategy]


def test_groups_wait_rather_than_run_what_may_not_be_needed(
    state: TunerState, predictor: BoundedPredictor
) -> None:
    times = as_predicted(state)
    alone = play(state, lambda strategy, _: measured(times[strategy]), predictor=predictor)
    beside = play(
        state, lambda strategy, _: measured(times[strategy]), num_groups=4, predictor=predictor
    )
    assert beside.num_trials <= alone.num_trials + 3


def noisy(state: TunerState, spread_fraction: float) -> dict[Strategy, Outcome]:
    """All strategies equally fast, and unsteady."""
    return {
        each.strategy: measured(1.0, spread_fraction=spread_fraction) for each in state.candidates
    }


def test_leaders_are_repeated_when_their_spread_leaves_the_winner_open(
    small: Experiment, ranking: Ranking, predictor: BoundedPredictor
) -> None:
    state = begin(small, ranking.results[:3], TunerSettings(budget=100))
    outcomes = noisy(state, 0.3)
    played = play(state, lambda strategy, _: outcomes[strategy], predictor=predictor)
    launches = [played.state.trials[number].candidate for number in range(played.num_trials)]
    assert all(1 < launches.count(index) <= 3 for index in range(3))
    again = [
        trial_record.trial
        for trial_record in played.state.trials
        if trial_record.trial.repeats is not None
    ]
    assert {trial.repeats for trial in again} <= {0, 1, 2}
    assert all(
        trial.strategy == played.state.trials[trial.repeats or 0].trial.strategy for trial in again
    )
    assert again[0].reason.startswith(f"repeats trial {again[0].repeats}:")


def test_only_the_winner_of_steady_runs_is_run_twice(
    small: Experiment, ranking: Ranking, predictor: BoundedPredictor
) -> None:
    state = begin(small, ranking.results[:3], TunerSettings(budget=100))
    outcomes = noisy(state, 0.01)
    played = play(state, lambda strategy, _: outcomes[strategy], predictor=predictor)
    again = [
        entry.trial.repeats for entry in played.state.trials if entry.trial.repeats is not None
    ]
    best = played.knowledge.status.best
    assert best is not None
    assert again == [played.knowledge.status.figures[best].numbers[0]]


def test_the_last_trials_of_a_budget_go_to_leaders_that_are_uncertain(
    state: TunerState, predictor: BoundedPredictor
) -> None:
    state = with_settings(state, budget=6)
    outcomes = noisy(state, 0.3)
    played = play(state, lambda strategy, _: outcomes[strategy], predictor=predictor)
    repeats = [trial_record.trial.repeats for trial_record in played.state.trials]
    assert repeats[:4] == [None] * 4
    assert None not in repeats[4:]


SETTINGS = TunerSettings(budget=100)


def figure(time_s: float, sigma: float, runs: int = 1) -> Figure:
    """A figure of a few runs."""
    outcome = measured(time_s)
    return Figure(
        measured_s=time_s, sigma=sigma, runs=(outcome,) * runs, numbers=tuple(range(runs))
    )


def status(
    *figures: Figure, running: tuple[int, ...] = (), launched: dict[int, int] | None = None
) -> TrialStatus:
    """Measured candidates, by index."""
    counts = {index: len(each.runs) for index, each in enumerate(figures)}
    return TrialStatus(
        figures=dict(enumerate(figures)),
        out_of_memory={},
        closed=frozenset(range(len(figures))),
        silent=frozenset(),
        running=running,
        launched=counts | (launched or {}),
    )


PAIR = (figure(1.0, 0.1), figure(1.03, 0.1))


@pytest.mark.parametrize(
    ("found", "repeated"),
    [
        pytest.param(status(), (), id="nothing measured"),
        pytest.param(status(figure(1.0, 0.05)), (), id="a single strategy has no rival"),
        pytest.param(status(figure(1.0, 0.01), figure(1.02, 0.01)), (0,), id="one steady run"),
        pytest.param(status(figure(1.0, 0.01, 2), figure(1.02, 0.01)), (), id="two steady runs"),
        pytest.param(status(figure(1.0, 0.0), figure(1.0, 0.0)), (0,), id="equal, no spread"),
        pytest.param(status(*PAIR[::-1]), (1, 0), id="uncertain: the fastest first"),
        pytest.param(status(*PAIR, figure(3.0, 0.1)), (0, 1), id="one far behind"),
        pytest.param(status(figure(1.0, 0.1), figure(9.0, 0.1)), (0,), id="an unsteady winner"),
        pytest.param(status(figure(1.0, 0.1, 2), PAIR[1]), (1, 0), id="fewest runs first"),
        pytest.param(status(*PAIR, launched={0: 3}), (1,), id="repeats end"),
        pytest.param(status(*PAIR, launched={0: 4}), (1,), id="repeats stay ended"),
        pytest.param(status(*PAIR, running=(0,)), (1,), id="not beside a running one"),
    ],
)
def test_uncertain_leaders_are_repeated(found: TrialStatus, repeated: tuple[int, ...]) -> None:
    assert to_repeat(found, SETTINGS) == repeated
    assert to_repeat(found, TunerSettings(budget=100, max_repeats=0)) == ()


def test_the_leader_of_many_is_looked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[TrialStatus] = []

    def best(found: TrialStatus) -> int:
        looks.append(found)
        return 0

    monkeypatch.setattr(TrialStatus, "best", property(best))
    assert to_repeat(status(*[figure(1.0, 0.1)] * 20), SETTINGS)[0] == 0
    assert len(looks) == 1


# ------------------------------------------------------------------------- new strategies


def belief(means_s: list[float], sigmas: list[float], finishes: list[float]) -> Belief:
    """Independent candidates."""
    return Belief(
        indices=tuple(range(len(means_s))),
        log_mean=np.log(means_s),
        covariance=np.diag(np.square(sigmas)),
        finishes=np.array(finishes),
    )


def test_the_expected_gain_is_the_mean_of_what_is_faster() -> None:
    (gain,) = expected_gain(belief([1.1], [0.2], [1.0]), [0], 1.0, error_model())
    draws = np.random.default_rng(0).normal(math.log(1.1), 0.2, 400_000)
    assert gain == pytest.approx(np.maximum(0.0, -draws).mean(), rel=0.02)


@pytest.mark.parametrize(
    ("means_s", "sigmas", "finishes"),
    [
        pytest.param([1.0, 1.1], [0.1, 0.1], [1.0, 1.0], id="faster expectation"),
        pytest.param([1.2, 1.2], [0.2, 0.05], [1.0, 1.0], id="less certain expectation"),
        pytest.param([1.0, 1.0], [0.1, 0.1], [1.0, 0.5], id="no chance to fail"),
    ],
)
def test_the_first_of_two_gains_more(
    means_s: list[float], sigmas: list[float], finishes: list[float]
) -> None:
    both = belief(means_s, sigmas, finishes)
    first, second = expected_gain(both, [0, 1], 1.0, error_model())
    assert first > second
    if finishes[1] < 1.0:
        assert second == pytest.approx(finishes[1] * first)


def test_errors_that_proved_too_small_gain_more() -> None:
    one = belief([1.2], [0.1], [1.0])
    plain, wide = (expected_gain(one, [0], 1.0, error_model(scale)) for scale in (1.0, 2.0))
    assert wide > plain


def test_a_share_of_surprises_gains_more() -> None:
    far = belief([2.0], [0.05], [1.0])
    (plain,), (more,) = (
        expected_gain(far, [0], 1.0, error_model(share=share)) for share in (0.0, 0.1)
    )
    draws = np.random.default_rng(0).normal(math.log(2.0), math.hypot(0.35, 0.05), 400_000)
    assert plain < 1e-9
    assert more == pytest.approx(0.1 * np.maximum(0.0, -draws).mean(), rel=0.05)


def test_the_second_of_two_is_chosen_as_if_the_first_took_what_is_predicted(
    state: TunerState, predictor: BoundedPredictor
) -> None:
    known = learn(state, predictor)
    (first, _), (_, second), *_ = explore(known, state.settings)
    predicted_s = known.estimates[first].iteration_time_s
    assert f"chance to be faster than {predicted_s:.4g} s" in second


def test_nothing_more_is_launched_when_what_runs_may_end_the_study(
    small: Experiment, ranking: Ranking, predictor: BoundedPredictor
) -> None:
    fast, slow = ranking.results[0], ranking.results[15]
    state = begin(small, [fast, slow], TunerSettings(budget=100))
    (trial,) = next_trials(state, 4, predictor)
    running = start(state, trial)
    assert next_trials(running, 3, predictor) == ()
    (other,) = next_trials(record(running, 0, out_of_memory()), 3, predictor)
    assert other.strategy == state.candidates[1].strategy


def test_a_repeat_that_runs_is_no_question_asked_already(
    state: TunerState, predictor: BoundedPredictor
) -> None:
    (trial,) = next_trials(state, 1, predictor)
    state = record(start(state, trial), 0, measured(trial.predicted_s))
    again = start(state, replace(trial, number=1, repeats=0))
    here, there = (
        [index for index, _ in explore(learn(each, predictor), each.settings)]
        for each in (state, again)
    )
    assert here == there


def test_after_those_whose_errors_were_worked_out_the_far_ones_follow(
    state: TunerState, predictor: BoundedPredictor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("amp_ray.tuner.knowledge.MOST_JUDGED_AT_FIRST", 2)
    promises = list(explore(learn(state, predictor), state.settings))
    assert sorted(index for index, _ in promises) == list(range(16))
    assert [index for index, _ in promises[2:]] == list(range(2, 16))
    assert promises[-1][1] == "the next prediction, far behind the leaders"
