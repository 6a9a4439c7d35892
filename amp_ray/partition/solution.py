"""What the exact solver answers: a partition, or why there is none."""

from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionSolution:
    """The best partition, or the best one found within a budget of evaluations.

    Attributes:
        bounds: ``(0, ..., num_layers)``; stage ``s`` takes layers ``[bounds[s], bounds[s + 1])``.
        options: The option of each stage, by its index in `OptionTable`.
        value_s: The objective.
        slowest_s: The largest beat.
        lower_bound_s: No partition has a smaller objective; equals ``value_s`` once proven.
        num_evaluations: Caps on the slowest stage that were tried.
    """

    bounds: tuple[int, ...]
    options: tuple[int, ...]
    value_s: float
    slowest_s: float
    lower_bound_s: float
    num_evaluations: int

    @property
    def proven(self) -> bool:
        """Whether no partition is better."""
        return self.lower_bound_s == self.value_s


class InfeasibleReason(StrEnum):
    """Why no partition exists."""

    NO_PATH = "no path"
    TOO_FEW_LAYERS = "too few layers"
    MEMORY = "memory"
    NEEDED_LAYERS = "needed layers"


@dataclass(frozen=True, slots=True, kw_only=True)
class InfeasiblePartition:
    """No partition exists.

    Attributes:
        reason: For counting.
        detail: For people: one sentence with the numbers.
    """

    reason: InfeasibleReason
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PrunedPartition:
    """Every partition is worse than the bound that the caller gave.

    Attributes:
        lower_bound_s: No partition has a smaller objective.
        num_evaluations: Caps on the slowest stage that were tried.
    """

    lower_bound_s: float
    num_evaluations: int
