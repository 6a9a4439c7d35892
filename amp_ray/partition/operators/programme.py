"""What the kernels of operator chains read and write: named tuples of arrays."""

from typing import NamedTuple

from amp_ray.partition.arrays import BoolArray, FloatArray, IntArray


class OperatorProgramme(NamedTuple):
    """An operator problem laid out: V options, L operators, Y layers, G devices.

    Attributes:
        time_prefix_s: Shape ``(V, L + 1)``.
        join_prefix_s: Shape ``(V, L)``. Of what joins operators of one stage: up to operator ``i``.
        start_s: Shape ``(V, K, L + 1)``. At the first operator of a stage, by kind of edge.
        end_s: Shape ``(V, K, L + 1)``. After its last.
        state_prefix: Shape ``(V, L + 1)``. Bytes.
        held_prefix: Shape ``(V, L + 1)``.
        weight_prefix: Shape ``(V, L + 1)``.
        input_bytes: Shape ``(V, L)``.
        forward_reserved: Shape ``(V, L)``.
        backward_reserved: Shape ``(V, L)``.
        devices: Shape ``(V,)``.
        allowed: Shape ``(V, G)``. By the devices in front of a stage.
        edge_kind: Shape ``(G + 1,)``.
        least_reserved: Shape ``(V,)``. What every whole layer reserves at least.
        free_end: Shape ``(L,)``.
        layer_begin: Shape ``(Y + 1,)``.
        layer_of: Shape ``(L,)``.
        operator_place: Shape ``(L,)``. Among the operators of all kinds of layers.
        relaxed: Shape ``(V,)``. Row of each option in the five tables below.
        charged: Shape ``(R, P)``. See `recompute.kernels.relaxed_s`.
        levels: Shape ``(R, P, N)``.
        rest: Shape ``(R, P, N, O, 2)``.
        layers: Shape ``(R, P, N, Y + 1, 2)``.
        head: Shape ``(R, P, N, O, 2)``.
        limit_bytes: Of every device.
        num_devices: ``G``.
        most_in_flight: Micro-batches that a stage holds at most.
        spared: Operators at the end of a stage that reserve nothing: 0 or 1.
        step_end_prefix_s: Shape ``(V, L + 1)``.
        step_start_s: Shape ``(V,)``.
        tied_s: Shape ``(V,)``.
        step_end_cap_s: No stage may have a longer step end.
    """

    time_prefix_s: FloatArray
    join_prefix_s: FloatArray
    start_s: FloatArray
    end_s: FloatArray
    state_prefix: FloatArray
    held_prefix: FloatArray
    weight_prefix: FloatArray
    input_bytes: FloatArray
    forward_reserved: FloatArray
    backward_reserved: FloatArray
    devices: IntArray
    allowed: BoolArray
    edge_kind: IntArray
    least_reserved: FloatArray
    free_end: BoolArray
    layer_begin: IntArray
    layer_of: IntArray
    operator_place: IntArray
    relaxed: IntArray
    charged: FloatArray
    levels: FloatArray
    rest: FloatArray
    layers: FloatArray
    head: FloatArray
    limit_bytes: float
    num_devices: int
    most_in_flight: int
    spared: int
    step_end_prefix_s: FloatArray
    step_start_s: FloatArray
    tied_s: FloatArray
    step_end_cap_s: float


class StageTerms(NamedTuple):
    """What the time of one option's stages at one place is made of; as in the programme."""

    time_prefix_s: FloatArray
    join_prefix_s: FloatArray
    start_s: FloatArray
    end_s: FloatArray
    step_end_prefix_s: FloatArray
    step_start_s: float
    tied_s: float
    step_end_cap_s: float


class Reach(NamedTuple):
    """How far devices get.

    Attributes:
        front: Shape ``(S + 1, G + 1)``. Most operators that so many devices can hold from the
            front, by the stages behind them.
        back: Shape ``(S + 1, G + 1)``. First operator from which so many stages on so many
            devices can hold all that follow.
    """

    front: IntArray
    back: IntArray


class Blocks(NamedTuple):
    """Stages worth pricing: a rectangle of starts and ends for each block of them.

    Blocks whose stages have the same options, edges and stages behind share a table: a row per
    start, with the ends that any of them has there.

    Attributes:
        behind: Shape ``(B,)``. Stages behind, ascending.
        taken: Shape ``(B,)``. Devices of the stages behind.
        size: Shape ``(B,)``. Devices of the stage.
        low_start: Shape ``(B,)``. Indices of cuts, from and up to.
        high_start: Shape ``(B,)``.
        low_end: Shape ``(B,)``.
        high_end: Shape ``(B,)``.
        table: Shape ``(B,)``.
        example: Shape ``(T,)``. One of the blocks of each table.
        row_low: Shape ``(T, C)``. By start: index of the first cut that is an end.
        row_begin: Shape ``(T, C + 1)``. Where a row begins in arrays of all stages; the last entry
            of a table is the first one of the next.
    """

    behind: IntArray
    taken: IntArray
    size: IntArray
    low_start: IntArray
    high_start: IntArray
    low_end: IntArray
    high_end: IntArray
    table: IntArray
    example: IntArray
    row_low: IntArray
    row_begin: IntArray

    @property
    def num_stages(self) -> int:
        """Length of arrays of all stages."""
        return int(self.row_begin[-1, -1]) if self.row_begin.size else 0
