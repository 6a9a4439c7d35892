"""The best plans by the published formulas in the published space, exactly."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from amp_ray.baselines.aceso2024.problem import (
    AcesoSetting,
    StageOption,
    operator_problem,
    stage_options,
)
from amp_ray.cost.estimate import Reason
from amp_ray.cost.operators import NOT_PROFILED
from amp_ray.cost.verdict import OUT_OF_MEMORY
from amp_ray.partition.operators import (
    OperatorProblem,
    OperatorSolution,
    solve_each,
    why_slower,
)
from amp_ray.partition.problem import PrunedPartition
from amp_ray.spec.operator_run import OperatorUse

SLOWER: Final = "slower than another micro-batch size"


@dataclass(frozen=True, slots=True, kw_only=True)
class AcesoFound:
    """The best plan with one size of the micro-batch."""

    stages: tuple[tuple[OperatorUse, ...], ...]  # how each operator of each stage is used
    lower_bound_s: float  # no plan with this size is faster


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
        answers = solve_each({size: problem for size, (_, problem) in known.items()})
        for size, found in answers.items():
            if isinstance(found, OperatorSolution):
                results[size] = _described(found, known[size][0])
            elif isinstance(found, PrunedPartition):
                results[size] = Reason(kind=SLOWER, detail=why_slower(answers))
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
