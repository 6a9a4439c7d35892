"""Cut a chain of layers into stages: the partition problem and its exact solver.

This package knows arrays, not devices. Planners fill `StageTables` and `OptionTable`.
"""

from amp_ray.partition.exact import solve
from amp_ray.partition.problem import (
    InfeasiblePartition,
    PartitionProblem,
    PartitionSolution,
    PrunedPartition,
    chain_problem,
    even_bounds,
    objective,
)
from amp_ray.partition.tables import NO_ROW, OptionTable, StageTables

__all__ = [
    "NO_ROW",
    "InfeasiblePartition",
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
