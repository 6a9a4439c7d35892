"""Recognise a second population: trials that are slower than any constant explains."""

from collections.abc import Callable
from typing import Final

import numpy as np

from amp_ray.arrays import BoolArray, FloatArray
from amp_ray.calibration.linear import LinearProblem, fit_linear

UNEXPLAINED: Final = 3.0
"""Sigmas of a prediction from the other trials; chance alone exceeds them once in 700 trials."""

_MOST_ROUNDS: Final = 4  # the split and the fit to its lower part settle in two or three


def upper_class(values: FloatArray) -> BoolArray:
    """Return which values lie beyond the gap that divides them in two; none without a gap.

    The division is the one with the least variance within both parts, which needs no parameter. It
    is a gap if it is wider than every gap in the lower part and than its standard deviation.

    References:
        Otsu, A threshold selection method from gray-level histograms, IEEE Trans. SMC 1979.

    Example:
        >>> upper_class(np.array([0.1, 0.9, 0.0, 0.8])).tolist()
        [False, True, False, True]
        >>> upper_class(np.array([1.0, 2.0, 3.0, 4.0])).tolist()
        [False, False, False, False]
    """
    nothing = np.zeros(len(values), dtype=np.bool_)
    ordered, below = np.sort(values), np.arange(1, len(values))
    if not len(below):
        return nothing
    sums = np.cumsum(ordered)[:-1]
    means, means_above = sums / below, (ordered.sum() - sums) / (len(values) - below)
    between = below * (len(values) - below) * (means_above - means) ** 2
    last = int(np.argmax(between))
    lower = ordered[: last + 1]
    if ordered[last + 1] - lower[-1] <= max(lower.std(), np.diff(lower).max(initial=0.0)):
        return nothing
    above: BoolArray = values > lower[-1]
    return above


def second_population(
    problem: LinearProblem, excess_s: Callable[[FloatArray], FloatArray]
) -> BoolArray:
    """Return which trials belong to a second population, shape ``(num_trials,)``.

    They are less than half of the trials, lie beyond a gap in the measured seconds per slot of the
    pipeline that the constants leave, and the fit to the other trials does not explain them: half
    of them or more are slower than its prediction by `UNEXPLAINED` of its sigmas, whose error is at
    least the one that was expected. A wrong constant leaves such a gap too, but the other trials
    then show it, or the prediction is as uncertain.

    Args:
        problem: Logarithms of predicted over measured times, with priors so wide that the constants
            explain whatever they can.
        excess_s: From such logarithms to measured minus predicted seconds per slot.
    """
    nothing = np.zeros(len(problem.offset), dtype=np.bool_)
    fit, slow = fit_linear(problem), nothing
    for _ in range(_MOST_ROUNDS):
        before = slow
        slow = upper_class(excess_s(problem.offset + problem.slopes @ fit.values))
        if not 0 < 2 * slow.sum() < len(slow):
            return nothing
        fit = fit_linear(problem.only(~slow))
        if (slow == before).all():
            break
    missed = problem.offset + problem.slopes @ fit.values
    variance = np.einsum("ij,jk,ik->i", problem.slopes, fit.covariance, problem.slopes)
    sigmas = -missed / np.sqrt(variance + problem.sigma(max(fit.error, problem.prior_error)) ** 2)
    return slow if np.median(sigmas[slow]) > UNEXPLAINED else nothing
