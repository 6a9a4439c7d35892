import re
from dataclasses import replace
from itertools import combinations
from typing import Final

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from amp_ray.calibration.calibrate import Choice, calibrate
from amp_ray.calibration.calibration import apply_calibration
from amp_ray.calibration.observation import Observation
from amp_ray.calibration.predictions import MEMORY_CONSTANTS, PRIOR, Predictor
from amp_ray.clusters.constants import PRIOR_SIGMA
from amp_ray.inputs.experiment import Experiment
from support.examples import examples
from support.experiments import small_experiment
from support.planted import planted_observations, predictive_error, small_strategies

SMALL: Final = small_experiment()
STRATEGIES: Final = small_strategies(SMALL)
LARGE: Final = small_experiment(
    ("hidden_size: 256", "hidden_size: 1024"), ("sequence_length: 128", "sequence_length: 512")
)
"""An experiment in which activations are a large part of the memory."""

LARGE_STRATEGIES: Final = small_strategies(LARGE)

PREDICTOR: Final = Predictor()
"""Caches predictions across examples, which is safe since they never change."""

PLANTED: Final = ("host_scale", "nic_efficiency", "intra_efficiency")
NOISE: Final = 0.01


def ratio_of(name: str) -> st.SearchStrategy[float]:
    """Draw the ratio of a constant to its prior, within 1.5 sigma."""
    return st.floats(-1.5, 1.5).map(lambda sigmas: float(np.exp(sigmas * PRIOR_SIGMA[name])))


RATIOS: Final = st.fixed_dictionaries({name: ratio_of(name) for name in PLANTED})


def noisy(trials: list[Observation], seed: int, outliers: int = 0) -> list[Observation]:
    """Multiply all times by a little noise, and those of ``outliers`` trials by a lot."""
    generator = np.random.default_rng(seed)
    factors = np.exp(generator.normal(0.0, NOISE, len(trials)))
    factors[generator.choice(len(trials), outliers, replace=False)] *= 3.0
    return [
        replace(trial, measured_s=(trial.measured_s or 0.0) * float(factor))
        for trial, factor in zip(trials, factors, strict=True)
    ]


def error(experiment: Experiment, ratios: dict[str, float]) -> float:
    """Return the mean error of an experiment's predictions, as a logarithm of the ratio."""
    truth, found = (
        np.log([trial.measured_s or 0.0 for trial in trials])
        for trials in (
            planted_observations(SMALL, STRATEGIES, ratios),
            planted_observations(experiment, STRATEGIES, {}),
        )
    )
    return float(np.abs(found - truth).mean())


@given(ratios=RATIOS, seed=st.integers(0, 1000))
@examples(8)
def test_planted_constants_are_recovered(ratios: dict[str, float], seed: int) -> None:
    trials = noisy(planted_observations(SMALL, STRATEGIES, ratios), seed)
    found = calibrate(SMALL, trials, Choice(names=PLANTED), predictor=PREDICTOR)
    for constant in found.constants:
        off = abs(np.log(constant.ratio / ratios[constant.name]))
        assert off < max(4.0 * constant.sigma, 0.02)


@given(ratios=RATIOS, seed=st.integers(0, 1000))
@examples(8)
def test_the_rule_predicts_a_planted_cluster_with_noise_and_outliers(
    ratios: dict[str, float], seed: int
) -> None:
    trials = noisy(planted_observations(SMALL, STRATEGIES, ratios), seed, outliers=1)
    found = calibrate(SMALL, trials, predictor=PREDICTOR, thorough=False)
    after = error(apply_calibration(found, SMALL), ratios)
    assert after < max(0.35 * error(SMALL, ratios), 0.03)


@given(
    ratios=RATIOS,
    world=st.sampled_from(["wrong constants", "two signs", "second population", "outliers"]),
    num_trials=st.integers(2, len(STRATEGIES)),
    seed=st.integers(0, 1000),
)
@examples(12)
def test_no_set_of_trials_makes_the_error_of_left_out_trials_larger(
    ratios: dict[str, float], world: str, num_trials: int, seed: int
) -> None:
    generator = np.random.default_rng(seed)
    trials = noisy(planted_observations(SMALL, STRATEGIES, ratios), seed, int(world == "outliers"))
    if world in WORLDS:
        trials = WORLDS[world](trials, generator)
    some = [trials[index] for index in generator.permutation(len(trials))[:num_trials]]
    found = calibrate(SMALL, some, predictor=PREDICTOR)
    before, left_out = found.mean_error("before_s"), found.mean_error("left_out_s")
    assert before is not None
    assert left_out is not None
    assert left_out <= before
    rest = [trial for trial in trials if not any(trial is each for each in some)]
    calibrated = apply_calibration(found, SMALL)
    if world == "second population" and rest:
        assert distance(calibrated, rest) < 1.1 * distance(SMALL, rest) + 0.05


def two_signs(trials: list[Observation], generator: np.random.Generator) -> list[Observation]:
    """Trials that contradict each other."""
    factors = generator.choice([0.8, 1.5], len(trials)).tolist()
    return [
        replace(trial, measured_s=(trial.measured_s or 0.0) * factor)
        for trial, factor in zip(trials, factors, strict=True)
    ]


def two_populations(trials: list[Observation], generator: np.random.Generator) -> list[Observation]:
    """Trials of which some take .4 to 1.7 s more in every slot of their pipelines."""
    waits_s = generator.uniform(0.4, 1.7, len(trials)) * (generator.random(len(trials)) < 0.3)
    return [
        replace(trial, measured_s=(trial.measured_s or 0.0) + wait_s * num_slots(trial))
        for trial, wait_s in zip(trials, waits_s.tolist(), strict=True)
    ]


WORLDS: Final = {"two signs": two_signs, "second population": two_populations}


def num_slots(trial: Observation) -> float:
    """Slots of a trial's pipeline."""
    return trial.strategy.num_micro_batches + trial.strategy.pp - 1


def distance(experiment: Experiment, trials: list[Observation]) -> float:
    """Return the median error of predicted times, as a logarithm of the ratio."""
    strategies = [trial.strategy for trial in trials]
    predicted = [
        each.measured_s or 0.0 for each in planted_observations(experiment, strategies, {})
    ]
    measured = [trial.measured_s or 0.0 for trial in trials]
    return float(np.median(np.abs(np.log(predicted) - np.log(measured))))


@given(trial=st.sampled_from(range(len(STRATEGIES))), log_factor=st.floats(-0.7, 0.7))
@examples(8)
def test_one_trial_never_reorders_the_others_beyond_the_models_error(
    trial: int, log_factor: float
) -> None:
    before = planted_observations(SMALL, STRATEGIES, {})
    measured_s = (before[trial].measured_s or 0.0) * float(np.exp(log_factor))
    found = calibrate(
        SMALL, [replace(before[trial], measured_s=measured_s)], predictor=PREDICTOR, thorough=False
    )
    calibrated = apply_calibration(found, SMALL)
    sigma = predictive_error(found, calibrated, STRATEGIES, PREDICTOR)
    prior = np.log([each.measured_s or 0.0 for each in before])
    after = np.log(
        [each.measured_s or 0.0 for each in planted_observations(calibrated, STRATEGIES, {})]
    )
    others = [index for index in range(len(STRATEGIES)) if index != trial]
    for i, j in combinations(others, 2):
        if (prior[i] - prior[j]) * (after[i] - after[j]) < 0:
            assert abs(prior[i] - prior[j]) < 2.0 * np.hypot(sigma[i], sigma[j])


@given(
    chosen=st.lists(st.sampled_from(sorted(PRIOR_SIGMA)), min_size=1, max_size=4, unique=True),
    count=st.integers(1, 5),
)
@examples(8)
def test_named_constants_are_fitted_or_refused_but_never_dropped(
    chosen: list[str], count: int
) -> None:
    trials = planted_observations(SMALL, STRATEGIES, {})[:count]
    choice = Choice(names=tuple(chosen))
    try:
        found = {each.name for each in calibrate(SMALL, trials, choice).constants}
    except ValueError as error:
        found = set(chosen) if re.search("not identified|at least as many", str(error)) else set()
    assert found == set(chosen)


@given(context=st.floats(0.5, 2.0), allocator=st.floats(0.9, 1.1), seed=st.integers(0, 1000))
@examples(8)
def test_planted_memory_is_recovered_from_measured_peaks(
    context: float, allocator: float, seed: int
) -> None:
    ratios = dict(zip(MEMORY_CONSTANTS, (context, allocator), strict=True))
    true = replace(LARGE, constants=replace(LARGE.constants, **ratios))
    found = Predictor().predict([(true, each) for each in LARGE_STRATEGIES], PRIOR)
    generator = np.random.default_rng(seed)
    trials = [
        Observation(
            experiment=LARGE,
            strategy=strategy,
            outcome="measured",
            measured_s=prediction.time_s,
            peak_memory_bytes=tuple(
                peak * float(np.exp(generator.normal(0, NOISE))) for peak in prediction.peaks_bytes
            ),
        )
        for strategy, prediction in zip(LARGE_STRATEGIES, found, strict=True)
    ]
    choice = Choice(names=MEMORY_CONSTANTS)
    for constant in calibrate(LARGE, trials, choice, predictor=PREDICTOR, thorough=False).constants:
        off = abs(np.log(constant.ratio / ratios[constant.name]))
        assert off < max(4.0 * constant.sigma, 0.02)
