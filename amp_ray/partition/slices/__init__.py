"""Cut a batch and its sequences into slices that a pipeline passes on: one problem, solved exactly.

This package knows arrays, not devices. Planners fill `SliceTables`.
"""

from amp_ray.partition.slices.exact import solve_slices
from amp_ray.partition.slices.slice_tables import (
    Slices,
    SliceSolution,
    SliceTables,
    critical_path_s,
)
from amp_ray.partition.slices.unequal import solve_unequal

__all__ = [
    "SliceSolution",
    "SliceTables",
    "Slices",
    "critical_path_s",
    "solve_slices",
    "solve_unequal",
]
