"""Build a problem of as many placements of a candidate as the solver can take."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from amp_ray.cost.model import CostModel
from amp_ray.search.placement.graph import FlatGraph, Grower
from amp_ray.search.placement.nodes import ClassMoves, Parts, Scope, class_moves, node_classes
from amp_ray.search.placement.prices import Prices
from amp_ray.search.placement.problem import PlacementProblem, stage_needs
from amp_ray.strategies.candidate import Candidate

MOST_WORK_PER_CAP: Final = 12_000_000
"""Options of one problem times layers that a stage can end at: about 0.15 s per cap."""

MOST_OPTIONS: Final = 300_000
"""Options of one problem: to build as many takes about as long as to solve them."""

MOST_OPTIONS_WITH_ENDS: Final = 60_000
"""Options where it counts which nodes both ends share; many more are needed to tell."""

NARROWER: Final[tuple[tuple[Parts, bool], ...]] = (
    ("any", False),
    ("even", False),
    ("even", True),
    ("row", False),
    ("row", True),
)
"""How nodes are taken, and whether stages are pure: from all placements to the fewest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltProblem:
    """A problem, and which placements it holds."""

    problem: PlacementProblem
    scope: Scope


def build_problem(cost_model: CostModel, candidate: Candidate) -> BuiltProblem | None:
    """Build the problem of the placements of a candidate.

    Returns:
        The widest scope that is not too large. None where tensor-parallel groups do not fit
        into nodes, or where every scope is too large.
    """
    slots = [node.num_slots for node in cost_model.experiment.cluster.nodes]
    if (
        sum(own // candidate.options.tp * candidate.options.tp for own in slots)
        < candidate.num_devices
    ):
        return None
    for scope in _scopes(cost_model, candidate):
        problem = build_within(cost_model, candidate, scope)
        if problem is None:
            continue
        with_ends = _with_ends(cost_model, candidate, scope, problem)
        if with_ends is not None:
            return with_ends
        return BuiltProblem(problem=problem, scope=scope)
    return None


def build_within(
    cost_model: CostModel, candidate: Candidate, scope: Scope
) -> PlacementProblem | None:
    """Build the problem of the placements of a candidate within a scope.

    Args:
        cost_model: Of the experiment.
        candidate: Its tensor-parallel groups fit into nodes.
        scope: What is looked at.

    Returns:
        The problem; None where there are too many placements.
    """
    cluster = cost_model.experiment.cluster
    classes = node_classes(cluster, candidate.options.tp, pairs_matter=scope.pairs)
    moves: list[ClassMoves] = []
    for node_class in classes:
        own = class_moves(node_class, candidate.options.dp, scope)
        if own is None:
            return None
        moves.append(own)
    prices = Prices(cost_model=cost_model, candidate=candidate, classes=classes)
    grower = Grower(
        moves=tuple(moves), dp=candidate.options.dp, cut_rows=prices.cut_rows, scope=scope
    )
    levels = grower.levels(candidate.pp)
    if levels is None:
        return None
    return PlacementProblem(
        graph=FlatGraph(levels=levels),
        moves=tuple(moves),
        prices=prices,
        needs=stage_needs(cost_model, candidate, tied_counts=scope.ends),
        blocking=cost_model.experiment.traits.blocking_transfers,
    )


def _scopes(cost_model: CostModel, candidate: Candidate) -> Iterator[Scope]:
    """Yield scopes, from all placements to fewer and fewer of them."""
    pairs = bool(cost_model.experiment.cluster.pair_links)
    num_ends = cost_model.experiment.model.num_layers + 1 - candidate.pp
    most = min(MOST_OPTIONS, MOST_WORK_PER_CAP // num_ends)
    for parts, pure in NARROWER:
        for exact in dict.fromkeys((True, not pairs)):
            yield Scope(parts=parts, pure=pure, pairs=exact, max_options=most)


def _with_ends(
    cost_model: CostModel, candidate: Candidate, scope: Scope, problem: PlacementProblem
) -> BuiltProblem | None:
    """Build the problem again with the nodes of both ends in its states, if a weight is tied."""
    tied = cost_model.weights(candidate.options.tp).tied is not None and candidate.pp > 1
    if not tied or len(problem.graph.source) > MOST_OPTIONS_WITH_ENDS:
        return None
    most = min(scope.max_options, MOST_OPTIONS_WITH_ENDS)
    with_ends = replace(scope, ends=True, max_options=most)
    found = build_within(cost_model, candidate, with_ends)
    return None if found is None else BuiltProblem(problem=found, scope=with_ends)
