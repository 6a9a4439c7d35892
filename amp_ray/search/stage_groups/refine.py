"""The best cuts of a plan whose groups are known: both cuts of a stage count in its bottleneck."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from amp_ray.cost.stages import prefix_sums
from amp_ray.partition import StageTables, chain_problem
from amp_ray.partition.step_end import (
    StepEndProblem,
    StepEndSolution,
    StepEndTerm,
    solve_with_step_end,
)
from amp_ray.search.stage_groups.limits import MemoryLimits
from amp_ray.search.stage_groups.objective import cut_s
from amp_ray.search.stage_groups.options import GroupCosts, GroupOption
from amp_ray.strategies.strategy import Strategy


def recut(costs: GroupCosts, limits: MemoryLimits, strategy: Strategy) -> Strategy:
    """Move the cuts of a plan to where they are best.

    Returns:
        The plan with other cuts; itself where none fit.
    """
    solution = solve_with_step_end(_problem(costs, limits, strategy))
    if not isinstance(solution, StepEndSolution):
        return strategy
    num_layers = solution.bounds[-1]
    bounds = [num_layers - bound for bound in solution.bounds[::-1]]
    return strategy.with_bounds(bounds)


def _problem(costs: GroupCosts, limits: MemoryLimits, strategy: Strategy) -> StepEndProblem:
    """Build the cuts of a plan, from the last stage to the first."""
    stages = _options(costs, strategy)
    cost_model, pp = costs.device_groups.cost_model, len(stages)
    nothing = np.zeros(cost_model.experiment.model.num_layers + 1)
    cuts = [cut_s(cost_model, (right, left))[::-1] for left, right in pairwise(stages)]
    behind, before = np.array([nothing, *cuts]), np.array([*cuts, nothing])
    blocks = cost_model.experiment.traits.blocking_transfers
    last = limits.num_positions - 1
    starts = [
        limits.tables[limits.row(own.tp, own.dp, own.needs)][min(position, last)]
        for position, own in enumerate(stages)
    ]
    problem = chain_problem(
        StageTables(
            time_prefix_s=prefix_sums(np.array([costs.slowest_s(own)[::-1] for own in stages])),
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
    """Return what follows the pipeline, by stage."""
    step_ends = np.array([own.device_group.step_end for own in stages])
    ends = (0, len(stages) - 1) if len(stages) > 1 else ()
    tied_s = np.array([costs.tied_s(own.device_group) for own in stages])
    return StepEndTerm(
        weight_prefix=prefix_sums(costs.device_groups.parameters[None, ::-1])[0],
        s_per_weight=step_ends[:, 1] / np.array([own.tp for own in stages]),
        fixed_s=step_ends[:, 0] + tied_s * np.isin(np.arange(len(stages)), ends),
    )
