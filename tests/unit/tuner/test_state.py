import random
from dataclasses import replace
from typing import Any

import pytest

from amp_ray.cost.estimate import Infeasible, Reason
from amp_ray.inputs.experiment import Experiment
from amp_ray.search.ranking import Ranking
from amp_ray.tuner.state import Trial, TunerSettings, TunerState, begin, record, start
from support.checked import grid_of
from support.replaying import measured, out_of_memory


@pytest.fixture
def state(small: Experiment, ranking: Ranking) -> TunerState:
    """A study that has not begun to launch."""
    return begin(small, ranking.results, TunerSettings(budget=5))


def trial(state: TunerState, number: int, index: int) -> Trial:
    """A trial of one candidate."""
    return Trial(
        number=number,
        strategy=state.candidates[index].strategy,
        predicted_s=1.0,
        sigma=0.1,
        repeats=None,
        reason="asked for",
    )


def test_candidates_stand_in_the_rankings_order_whatever_order_they_came_in(
    small: Experiment, ranking: Ranking, state: TunerState
) -> None:
    shuffled = list(ranking.results)
    random.Random(3).shuffle(shuffled)
    assert begin(small, shuffled, TunerSettings(budget=5)) == state
    assert state.candidates == ranking.results


def test_a_strategy_that_comes_twice_is_one_candidate(
    small: Experiment, ranking: Ranking, state: TunerState
) -> None:
    twice = [*ranking.results, *ranking.results]
    assert begin(small, twice, TunerSettings(budget=5)).candidates == state.candidates


def test_what_could_not_be_planned_is_no_candidate(small: Experiment, ranking: Ranking) -> None:
    candidate = grid_of(tp=4, num_micro_batches=8)
    impossible = Infeasible(candidate=candidate, reason=Reason(kind="heads", detail=""))
    study = begin(small, [impossible, *ranking.results], TunerSettings(budget=5))
    assert study.candidates == ranking.results


def test_a_started_trial_runs_until_its_outcome_is_recorded(state: TunerState) -> None:
    running = start(state, trial(state, 0, 2))
    assert [each.number for each in running.running] == [0]
    assert running.budget_left == 4
    ended = record(running, 0, measured(1.5))
    assert ended.running == ()
    assert ended.trials[0].outcome == measured(1.5)
    assert ended.trials[0].candidate == 2


def test_the_second_outcome_of_a_trial_changes_nothing(state: TunerState) -> None:
    ended = record(start(state, trial(state, 0, 0)), 0, measured(1.5))
    assert record(ended, 0, out_of_memory()) is ended


def test_an_older_state_stays_valid(state: TunerState) -> None:
    running = start(state, trial(state, 0, 0))
    record(running, 0, measured(1.0))
    assert running.trials[0].outcome is None
    assert len(state.trials) == 0


@pytest.mark.parametrize("number", [1, -1])
def test_a_trial_out_of_turn_is_refused(state: TunerState, number: int) -> None:
    with pytest.raises(ValueError, match="the next trial is number 0, found number"):
        start(state, trial(state, number, 0))


def test_a_strategy_that_is_no_candidate_is_refused(state: TunerState) -> None:
    strange = replace(trial(state, 0, 0).strategy, num_micro_batches=77)
    with pytest.raises(ValueError, match="trial 0 runs a strategy that is no candidate"):
        start(state, replace(trial(state, 0, 0), strategy=strange))


@pytest.mark.parametrize("number", [0, -1, 3])
def test_an_outcome_of_no_trial_is_refused(state: TunerState, number: int) -> None:
    with pytest.raises(ValueError, match=f"trial {number} was never launched; the study has 0"):
        record(state, number, measured(1.0))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"budget": -1}, "budget starts at 0, found -1"),
        ({"seed": -1}, "seed starts at 0"),
        ({"max_repeats": -1}, "max_repeats starts at 0"),
        ({"policy": "greedy"}, "policy is one of best, predicted-order, random, amp-2022"),
        ({"tolerance_fraction": 0.0}, "tolerance_fraction lies between 0 and 1"),
        ({"confidence_fraction": 1.0}, "confidence_fraction lies between 0 and 1, found 1.0"),
    ],
)
def test_settings_that_make_no_study_are_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TunerSettings(**{"budget": 3, **changed})


def test_the_published_planners_policy_needs_its_order(small: Experiment, ranking: Ranking) -> None:
    with pytest.raises(ValueError, match="needs the order of the published planner"):
        begin(small, ranking.results, TunerSettings(budget=3, policy="amp-2022"))


def test_an_order_names_candidates_only(small: Experiment, ranking: Ranking) -> None:
    strange = replace(ranking.results[0].strategy, num_micro_batches=77)  # type: ignore[union-attr]
    settings = TunerSettings(budget=3, policy="amp-2022")
    with pytest.raises(ValueError, match="the order names 1 strategy outside the candidates"):
        begin(small, ranking.results, settings, [strange])
