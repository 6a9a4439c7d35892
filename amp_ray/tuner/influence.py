"""One trial has one voice: how far a single one may move plans that nobody has run."""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from amp_ray.calibration.linear import LinearProblem, fit_linear

FloatArray = NDArray[np.float64]

_ALMOST: Final = 1e-9
"""Relative room below a limit, so that rounding does not cross it."""


def influences(problem: LinearProblem, slopes: FloatArray) -> FloatArray:
    """Return what each trial has changed: predictions with it minus predictions without it.

    Args:
        problem: The calibration as a linear model around its mode.
        slopes: Shape ``(num_plans, num_constants)``. How plans' times change with its constants.

    Returns:
        Shape ``(num_trials, num_plans)``, of logarithms.
    """
    values = fit_linear(problem).values
    moved = [
        values - fit_linear(problem.without(trial)).values for trial in range(len(problem.offset))
    ]
    changes: FloatArray = np.array(moved).reshape(len(moved), len(values)) @ slopes.T
    return changes


def limit_influences(log_mean: FloatArray, changes: FloatArray, error: float) -> FloatArray:
    """Take back so much of every trial's influence that alone it turns no certain order.

    Two plans that lie further apart than the model's error without the trial stay in their order
    with it. Plans that lie closer are ties, and may change places. What a trial has changed in all
    plans alike turns no order and is kept. What several trials say together is in none of their
    own influences, and is not limited.

    ``log_mean`` (num_plans,) has the expected logarithms of times with all trials, ``changes``
    (num_trials, num_plans) what each trial has changed of them; ``error`` is the lognormal
    sigma of a prediction.

    Returns:
        Expected logarithms of times, shape ``(num_plans,)``.
    """
    limited = log_mean.copy()
    for change in changes:
        share = _share(log_mean - change, change, error)
        if share < 1.0:
            limited -= (1.0 - share) * (change - np.median(change))
    return limited


def _share(before: FloatArray, change: FloatArray, error: float) -> float:
    """Return the largest share of a change that turns no certain order."""
    if not len(change) or change.max() - change.min() <= error:
        return 1.0
    ahead = before[None, :] - before[:, None]
    closing = change[:, None] - change[None, :]
    turned = (ahead > error) & (closing >= ahead)
    if not turned.any():
        return 1.0
    return float((ahead[turned] / closing[turned]).min()) * (1.0 - _ALMOST)
