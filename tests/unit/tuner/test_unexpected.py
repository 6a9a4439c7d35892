from dataclasses import replace

import pytest

from amp_ray.cost.estimate import Estimate
from amp_ray.cost.model import CostModel
from amp_ray.inputs.experiment import Experiment
from amp_ray.search.ranking import Ranking
from amp_ray.strategies.candidate import Candidate
from amp_ray.strategies.strategy import Strategy
from amp_ray.trials.outcome import Outcome
from amp_ray.tuner.state import TunerSettings, TunerState, begin
from amp_ray.tuner.unexpected import Surprise, surprise_of
from support.checked import required
from support.experiments import experiment_from
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


NANOTRON = """
name: wide
model:
  {family: llama, num_layers: 4, hidden_size: 2048, num_heads: 16, feed_forward_size: 8192,
   vocab_size: 32000, sequence_length: 4096}
cluster: {nodes: [{count: 2, device: H100, slots: 8, inter_gbit_per_s: 3200}]}
precision: bf16
zero_stage: 1
runtime: nanotron
global_batch_size: 16
"""


@pytest.mark.parametrize("explained", [True, False])
def test_another_setting_that_explains_a_time_is_offered(*, explained: bool) -> None:
    """Where inputs are gathered again, a trial takes longer and needs less memory."""
    given = experiment_from(NANOTRON)
    ((change, switched),) = given.traits.other_settings()
    options = given.stage_options(16, 1, zero=given.zero(1), sequence_parallel=True)
    candidate = Candidate(micro_batch_size=16, options=options, pp=1, num_micro_batches=1)
    strategy = Strategy.uniform(candidate, (0, 7))
    usual, other = (
        CostModel(experiment=replace(given, traits=traits)).estimate(strategy)
        for traits in (given.traits, switched)
    )
    ratio = other.iteration_time_s / usual.iteration_time_s
    state = begin(given, [usual], TunerSettings(budget=3))
    state = ran(state, 0, measured(ratio if explained else 3.0), predicted_s=1.0, sigma=0.02)
    offer = f"; {ratio:.4g} s are predicted with {change}"
    assert change == "traits.keeps_gathered_inputs=false"
    assert (offer in required(surprise_in(state)).text) is explained
    assert max(other.peak_memory_bytes) < max(usual.peak_memory_bytes)


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
