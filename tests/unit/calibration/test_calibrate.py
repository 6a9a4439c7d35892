import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from amp_ray.calibration.calibrate import Choice, calibrate
from amp_ray.calibration.calibration import Calibration
from amp_ray.calibration.observation import Observation
from amp_ray.calibration.predictions import TIME_CONSTANTS, Point, Predictor
from amp_ray.calibration.time_fit import TimeTrials
from amp_ray.clusters.constants import PRIOR_SIGMA
from amp_ray.inputs.experiment import Experiment
from amp_ray.strategies.strategy import Strategy
from support.experiments import small_experiment
from support.planted import Plant, planted_observations, small_strategies

TIMES = Choice(names=("host_scale", "nic_efficiency"))


def ratio(calibration: Calibration, name: str) -> float:
    """A fitted constant over its prior."""
    return next(each.ratio for each in calibration.constants if each.name == name)


def with_times(trials: Sequence[Observation], factors: Sequence[float]) -> list[Observation]:
    """Multiply measured times."""
    return [
        replace(trial, measured_s=(trial.measured_s or math.nan) * factor)
        for trial, factor in zip(trials, factors, strict=True)
    ]


def test_constants_at_their_priors_stay_there(small: Experiment, plant: Plant) -> None:
    found = calibrate(small, plant({}))
    assert [each.ratio for each in found.constants] == pytest.approx(
        [1.0] * found.num_constants, abs=0.02
    )


def test_a_factor_that_all_trials_have_in_common_is_found(small: Experiment, plant: Plant) -> None:
    trials = plant({"host_scale": 1.2})
    slow = calibrate(small, with_times(trials, [2.0] * len(trials)))
    assert ratio(slow, "program_scale") == pytest.approx(2.0, rel=0.2)
    assert (slow.mean_error("after_s") or 1) < 0.02
    assert "program_scale" in {each.name for each in calibrate(small, trials).refused}


def test_failed_trials_play_no_part_in_times_and_unsteady_ones_a_small_one(
    small: Experiment, plant: Plant
) -> None:
    trials = plant({"host_scale": 1.4})
    odd = replace(trials[0], measured_s=1.15 * (trials[0].measured_s or 1.0))
    unsteady = replace(odd, spread_s=0.5, noise=0.5)
    failed = replace(trials[1], outcome="failed", measured_s=None)
    with_them = calibrate(small, [unsteady, failed, *trials[2:]], TIMES)
    believed, without = (
        calibrate(small, found, TIMES) for found in ([odd, *trials[2:]], trials[2:])
    )
    moved = [
        abs(ratio(found, "host_scale") - ratio(without, "host_scale"))
        for found in (with_them, believed)
    ]
    assert 0.0 < moved[0] < 0.2 * moved[1]
    assert [trial.tells_time for trial in with_them.trials[:3]] == [True, False, True]
    assert with_them.trials[1].left_out_s is None


def test_the_rule_chooses_at_most_as_many_constants_as_it_may(
    small: Experiment, plant: Plant
) -> None:
    found = calibrate(small, plant({}), Choice(most_time=2, most_memory=0))
    assert found.num_constants <= 2


def test_the_rule_never_chooses_more_constants_than_trials(small: Experiment, plant: Plant) -> None:
    found = calibrate(small, plant({"host_scale": 1.4})[:1])
    assert (
        sum(each.name not in {"context_scale", "allocator_scale"} for each in found.constants) == 1
    )


def test_constants_that_trials_identify_do_not_depend_on_what_was_measured(
    small: Experiment, plant: Plant
) -> None:
    trials = plant({})
    scaled = with_times(trials, np.linspace(0.8, 1.2, len(trials)).tolist())
    names = [
        TimeTrials(
            predictor=Predictor(),
            observations=tuple(measured),
            prior_error=small.constants.time_error,
        ).identifiable(4)[0]
        for measured in (trials, scaled)
    ]
    assert names[0] == names[1] != []


def test_trials_that_contradict_each_other_leave_times_as_they_are(
    small: Experiment, plant: Plant
) -> None:
    trials = plant({})
    wrong = with_times(trials, [1.5 if index % 2 else 0.7 for index in range(len(trials))])
    found = calibrate(small, wrong)
    assert [constant.name for constant in found.constants if constant.name in TIME_CONSTANTS] == []
    assert any(refused.reason.startswith("not needed: a trial is") for refused in found.refused)
    assert found.time_error > 3 * small.constants.time_error


def test_every_constant_is_fitted_or_refused_with_a_reason(small: Experiment, plant: Plant) -> None:
    found = calibrate(small, plant({}))
    names = {each.name for each in found.constants} | {each.name for each in found.refused}
    assert names == set(PRIOR_SIGMA)
    assert all(each.reason for each in found.refused)
    assert found.num_constants + len(found.refused) == len(PRIOR_SIGMA)


def test_a_constant_that_no_trial_depends_on_is_told(
    small: Experiment, strategies: tuple[Strategy, ...], plant: Plant
) -> None:
    alone = [trial for trial in plant({}) if trial.strategy.dp == 4]
    reasons = {each.name: each.reason for each in calibrate(small, alone).refused}
    assert "depends on it" in reasons["profile_scale"]


def test_left_out_error_is_larger_than_the_error_of_the_fit(
    small: Experiment, plant: Plant
) -> None:
    trials = plant({"host_scale": 1.3})
    wobbles = np.random.default_rng(3).normal(0, 0.03, len(trials))
    found = calibrate(small, with_times(trials, np.exp(wobbles).tolist()), TIMES)
    assert (found.mean_error("left_out_s") or 0) > (found.mean_error("after_s") or 1)


def test_left_out_predictions_are_those_of_a_calibration_without_the_trial(
    small: Experiment, plant: Plant
) -> None:
    trials = plant({"host_scale": 1.3})
    wobbles = np.random.default_rng(3).normal(0, 0.03, len(trials))
    noisy = with_times(trials, np.exp(wobbles).tolist())
    found = calibrate(small, noisy, TIMES)
    for left in (0, 5, 11):
        others = calibrate(small, noisy[:left] + noisy[left + 1 :], TIMES)
        changed = replace(small, constants=replace(small.constants, **others.values()))
        again = calibrate(changed, [replace(noisy[left], experiment=changed)], Choice(most_time=0))
        assert found.trials[left].left_out_s == pytest.approx(again.trials[0].before_s, rel=3e-3)


def test_a_quick_calibration_is_close_to_a_thorough_one(small: Experiment, plant: Plant) -> None:
    trials = plant({"host_scale": 1.4, "intra_efficiency": 0.7})
    quick = calibrate(small, trials, thorough=False)
    thorough = calibrate(small, trials)
    assert quick.mean_error("after_s") == pytest.approx(thorough.mean_error("after_s"), abs=0.005)
    assert quick.mean_error("left_out_s") is None


def test_a_predictor_changes_nothing_but_the_time_it_takes(small: Experiment, plant: Plant) -> None:
    trials, predictor = plant({"host_scale": 1.4}), Predictor()
    calibrate(small, trials[:4], predictor=predictor)
    assert calibrate(small, trials, predictor=predictor) == calibrate(small, trials)


def test_order_of_trials_does_not_matter(small: Experiment, plant: Plant) -> None:
    trials = plant({"host_scale": 1.4})
    forwards, backwards = (calibrate(small, each) for each in (trials, trials[::-1]))
    for ours, theirs in zip(forwards.constants, backwards.constants, strict=True):
        assert ours.name == theirs.name
        assert ours.value == pytest.approx(theirs.value, rel=1e-6)


def test_out_of_memory_where_the_model_sees_room_raises_memory() -> None:
    tight = small_experiment(("device: T4, slots: 2", "device: T4, slots: 2, memory_gib: 2.6"))
    strategies = small_strategies(tight)
    trials = [
        replace(trial, outcome="oom", measured_s=None)
        for trial in planted_observations(tight, strategies, {})
    ]
    found = calibrate(tight, trials, Choice(names=("context_scale",)))
    assert ratio(found, "context_scale") > 1.0


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("hosts_scale",), "hosts_scale"),
        (("host_scale", "host_scale"), "once each"),
        ((), "at least one"),
        (("profile_scale",), "profile_scale is not identified"),
        (("context_scale",), "context_scale is not identified"),
    ],
)
def test_names_that_cannot_be_fitted_are_refused(
    small: Experiment, plant: Plant, names: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        calibrate(small, plant({}), Choice(names=names))


def test_fewer_usable_trials_than_named_constants_are_refused(
    small: Experiment, plant: Plant
) -> None:
    trials = plant({})[:3]
    trials[1:] = [replace(trial, outcome="failed", measured_s=None) for trial in trials[1:]]
    with pytest.raises(ValueError, match=r"2 constants .* found 1 of 3"):
        calibrate(small, trials, TIMES)


def test_no_trial_at_all_is_refused(small: Experiment) -> None:
    with pytest.raises(ValueError, match="no trial"):
        calibrate(small, [])


def noisy(trials: Sequence[Observation], factor: float, seed: int) -> list[Observation]:
    """Multiply measured times by a common factor and by 5 % of noise."""
    generator = np.random.default_rng(seed)
    return with_times(trials, (factor * generator.lognormal(0.0, 0.05, len(trials))).tolist())


def times_of(calibration: Calibration) -> set[str]:
    """Names of the fitted constants of time."""
    memory = {"context_scale", "allocator_scale"}
    return {constant.name for constant in calibration.constants} - memory


@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize("factor", [0.9, 1.0, 1.1])
def test_up_to_three_trials_move_a_common_factor_alone(
    small: Experiment, plant: Plant, number: int, factor: float
) -> None:
    trials = plant({"host_scale": 1.4})
    assert "host_scale" in times_of(calibrate(small, trials, thorough=False))
    few = noisy(trials, factor, seed=number)[:number]
    assert times_of(calibrate(small, few, thorough=False)) == {"program_scale"}


@pytest.mark.parametrize("factor", [0.86, 1.16])
@pytest.mark.parametrize("seed", range(8))
def test_after_five_trials_of_one_sign_the_rest_follows(
    small: Experiment, plant: Plant, factor: float, seed: int
) -> None:
    """However the trials were drawn: a program that is off by 14 % on all of them is off."""
    trials = noisy(plant({}), factor, seed)
    order = np.random.default_rng(seed).permutation(len(trials))
    drawn, rest = ([trials[index] for index in part] for part in (order[:5], order[5:]))
    found = calibrate(small, drawn)
    plans = [trial.plan for trial in rest]
    measured = np.log([trial.measured_s or math.nan for trial in rest])
    before = (Predictor().log_times(plans, Point()) - measured).mean()
    logs = {constant.name: math.log(constant.ratio) for constant in found.constants}
    after = (
        Predictor().log_times(plans, Point.of(tuple(logs), tuple(logs.values()))) - measured
    ).mean()
    assert abs(after) < 0.6 * abs(before)
