"""The door: all that a search, a score, a report or a test knows of a planner; who plans by name.

A planner answers for one experiment. Where it keeps tables, they belong to one process.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import entry_points
from typing import ClassVar, Final, Protocol, cast

from amp_ray import guests
from amp_ray.cost.estimate import Estimate, Result
from amp_ray.cost.timeline import Timeline
from amp_ray.errors import InputError, Where, placed
from amp_ray.inputs.experiment import Experiment
from amp_ray.inputs.strategy_file import Given
from amp_ray.strategies.candidate import AnyCandidate, Candidate
from amp_ray.strategies.strategy import Strategy

AMP_RAY: Final = "amp-ray"
"""The name of our own planner, the default."""

BUILT_IN: Final = (AMP_RAY, *guests.PLANNERS)
"""The planners of this package, imported by name: no module needs them."""

ENTRY_POINTS: Final = "amp_ray.planners"
"""The group of entry points by which other packages add planners: name = "module:class"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerTraits:
    """Facts about the estimates of a planner."""

    knows_prices: bool = False  # whether they tell what an iteration costs
    # Whether they rest on our constants: a calibration changes them, and the uncertainty of the
    # constants tells how far a time may be off
    has_constants: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionalCandidates:
    """Candidates that need not be planned where others are faster."""

    candidates: tuple[Candidate, ...] = ()
    # Lower bound on the time of any strategy of a candidate, infinite where there is none; above
    # the limit that is given it need not be the best bound that is known
    least_s: Callable[[Candidate, float], float] = lambda _, limit_s: limit_s
    # Time that strategies of a candidate are expected to take at least, unproven
    expected_s: Callable[[Candidate], float] = lambda _: math.inf
    # Where the required candidates are likely to be faster than all of these: of more devices
    # together, only those are planned that are expected to be fast, up to as many
    most_devices: int | None = None
    # So many of the fastest are wanted, and what ties with the fastest, all of them proven; 0 where
    # nothing but the fastest counts
    num_rows: int = 0
    # Makes the fastest strategies faster in the end; what it returns is no slower
    improve: Callable[[Estimate], Result] = lambda estimate: estimate
    # Strategies of no candidate, ranked where they are faster than those of the candidates
    extra_plans: Callable[[Sequence[Estimate]], list[Estimate]] = lambda _estimates: []


NO_CANDIDATES: Final = OptionalCandidates()


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """What there is to plan."""

    required: tuple[AnyCandidate, ...] = ()  # planned in any case
    optional: OptionalCandidates = NO_CANDIDATES  # planned only if they may be among the fastest
    # Whether they are the whole space, so that the least of their lower bounds bounds it
    are_whole_space: bool = False


class Planner(Protocol):
    """Plans and scores the strategies of one experiment, from which alone it is made."""

    traits: ClassVar[PlannerTraits]

    @property
    def relative_error(self) -> float:
        """Share by which two predictions must differ to be no tie."""
        ...

    def candidates(self, num_rows: int | None = None) -> Candidates:
        """List what there is to plan.

        Args:
            num_rows: First rows that matter: candidates may be optional that are proven not to be
                among them. None where every candidate is wanted.

        Raises:
            ValueError: If the experiment leaves none, with the limit that did it.
        """
        ...

    def plan(self, candidate: AnyCandidate) -> Result:
        """Give a candidate its cuts and devices, and estimate it."""
        ...

    def score(self, strategy: Strategy) -> Result:
        """Estimate a complete strategy."""
        ...

    def why_none(self, results: Sequence[Result]) -> str:
        """Say why none of these results of a search is feasible, and what comes closest to it."""
        ...

    def memory_parts(self, strategy: Strategy) -> list[dict[str, float]] | None:
        """Return what the peak of each stage is made of, in bytes; None where it is not known."""
        ...

    def timeline(self, strategy: Strategy) -> Timeline | None:
        """Return when every stage does what in one iteration; None where it is not known."""
        ...


def planner_names() -> tuple[str, ...]:
    """Return the names of all planners, those of other packages last."""
    added = (point.name for point in entry_points(group=ENTRY_POINTS))
    return tuple(dict.fromkeys((*BUILT_IN, *sorted(added))))


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerChoice:
    """The planner that has a name, for one experiment and variants of it."""

    name: str
    planner_class: type[Planner]

    def make(self, experiment: Experiment) -> Planner:
        """Return the planner of an experiment.

        Raises:
            InputError: If it cannot plan such an experiment.
        """
        make: Callable[..., Planner] = self.planner_class
        with placed(experiment.where()):
            return make(experiment=experiment)


def choose_planner(experiment: Experiment, name: str) -> PlannerChoice:
    """Choose the planner with a name.

    Raises:
        InputError: If no planner has this name.
    """
    # A profile of operators has no times of layers, whatever the space
    space = experiment.space if experiment.profile.operators is None else "operator"
    if name == AMP_RAY and space in guests.SPACES:
        planner_class = guests.load(
            guests.SPACES[space], f"search.space {space}", experiment.where()
        )
    else:
        asked_by_file = name == experiment.planner
        planner_class = load_planner(
            name, experiment.where("search", "planner") if asked_by_file else None
        )
    return PlannerChoice(name=name, planner_class=planner_class)


def make_planner(experiment: Experiment, name: str) -> Planner:
    """Choose the planner with a name, and make it for an experiment.

    Raises:
        InputError: If no planner has this name, or it cannot plan such an experiment.
    """
    return choose_planner(experiment, name).make(experiment)


def load_planner(name: str, where: Where | None = None) -> type[Planner]:
    """Return the class of a planner.

    Args:
        name: Ours, that of a guest, or of an entry point of another package.
        where: The place that names it, for messages.

    Raises:
        InputError: If no planner has this name.
    """
    if name == AMP_RAY:
        module = import_module("amp_ray.search.amp_ray_planner")
        return cast("type[Planner]", module.AmpRayPlanner)
    if name in guests.PLANNERS:
        return cast(
            "type[Planner]", guests.load(guests.PLANNERS[name], f"cost model {name}", where)
        )
    for point in entry_points(group=ENTRY_POINTS, name=name):
        return cast("type[Planner]", point.load())
    message = f"no planner has the name {name!r}; known: {', '.join(planner_names())}"
    raise InputError(message, where=where)


def evaluate(planner: Planner, entry: Given) -> Result:
    """Estimate a strategy that a user named; cuts that are left out are the planner's."""
    if entry.strategy is not None:
        return planner.score(entry.strategy)
    assert entry.candidate is not None
    return planner.plan(entry.candidate)
