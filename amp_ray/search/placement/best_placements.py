"""Plan a candidate on any devices: simulate the best placements by the objective.

The objective is the closed form of the pipeline plus the step end: the gradient sync and optimizer
step of the stage where they take longest. Let ``P(c)`` be the time of the shortest pipeline in
which no stage's step end takes longer than ``c``. ``P`` never grows with ``c``, so a plan with a
step end in ``[low, high]`` takes at least ``P(high) + low``. If the solution for a cap has the step
end ``t``, it is also the solution for every cap between ``t`` and that cap. The search drops
intervals whose bound is no better than the best placement.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop
from typing import Final, NamedTuple

import numpy as np

from amp_ray.arrays import IntArray
from amp_ray.cost.estimate import Estimate
from amp_ray.cost.model import CostModel
from amp_ray.cost.verdict import safe_memory_fraction, would_fit
from amp_ray.partition.caps import BestFirst
from amp_ray.partition.exact import solve
from amp_ray.partition.problem import InfeasiblePartition, PartitionSolution, PrunedPartition
from amp_ray.search.effort import EFFORT, SearchEffort
from amp_ray.search.placement.local_search import (
    Chains,
    class_orders,
    climb,
    kept_orders,
    key_of,
    simple_orders,
    swap_replicas,
)
from amp_ray.search.placement.node_moves import ClassMoves, NodeState, Pick, cleared
from amp_ray.search.placement.placement_prices import Prices
from amp_ray.search.placement.placement_problem import (
    BuiltProblem,
    PlacementProblem,
    build_problem,
    stage_needs,
)
from amp_ray.search.ranking import leader_order
from amp_ray.search.space import has_groups
from amp_ray.strategies.candidate import Candidate
from amp_ray.strategies.strategy import Strategy


def plan_placements(
    cost_model: CostModel,
    candidate: Candidate,
    start: Estimate | None = None,
    effort: SearchEffort = EFFORT,
) -> list[Estimate]:
    """Choose devices and cuts of a candidate, and estimate the result.

    If ``start`` is set, the best of `simple_plans`, the search starts only from its devices.
    Otherwise it also simulates rank ``r`` on device ``r``.

    Returns:
        The best estimate, and perhaps a worse one with other devices or cuts: if some plans are
        likely to run out of memory, the search is repeated for the memory that safe ones may need.
        If nothing fits, it is the one that enough memory would have. In space `heterogeneous`
        they have no lower bound, since all plans are compared by simulated time, which may be less
        than the closed form.
    """
    chains = Chains(cost_model=cost_model, candidate=candidate, effort=effort)
    built = build_problem(cost_model, candidate, effort)
    return _best_and_safe(chains, lambda part: _placed(part, built, start))


def plan_listed(
    cost_model: CostModel, candidate: Candidate, effort: SearchEffort = EFFORT
) -> list[Estimate]:
    """Cut a candidate on devices in hostfile order, and estimate it.

    If devices stay idle, `kept_orders` chooses the nodes.

    Returns:
        The best estimate, and perhaps a worse one, as `plan_placements` does.
    """
    chains = Chains(cost_model=cost_model, candidate=candidate, effort=effort)
    orders = kept_orders(cost_model.experiment.cluster, candidate, effort)

    def best(part: Chains) -> Estimate:
        return min((part.estimate(part.best(order)) for order in orders), key=leader_order)

    return _best_and_safe(chains, best)


def _best_and_safe(chains: Chains, plan: Callable[[Chains], Estimate]) -> list[Estimate]:
    """Return the best plan for the whole memory, and the best safe one, if they differ."""
    best, part = plan(chains), safe_memory_fraction(chains.cost_model.experiment.constants)
    if not any(one.feasible and one.memory_share > part for one in chains.estimates):
        return [best]
    safe = plan(replace(chains, memory_scale=part))
    if not safe.feasible or safe.strategy == best.strategy:
        return [best]
    return sorted((best, replace(safe, lower_bound_s=best.lower_bound_s)), key=leader_order)


def _placed(chains: Chains, built: BuiltProblem | None, start: Estimate | None) -> Estimate:
    """Return the best estimate with the chains' part of the memory; see `plan_placements`.

    If nothing fits, it is the one that enough memory would have.
    """
    cost_model, effort = chains.cost_model, chains.effort
    starts = () if start is None else (start.strategy.placement,)
    solution = solve_chains(chains, built, starts)
    leaders = {key_of(leader): leader for leader in solution.leaders}
    for leader in solution.leaders:
        refined = chains.best(leader.placement)
        leaders.setdefault(key_of(refined), refined)
    estimates = map(chains.estimate, leaders.values())
    best = min(estimates, key=lambda one: (not would_fit(one), *leader_order(one)))
    if not best.feasible and chains.memory_scale < math.inf:
        roomy = replace(chains, memory_scale=math.inf)
        return replace(_placed(roomy, built, start), lower_bound_s=None)
    experiment = cost_model.experiment
    if has_groups(experiment):  # stage groups are searched too
        bound_s = solution.lower_bound_s if experiment.space == "operator" else None
        return replace(best, lower_bound_s=bound_s)
    swapped = swap_replicas(chains, best)
    best = climb(cost_model, swapped, most_stages=effort.max_climbed_stages)
    return replace(best, lower_bound_s=solution.lower_bound_s)


def simple_plans(
    cost_model: CostModel, candidate: Candidate, effort: SearchEffort = EFFORT
) -> list[Estimate]:
    """Estimate a few simple placements; skip a placement if a faster one fits."""
    chains = Chains(cost_model=cost_model, candidate=candidate, effort=effort)
    plans: list[Estimate] = []
    limit_s = math.inf
    for order in simple_orders(cost_model.experiment, candidate):
        strategy = chains.best(order)
        if plans and not chains.may_take(strategy, limit_s):
            continue
        plans.append(chains.estimate(strategy))
        if plans[-1].feasible:
            limit_s = min(limit_s, plans[-1].iteration_time_s)
    return plans


ROUNDING: Final = 1e-9
"""Largest relative difference between objectives whose terms are added in another order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementSolution:
    """The best placements by the objective."""

    leaders: tuple[Strategy, ...]  # complete strategies, best first
    # Least objective of placements that fit the memory; None if none fits
    value_s: float | None = None
    # Lower bound on the objective of all placements with tensor-parallel groups inside nodes; None
    # if not all of them were covered
    lower_bound_s: float | None = None


def solve_placement(
    cost_model: CostModel, candidate: Candidate, effort: SearchEffort = EFFORT
) -> PlacementSolution:
    """Find the best placements by the objective."""
    chains = Chains(cost_model=cost_model, candidate=candidate, effort=effort)
    return solve_chains(chains, build_problem(cost_model, candidate, effort))


def solve_chains(
    chains: Chains, built: BuiltProblem | None, starts: Sequence[tuple[int, ...]] = ()
) -> PlacementSolution:
    """Find the best placements by the objective, as `solve_placement` does.

    ``built`` is the candidate's problem for the whole memory. The search starts from the devices in
    ``starts``, by default `class_orders`.
    """
    cluster, effort = chains.cost_model.experiment.cluster, chains.effort
    orders = starts or class_orders(cluster, chains.candidate, effort)
    seeds = [chains.best(order) for order in orders]
    feasible = [seed for seed in seeds if chains.fits(seed)]
    if built is None:
        return _ordered(chains, feasible, seeds, bound_s=None)
    problem = built.problem
    if chains.memory_scale != 1:
        model, scale, tied_counts = chains.cost_model, chains.memory_scale, built.scope.ends
        needs = stage_needs(model, chains.candidate, scale, tied_counts=tied_counts)
        problem = replace(problem, needs=needs)
    known_s = min((chains.objective_s(seed) for seed in feasible), default=math.inf)
    search = StepEndSearch(
        problem=problem,
        upper_bound_s=known_s * (1 + ROUNDING),
        most_work=effort.max_placement_work,
        min_caps=effort.min_placement_caps,
    )
    search.run()
    if not search.placements and not feasible:
        return PlacementSolution(leaders=tuple(seeds))
    best = sorted(search.placements, key=lambda placed: (placed.value_s, placed.step_end_s))
    leaders = [_strategy(problem, placed) for placed in best[: effort.max_leaders]]
    bound_s = search.lower_bound_s if built.scope.is_whole else None
    return _ordered(chains, [*leaders, *feasible], [*leaders, *seeds], bound_s=bound_s)


def _ordered(
    chains: Chains,
    fitting: Sequence[Strategy],
    strategies: Sequence[Strategy],
    *,
    bound_s: float | None,
) -> PlacementSolution:
    """Sort strategies by the objective; ``value_s`` is that of the best one that fits memory."""
    leaders = {key_of(leader): leader for leader in strategies}
    order = sorted(leaders, key=lambda key: (chains.objective_s(leaders[key]), key))
    value_s = min((chains.objective_s(leader) for leader in fitting), default=None)
    return PlacementSolution(
        leaders=tuple(leaders[key] for key in order), value_s=value_s, lower_bound_s=bound_s
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CutPlacement:
    """One placement with its cuts."""

    value_s: float  # closed form of the pipeline plus step end
    step_end_s: float  # step end alone
    bounds: tuple[int, ...]
    options: tuple[int, ...]  # option of each stage


class Interval(NamedTuple):
    """An open interval of step ends, for one time of the tied weights."""

    bound_s: float  # no placement with such a step end costs less
    low_s: float
    high_s: float
    pipeline_s: float  # no pipeline with such a step end is shorter
    tied_s: float  # most that the tied weights may take; both ends are charged as much


@dataclass(slots=True, kw_only=True)
class StepEndSearch(BestFirst[Interval]):
    """Open intervals of step ends, and the placements so far."""

    problem: PlacementProblem
    # Options times possible ends of their stages, summed over caps on the bottleneck
    most_work: float = EFFORT.max_placement_work
    min_caps: int = EFFORT.min_placement_caps
    placements: list[CutPlacement] = field(default_factory=list)

    def run(self) -> None:
        """Search until the best is proven or the work limit is reached."""
        least_s = self.problem.least_step_end_s
        *others_s, longest_s = self.problem.tied_times_s.tolist()
        self._open_interval(max(least_s, longest_s), math.inf, 0.0, longest_s)
        shortest_s = self._try(heappop(self.open), math.inf)
        for tied_s in others_s:
            self._open_interval(max(least_s, tied_s), math.inf, shortest_s, tied_s)
        at_top = True
        while self.open and self.open[0].bound_s < self.limit_s:
            if self.most_work <= 0 and self.placements:
                return
            interval = heappop(self.open)
            high_s = min(interval.high_s, self.limit_s - interval.pipeline_s)
            middle_s = interval.low_s + (high_s - interval.low_s) / 2
            self._try(interval, high_s if at_top else middle_s)
            at_top = not at_top

    @property
    def lower_bound_s(self) -> float:
        """Proven lower bound on the objective of any placement."""
        return min(self.limit_s, self.open_s, self.unwanted_s)

    def _try(self, interval: Interval, cap_s: float) -> float:
        """Solve one cap of an interval, open the rest; return a lower bound on the pipeline."""
        low_s, high_s, tied_s = interval.low_s, interval.high_s, interval.tied_s
        size = self.problem.work
        solution = solve(
            self.problem.problem,
            programme=self.problem.capped(cap_s, tied_s),
            upper_bound_s=max(self.limit_s - low_s, 0.0),
            max_evaluations=max(self.min_caps, math.ceil(self.most_work / size)),
        )
        self._open_interval(math.nextafter(cap_s, math.inf), high_s, interval.pipeline_s, tied_s)
        if isinstance(solution, InfeasiblePartition):
            self.most_work -= size
            return math.inf
        self.most_work -= solution.num_evaluations * size
        # The interval's bound still holds if the solver stopped early.
        pipeline_s = max(solution.lower_bound_s, interval.pipeline_s)
        if isinstance(solution, PrunedPartition):
            self.unwanted_s = min(self.unwanted_s, pipeline_s + low_s)
            return pipeline_s
        placed = _with_step_end(self.problem, solution, tied_s)
        self.placements.append(placed)
        self.value_s = min(self.value_s, placed.value_s)
        self._open_interval(low_s, math.nextafter(placed.step_end_s, -math.inf), pipeline_s, tied_s)
        # Settle the interval only as far as the solver has proved it.
        self.unwanted_s = min(self.unwanted_s, pipeline_s + placed.step_end_s)
        return pipeline_s

    def _open_interval(self, low_s: float, high_s: float, pipeline_s: float, tied_s: float) -> None:
        if low_s <= high_s and low_s < math.inf:
            self.offer(Interval(pipeline_s + low_s, low_s, high_s, pipeline_s, tied_s))


def _with_step_end(
    problem: PlacementProblem, solution: PartitionSolution, tied_s: float
) -> CutPlacement:
    step_end_s = problem.step_end_s(solution.bounds, solution.options, tied_s)
    return CutPlacement(
        value_s=solution.value_s + step_end_s,
        step_end_s=step_end_s,
        bounds=solution.bounds,
        options=solution.options,
    )


@dataclass(slots=True, kw_only=True)
class Walk:
    """State of the cluster's nodes while stages take units one after another."""

    moves: tuple[ClassMoves, ...]
    prices: Prices  # their cut rows record which node sends to which
    _states: list[list[NodeState]] = field(init=False)

    def __post_init__(self) -> None:
        """Begin with unused nodes."""
        self._states = [list(moves.states[0]) for moves in self.moves]

    def placement(self, steps: IntArray, cut_rows: Sequence[int]) -> tuple[int, ...]:
        """Return every rank's device, given the steps of stages by class and the prices of cuts."""
        stage_nodes: list[list[int]] = []
        for stage, row in enumerate(steps.tolist()):
            pairs = self._pairs(
                [moves.steps[i].picks for moves, i in zip(self.moves, row, strict=True)]
            )
            if not stage:
                stage_nodes.append(
                    [node for node, (_, units) in sorted(pairs) for _ in range(units)]
                )
                continue
            stage_nodes.append(self._matched(stage_nodes[-1], pairs, cut_rows[stage - 1]))
        return self._devices(stage_nodes)

    def _pairs(
        self, picks_of_class: Sequence[tuple[Pick, ...]]
    ) -> list[tuple[int, tuple[int, int]]]:
        """Take units; return (node, (units in last stage, units in next stage)) for nodes in use.

        Nodes have the order of the relation between both stages.
        """
        pairs: list[tuple[int, tuple[int, int]]] = []
        for c, (moves, picks) in enumerate(zip(self.moves, picks_of_class, strict=True)):
            before = self._states[c]
            after = [cleared(state, moves.num_units) for state in before]
            taken: set[int] = set()
            for pick in picks:
                index = next(
                    index
                    for index, state in enumerate(before)
                    if state == pick.before and index not in taken
                )
                taken.add(index)
                after[index] = pick.after
            class_pairs = [
                (node, (state.last, after[index].last if index in taken else 0))
                for index, (node, state) in enumerate(
                    zip(self.prices.classes[c].nodes, before, strict=True)
                )
                if state.last or index in taken
            ]
            pairs += sorted(
                class_pairs, key=lambda entry: (*(-units for units in entry[1]), entry[0])
            )
            self._states[c] = after
        return pairs

    def _matched(
        self, senders: Sequence[int], pairs: list[tuple[int, tuple[int, int]]], row: int
    ) -> list[int]:
        """Return the node of each replica in the next stage."""
        groups: list[tuple[tuple[int, int], ...]] = []
        for node_class in self.prices.classes:
            members = set(node_class.nodes)
            groups.append(tuple(units for node, units in pairs if node in members))
        (prices,) = self.prices.cut_rows([tuple(groups)])
        matching = next(price.matching for price in prices if price.row == row)
        waiting: dict[int, list[int]] = {}
        for i, j, units in matching:
            waiting.setdefault(pairs[i][0], []).extend([pairs[j][0]] * units)
        return [waiting[node].pop(0) for node in senders]

    def _devices(self, stage_nodes: Sequence[Sequence[int]]) -> tuple[int, ...]:
        """Assign to each replica of each stage the next free devices of its node."""
        tp = self.prices.candidate.options.tp
        slots = [node.num_slots for node in self.prices.cost_model.experiment.cluster.nodes]
        free = np.concatenate(([0], np.cumsum(slots)[:-1])).tolist()
        placement: list[int] = []
        for node in (node for stage in stage_nodes for node in stage):
            placement += range(free[node], free[node] + tp)
            free[node] += tp
        return tuple(placement)


def _strategy(problem: PlacementProblem, placed: CutPlacement | PartitionSolution) -> Strategy:
    steps, cut_rows = problem.graph.path(placed.options)
    walk = Walk(moves=problem.moves, prices=problem.prices)
    placement = walk.placement(steps, cut_rows)
    return Strategy.uniform(problem.prices.candidate, placed.bounds, placement)
