"""Several problems of which only the best answers count: the most promising one first."""

import math
from collections.abc import Mapping
from typing import Final

import numpy as np

from amp_ray.partition.operators.problem import OperatorProblem, OperatorSolution
from amp_ray.partition.operators.solve import solve_operators
from amp_ray.partition.problem import InfeasiblePartition, PrunedPartition

KEPT_WITHIN: Final = 1.05
"""Problems are solved to the end as far as they come so close to the best one."""

Answer = OperatorSolution | InfeasiblePartition | PrunedPartition


def solve_each(problems: Mapping[int, OperatorProblem]) -> dict[int, Answer]:
    """Solve problems by number; what the best one takes so far bounds the others.

    Returns:
        The answer of each: pruned where it is not within `KEPT_WITHIN` of the best.
    """
    best_s = math.inf
    found: dict[int, Answer] = {}
    for number in sorted(problems, key=lambda own: (_expected_s(problems[own]), own)):
        found[number] = solve_operators(problems[number], upper_bound_s=KEPT_WITHIN * best_s)
        answer = found[number]
        if isinstance(answer, OperatorSolution):
            best_s = min(best_s, answer.value_s)
    return found


def why_slower(answers: Mapping[int, Answer]) -> str:
    """Name the best answer, for those that were pruned because of it."""
    values = {
        number: answer.value_s
        for number, answer in answers.items()
        if isinstance(answer, OperatorSolution)
    }
    best = min(values, key=lambda number: (values[number], number))
    return f"micro-batch {best} takes {values[best]:.4g} s; no plan within 5 % of it"


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
    edge_s = sum(
        table[:, 0, 1:-1].min(axis=1, initial=math.inf)
        for table in (problem.start_s, problem.end_s)
    )
    stage_s = work_s / num_stages + np.where(num_stages > 1, edge_s, 0.0)
    return float((stage_s * (number + num_stages - 1)).min())
