"""Cut a chain of operators into stages that recompute what their memory cannot hold."""

from amp_ray.planners.operators.partition.mixed import alike_rows, relaxed, with_mixes
from amp_ray.planners.operators.partition.problem import (
    OperatorProblem,
    OperatorSolution,
    OperatorStage,
)
from amp_ray.planners.operators.partition.several import (
    FoundStages,
    NoStages,
    PosedProblem,
    SolveEach,
)
from amp_ray.planners.operators.partition.solve import solve_operators

__all__ = [
    "FoundStages",
    "NoStages",
    "OperatorProblem",
    "OperatorSolution",
    "OperatorStage",
    "PosedProblem",
    "SolveEach",
    "alike_rows",
    "relaxed",
    "solve_operators",
    "with_mixes",
]
