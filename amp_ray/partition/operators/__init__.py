"""Cut a chain of operators into stages that recompute what their memory cannot hold."""

from amp_ray.partition.operators.problem import OperatorProblem, OperatorSolution, OperatorStage
from amp_ray.partition.operators.several import solve_each, why_slower
from amp_ray.partition.operators.solve import solve_operators

__all__ = [
    "OperatorProblem",
    "OperatorSolution",
    "OperatorStage",
    "solve_each",
    "solve_operators",
    "why_slower",
]
