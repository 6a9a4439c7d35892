"""Inputs and outputs of the kernels for chains of operators: arrays."""

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import numpy as np

from amp_ray.arrays import BoolArray, FloatArray, IntArray
from amp_ray.planners.operators.partition.kernels import BlocksViews, ProgrammeViews
from amp_ray.planners.operators.recompute.kernels import Relaxation


@dataclass(frozen=True, kw_only=True, eq=False)
class OperatorProgramme:
    """A problem laid out for kernels: V options, L operators, Y layers, G devices."""

    time_prefix_s: FloatArray  # shape ``(V, L + 1)``
    # Shape ``(V, L)``. Sum of the exchanges between operators up to operator ``i``, within a stage.
    join_prefix_s: FloatArray
    # Shape ``(V, K, L + 1)``. Time at the first operator of a stage, by kind of edge.
    start_s: FloatArray
    end_s: FloatArray  # shape ``(V, K, L + 1)``. Time after its last operator.
    state_prefix: FloatArray  # shape ``(V, L + 1)``. Bytes.
    held_prefix: FloatArray  # shape ``(V, L + 1)``. Without operators that run again.
    # Shape ``(V, L)``. Bytes held by a run of recomputed operators up to each of them; else 0.
    again_bytes: FloatArray
    weight_prefix: FloatArray  # shape ``(V, L + 1)``
    input_bytes: FloatArray  # shape ``(V, L)``
    forward_reserved: FloatArray  # shape ``(V, L)``
    backward_reserved: FloatArray  # shape ``(V, L)``
    devices: IntArray  # shape ``(V,)``
    allowed: BoolArray  # shape ``(V, G)``. By the number of devices in front of a stage.
    edge_kind: IntArray  # shape ``(G + 1,)``
    least_reserved: FloatArray  # shape ``(V,)``. Least reserve of any whole layer.
    free_end: BoolArray  # shape ``(L,)``
    layer_begin: IntArray  # shape ``(Y + 1,)``
    layer_of: IntArray  # shape ``(L,)``
    operator_place: IntArray  # shape ``(L,)``. Index among the operators of all kinds of layers.
    relaxed: IntArray  # shape ``(V,)``. Row of each option in the tables of the relaxation.
    relaxation: Relaxation
    limit_bytes: float  # of every device
    num_devices: int  # ``G``
    most_in_flight: int  # most micro-batches that a stage holds at once
    spared: int  # operators at the end of a stage that reserve nothing: 0 or 1
    step_end_prefix_s: FloatArray  # shape ``(V, L + 1)``
    step_start_s: FloatArray  # shape ``(V,)``
    tied_s: FloatArray  # shape ``(V,)``
    step_end_cap_s: float  # no stage may have a longer step end

    @cached_property
    def views(self) -> ProgrammeViews:
        """The same for the kernels."""
        tables = _by_name(self)
        for name, table in tables.items():
            if isinstance(table, np.ndarray):
                tables[name] = np.ascontiguousarray(table)
        return ProgrammeViews(**tables)


@dataclass(frozen=True, kw_only=True, eq=False)
class Blocks:
    """Stages to price, in blocks; each block is a rectangle of starts and ends.

    Blocks whose stages have the same options, edges and stages behind share a table. It has a row
    per start, with the ends that any of the blocks has there.
    """

    behind: IntArray  # shape ``(B,)``. Number of stages behind, ascending.
    taken: IntArray  # shape ``(B,)``. Devices of the stages behind.
    size: IntArray  # shape ``(B,)``. Devices of the stage.
    low_start: IntArray  # shape ``(B,)``. Indices of cuts, half-open.
    high_start: IntArray  # shape ``(B,)``
    low_end: IntArray  # shape ``(B,)``
    high_end: IntArray  # shape ``(B,)``
    table: IntArray  # shape ``(B,)``
    example: IntArray  # shape ``(T,)``. One block of each table.
    row_low: IntArray  # shape ``(T, C)``. By start: index of the first cut that is an end.
    # Shape ``(T, C + 1)``. Where a row begins in arrays over all stages; the last entry of a table
    # is the first one of the next.
    row_begin: IntArray

    @cached_property
    def views(self) -> BlocksViews:
        """The same for the kernels."""
        return BlocksViews(**_by_name(self))

    @property
    def num_stages(self) -> int:
        """Length of arrays over all stages."""
        return int(self.row_begin[-1, -1]) if self.row_begin.size else 0


def _by_name(of: OperatorProgramme | Blocks) -> dict[str, Any]:
    return {field.name: getattr(of, field.name) for field in fields(of)}
