import math
from pathlib import Path

import numpy as np
import pytest

from amp_ray.calibration.calibration import SCOPES
from amp_ray.calibration.predictions import (
    MEMORY_CONSTANTS,
    PRIOR,
    TIME_CONSTANTS,
    Point,
    Predictor,
)
from amp_ray.clusters.constants import PRIOR_SIGMA, PROGRAM_SCALE, Constants
from amp_ray.cost.model import CostModel
from amp_ray.inputs.experiment import Experiment
from amp_ray.runtime.files import load_experiment
from amp_ray.strategies.strategy import Strategy
from support.checked import grid_of


def test_points_are_equal_by_value_in_any_order() -> None:
    assert Point.of(["a", "b"], [1.0, 2.0]) == Point.of(["b", "a"], [2.0, 1.0])


def test_a_constant_at_its_prior_is_left_out_of_a_point() -> None:
    assert Point.of(["host_scale"], [0.0]) == PRIOR


def test_moving_adds_up_and_back_to_the_prior() -> None:
    assert PRIOR.moved("host_scale", 0.5).moved("host_scale", -0.5) == PRIOR


def test_a_point_multiplies_constants() -> None:
    point = Point.of(["nic_efficiency"], [math.log(0.5)])
    prior = Constants()
    assert point.constants(prior).nic_efficiency == pytest.approx(0.5 * prior.nic_efficiency)


def test_every_constant_with_a_prior_has_a_scope() -> None:
    assert set(PRIOR_SIGMA) == set(SCOPES)


def test_prediction_at_the_prior_is_the_cost_models(
    small: Experiment, strategies: tuple[Strategy, ...]
) -> None:
    (found,) = Predictor().predict([(small, strategies[0])], PRIOR)
    estimate = CostModel(experiment=small).estimate(strategies[0])
    assert found.time_s == estimate.iteration_time_s
    assert found.peaks_bytes == estimate.peak_memory_bytes


def test_a_known_prediction_is_remembered(
    small: Experiment, strategies: tuple[Strategy, ...]
) -> None:
    predictor = Predictor()
    first = predictor.predict([(small, strategies[0])], PRIOR)[0]
    assert predictor.predict([(small, strategies[0])], PRIOR)[0] is first


def test_slope_tells_what_a_small_change_does(
    small: Experiment, strategies: tuple[Strategy, ...]
) -> None:
    plans = [(small, strategy) for strategy in strategies]
    predictor = Predictor()
    (slopes,) = predictor.time_slopes(plans, ["nic_efficiency"], PRIOR).T
    change = predictor.log_times(plans, PRIOR.moved("nic_efficiency", 0.01)) - predictor.log_times(
        plans, PRIOR
    )
    assert change == pytest.approx(0.01 * slopes, abs=2e-4)
    assert (slopes <= 0).all()


@pytest.mark.parametrize("scale", [0.4, 2.0])
def test_the_common_factor_multiplies_every_time(
    small: Experiment, strategies: tuple[Strategy, ...], repository: Path, scale: float
) -> None:
    measured = load_experiment(repository / "experiments" / "homogeneous.yaml")
    point = PRIOR.moved(PROGRAM_SCALE, math.log(scale))
    whole = grid_of(tp=2, dp=4, pp=2, num_micro_batches=8)
    plans = [(small, strategy) for strategy in strategies]
    plans.append((measured, Strategy.uniform(whole, (0, 15, measured.model.num_layers))))
    change = Predictor().log_times(plans, point) - Predictor().log_times(plans, PRIOR)
    assert change == pytest.approx(np.full(len(plans), math.log(scale)), abs=1e-12)


def test_constants_of_memory_do_not_change_times(
    small: Experiment, strategies: tuple[Strategy, ...]
) -> None:
    plans = [(small, strategy) for strategy in strategies]
    assert not Predictor().time_slopes(plans, MEMORY_CONSTANTS, PRIOR).any()


def test_constants_of_time_do_not_change_peaks(
    small: Experiment, strategies: tuple[Strategy, ...]
) -> None:
    predictor, plan = Predictor(), (small, strategies[0])
    moved = Point.of(TIME_CONSTANTS, np.full(len(TIME_CONSTANTS), 0.3))
    assert (
        predictor.predict([plan], moved)[0].peaks_bytes
        == predictor.predict([plan], PRIOR)[0].peaks_bytes
    )


def test_peaks_are_sums_of_parts_that_grow_with_one_constant_each(
    small: Experiment, strategies: tuple[Strategy, ...]
) -> None:
    plans = [(small, strategy) for strategy in strategies]
    logs = [math.log(1.5), math.log(0.8)]
    predictor = Predictor()

    def peaks(point: Point) -> list[float]:
        found = predictor.predict(plans, point)
        return [peak for prediction in found for peak in prediction.peaks_bytes]

    each = [
        peaks(Point.of([name], [log])) for name, log in zip(MEMORY_CONSTANTS, logs, strict=True)
    ]
    added = np.array(each).sum(axis=0) - np.array(peaks(PRIOR))
    assert peaks(Point.of(MEMORY_CONSTANTS, logs)) == pytest.approx(added.tolist(), rel=1e-12)
