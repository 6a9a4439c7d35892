"""The best plans by the published formulas in the published space, exactly."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np

from amp_ray.baselines.aceso2024.cost import NOT_PROFILED
from amp_ray.baselines.aceso2024.problem import (
    AcesoSetting,
    StageOption,
    operator_problem,
    stage_options,
)
from amp_ray.cost.estimate import Reason
from amp_ray.cost.verdict import OUT_OF_MEMORY
from amp_ray.partition.operators import OperatorProblem, OperatorSolution, solve_operators
from amp_ray.partition.problem import PrunedPartition
from amp_ray.spec.operator_run import OperatorUse

SLOWER: Final = "slower than another micro-batch size"

KEPT_WITHIN: Final = 1.05
"""Micro-batch sizes are searched to the end as far as they come so close to the best one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AcesoFound:
    """The best plan with one size of the micro-batch.

    Args:
        stages: How each operator of each stage is used.
        lower_bound_s: No plan with this size is faster.
    """

    stages: tuple[tuple[OperatorUse, ...], ...]
    lower_bound_s: float


@dataclass(frozen=True, kw_only=True, eq=False)
class AcesoSearch:
    """Searches every size of the micro-batch, the most promising first.

    A time that one of them reaches bounds the others: so they are searched together.
    """

    setting: AcesoSetting

    @cached_property
    def found(self) -> Mapping[int, AcesoFound | Reason]:
        """What was found for each micro-batch size, summed over all replicas."""
        problems = {size: self._problem(size) for size in self.setting.micro_batch_sizes}
        known = {size: found for size, found in problems.items() if found is not None}
        results: dict[int, AcesoFound | Reason] = {
            size: Reason(
                kind=NOT_PROFILED, detail=f"no tp and dp at a micro-batch of {size} samples"
            )
            for size in problems
            if size not in known
        }
        best_s, best_size = math.inf, 0
        for size in sorted(known, key=lambda size: (_expected_s(known[size][1]), size)):
            options, problem = known[size]
            found = solve_operators(problem, upper_bound_s=KEPT_WITHIN * best_s)
            if isinstance(found, OperatorSolution):
                results[size] = _described(found, options)
                if found.value_s < best_s:
                    best_s, best_size = found.value_s, size
            elif isinstance(found, PrunedPartition):
                detail = f"micro-batch {best_size} takes {best_s:.4g} s; no plan within 5 % of it"
                results[size] = Reason(kind=SLOWER, detail=detail)
            else:
                results[size] = Reason(kind=OUT_OF_MEMORY, detail=found.detail)
        return results

    def _problem(self, size: int) -> tuple[tuple[StageOption, ...], OperatorProblem] | None:
        """Pose the problem of a micro-batch size; None where no stage has a price."""
        options = stage_options(self.setting, size)
        if not options:
            return None
        number = self.setting.global_batch_size // size
        return options, operator_problem(self.setting, options, number)


def _expected_s(problem: OperatorProblem) -> float:
    """Guess what an iteration takes; only decides which problem is solved first.

    All stages by the one option that is best, as many as the devices allow, cut where transfers are
    shortest: the work is spread evenly, and what all devices together cannot hold is recomputed in
    proportion. Of a pipeline of ``S`` stages, a device holds ``(S + 1) / 2`` micro-batches on
    average.
    """
    devices, everyone = problem.devices, problem.num_devices
    num_stages, number = everyone / devices, problem.num_micro_batches
    held = problem.held_bytes.sum(axis=1) * (num_stages + 1) / 2
    reserved = problem.forward_reserved_bytes.max(axis=1)
    reserved += problem.backward_reserved_bytes.max(axis=1)
    excess = held + problem.state_bytes.sum(axis=1)
    excess = np.maximum(excess - num_stages * (problem.limit_bytes - reserved), 0.0)
    share = np.where(excess < held, excess / np.maximum(held, 1.0), math.inf)
    work_s = problem.time_s.sum(axis=1) + np.where(
        share > 0, share * problem.recompute_s.sum(axis=1), 0.0
    )
    edge_s = problem.start_s[:, 0, 1:-1].min(axis=1) + problem.end_s[:, 0, 1:-1].min(axis=1)
    stage_s = work_s / num_stages + np.where(num_stages > 1, edge_s, 0.0)
    return float((stage_s * (number + num_stages - 1)).min())


def _described(solution: OperatorSolution, options: tuple[StageOption, ...]) -> AcesoFound:
    """Say how a solution uses each operator."""
    stages = []
    for stage in solution.stages:
        option, again = options[stage.option], frozenset(stage.recomputed)
        stages.append(
            tuple(
                (option.tp, option.dp, option.algorithm, operator in again)
                for operator in range(stage.start, stage.end)
            )
        )
    return AcesoFound(stages=tuple(stages), lower_bound_s=solution.lower_bound_s)
