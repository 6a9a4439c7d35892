"""Where to cut a chain of layers into stages: one problem, one exact solver.

This package knows arrays, not devices. Planners fill `StageTables` and `OptionTable`.
"""

from amp_ray.partition.exact import solve
from amp_ray.partition.problem import Objective, PartitionProblem, chain_problem, objective
from amp_ray.partition.solution import (
    InfeasiblePartition,
    InfeasibleReason,
    PartitionSolution,
    PrunedPartition,
)
from amp_ray.partition.tables import NO_ROW, OptionTable, StageTables
from amp_ray.partition.uniform import even_bounds

__all__ = [
    "NO_ROW",
    "InfeasiblePartition",
    "InfeasibleReason",
    "Objective",
    "OptionTable",
    "PartitionProblem",
    "PartitionSolution",
    "PrunedPartition",
    "StageTables",
    "chain_problem",
    "even_bounds",
    "objective",
    "solve",
]
