"""The best plans by the published formulas in the published space, exactly."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from amp_ray.baselines.aceso2024.problem import (
    AcesoSetting,
    StageOption,
    offered,
    operator_problem,
    stage_options,
)
from amp_ray.cost.estimate import Reason
from amp_ray.cost.operators import NOT_PROFILED, NOT_SEARCHED
from amp_ray.cost.verdict import OUT_OF_MEMORY
from amp_ray.partition.arrays import IntArray
from amp_ray.partition.operators import (
    OperatorProblem,
    OperatorSolution,
    SolveEach,
)
from amp_ray.partition.problem import InfeasibleReason, PrunedPartition
from amp_ray.spec.operator_run import OperatorUse

SLOWER: Final = "slower than another micro-batch size"


Posed = tuple[tuple[StageOption, ...], IntArray, OperatorProblem]
"""Options of stages, the problem, and by option of the problem: index of each operator's option."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AcesoFound:
    """The best plan with one size of the micro-batch."""

    stages: tuple[tuple[OperatorUse, ...], ...]  # how each operator of each stage is used
    lower_bound_s: float  # no plan with this size is faster


@dataclass(frozen=True, kw_only=True, eq=False)
class AcesoSearch:
    """Searches every size of the micro-batch.

    What the most promising one takes bounds the others.
    """

    setting: AcesoSetting

    def found(self, size: int) -> AcesoFound | Reason:
        """Return what was found for a micro-batch size, summed over all replicas."""
        if size not in self._posed:
            detail = f"no tp and dp at a micro-batch of {size} samples"
            return Reason(kind=NOT_PROFILED, detail=detail)
        answer = self._answers.answer(size)
        if isinstance(answer, OperatorSolution):
            return _described(answer, *self._posed[size])
        if isinstance(answer, PrunedPartition):
            return Reason(kind=SLOWER, detail=self._answers.why_slower())
        searched = answer.reason is not InfeasibleReason.NOT_SEARCHED
        return Reason(kind=OUT_OF_MEMORY if searched else NOT_SEARCHED, detail=answer.detail)

    @cached_property
    def _answers(self) -> SolveEach:
        """The answers for all micro-batch sizes."""
        return SolveEach(problems={size: posed[-1] for size, posed in self._posed.items()})

    @cached_property
    def _posed(self) -> Mapping[int, Posed]:
        """The problems of all micro-batch sizes where a stage has a price."""
        setting, found = self.setting, {}
        for size in setting.micro_batch_sizes:
            options = stage_options(setting, size)
            if options:
                number = setting.global_batch_size // size
                problem = operator_problem(setting, options, number)
                rows, problem = offered(setting, options, problem)
                found[size] = options, rows, problem
        return found


def _described(
    solution: OperatorSolution,
    options: tuple[StageOption, ...],
    rows: IntArray,
    _: OperatorProblem,
) -> AcesoFound:
    """Say how a solution uses each operator."""
    stages = []
    for stage in solution.stages:
        row, again = rows[stage.option].tolist(), frozenset(stage.recomputed)
        stages.append(
            tuple(
                (*options[row[operator]].use[:3], operator in again)
                for operator in range(stage.start, stage.end)
            )
        )
    return AcesoFound(stages=tuple(stages), lower_bound_s=solution.lower_bound_s)
