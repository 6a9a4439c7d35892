import math
from dataclasses import replace

import numpy as np
import pytest

from amp_ray.calibration.calibrate import Choice, calibrate
from amp_ray.calibration.calibration import Calibration, apply_calibration, transferable
from amp_ray.calibration.evidence import COMMON, FIRST_MET, Evidence
from amp_ray.calibration.intervals import (
    WIDTH,
    log_shifts,
    prior_uncertainty,
    tie_errors,
    with_intervals,
)
from amp_ray.calibration.predictions import PRIOR, Predictor
from amp_ray.clusters.constants import PRIOR_SIGMA, PROGRAM_SCALE, Uncertainty
from amp_ray.cost.model import CostModel
from amp_ray.inputs.experiment import Experiment
from amp_ray.strategies.strategy import Strategy
from amp_ray.tuner.belief import time_covariance
from support.experiments import small_experiment
from support.planted import Plant, predictive_error, small_strategies

CHOICE = Choice(names=("gemm_scale", "host_scale", "nic_efficiency"))
"""One constant of a device, one of the library, one of the site."""

GROWN = (
    ("hidden_size: 256", "hidden_size: 1024"),
    ("sequence_length: 128", "sequence_length: 256"),
)
"""Layers that keep host or device busy, by micro-batch: both can be told from trials."""


def grown(*replacements: tuple[str, str]) -> Experiment:
    """The small experiment with larger layers."""
    return small_experiment(*GROWN, *replacements)


@pytest.fixture(scope="module")
def small() -> Experiment:
    """Four T4, larger layers."""
    return grown()


@pytest.fixture(scope="module")
def strategies(small: Experiment) -> tuple[Strategy, ...]:
    """Every strategy that the planner makes of it."""
    return small_strategies(small)


@pytest.fixture(scope="module")
def calibration(small: Experiment, plant: Plant) -> Calibration:
    """Fitted to a cluster that differs in all three."""
    return calibrate(
        small, plant({"gemm_scale": 0.9, "host_scale": 1.4, "nic_efficiency": 0.7}), CHOICE
    )


def test_applying_sets_the_fitted_constants_and_the_learnt_errors(
    small: Experiment, calibration: Calibration
) -> None:
    constants = apply_calibration(calibration, small).constants
    assert {name: getattr(constants, name) for name in CHOICE.names or ()} == calibration.values()
    assert constants.time_error == calibration.time_error
    assert constants.memory_error == calibration.memory_error


def test_applying_a_common_factor_predicts_what_was_fitted(small: Experiment, plant: Plant) -> None:
    slow = [replace(trial, measured_s=2.0 * (trial.measured_s or 0.0)) for trial in plant({})]
    found = calibrate(small, slow, thorough=False)
    applied = apply_calibration(found, small)
    assert applied.constants.program_scale == pytest.approx(2.0, rel=0.1)
    plans = [(applied, trial.strategy) for trial in slow]
    predicted = [each.time_s for each in Predictor().predict(plans, PRIOR)]
    assert predicted == pytest.approx([trial.after_s for trial in found.trials])


def test_names_of_hosts_limits_and_batch_do_not_matter(calibration: Calibration) -> None:
    other = grown(("name: small", "name: other"), ("global_batch_size: 8", "global_batch_size: 16"))
    assert apply_calibration(calibration, other).constants.host_scale > 1.0


@pytest.mark.parametrize(
    ("old", "new", "part"),
    [
        ("num_layers: 6", "num_layers: 8", r"model: model\.num_layers is 6 .* 8 here"),
        ("slots: 2", "slots: 4", r"cluster: cluster\.nodes\.0\.slots is 2 .* 4 here"),
        ("device: T4", "device: A30", r"cluster: .*name is 'T4' .* 'A30' here"),
        ("inter_gbit_per_s: 10", "inter_gbit_per_s: 25", r"inter\.bandwidth_bytes_per_s"),
        ("global", "runtime: megatron\nglobal", r"runtime: runtime\.name is 'deepspeed'"),
        ("global", "precision: fp32\nglobal", r"runtime: .*precision is 'fp16'"),
    ],
)
def test_a_calibration_of_something_else_is_refused_by_name(
    calibration: Calibration, old: str, new: str, part: str
) -> None:
    other = grown((old, new))
    with pytest.raises(ValueError, match=part):
        apply_calibration(calibration, other)


def test_transfer_is_named_in_the_refusal(calibration: Calibration) -> None:
    other = grown(("num_layers: 6", "num_layers: 8"))
    with pytest.raises(ValueError, match="--transfer-calibration"):
        apply_calibration(calibration, other)


def test_to_another_model_everything_is_transferred(calibration: Calibration) -> None:
    other = grown(("num_layers: 6", "num_layers: 8"))
    assert transferable(calibration, other) == CHOICE.names
    changed = apply_calibration(calibration, other, transfer=True).constants
    assert changed.nic_efficiency == calibration.values()["nic_efficiency"]
    assert changed.time_error == other.constants.time_error


def test_to_other_links_the_sites_constants_are_not_transferred(calibration: Calibration) -> None:
    other = grown(("inter_gbit_per_s: 10", "inter_gbit_per_s: 25"))
    assert transferable(calibration, other) == ("gemm_scale", "host_scale")


def test_to_other_devices_only_the_librarys_constants_are_transferred(
    calibration: Calibration,
) -> None:
    other = grown(("device: T4", "device: A30"))
    assert transferable(calibration, other) == ("host_scale",)
    changed = apply_calibration(calibration, other, transfer=True).constants
    assert changed.gemm_scale == other.constants.gemm_scale


def test_trials_make_predictions_more_certain(
    small: Experiment, strategies: tuple[Strategy, ...], plant: Plant
) -> None:
    trials = plant({"host_scale": 1.2})
    one, all_of_them = (calibrate(small, each, thorough=False) for each in (trials[:1], trials))
    before, after = (
        predictive_error(found, apply_calibration(found, small), strategies)
        for found in (one, all_of_them)
    )
    assert (after < before).all()


def test_a_trial_makes_what_is_like_it_more_certain_than_the_rest(
    small: Experiment, strategies: tuple[Strategy, ...], plant: Plant
) -> None:
    trials = plant({})
    found = calibrate(small, trials[:1], thorough=False)
    nothing = replace(
        found,
        covariance=tuple(
            tuple(float(value) for value in row)
            for row in np.diag([PRIOR_SIGMA[name] ** 2 for name in found.time_constants])
        ),
        time_error=small.constants.time_error,
    )
    gains = predictive_error(found, small, strategies) / predictive_error(
        nothing, small, strategies
    )
    assert gains[0] == gains.min()
    assert gains.max() > gains.min() + 0.05


def test_an_error_is_never_below_what_is_left_after_the_fit(
    small: Experiment, strategies: tuple[Strategy, ...], calibration: Calibration
) -> None:
    calibrated = apply_calibration(calibration, small)
    assert (predictive_error(calibration, calibrated, strategies) >= calibration.time_error).all()


def test_errors_of_like_strategies_go_together(
    small: Experiment, strategies: tuple[Strategy, ...], calibration: Calibration
) -> None:
    calibrated = apply_calibration(calibration, small)
    covariance = time_covariance(calibrated, strategies, calibration, Predictor())
    sigma = predictive_error(calibration, calibrated, strategies)
    assert covariance == pytest.approx(covariance.T)
    assert np.sqrt(np.diag(covariance)) == pytest.approx(sigma)
    assert np.linalg.eigvalsh(covariance).min() > 0


def test_mean_error_counts_measured_trials_only(calibration: Calibration) -> None:
    errors = [abs(t.after_s / (t.measured_s or math.nan) - 1) for t in calibration.trials]
    assert calibration.mean_error("after_s") == pytest.approx(np.mean(errors))
    failed = replace(calibration.trials[0], outcome="oom", measured_s=None)
    assert replace(calibration, trials=(failed,)).mean_error("after_s") is None


def test_what_moves_two_strategies_alike_is_no_reason_for_a_tie(
    small: Experiment, strategies: tuple[Strategy, ...]
) -> None:
    model = CostModel(experiment=small)
    estimates = [model.estimate(strategy) for strategy in strategies]
    shifts = log_shifts(small, estimates)
    errors = tie_errors(small, shifts)
    own = small.constants.time_error
    assert errors[0] == pytest.approx(own)
    assert (errors >= own).all()
    assert errors.max() > 1.01 * own
    assert tie_errors(small, np.vstack([shifts, np.ones(len(estimates))])) == pytest.approx(errors)


def sigmas(experiment: Experiment, strategies: tuple[Strategy, ...]) -> list[float]:
    """Half the width of every interval, as a lognormal sigma."""
    model = CostModel(experiment=experiment)
    told = with_intervals(experiment, [model.estimate(strategy) for strategy in strategies])
    found = []
    for estimate in told:
        assert estimate.interval_s is not None
        low, high = estimate.interval_s
        assert math.sqrt(low * high) == pytest.approx(estimate.iteration_time_s)
        found.append(math.log(high / low) / 2 / WIDTH)
    return found


def test_intervals_are_as_wide_as_the_constants_are_uncertain(
    small: Experiment, strategies: tuple[Strategy, ...]
) -> None:
    error = small.constants.time_error
    certain = Uncertainty(names=("gemm_scale",), covariance=((0.0,),))
    assert sigmas(replace(small, uncertainty=certain), strategies[:3]) == pytest.approx([error] * 3)
    common = Uncertainty(names=(PROGRAM_SCALE,), covariance=((0.04,),))
    expected = [math.hypot(error, 0.2)] * 3
    assert sigmas(replace(small, uncertainty=common), strategies[:3]) == pytest.approx(expected)
    least = math.hypot(FIRST_MET, error, COMMON)
    assert min(sigmas(small, strategies[:3])) > least


def test_published_measurements_narrow_or_widen_intervals() -> None:
    backed = grown(("device: T4", "device: A100-80"), ("global", "runtime: megatron\nglobal"))
    plans = small_strategies(backed)[:3]
    known = replace(backed, uncertainty=prior_uncertainty(backed))
    factor = Evidence.of(backed, plans[0]).factor
    assert factor != 1.0
    ratios = np.array(sigmas(backed, plans)) / sigmas(known, plans)
    assert ratios == pytest.approx([factor] * len(plans))


def test_an_interval_that_no_measurement_backs_says_so(
    small: Experiment, strategies: tuple[Strategy, ...]
) -> None:
    (estimate,) = with_intervals(small, [CostModel(experiment=small).estimate(strategies[0])])
    assert "wide interval: no published time of runtime 'deepspeed'" in estimate.warnings


def prior(name: str, *changes: tuple[str, str]) -> float:
    """Return the prior sigma of a constant on the small experiment with changes of its text."""
    uncertainty = prior_uncertainty(small_experiment(*changes))
    index = uncertainty.names.index(name)
    return math.sqrt(uncertainty.covariance[index][index])


def test_what_was_measured_elsewhere_is_known_better() -> None:
    stated = ("device: T4", "device: A100-80")
    default = ("device: T4, slots: 2, intra_gbit_per_s: 50", "device: A100-80, slots: 2")
    assert prior("intra_efficiency", default) < prior("intra_efficiency", stated) / 2


def test_latencies_of_a_guessed_protocol_are_known_less() -> None:
    stated = ("inter_gbit_per_s: 10", "inter_gbit_per_s: 10, protocol: tcp")
    assert prior("latency_scale", stated) <= prior("latency_scale") / 2


def test_trials_narrow_intervals_and_a_transfer_widens_what_it_does_not_know(
    small: Experiment, calibration: Calibration, strategies: tuple[Strategy, ...]
) -> None:
    here = apply_calibration(calibration, small)
    other = grown(("inter_gbit_per_s: 10", "inter_gbit_per_s: 20"))
    there = apply_calibration(calibration, other, transfer=True)
    blind = [sigmas(each, strategies) for each in (small, other)]
    told = [sigmas(each, strategies) for each in (here, there)]
    assert all(ours < prior for ours, prior in zip(told[0], blind[0], strict=True))
    assert np.mean(told[0]) < np.mean(told[1]) < np.mean(blind[1])


def test_correlated_constants_are_uncertain_together(
    small: Experiment, strategies: tuple[Strategy, ...]
) -> None:
    names = ("host_scale", PROGRAM_SCALE)
    alike = Uncertainty(names=names, covariance=((0.01, 0.01), (0.01, 0.01)))
    apart = Uncertainty(names=names, covariance=((0.01, -0.01), (-0.01, 0.01)))
    more, less = (
        sigmas(replace(small, uncertainty=each), strategies[:1])[0] for each in (alike, apart)
    )
    assert less < more  # a faster host makes up for a slower program
