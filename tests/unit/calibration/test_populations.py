from dataclasses import replace

import numpy as np
import pytest

from amp_ray.calibration.calibrate import calibrate
from amp_ray.calibration.observation import Observation
from amp_ray.calibration.populations import upper_class
from amp_ray.inputs.experiment import Experiment
from support.planted import Plant


def slowed(trials: list[Observation], indices: tuple[int, ...], slot_s: float) -> list[Observation]:
    """Let some trials wait in every slot of their pipelines."""
    return [
        replace(trial, measured_s=waited(trial, slot_s)) if index in indices else trial
        for index, trial in enumerate(trials)
    ]


def waited(trial: Observation, slot_s: float) -> float:
    """Measured seconds with a wait in every slot."""
    measured_s = trial.measured_s or 0.0
    return measured_s + slot_s * measured_s / trial.excess_s(0.0)


@pytest.mark.parametrize(
    ("values", "above"),
    [
        ([], []),
        ([1.0], [False]),
        ([1.0, 1.0, 1.0], [False] * 3),
        ([1.0, 2.0, 3.0, 4.0, 5.0], [False] * 5),
        ([0.0, 0.9, 0.1, 1.6], [False, True, False, True]),
    ],
)
def test_values_are_divided_only_at_a_gap(values: list[float], above: list[bool]) -> None:
    assert upper_class(np.array(values)).tolist() == above


def test_a_second_population_is_recognised_and_teaches_nothing(
    small: Experiment, plant: Plant
) -> None:
    trials = plant({"host_scale": 1.4})
    spoilt = slowed(trials, (0, 2, 5), slot_s=0.5)
    found = calibrate(small, spoilt)
    assert [index for index, each in enumerate(found.trials) if not each.tells_time] == [0, 2, 5]
    assert len(found.second_population) == 3
    rest = [trial for index, trial in enumerate(trials) if index not in {0, 2, 5}]
    assert found.values() == pytest.approx(calibrate(small, rest).values(), rel=1e-6)
    assert found.mean_error("after_s") == pytest.approx(
        calibrate(small, rest).mean_error("after_s"), abs=1e-9
    )
    assert "3 trials of a second population" in found.second_population_text


def test_a_wrong_constant_is_no_second_population(small: Experiment, plant: Plant) -> None:
    for ratios in ({}, {"host_scale": 1.5}, {"nic_efficiency": 0.6}, {"intra_efficiency": 0.3}):
        found = calibrate(small, plant(ratios))
        assert found.second_population == ()
        assert found.second_population_text == ""


def test_trials_that_are_all_slow_are_a_slow_site(small: Experiment, plant: Plant) -> None:
    trials = plant({})
    found = calibrate(small, slowed(trials, tuple(range(len(trials))), slot_s=0.5))
    assert found.second_population == ()


def test_half_of_the_trials_are_no_second_population(small: Experiment, plant: Plant) -> None:
    trials = plant({})[:2]
    assert calibrate(small, slowed(trials, (0,), slot_s=2.0)).second_population == ()
