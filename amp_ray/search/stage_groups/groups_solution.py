"""The best plan by the objective: first with loose memory limits, then with those that count."""

import math
from dataclasses import dataclass, replace

import numpy as np

from amp_ray.cost.estimate import Estimate
from amp_ray.search.cuts import without_limits
from amp_ray.search.stage_groups.branch_and_bound import (
    BestGroups,
    best_groups,
    cheapest_choices,
    plan_values,
)
from amp_ray.search.stage_groups.device_graph import DeviceGraph
from amp_ray.search.stage_groups.device_group import DeviceGroups
from amp_ray.search.stage_groups.group_options import Choices, GroupCosts, all_choices
from amp_ray.search.stage_groups.groups_problem import GroupsProblem, MemoryLimits
from amp_ray.search.stage_groups.simulated_plans import Simulations
from amp_ray.strategies.candidate import GroupsCandidate
from amp_ray.strategies.strategy import Strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupsSolution:
    """The best plans of one candidate."""

    # Of the best plan by the objective first, of others that may be faster, and all of them with
    # their cuts moved. Where none fits, of one that would be good without limits; empty where no
    # group can be a stage.
    estimates: tuple[Estimate, ...] = ()
    value_s: float | None = None  # objective of the best; None where nothing fits
    # No plan in the scope of the search has a smaller objective and fits; None where nothing fits
    lower_bound_s: float | None = None

    @property
    def leaders(self) -> tuple[Strategy, ...]:
        """The plans."""
        return tuple(estimate.strategy for estimate in self.estimates)


def solve_groups(device_groups: DeviceGroups, candidate: GroupsCandidate) -> GroupsSolution:
    """Find the plan that is best by the objective.

    Args:
        device_groups: Of the experiment.
        candidate: Micro-batch, its number, options of all stages.
    """
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
    """Find the best plan with some groups; None where none of them can be a stage."""
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
    """Solve with memory limits that are too loose, then with those that count."""
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
    solution = (
        without_limits(roomy.problem.problem, roomy.effort) if upper_bound_s is None else None
    )
    plans = () if solution is None else (roomy.strategy(solution.bounds, solution.options),)
    return GroupsSolution(
        estimates=tuple(map(cost_model.estimate, plans)), lower_bound_s=bound_s + other_s
    )


def _best_among_few(
    loose: GroupsProblem, whole: GroupsProblem, *, upper_bound_s: float
) -> tuple[GroupsProblem, BestGroups]:
    """Find the best plan; where states count stages, first with few choices, to leave others out.

    Args:
        loose: Where memory limits are those of the shortest pipeline.
        whole: The problem.
        upper_bound_s: Only plans that cost no more are of interest.

    Returns:
        The problem with the choices that matter, and its best plan.
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
