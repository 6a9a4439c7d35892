from dataclasses import replace

import pytest

from amp_ray.cost.estimate import Estimate
from amp_ray.inputs.experiment import Experiment
from amp_ray.search.ranking import Ranking
from amp_ray.trials.outcome import Outcome
from amp_ray.tuner.state import TunerSettings, TunerState, begin
from amp_ray.tuner.unexpected import Surprise, surprise_of
from support.checked import required
from support.replaying import crashed, measured, out_of_memory, ran


def after(
    small: Experiment, ranking: Ranking, outcome: Outcome | None, *, chance: float = 0.0
) -> TunerState:
    """A study after one trial that was predicted to take 1 s with an error of 10 %."""
    first, *rest = ranking.results
    assert isinstance(first, Estimate)
    risky = replace(first, failure_probability=chance)
    state = begin(small, [risky, *rest], TunerSettings(budget=3))
    tried = [candidate.strategy for candidate in state.candidates].index(risky.strategy)
    return ran(state, tried, outcome, predicted_s=1.0)


def surprise_in(state: TunerState) -> Surprise | None:
    return surprise_of(state, state.trials[0])


@pytest.mark.parametrize("time_s", [0.83, 1.0, 1.2])
def test_a_time_within_the_band_is_no_surprise(
    small: Experiment, ranking: Ranking, time_s: float
) -> None:
    assert surprise_in(after(small, ranking, measured(time_s))) is None


def test_an_unsteady_trial_surprises_nobody(small: Experiment, ranking: Ranking) -> None:
    assert surprise_in(after(small, ranking, measured(9.0, spread_fraction=0.3))) is None


@pytest.mark.parametrize(("time_s", "word"), [(0.8, "faster"), (1.25, "slower")])
def test_a_time_outside_the_band_is_told_with_the_band(
    small: Experiment, ranking: Ranking, time_s: float, word: str
) -> None:
    surprise = required(surprise_in(after(small, ranking, measured(time_s))))
    assert surprise.trial.number == 0
    assert surprise.measured_s == time_s
    assert (surprise.low_s, surprise.high_s) == pytest.approx((0.822, 1.2165), rel=1e-3)
    assert surprise.text == (
        f"trial 0 was {word} than expected: measured {time_s:.4g} s, predicted 1 s, at most "
        "1.217 s and at least 0.822 s with 95 % confidence"
    )


def test_running_out_of_memory_unexpectedly_is_told(small: Experiment, ranking: Ranking) -> None:
    surprise = required(surprise_in(after(small, ranking, out_of_memory(), chance=0.01)))
    assert surprise.measured_s is None
    assert "trial 0 ran out of memory, with a chance of 1 % to fail" in surprise.text


def test_running_out_of_memory_as_feared_is_no_surprise(
    small: Experiment, ranking: Ranking
) -> None:
    assert surprise_in(after(small, ranking, out_of_memory(), chance=0.3)) is None


@pytest.mark.parametrize("outcome", [None, crashed()])
def test_what_tells_nothing_of_the_cost_is_no_surprise(
    small: Experiment, ranking: Ranking, outcome: Outcome | None
) -> None:
    assert surprise_in(after(small, ranking, outcome)) is None
