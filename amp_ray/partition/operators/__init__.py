"""Cut a chain of operators into stages that recompute what their memory cannot hold."""

from amp_ray.partition.operators.mixed import relaxed, with_mixes
from amp_ray.partition.operators.problem import OperatorProblem, OperatorSolution, OperatorStage
from amp_ray.partition.operators.several import SolveEach
from amp_ray.partition.operators.solve import solve_operators

__all__ = [
    "OperatorProblem",
    "OperatorSolution",
    "OperatorStage",
    "SolveEach",
    "relaxed",
    "solve_operators",
    "with_mixes",
]
