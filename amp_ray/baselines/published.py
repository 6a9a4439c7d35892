"""What all published planners share."""

from amp_ray.errors import InputError
from amp_ray.spec.candidate import AnyCandidate, GroupsCandidate


class PublishedPlanner:
    """A planner by formulas that state no error of theirs."""

    @property
    def relative_error(self) -> float:
        """None is published."""
        return 0.0


def free_groups(candidate: AnyCandidate, cost_model: str) -> GroupsCandidate:
    """Return a candidate whose stages are still to be chosen.

    Raises:
        InputError: If tp, dp and pp are chosen already.
    """
    if isinstance(candidate, GroupsCandidate):
        return candidate
    message = f"cost model {cost_model} chooses tp, dp and pp of every stage: name a whole strategy"
    raise InputError(message)
