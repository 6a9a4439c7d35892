"""Solve the problems of several micro-batch sizes; the most promising one bounds the others.

Apart from that bound, each is solved on its own, so the answers do not depend on the number of
workers.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final, Literal

import numpy as np

from amp_ray.arrays import IntArray
from amp_ray.partition.problem import InfeasiblePartition, InfeasibleReason, PrunedPartition
from amp_ray.planners.operators.partition.problem import OperatorProblem, OperatorSolution
from amp_ray.planners.operators.partition.solve import solve_operators
from amp_ray.strategies.operator_run import OperatorUse
from amp_ray.units import figure_text

KEPT_WITHIN: Final = 1.05
"""Problems are solved exactly if they come within this factor of the most promising one's time.

Problems whose search may leave a gap are solved only if they are not slower at all."""

Answer = OperatorSolution | InfeasiblePartition | PrunedPartition

Degrees = tuple[int, int, int]
"""tp, dp and algorithm of an operator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BestStages:
    """The best stages of one problem."""

    stages: tuple[tuple[OperatorUse, ...], ...]  # how each operator of each stage is used
    lower_bound_s: float  # lower bound on the cost of any stages of the problem


@dataclass(frozen=True, slots=True, kw_only=True)
class NoStages:
    """Reason why a problem has no stages."""

    kind: Literal["not posed", "slower", "memory", "not searched"]
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PosedProblem:
    """The problem of one micro-batch size, and the use of operators by its options."""

    problem: OperatorProblem
    rows: IntArray  # shape ``(V, L)``. Row of the degrees of each operator, by option.
    degrees: Sequence[Degrees]
    runs_again: frozenset[int] = frozenset()  # operators that every stage recomputes

    def stages(self, solution: OperatorSolution) -> BestStages:
        """Return the use of each operator in a solution."""
        stages = []
        for stage in solution.stages:
            row, again = self.rows[stage.option].tolist(), self.runs_again.union(stage.recomputed)
            operators = range(stage.start, stage.end)
            stages.append(tuple((*self.degrees[row[index]], index in again) for index in operators))
        return BestStages(stages=tuple(stages), lower_bound_s=solution.lower_bound_s)


@dataclass(kw_only=True, eq=False)
class SolveEach:
    """Solves the problem of each micro-batch size on demand."""

    posed: Mapping[int, PosedProblem]
    _answers: dict[int, Answer] = field(init=False, default_factory=dict)

    def best(self, size: int) -> BestStages | NoStages:
        """Return the best stages, or none if they are slower than `KEPT_WITHIN` allows.

        ``size`` counts samples over all replicas.
        """
        if size not in self.posed:
            detail = f"no tp and dp at a micro-batch of {size} samples"
            return NoStages(kind="not posed", detail=detail)
        if size not in self._answers:
            self._answers[size] = self._solved(size)
        answer = self._answers[size]
        if isinstance(answer, OperatorSolution):
            return self.posed[size].stages(answer)
        if isinstance(answer, PrunedPartition):
            first, value_s, _ = self._first
            near = "as fast" if self.posed[size].problem.gap else "within 5 % of it"
            detail = f"micro-batch {first} takes {figure_text(value_s)} s; no plan {near}"
            return NoStages(kind="slower", detail=detail)
        kind: Final = "not searched" if _is_open(answer) else "memory"
        return NoStages(kind=kind, detail=answer.detail)

    def _solved(self, number: int) -> Answer:
        """Solve a problem up to the limit that the first one's answer sets."""
        _, value_s, tried = self._first
        if number in tried and (value_s == math.inf or not _is_open(tried[number])):
            return tried[number]
        problem = self.posed[number].problem
        limit_s = value_s if problem.gap else KEPT_WITHIN * value_s
        answer = solve_operators(problem, upper_bound_s=limit_s)
        if isinstance(answer, PrunedPartition) and problem.relaxed is not None:
            bound = solve_operators(problem.relaxed, upper_bound_s=limit_s)
            if isinstance(bound, OperatorSolution):  # other stages may be in the limit
                return solve_operators(problem)
        return answer

    @cached_property
    def _first(self) -> tuple[int, float, dict[int, Answer]]:
        """The first problem with a solution, its time, and the answers of all problems tried."""
        order = sorted(self.posed, key=lambda size: (_expected_s(self.posed[size].problem), size))
        tried: dict[int, Answer] = {}
        for number in order:
            answer = tried[number] = solve_operators(self.posed[number].problem)
            if isinstance(answer, OperatorSolution):
                return number, answer.value_s, tried
        return order[0], math.inf, tried


def _is_open(answer: Answer) -> bool:
    """Return whether some possible stages were not searched."""
    if isinstance(answer, InfeasiblePartition):
        return answer.reason is InfeasibleReason.NOT_SEARCHED
    return False


def _expected_s(problem: OperatorProblem) -> float:
    """Estimate the time of an iteration roughly, only to order the problems.

    The estimate takes the best single option for all stages, as many stages as the devices allow,
    and cuts where transfers are shortest. It assumes evenly spread work, and recompute in
    proportion to the memory that all devices together lack. In a pipeline of ``S`` stages, a device
    is taken to hold ``(S + 1) / 2`` micro-batches on average.
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
