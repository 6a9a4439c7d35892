"""Whether two trainings are the same: loss curves beside each other."""

from collections.abc import Sequence
from typing import Final

TOLERANCE: Final = 1e-5
"""Of losses in single precision, which ranks add up in another order."""


def largest_difference(found: Sequence[float], expected: Sequence[float]) -> float:
    """Return how far two loss curves are apart, which must be equally long."""
    return max(abs(one - other) for one, other in zip(found, expected, strict=True))
