"""Base class and helpers of all published planners."""

from collections.abc import Sequence
from typing import ClassVar, Final

from amp_ray.cost.estimate import Result
from amp_ray.errors import InputError
from amp_ray.inputs.experiment import DEGREES
from amp_ray.search.planner import PlannerTraits
from amp_ray.search.ranking import why_none
from amp_ray.strategies.candidate import AnyCandidate, GroupsCandidate
from amp_ray.strategies.strategy import Strategy


class PublishedPlanner:
    """Base of planners whose formulas have no error estimate, no prices and no parts of memory."""

    traits: ClassVar = PlannerTraits(dimensions=(*DEGREES, "sequence_parallel"))
    relative_error: Final = 0.0  # the publications state none

    def why_none(self, results: Sequence[Result]) -> str:
        """Explain why no result is feasible, and name the closest one."""
        return why_none(results)

    def memory_parts(self, _strategy: Strategy) -> None:
        """Return None: the formulas do not divide the peak memory into parts."""

    def timeline(self, _strategy: Strategy) -> None:
        """Return None: the formulas have no schedule."""


def free_groups(candidate: AnyCandidate, cost_model: str) -> GroupsCandidate:
    """Return a candidate, after checking that its stages are still to be chosen.

    Raises:
        InputError: If tp, dp and pp are chosen already.
    """
    if isinstance(candidate, GroupsCandidate):
        return candidate
    message = f"cost model {cost_model} chooses tp, dp and pp of every stage: name a whole strategy"
    raise InputError(message)
