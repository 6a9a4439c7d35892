"""The interface of planners, and how to find a planner by its name.

Search, score, report and tests use planners through this interface only. A planner belongs to one
experiment and one process, since it may cache tables.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import ClassVar, Final, Protocol, cast

from amp_ray import guests
from amp_ray.cost.estimate import Estimate, Result
from amp_ray.cost.timeline import Timeline
from amp_ray.errors import InputError, Where, placed
from amp_ray.inputs.experiment import DIMENSIONS, Experiment, Space
from amp_ray.strategies.candidate import AnyCandidate, Candidate
from amp_ray.strategies.strategy import Strategy

AMP_RAY: Final = "amp-ray"
"""The name of our own planner, the default."""

_OURS: Final = "amp_ray.search.amp_ray_planner:AmpRayPlanner"

BUILT_IN: Final = (AMP_RAY, *guests.PLANNERS)
"""The planners of this package; they are imported by name, when needed."""

ENTRY_POINTS: Final = "amp_ray.planners"
"""The group of entry points by which other packages add planners: name = "module:class"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerTraits:
    """Facts about the estimates of a planner."""

    knows_prices: bool = False  # whether estimates include the cost of an iteration
    # Whether estimates use our constants: a calibration then changes the estimates, and the
    # constants' uncertainty gives an interval for the time
    has_constants: bool = False
    # Dimensions that it can choose; a search leaves out what the experiment opens besides them
    dimensions: tuple[str, ...] = DIMENSIONS


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionalCandidates:
    """Candidates that are skipped if others are proven or expected to be faster."""

    candidates: tuple[Candidate, ...] = ()
    # Lower bound on the time of any strategy of a candidate, infinite if there is no strategy; a
    # bound above the limit (second argument) need not be tight
    least_s: Callable[[Candidate, float], float] = lambda _, limit_s: limit_s
    # Unproven estimate of the least time of a candidate's strategies
    expected_s: Callable[[Candidate], float] = lambda _: math.inf
    # Limit on the sum of the candidates' devices; beyond it only the candidates with the least
    # expected times are planned. None for no limit.
    most_devices: int | None = None
    # Number of first rows that must be proven to be the fastest; 0 if only the fastest counts
    num_rows: int = 0
    # Strategies that take longer are not wanted
    limit_s: float = math.inf
    # Whether bounds are tightened one by one, when a candidate's turn comes
    is_lazy: bool = False
    # Improves the fastest strategies in the end; the result is never slower
    improve: Callable[[Estimate], Result] = lambda estimate: estimate
    # Strategies that belong to no candidate; they are ranked if faster than all other plans
    extra_plans: Callable[[Sequence[Estimate]], list[Estimate]] = lambda _estimates: []


Within = Callable[[int, int, float], OptionalCandidates]

NO_CANDIDATES: Final = OptionalCandidates()


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """The candidates of an experiment, required and optional."""

    required: tuple[AnyCandidate, ...] = ()  # planned in any case
    optional: OptionalCandidates = NO_CANDIDATES  # planned only if they may be among the fastest
    # The grids on some numbers of devices that may beat a time, given the least and the largest
    # number and the time. Those with idle devices are planned after the others. None if the others
    # cover them, or if devices may not be idle.
    within: Within | None = None
    # Whether they cover the whole space, so that their least lower bound holds for it
    are_whole_space: bool = False


class Planner(Protocol):
    """Plans and scores strategies of one experiment; its constructor takes only that."""

    traits: ClassVar[PlannerTraits]

    @property
    def experiment(self) -> Experiment:
        """The experiment, without the dimensions that the planner cannot choose."""
        ...

    @property
    def relative_error(self) -> float:
        """Relative difference of two predicted times below which they are a tie."""
        ...

    def candidates(self, num_rows: int | None = None) -> Candidates:
        """List the candidates to plan.

        Args:
            num_rows: Number of first rows that matter; candidates proven not to be among them may
                be optional. None if every candidate is wanted.

        Raises:
            ValueError: If the limits exclude every candidate; the message names the limit.
        """
        ...

    def plan(self, candidate: AnyCandidate) -> Result:
        """Choose the cuts and devices of a candidate, and estimate the result."""
        ...

    def score(self, strategy: Strategy) -> Result:
        """Estimate a complete strategy."""
        ...

    def why_none(self, results: Sequence[Result]) -> str:
        """Explain why no result of a search is feasible, and name the closest one."""
        ...

    def memory_parts(self, strategy: Strategy) -> list[dict[str, float]] | None:
        """Return the parts of each stage's peak memory, in bytes; None if unknown."""
        ...

    def timeline(self, strategy: Strategy) -> Timeline | None:
        """Return the predicted timeline of one iteration; None if unknown."""
        ...


def planner_names() -> tuple[str, ...]:
    """Return the names of all planners, with planners of other packages last."""
    added = (point.name for point in entry_points(group=ENTRY_POINTS))
    return tuple(dict.fromkeys((*BUILT_IN, *sorted(added))))


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerChoice:
    """A planner class with its name, to plan one experiment and its variants."""

    name: str
    planner_class: type[Planner]

    @property
    def traits(self) -> PlannerTraits:
        """Facts about the planner's estimates."""
        return self.planner_class.traits

    def make(self, experiment: Experiment) -> Planner:
        """Make a planner for an experiment.

        Raises:
            InputError: If the planner class does not support the experiment.
        """
        make: Callable[..., Planner] = self.planner_class
        with placed(experiment.where()):
            return make(experiment=experiment.only(self.traits.dimensions))


def choose_planner(experiment: Experiment, name: str | None = None) -> PlannerChoice:
    """Choose the planner with a name, by default the one that the experiment names.

    Raises:
        InputError: If no planner has this name.
    """
    name = name or experiment.planner
    # A profile of operators has no times of layers, whatever the space
    space = experiment.space if experiment.profile.operators is None else "operator"
    if name == AMP_RAY:
        where: Where | None = experiment.where()
    else:
        where = experiment.where("search", "planner") if name == experiment.planner else None
    return PlannerChoice(name=name, planner_class=load_planner(name, where, space=space))


def make_planner(experiment: Experiment, name: str) -> Planner:
    """Choose the planner with a name, and make it for an experiment.

    Raises:
        InputError: If no planner has this name, or it does not support the experiment.
    """
    return choose_planner(experiment, name).make(experiment)


def load_planner(
    name: str, where: Where | None = None, *, space: Space = "uniform"
) -> type[Planner]:
    """Return the class of a planner.

    It may be ours, a guest, or an entry point of another package. For some spaces our planner is a
    separate class.

    Raises:
        InputError: If no planner has this name.
    """
    place, setting = guests.PLANNERS.get(name), f"cost model {name}"
    if name == AMP_RAY:
        place, setting = guests.SPACES.get(space, _OURS), f"search.space {space}"
    if place is not None:
        return cast("type[Planner]", guests.load(place, setting, where))
    for point in entry_points(group=ENTRY_POINTS, name=name):
        return cast("type[Planner]", point.load())
    message = f"no planner has the name {name!r}; known: {', '.join(planner_names())}"
    raise InputError(message, where=where)
