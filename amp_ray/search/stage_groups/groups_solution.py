"""The best plans of a candidate: by the objective, then by simulation.

The search minimises the objective with loose memory limits first, then with exact ones. Plans are
then simulated in the order of their closed form, until no other one can be faster.

The closed form is too low if the rings of several stages share a network interface, or if a stage
waits for a cut that costs more than its lower bound. The excess of the simulation is then charged
to the choices of the plan, and the search continues with these prices. It ends when the next closed
form, minus the largest amount by which a simulation was below it, exceeds the best simulated time.
The same rule selects further plans of the solver for simulation: each has the smallest closed form
under some cap on the slowest stage and the step end. The cuts of the best few are then moved as
long as that makes them faster.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from operator import itemgetter
from typing import Final

import numpy as np

from amp_ray.arrays import FloatArray
from amp_ray.cost.estimate import Estimate
from amp_ray.cost.stages import PlacedStages, prefix_sums
from amp_ray.partition.exact import solve
from amp_ray.partition.problem import PartitionSolution, chain_problem
from amp_ray.partition.step_end import (
    StepEndProblem,
    StepEndSolution,
    StepEndTerm,
    solve_with_step_end,
)
from amp_ray.partition.tables import StageTables
from amp_ray.search.cuts import NO_LIMIT
from amp_ray.search.placement.local_search import climb
from amp_ray.search.ranking import leader_order
from amp_ray.search.stage_groups.device_groups import DeviceGraph, DeviceGroups
from amp_ray.search.stage_groups.group_options import Choices, GroupCosts, GroupOption, all_choices
from amp_ray.search.stage_groups.groups_objective import blocked_s, cut_s, step_ends_s
from amp_ray.search.stage_groups.groups_problem import (
    BestGroups,
    GroupsProblem,
    MemoryLimits,
    best_groups,
    cheapest_choices,
    plan_values,
    plans_of,
)
from amp_ray.strategies.candidate import GroupsCandidate
from amp_ray.strategies.strategy import Strategy

LEAST_EXCESS: Final = 1e-4
"""Relative excess of a simulation over the closed form, below which it counts as 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupsSolution:
    """The best plans of one candidate."""

    # Estimates of the best plan by the objective, of others that may be faster, and of all these
    # with moved cuts. If none fits, of a good plan without limits; empty if no group can be a
    # stage.
    estimates: tuple[Estimate, ...] = ()
    value_s: float | None = None  # objective of the best; None if nothing fits
    # Lower bound on the objective of any plan in the search that fits; None if nothing fits
    lower_bound_s: float | None = None

    @property
    def leaders(self) -> tuple[Strategy, ...]:
        """The strategies of the estimates, in the same order."""
        return tuple(estimate.strategy for estimate in self.estimates)


def solve_groups(device_groups: DeviceGroups, candidate: GroupsCandidate) -> GroupsSolution:
    """Find the best plan by the objective."""
    best = GroupsSolution()
    bound_s = math.inf
    for graph, one_node in device_groups.graphs:
        costs = GroupCosts(
            device_groups=device_groups,
            candidate=candidate,
            one_node=one_node,
            offers_all=graph.is_small,
        )
        solution = _solve_graph(costs, graph, upper_bound_s=_limit_s(best))
        if solution is None:
            continue
        if solution.lower_bound_s is not None:
            bound_s = min(bound_s, solution.lower_bound_s)
        better = solution.value_s is not None and (
            best.value_s is None or solution.value_s < best.value_s
        )
        first, then = (solution, best) if better or not best.estimates else (best, solution)
        if first.value_s is not None and then.value_s is None:
            then = GroupsSolution()
        best = replace(first, estimates=(*first.estimates, *then.estimates))
    return replace(best, lower_bound_s=None if best.value_s is None else bound_s)


def _limit_s(best: GroupsSolution) -> float | None:
    """Return the largest objective of a plan that could be better; None without a limit."""
    if best.value_s is None:
        return None
    return max(best.value_s, *(estimate.iteration_time_s for estimate in best.estimates[:1]))


def _solve_graph(
    costs: GroupCosts, graph: DeviceGraph, *, upper_bound_s: float | None
) -> GroupsSolution | None:
    """Find the best plan with the groups of a graph; None if none of them can be a stage."""
    choices = all_choices(graph, costs)
    if not choices.options:
        return None
    experiment = costs.device_groups.cost_model.experiment
    most = min(experiment.model.num_layers, graph.num_devices)
    max_pp = experiment.limits.max_pp or most
    limits = MemoryLimits(
        cost_model=costs.device_groups.cost_model,
        candidate=costs.candidate,
        most_stages=min(most, max_pp),
        capped=max_pp < most,
    )
    return _solved(costs, choices, limits, upper_bound_s=upper_bound_s)


def _solved(
    costs: GroupCosts,
    choices: Choices,
    limits: MemoryLimits,
    *,
    upper_bound_s: float | None,
) -> GroupsSolution:
    """Solve with loose memory limits, then with exact ones."""
    cost_model = costs.device_groups.cost_model
    other_s = cost_model.experiment.constants.host_s_per_iteration
    limit_s = math.inf if upper_bound_s is None else upper_bound_s - other_s
    loose = GroupsProblem(costs=costs, choices=choices, limits=limits, counted=False, joined=False)
    counted = replace(loose, counted=True)
    strict = replace(counted, limits=replace(limits, strict=True))
    bound_s = -math.inf
    for whole in (loose, counted, strict):
        problem, best = _best_among_few(loose, whole, upper_bound_s=limit_s)
        if whole is not strict:
            bound_s = best.lower_bound_s
        if best.strategy is None:
            break
        first = cost_model.estimate(best.strategy)
        if best.strategy.pp <= limits.most_stages and first.feasible:
            simulations = Simulations(problem=problem, estimates={best.strategy: first})
            simulations.run(best)
            return GroupsSolution(
                estimates=tuple(simulations.estimates.values()),
                value_s=best.value_s + other_s,
                lower_bound_s=bound_s + other_s,
            )
    roomy = counted if limits.capped else loose
    estimates: tuple[Estimate, ...] = ()
    if upper_bound_s is None and roomy.has_plans:
        limited = roomy.problem.problem
        options = replace(limited.options, memory_row=NO_LIMIT)
        tables = replace(limited.tables, latest_start=NO_LIMIT)
        solution = solve(replace(limited, options=options, tables=tables), max_evaluations=1)
        if isinstance(solution, PartitionSolution):
            estimates = (cost_model.estimate(roomy.strategy(solution.bounds, solution.options)),)
    return GroupsSolution(estimates=estimates, lower_bound_s=bound_s + other_s)


def _best_among_few(
    loose: GroupsProblem, whole: GroupsProblem, *, upper_bound_s: float
) -> tuple[GroupsProblem, BestGroups]:
    """Find the best plan; if states count stages, first solve with few choices to prune others.

    ``loose`` has the memory limits of the shortest pipeline, ``whole`` the exact ones. Return also
    the problem with the remaining choices.
    """
    if not whole.counted or len(whole.choices.edge) < whole.effort.max_counted_choices:
        return whole, best_groups(whole, upper_bound_s=upper_bound_s)
    values = plan_values(loose, upper_bound_s)
    chosen, _ = cheapest_choices(
        loose, values, limit_s=upper_bound_s, most=loose.effort.few_neighbours
    )
    first = best_groups(
        replace(whole, choices=whole.choices.among(chosen)), upper_bound_s=upper_bound_s
    )
    if first.strategy is None:
        return whole, best_groups(whole, upper_bound_s=upper_bound_s)
    limit_s = min(upper_bound_s, first.value_s * (1 + whole.effort.spare_fraction))
    chosen = np.flatnonzero(plan_values(loose, limit_s) <= limit_s)
    problem = replace(whole, choices=whole.choices.among(chosen))
    return problem, best_groups(problem, upper_bound_s=limit_s)


@dataclass(slots=True, kw_only=True)
class Simulations:
    """Simulated plans of one candidate."""

    problem: GroupsProblem  # not joined
    gain_s: float = 0.0  # the most by which a simulation was below the closed form
    estimates: dict[Strategy, Estimate]  # of every plan, in the order of simulation

    def run(self, best: BestGroups) -> None:
        """Simulate plans from the best one by the closed form until none can be faster."""
        assert best.strategy is not None
        self._add(best.strategy)
        excess_s = self._excess_s(best.strategy, best.value_s)
        self._add_others(best.other_plans)
        if excess_s > 0.0:
            self._charge_and_go_on(best, excess_s)
        model, effort = self.problem.costs.device_groups.cost_model, self.problem.effort
        fastest = sorted(self.estimates.values(), key=leader_order)[: effort.max_climbed_plans]
        for start in fastest:
            summit = climb(model, start, most_stages=effort.max_climbed_stages_of_groups)
            self.estimates[summit.strategy] = summit

    def _add_others(self, plans: Iterable[tuple[float, Strategy]]) -> None:
        """Simulate plans by their closed forms, until none can be faster."""
        model = self.problem.costs.device_groups.cost_model
        for value_s, plan in sorted(plans, key=itemgetter(0)):
            if value_s > self._limit_s:
                return
            if plan not in self.estimates and plan.pp <= self.problem.limits.most_stages:
                self.estimates[plan] = model.estimate(plan)
                self._excess_s(plan, value_s)

    def _charge_and_go_on(self, best: BestGroups, excess_s: float) -> None:
        """Charge the excess of the best plan, and continue the search with these prices."""
        assert best.strategy is not None
        values = plan_values(self.problem, self._limit_s)
        chosen, _ = cheapest_choices(
            self.problem, values, limit_s=self._limit_s, most=self.problem.effort.few_neighbours
        )
        joined = replace(self.problem, choices=self.problem.choices.among(chosen), joined=True)
        if not len(chosen) or not joined.has_plans:
            return  # no plan consists of choices within the limit
        prices = Prices.of(joined)
        index = {choice: place for place, choice in enumerate(chosen.tolist())}
        places = [index[choice] for choice in best.chosen if choice in index]
        if len(places) == len(best.chosen):
            self._charge(prices, best.strategy, places, excess_s)
        self._go_on(prices)

    def _go_on(self, prices: "Prices") -> None:
        """Solve and simulate in turn; charge the excess of each simulation to the prices."""
        for _ in range(self.problem.effort.max_price_rounds):
            met: list[tuple[float, tuple[int, ...], tuple[int, ...]]] = []
            solution = solve_with_step_end(
                prices.problem,
                upper_bound_s=self._limit_s,
                most_boxes=self.problem.effort.max_boxes,
                met=met,
            )
            kept = np.arange(len(prices.joined.steps.choice))
            self._add_others(plans_of(prices.joined, met, kept))
            if not isinstance(solution, StepEndSolution):
                return
            plan = prices.joined.strategy(solution.bounds, solution.options)
            self._add(plan)
            if plan not in self.estimates:
                return
            excess_s = self._excess_s(plan, solution.value_s)
            if excess_s <= 0.0:
                return
            self._charge(prices, plan, prices.joined.chosen(solution.options), excess_s)

    @property
    def _limit_s(self) -> float:
        """Largest objective, without host time, that a faster plan can have."""
        best = min(self.estimates.values(), key=leader_order)
        return best.iteration_time_s + self.gain_s - self._other_s

    @property
    def _other_s(self) -> float:
        return self.problem.costs.device_groups.cost_model.experiment.constants.host_s_per_iteration

    def _add(self, plan: Strategy) -> None:
        """Simulate a plan, and the same plan with moved cuts."""
        model = self.problem.costs.device_groups.cost_model
        if plan.pp > self.problem.limits.most_stages:
            return
        for strategy in (plan, recut(self.problem.costs, self.problem.limits, plan)):
            if strategy not in self.estimates:
                self.estimates[strategy] = model.estimate(strategy)

    def _excess_s(self, plan: Strategy, value_s: float) -> float:
        """Return the excess of a simulation over the objective; 0 if negligible."""
        took_s = self.estimates[plan].iteration_time_s
        excess_s = took_s - value_s - self._other_s
        self.gain_s = max(self.gain_s, -excess_s)
        return excess_s if excess_s > LEAST_EXCESS * took_s else 0.0

    def _charge(
        self, prices: "Prices", plan: Strategy, chosen: Sequence[int], excess_s: float
    ) -> None:
        blocked, ends = lacking(self.problem.costs, prices.groups(chosen), plan)
        index = list(chosen)
        blocked -= prices.blocked_s[index]
        ends -= prices.step_end_s[index]
        later_s = (plan.num_micro_batches - 1) * float(blocked.max(initial=0.0))
        ends = np.maximum(ends, 0.0) + max(0.0, excess_s - later_s - float(ends.max(initial=0.0)))
        prices.blocked_s[index] += np.maximum(blocked, 0.0)
        prices.step_end_s[index] += ends


@dataclass(slots=True, kw_only=True)
class Prices:
    """A joined problem, and the extra times that simulations add to its choices."""

    joined: GroupsProblem  # the problem without extra times
    blocked_s: FloatArray  # shape ``(C,)``. Added to every micro-batch of a stage.
    step_end_s: FloatArray  # shape ``(C,)``. Added to its step end.

    @classmethod
    def of(cls, joined: GroupsProblem) -> "Prices":
        """Return prices without extra times."""
        blocked_s, step_end_s = np.zeros((2, len(joined.choices.edge)))
        return cls(joined=joined, blocked_s=blocked_s, step_end_s=step_end_s)

    @property
    def problem(self) -> StepEndProblem:
        """The problem at the raised prices."""
        problem, choice = self.joined.problem, self.joined.steps.choice
        options, (term,) = problem.problem.options, problem.terms
        dearer = replace(options, overhead_s=options.overhead_s + self.blocked_s[choice])
        return StepEndProblem(
            problem=replace(problem.problem, options=dearer),
            terms=(replace(term, fixed_s=term.fixed_s + self.step_end_s[choice]),),
        )

    def groups(self, chosen: Sequence[int]) -> list[GroupOption]:
        """Return the group options of some choices."""
        choices = self.joined.choices
        return [choices.options[option] for option in choices.option[list(chosen)].tolist()]


def lacking(
    costs: GroupCosts, groups: Sequence[GroupOption], plan: Strategy
) -> tuple[FloatArray, FloatArray]:
    """Return the time that the closed form misses, by stage and micro-batch, and at step ends."""
    model = costs.device_groups.cost_model
    blocked = np.zeros(len(groups))
    if model.experiment.traits.blocking_transfers:
        inner = plan.bounds[1:-1]
        least = blocked_s(model, groups, inner, [0.0] * len(inner))
        cuts = zip(pairwise(groups), inner, strict=True)
        blocked = np.array([0.0, *(float(cut_s(model, pair)[cut]) for pair, cut in cuts)]) - least
    ends = model.stage_costs(PlacedStages.of_strategy(plan)).step_ends.of_stages(plan.bounds)
    return blocked, np.array([sum(end) for end in ends]) - step_ends_s(costs, groups, plan)


def recut(costs: GroupCosts, limits: MemoryLimits, strategy: Strategy) -> Strategy:
    """Return a plan with the best cuts for its stages; the same plan if none fit."""
    solution = solve_with_step_end(_problem(costs, limits, strategy))
    if not isinstance(solution, StepEndSolution):
        return strategy
    num_layers = solution.bounds[-1]
    bounds = [num_layers - bound for bound in solution.bounds[::-1]]
    return strategy.with_bounds(bounds)


def _problem(costs: GroupCosts, limits: MemoryLimits, strategy: Strategy) -> StepEndProblem:
    """Build the problem of a plan's cuts, with both cuts of a stage in its bottleneck."""
    stages = _options(costs, strategy)
    cost_model, pp = costs.device_groups.cost_model, len(stages)
    nothing = np.zeros(cost_model.experiment.model.num_layers + 1)
    cuts = [cut_s(cost_model, (earlier, later))[::-1] for later, earlier in pairwise(stages)]
    behind, before = np.array([nothing, *cuts]), np.array([*cuts, nothing])
    blocks = cost_model.experiment.traits.blocking_transfers
    last = limits.num_positions - 1
    starts = [
        limits.tables[limits.row(stage.options, stage.needs)][min(position, last)]
        for position, stage in enumerate(stages)
    ]
    problem = chain_problem(
        StageTables(
            time_prefix_s=prefix_sums(np.array([costs.slowest_s(stage)[::-1] for stage in stages])),
            cut_time_s=behind,
            bottleneck_start_s=behind if blocks else np.empty(0),
            bottleneck_end_s=before if blocks else np.empty(0),
            earliest_start=np.array(starts),
            latest_start=limits.latest_start,
        ),
        strategy.num_micro_batches,
        time_row=np.arange(pp),
        cut_row=np.arange(1, pp),
        bottleneck_row=np.arange(pp) if blocks else None,
        memory_row=np.arange(pp),
    )
    return StepEndProblem(problem=problem, terms=(_step_end(costs, stages),))


def _options(costs: GroupCosts, strategy: Strategy) -> list[GroupOption]:
    """Return the stages of a plan, from the last one."""
    return [
        costs.option(
            costs.device_groups.of_devices(
                np.array(strategy.devices(index)).reshape(stage.options.dp, stage.options.tp)
            ),
            stage.shares or (strategy.micro_batch_size,) * stage.options.dp,
        )
        for index, stage in enumerate(strategy.stages)
    ][::-1]


def _step_end(costs: GroupCosts, stages: Sequence[GroupOption]) -> StepEndTerm:
    step_ends = np.array([stage.step_end for stage in stages])
    ends = (0, len(stages) - 1) if len(stages) > 1 else ()
    tied_s = np.array([costs.tied_s(stage.device_group) for stage in stages])
    return StepEndTerm(
        weight_prefix=prefix_sums(costs.device_groups.parameters[None, ::-1])[0],
        s_per_weight=step_ends[:, 1] / np.array([stage.tp for stage in stages]),
        fixed_s=step_ends[:, 0] + tied_s * np.isin(np.arange(len(stages)), ends),
    )
