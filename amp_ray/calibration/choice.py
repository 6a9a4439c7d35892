"""The rule that chooses which constants to fit, independent of measured times."""

from collections.abc import Sequence
from typing import Final

import numpy as np

from amp_ray.arrays import FloatArray
from amp_ray.clusters.constants import PRIOR_SIGMA

# The rule fits a constant only if the trials leave at most this share of its prior uncertainty
IDENTIFIED_SHARE: Final = 0.9
# The same for a constant that the user names: above it, the result would be the prior
TOLD_SHARE: Final = 0.99
NO_EFFECT: Final = 1e-6  # relative change of a time that is only rounding


def prior_sigma(names: Sequence[str]) -> FloatArray:
    """Return the prior's sigma of constants, shape ``(num_names,)``."""
    return np.array([PRIOR_SIGMA[name] for name in names], dtype=np.float64)


def prior_effects(slopes: FloatArray, names: Sequence[str]) -> FloatArray:
    """Return the effect of each constant's prior uncertainty on the predictions.

    Slopes are ``d log time / d log constant``, shape ``(num_trials, num_names)``; the result, shape
    ``(num_names,)``, is the root mean square over trials of the relative change.
    """
    scaled = slopes * prior_sigma(names)
    return np.sqrt((scaled**2).mean(axis=0)) if len(scaled) else np.zeros(len(names))


def order_by_effect(slopes: FloatArray, names: Sequence[str], most: int) -> list[str]:
    """Choose constants by the effect of their prior uncertainty beyond that of chosen ones.

    This is the order of a pivoted QR factorisation of the slopes, shape ``(num_trials,
    num_names)``, in units of the priors: first the constant with the largest effect on these
    trials, then the one with the largest effect that the first cannot explain, and so on; the
    earlier name wins a tie. Two constants that change the trials in the same way are therefore not
    both chosen. Measured times are not used, so a wrong measurement cannot change the choice.
    """
    rest = slopes * prior_sigma(names)
    chosen: list[int] = []
    for _ in range(min(most, *rest.shape)):
        effects = np.sqrt((rest**2).mean(axis=0))
        effects[chosen] = 0.0
        best = int(np.argmax(effects))
        if effects[best] <= NO_EFFECT:
            break
        chosen.append(best)
        direction = rest[:, best] / np.linalg.norm(rest[:, best])
        rest = rest - np.outer(direction, direction @ rest)
    return [names[index] for index in chosen]


def identified(covariance: FloatArray, names: Sequence[str]) -> FloatArray:
    """Return the share of each prior uncertainty that a posterior covariance leaves."""
    shares: FloatArray = np.sqrt(np.diag(covariance)) / prior_sigma(names)
    return shares


def not_identified(share: float, num_trials: int, largest: float = IDENTIFIED_SHARE) -> str:
    """Return the reason why a constant is not identified."""
    return (
        f"not identified: {num_trials} trials leave {100 * share:.0f} % of its prior uncertainty "
        f"(at most {100 * largest:.0f} % is asked for)"
    )
