"""Cut a batch and its sequences into slices for a pipeline: the problem and its exact solver.

This package knows arrays, not devices. Planners fill `SliceTables`.
"""

from amp_ray.partition.slices.exact import solve_slices, solve_unequal
from amp_ray.partition.slices.slice_tables import (
    Slices,
    SliceSolution,
    SliceTables,
    critical_path_s,
)

__all__ = [
    "SliceSolution",
    "SliceTables",
    "Slices",
    "critical_path_s",
    "solve_slices",
    "solve_unequal",
]
