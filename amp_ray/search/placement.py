"""The space of placements: a uniform candidate on the devices that suit each stage best.

Uniform tp, dp and pp, with any assignment of devices to ranks. The order of nodes over stages, the
cuts and the memory are chosen together: `plan_placement` poses all orders, up to equal nodes, as
one partition problem, and judges the best answers by the simulated schedule.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, permutations
from typing import Final

import numpy as np

from amp_ray.cost.estimate import Estimate
from amp_ray.cost.model import CostModel
from amp_ray.cost.topology import IntArray
from amp_ray.search.cuts import NO_LIMIT, best_bounds, even_block_bounds, last_with_parameters
from amp_ray.search.placement_graph import Grower
from amp_ray.search.placement_nodes import ClassMoves, class_moves, node_classes
from amp_ray.search.placement_prices import Prices
from amp_ray.search.placement_problem import PlacementProblem, StageNeeds
from amp_ray.search.placement_ranks import Walk
from amp_ray.search.placement_tail import Placed, TailSearch, without_limits
from amp_ray.search.ranking import SIGNIFICANT_DIGITS
from amp_ray.spec.strategy import Candidate, Strategy

MOST_OPTIONS: Final = 400_000
"""Options of one problem: as many take about a tenth of a second per cap on the slowest beat."""

MOST_STEPS: Final = 10_000
"""Ways to give units that are explored for one class: about a tenth of a second."""

MOST_LEADERS: Final = 6
"""Placements that are simulated, the best by the objective first."""

MOST_ORDERS: Final = 24
"""Orders of whole nodes that are tried where tensor-parallel groups span nodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """One way to look at the placements of a candidate, from all of them to fewer and fewer.

    Args:
        even: Whether parts of nodes are taken in equal parts only.
        pairs_matter: Whether links of single pairs of nodes count.
    """

    even: bool
    pairs_matter: bool

    @property
    def is_whole(self) -> bool:
        """Whether no placement is left out and none is mispriced."""
        return self.pairs_matter and not self.even


SPACES: Final = tuple(
    Space(even=even, pairs_matter=pairs_matter)
    for pairs_matter in (True, False)
    for even in (False, True)
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementSolution:
    """The placements that are best by the objective: closed form of the pipeline, and the tail.

    Args:
        leaders: Complete strategies, best first.
        value_s: Objective of the first; None where nothing fits.
        lower_bound_s: No placement with tensor-parallel groups inside nodes has a smaller
            objective; None where not all of them were looked at.
    """

    leaders: tuple[Strategy, ...]
    value_s: float | None = None
    lower_bound_s: float | None = None


def plan_placement(cost_model: CostModel, candidate: Candidate) -> Estimate:
    """Choose devices and cuts of a candidate, and estimate the result.

    Never worse than the candidate with rank ``r`` on device ``r``: that is among what is judged.

    Args:
        cost_model: Of the experiment.
        candidate: Degrees that the model can be divided by.

    Returns:
        The best estimate. Where nothing fits, the one that would be best without limits.
    """
    solution = solve_placement(cost_model, candidate)
    default = tuple(range(candidate.num_devices))
    placements = dict.fromkeys((default, *(leader.placement for leader in solution.leaders)))
    strategies = dict.fromkeys(_key(leader) for leader in solution.leaders)
    for placement in placements:
        strategies.setdefault((placement, _pipeline_bounds(cost_model, candidate, placement)))
    estimates = [
        cost_model.estimate(Strategy.uniform(candidate, bounds, placement))
        for placement, bounds in strategies
    ]
    return min(estimates, key=_order)


def solve_placement(cost_model: CostModel, candidate: Candidate) -> PlacementSolution:
    """Find the placements that are best by the objective.

    Args:
        cost_model: Of the experiment.
        candidate: Degrees that the model can be divided by.
    """
    cluster = cost_model.experiment.cluster
    if any(node.num_slots % candidate.tp for node in cluster.nodes):
        return _whole_nodes(cost_model, candidate)
    for space in SPACES:
        if not (space.pairs_matter or cluster.pair_links):
            break
        problem = _problem(cost_model, candidate, space)
        if problem is not None:
            return _solved(problem, is_whole=space.is_whole)
    return _whole_nodes(cost_model, candidate)


def _solved(problem: PlacementProblem, *, is_whole: bool) -> PlacementSolution:
    """Search a problem, and give its best placements as strategies."""
    search = TailSearch(problem=problem)
    search.run()
    if not search.found:
        placed = without_limits(problem)
        return PlacementSolution(leaders=() if placed is None else (_strategy(problem, placed),))
    found = sorted(search.found, key=lambda placed: (placed.value_s, placed.tail_s))
    return PlacementSolution(
        leaders=tuple(_strategy(problem, placed) for placed in found[:MOST_LEADERS]),
        value_s=found[0].value_s,
        lower_bound_s=search.lower_bound_s if is_whole else None,
    )


def _strategy(problem: PlacementProblem, placed: Placed) -> Strategy:
    """Give a solution its devices."""
    steps, cut_rows = problem.path(placed.options)
    walk = Walk(moves=problem.moves, prices=problem.prices)
    placement = walk.placement(steps, cut_rows)
    return Strategy.uniform(problem.prices.candidate, placed.bounds, placement)


def _problem(
    cost_model: CostModel, candidate: Candidate, space: Space
) -> PlacementProblem | None:
    """Pose all placements of a candidate; None where there are too many."""
    cluster = cost_model.experiment.cluster
    classes = node_classes(cluster, candidate.tp, pairs_matter=space.pairs_matter)
    found: list[ClassMoves] = []
    for node_class in classes:
        moves = class_moves(node_class, candidate.dp, even=space.even, max_steps=MOST_STEPS)
        if moves is None:
            return None
        found.append(moves)
    prices = Prices(cost_model=cost_model, candidate=candidate, classes=classes)
    grower = Grower(moves=tuple(found), dp=candidate.dp, cut_rows=prices.cut_rows)
    levels = grower.levels(candidate.pp, MOST_OPTIONS)
    if levels is None:
        return None
    return PlacementProblem(
        levels=levels,
        moves=tuple(found),
        prices=prices,
        needs=_needs(cost_model, candidate),
        blocking=cost_model.experiment.traits.blocking_transfers,
    )


def _needs(cost_model: CostModel, candidate: Candidate) -> StageNeeds:
    """Return what stages need, whatever they run on."""
    model, traits = cost_model.experiment.model, cost_model.experiment.traits
    memory = cost_model.costs(candidate).memory
    sizes = {float(device.memory_bytes) for device in cost_model.experiment.cluster.device_types}
    starts = {
        size: memory.earliest_starts(np.full(candidate.pp, size)) for size in sorted(sizes)
    }
    if traits.partition == "even-blocks":
        bounds = even_block_bounds(model, candidate.pp)
        starts = {size: _only(bounds, start) for size, start in starts.items()}
    return StageNeeds(
        earliest_start=starts,
        latest_start=_latest_start(cost_model),
        parameters=memory.weights.prefix,
    )


def _only(bounds: Sequence[int], earliest_start: IntArray) -> IntArray:
    """Let every stage end where it must."""
    ends = np.arange(earliest_start.shape[1])
    allowed = ends == np.array(bounds[1:])[:, None]
    return np.where(allowed, np.maximum(earliest_start, np.array(bounds[:-1])[:, None]), ends)


def _latest_start(cost_model: CostModel) -> IntArray:
    """Return where stages must start at the latest to have parameters, if they need any."""
    needed = cost_model.experiment.traits.fails_without_parameters
    return last_with_parameters(cost_model.experiment.model) if needed else NO_LIMIT


def _pipeline_bounds(
    cost_model: CostModel, candidate: Candidate, placement: tuple[int, ...]
) -> tuple[int, ...]:
    """Return the cuts that are best for one placement, by the pipeline alone."""
    given = cost_model.experiment
    if given.traits.partition == "even-blocks":
        return even_block_bounds(given.model, candidate.pp)
    costs = cost_model.costs(candidate, placement)
    return best_bounds(costs, given.traits, _latest_start(cost_model))


def _whole_nodes(cost_model: CostModel, candidate: Candidate) -> PlacementSolution:
    """Try orders of whole nodes, each class in a row: for groups that span nodes."""
    leaders = [
        Strategy.uniform(
            candidate, _pipeline_bounds(cost_model, candidate, placement), placement
        )
        for placement in _class_orders(cost_model, candidate.num_devices)
    ]
    return PlacementSolution(leaders=tuple(leaders))


def _class_orders(cost_model: CostModel, num_devices: int) -> Iterator[tuple[int, ...]]:
    """Give orders of the devices in which equal nodes stand together."""
    cluster = cost_model.experiment.cluster
    devices: dict[int, list[int]] = {}
    for device, node in enumerate(cluster.node_of_device):
        devices.setdefault(node, []).append(device)
    classes = node_classes(cluster, 1, pairs_matter=False)
    for order in islice(permutations(classes), MOST_ORDERS):
        placement = [device for part in order for node in part.nodes for device in devices[node]]
        yield tuple(placement[:num_devices])


def _key(strategy: Strategy) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return what tells strategies of one candidate apart."""
    return strategy.placement, strategy.bounds


def _order(estimate: Estimate) -> tuple[object, ...]:
    """Order estimates: what runs first, then by time, then by value."""
    time_s = float(f"{estimate.iteration_time_s:.{SIGNIFICANT_DIGITS}g}")
    return (not estimate.feasible, time_s, estimate.strategy.bounds, estimate.strategy.placement)
