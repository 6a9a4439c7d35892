"""Several problems of which only the best answers count: the most promising one bounds the others.

Each is answered apart from the others, so that any number of workers finds the same.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

import numpy as np

from amp_ray.partition.operators.problem import OperatorProblem, OperatorSolution
from amp_ray.partition.operators.solve import solve_operators
from amp_ray.partition.problem import InfeasiblePartition, PrunedPartition

KEPT_WITHIN: Final = 1.05
"""Problems are solved to the end as far as they come so close to the most promising one."""

Answer = OperatorSolution | InfeasiblePartition | PrunedPartition


@dataclass(kw_only=True, eq=False)
class SolveEach:
    """Solves problems by number, each when it is asked for."""

    problems: Mapping[int, OperatorProblem]
    _answers: dict[int, Answer] = field(init=False, default_factory=dict)

    def answer(self, number: int) -> Answer:
        """Return an answer: pruned where it is not within `KEPT_WITHIN` of the first one's."""
        if number not in self._answers:
            self._answers[number] = self._solved(number)
        return self._answers[number]

    def why_slower(self) -> str:
        """Name the answer that bounds the others, for those that were pruned because of it."""
        return (
            f"micro-batch {self._first[0]} takes {self._first[1]:.4g} s; no plan within 5 % of it"
        )

    def _solved(self, number: int) -> Answer:
        """Solve a problem, as far as the first one's answer bounds it."""
        _, value_s = self._first
        if number in self._answers:
            return self._answers[number]
        problem, limit_s = self.problems[number], KEPT_WITHIN * value_s
        answer = solve_operators(problem, upper_bound_s=limit_s)
        if isinstance(answer, PrunedPartition) and problem.relaxed is not None:
            bound = solve_operators(problem.relaxed, upper_bound_s=limit_s)
            if isinstance(bound, OperatorSolution):  # Others of its stages may be within the limit.
                return solve_operators(problem)
        return answer

    @cached_property
    def _first(self) -> tuple[int, float]:
        """The most promising problem that has an answer, and what that takes."""
        order = sorted(self.problems, key=lambda own: (_expected_s(self.problems[own]), own))
        for number in order:
            answer = self._answers[number] = solve_operators(self.problems[number])
            if isinstance(answer, OperatorSolution):
                return number, answer.value_s
        return order[0], math.inf


def _expected_s(problem: OperatorProblem) -> float:
    """Guess what an iteration takes; only decides which problem is solved first.

    All stages by the one option that is best, as many as the devices allow, cut where transfers are
    shortest: the work is spread evenly, and what all devices together cannot hold is recomputed in
    proportion. Of a pipeline of ``S`` stages, a device holds ``(S + 1) / 2`` micro-batches on
    average.
    """
    devices, everyone = problem.devices, problem.num_devices
    num_stages, number = everyone / devices, problem.num_micro_batches
    held = problem.kept_bytes.sum(axis=1) * (num_stages + 1) / 2
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
