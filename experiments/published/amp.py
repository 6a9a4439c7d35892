"""Figures of the published AMP experiments."""

from collections.abc import Sequence
from typing import Final

from amp_ray.calibration.calibrate import Choice, calibrate
from amp_ray.calibration.calibration import Calibration, apply_calibration
from amp_ray.calibration.observation import Observation
from amp_ray.cost.model import CostModel
from amp_ray.inputs.experiment import Experiment
from amp_ray.strategies.strategy import Strategy
from published.evaluation import Metrics, Predicted, band, predict, with_values
from published.metrics import (
    bias,
    kendall,
    mean_absolute_error,
    precision_and_recall,
    regret,
    spearman,
)

CHOICES: Final = {
    "3 by the rule": Choice(most_time=3, most_memory=0),
    "3 named": Choice(names=("host_scale", "intra_efficiency", "nic_efficiency")),
    "8 by the rule": Choice(),
}
"""The named three are what neither a data sheet nor a layer profile can tell: how fast the host
launches, and what share of two kinds of links collectives reach. They were named after the errors
of several threes had been seen; the rule looks at no measurement."""

NUM_BEST: Final = 3
"""Best predicted strategies that are listed, because a later measurement can check them."""


def metrics(predicted: Predicted) -> Metrics:
    """Return what the table is judged by."""
    ours, theirs = predicted.times()
    precision, recall = precision_and_recall(*predicted.failures())
    return {
        "spearman": spearman(ours, theirs),
        "kendall": kendall(ours, theirs),
        "mean_error": mean_absolute_error(ours, theirs),
        "bias": bias(ours, theirs),
        "regret": regret(ours, theirs),
        "failure_precision": precision,
        "failure_recall": recall,
    }


def calibrations(observations: list[Observation]) -> dict[str, Calibration]:
    """Calibrate on the homogeneous experiment in every way of `CHOICES`."""
    experiment = observations[0].experiment
    return {label: calibrate(experiment, observations, how) for label, how in CHOICES.items()}


def homogeneous(
    observations: list[Observation], calibrations: dict[str, Calibration], num_draws: int
) -> dict[str, Metrics]:
    """Return the figures of the homogeneous experiment, by what was measured before.

    Args:
        observations: The published trials.
        calibrations: On them.
        num_draws: Of the band; none for 0.
    """
    figures: dict[str, Metrics] = {
        "no measurement": {"num_constants": 0, **metrics(predict(observations))}
    }
    for label, calibration in calibrations.items():
        left_out = calibration.mean_error("left_out_s")
        assert left_out is not None
        figures[label] = {
            "num_constants": calibration.num_constants,
            **metrics(predict(observations, with_values(calibration))),
            "left_out_error": left_out,
            "time_error": calibration.time_error,
        }
    if num_draws:
        figures["band of no measurement"] = band(observations, metrics, num_draws)
    return figures


def transferred(
    experiment: Experiment, strategies: Sequence[Strategy], calibrations: dict[str, Calibration]
) -> dict[str, dict[str, float | str]]:
    """Return what is predicted for an experiment whose measurements are not here.

    Args:
        experiment: One of the two heterogeneous experiments.
        strategies: The published ones.
        calibrations: On the homogeneous experiment.
    """
    cases = {"no measurement": experiment} | {
        label: apply_calibration(calibration, experiment, transfer=True)
        for label, calibration in calibrations.items()
    }
    figures: dict[str, dict[str, float | str]] = {}
    for label, case in cases.items():
        model = CostModel(experiment=case)
        estimates = [model.estimate(strategy) for strategy in strategies]
        infeasible = [estimate for estimate in estimates if not estimate.feasible]
        best = sorted(
            (estimate for estimate in estimates if estimate.feasible),
            key=lambda estimate: estimate.iteration_time_s,
        )
        figures[label] = {
            "num_strategies": len(estimates),
            "num_told_to_fail": len(infeasible),
            "expected_failures": sum(estimate.failure_probability for estimate in estimates),
            **{
                f"best_{place}": f"tp {plan.tp} dp {plan.dp} pp {plan.pp} micro "
                f"{plan.micro_batch_size}: {estimate.iteration_time_s:.3f} s"
                for place, estimate in enumerate(best[:NUM_BEST], start=1)
                for plan in [estimate.strategy]
            },
        }
    return figures
