"""What predictions are judged by: order, error, failures found, regret."""

from collections.abc import Sequence
from itertools import combinations

import numpy as np

from amp_ray.arrays import FloatArray


def mean_absolute_error(predicted: FloatArray, measured: FloatArray) -> float:
    """Return the mean absolute relative error."""
    return float(np.abs(predicted / measured - 1.0).mean())


def median_absolute_error(predicted: FloatArray, measured: FloatArray) -> float:
    """Return the median absolute relative error."""
    return float(np.median(np.abs(predicted / measured - 1.0)))


def bias(predicted: FloatArray, measured: FloatArray) -> float:
    """Return the median relative error with its sign."""
    return float(np.median(predicted / measured - 1.0))


def spearman(predicted: FloatArray, measured: FloatArray) -> float:
    """Return Spearman's correlation of orders; equal values share their mean place."""
    return float(np.corrcoef(_places(predicted), _places(measured))[0, 1])


def kendall(predicted: FloatArray, measured: FloatArray) -> float:
    """Return Kendall's tau-b over all pairs.

    Example:
        >>> round(kendall(np.array([1.0, 2.0, 3.0]), np.array([1.0, 3.0, 2.0])), 4)
        0.3333
    """
    upper = np.triu_indices(len(measured), 1)
    ours, theirs = (np.sign(np.subtract.outer(each, each))[upper] for each in (predicted, measured))
    return float((ours * theirs).sum() / np.sqrt((ours**2).sum() * (theirs**2).sum()))


def pair_agreement(
    groups: Sequence[tuple[FloatArray, FloatArray]], *, apart_fraction: float = 0.0
) -> float:
    """Return Kendall's tau over the pairs of several groups, without pairs across groups.

    Args:
        groups: Predicted and measured values of each group.
        apart_fraction: Pairs count whose measured values lie further apart than this share.
    """
    signs = [
        np.sign((predicted[i] - predicted[j]) * (measured[i] - measured[j]))
        for predicted, measured in groups
        for i, j in combinations(range(len(measured)), 2)
        if max(measured[i], measured[j]) > (1.0 + apart_fraction) * min(measured[i], measured[j])
    ]
    return float(np.mean(signs))


def regret(predicted: FloatArray, measured: FloatArray) -> float:
    """Return how much slower the best predicted strategy is than the best measured one."""
    return float(measured[int(np.argmin(predicted))] / measured.min() - 1.0)


def precision_and_recall(predicted: Sequence[bool], failed: Sequence[bool]) -> tuple[float, float]:
    """Return the share of told failures that failed, and of failures that were told.

    Nothing told is never wrong; nothing failed leaves nothing to miss.
    """
    hits = sum(ours and theirs for ours, theirs in zip(predicted, failed, strict=True))
    precision = hits / sum(predicted) if any(predicted) else 1.0
    return precision, hits / sum(failed) if any(failed) else 1.0


def _places(values: FloatArray) -> FloatArray:
    """Return each value's place in the order, equal values the mean of theirs."""
    below = (values[:, None] > values[None, :]).sum(axis=1)
    equal = (values[:, None] == values[None, :]).sum(axis=1)
    places: FloatArray = below + (equal - 1) / 2
    return places
