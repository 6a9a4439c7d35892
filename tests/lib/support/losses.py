"""Compares the loss curves of two trainings."""

from collections.abc import Sequence
from typing import Final

TOLERANCE: Final = 1e-5
"""Maximum difference of losses in single precision, whose parts are added in different orders."""


def largest_difference(found: Sequence[float], expected: Sequence[float]) -> float:
    """Return the largest difference between two loss curves in the steps that both have.

    On a busy machine a trial whose time is uncertain adds steps.
    """
    return max(abs(one - other) for one, other in zip(found, expected, strict=False))
