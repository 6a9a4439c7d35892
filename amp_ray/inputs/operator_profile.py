"""Measured operators: time, memory and output size of each kernel, and times of links.

The chain consists of operators. Values are those of one rank: of an operator divided by ``tp``, for
the micro-batch of one data-parallel rank.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any, Final, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from amp_ray.arrays import BoolArray, FloatArray

OperatorFamily = Literal["gpt", "t5", "resnet"]

CollectiveKind = Literal["all_gather", "all_reduce", "reduce_scatter", "all_to_all"]

COLLECTIVES: Final[tuple[CollectiveKind, ...]] = get_args(CollectiveKind)


class OperatorKey(NamedTuple):
    """One measured setting of every operator.

    ``algorithm`` says how an operator's matrix is divided over ``tp`` ranks: 0 as in Megatron-LM, 1
    the other way round (rows for columns). Only few operators differ between the two.
    """

    micro_batch_size: int
    tp: int
    algorithm: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OperatorTable:
    """All operators at one `OperatorKey`; every array has shape ``(num_operators,)``."""

    forward_s: FloatArray  # seconds of the forward pass, tensor-parallel collectives included
    backward_s: FloatArray  # seconds of the backward pass
    input_bytes: FloatArray  # size of its input, including tensors that only pass through
    output_bytes: FloatArray  # size of its output
    weight_bytes: FloatArray  # size of its parameters
    activation_bytes: FloatArray  # bytes that its forward pass leaves allocated
    # Bytes that the allocator reserves beyond that in the forward pass
    forward_reserved_bytes: FloatArray
    backward_reserved_bytes: FloatArray  # further bytes reserved in the backward pass
    # False for a failed or missing measurement. Its values are those of the file: too large to be
    # chosen, and never reported as a prediction.
    measured: BoolArray
    interpolated: bool = False  # whether the table lies between two measured micro-batch sizes

    def __post_init__(self) -> None:
        for name in (*VALUES, "measured"):
            values: FloatArray = getattr(self, name)
            if values.shape != self.forward_s.shape:
                message = f"{name} has shape {values.shape}, forward_s {self.forward_s.shape}"
                raise ValueError(message)
            if not (np.isfinite(values).all() and (values >= 0).all()):
                raise ValueError(f"{name} must be finite and not negative")
            values.setflags(write=False)

    def take(self, rows: NDArray[np.int64]) -> "OperatorTable":
        """Return the table of a chain whose operators are the given rows of this one."""
        values = {name: getattr(self, name)[rows] for name in VALUES}
        return operator_table(values, self.measured[rows], interpolated=self.interpolated)


VALUES: Final = tuple(
    part.name for part in fields(OperatorTable) if part.name not in {"measured", "interpolated"}
)
"""The fields of a table that hold seconds or bytes."""


def operator_table(
    values: Mapping[str, FloatArray], measured: BoolArray, *, interpolated: bool = False
) -> OperatorTable:
    """Return a table from arrays by the names in `VALUES`."""
    arrays: dict[str, Any] = dict(values)
    return OperatorTable(**arrays, measured=measured, interpolated=interpolated)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CollectiveTable:
    """Seconds of one collective among one number of devices."""

    sizes_bytes: FloatArray  # shape ``(n,)``, ascending; failed measurements are left out
    seconds: FloatArray  # shape ``(n,)``
    num_failed: int = 0  # measurements that failed

    def __post_init__(self) -> None:
        self.sizes_bytes.setflags(write=False)
        self.seconds.setflags(write=False)

    def exact_s(self, size_bytes: float) -> float | None:
        """Return the seconds of a measured size; None if it was not measured."""
        index = int(np.searchsorted(self.sizes_bytes, size_bytes))
        if index < len(self.sizes_bytes) and self.sizes_bytes[index] == size_bytes:
            return float(self.seconds[index])
        return None

    def interpolated_s(self, size_bytes: float) -> float:
        """Return the seconds of any size: linear between measured sizes, proportional outside."""
        sizes, seconds = self.sizes_bytes, self.seconds
        if size_bytes > sizes[-1]:
            return float(seconds[-1] * size_bytes / sizes[-1])
        return float(np.interp(size_bytes, sizes, seconds))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TransferTable:
    """Rate of a transfer between two devices by its size."""

    sizes_bytes: FloatArray  # shape ``(n,)``, ascending
    bytes_per_s: FloatArray  # shape ``(n,)``

    def __post_init__(self) -> None:
        self.sizes_bytes.setflags(write=False)
        self.bytes_per_s.setflags(write=False)

    def seconds(self, size_bytes: float) -> float:
        """Return the seconds of a transfer, its rate interpolated between measured sizes."""
        return size_bytes / float(np.interp(size_bytes, self.sizes_bytes, self.bytes_per_s))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OperatorProfile:
    """All measurements of one model's operators."""

    source: str  # name of the profile in messages
    model: str  # the model's name in the profile, such as ``gpt_1_3B``
    family: OperatorFamily
    names: tuple[str, ...]  # shape ``(num_operators,)``. In the order of the forward pass.
    # ``(0, ..., num_operators)``. Edges of the blocks; an operator outside of them counts as a
    # layer of its own.
    layer_bounds: tuple[int, ...]
    # Shape ``(num_operators,)``. Whether a block begins with this operator; if the block
    # recomputes, its input is kept.
    starts_block: BoolArray
    # Shape ``(num_operators,)``. Share of ``activation_bytes`` that a rank holds until the backward
    # pass: 0 if an operator shares its neighbour's buffer, 1.5 if it also holds a mask.
    kept_share: FloatArray
    # Shape ``(2, num_operators)``, by algorithm. Whether each tp rank reads only a part of the
    # operator's input; otherwise each reads all of it.
    reads_divided: BoolArray
    writes_divided: BoolArray  # the same for the output
    tables: Mapping[OperatorKey, OperatorTable]  # measurements by key; at least one
    # By kind and number of devices; some may be missing
    collectives: Mapping[tuple[CollectiveKind, int], CollectiveTable]
    intra: TransferTable  # transfers between devices of one node
    # Transfers between nodes; the same as ``intra`` if they were not measured
    inter: TransferTable
    notes: tuple[str, ...] = ()  # remarks of the reader, to be shown to the user

    def __post_init__(self) -> None:
        lengths = {len(table.forward_s) for table in self.tables.values()}
        if lengths != {self.num_operators}:
            message = f"{self.source}: expected {self.num_operators} operators, found {lengths}"
            raise ValueError(message)
        for values in (
            self.starts_block,
            self.kept_share,
            self.reads_divided,
            self.writes_divided,
        ):
            values.setflags(write=False)

    @property
    def num_operators(self) -> int:
        """Number of operators of the chain."""
        return len(self.names)

    @property
    def micro_batch_sizes(self) -> tuple[int, ...]:
        """Measured micro-batch sizes per rank, at any tp, ascending."""
        return tuple(sorted({key.micro_batch_size for key in self.tables}))

    @property
    def tps(self) -> tuple[int, ...]:
        """Measured tensor parallel degrees, ascending."""
        return tuple(sorted({key.tp for key in self.tables}))

    @property
    def algorithms(self) -> tuple[int, ...]:
        """Measured algorithms to divide operators, ascending."""
        return tuple(sorted({key.algorithm for key in self.tables}))

    def table(self, micro_batch_size: int, tp: int, algorithm: int = 0) -> OperatorTable | None:
        """Return the table of a key, interpolated between two micro-batch sizes if it is missing.

        Times and sizes are nearly affine in the micro-batch. Nothing is extrapolated: the result is
        None outside the measured sizes, and at another tp or algorithm.

        Interpolation:
            ``v(b) = v(low) + (b - low) / (high - low) * (v(high) - v(low))`` for the measured
            neighbours ``low < b < high``.
        """
        table = self.tables.get(OperatorKey(micro_batch_size, tp, algorithm))
        if table is not None:
            return table
        sizes = sorted(key.micro_batch_size for key in self.tables if key[1:] == (tp, algorithm))
        for low, high in pairwise(sizes):
            if low < micro_batch_size < high:
                below = self.tables[OperatorKey(low, tp, algorithm)]
                above = self.tables[OperatorKey(high, tp, algorithm)]
                return _between(below, above, (micro_batch_size - low) / (high - low))
        return None

    def gap(self, micro_batch_size: int, tp: int, algorithm: int = 0) -> str | None:
        """Return the measurement that a candidate needs and the profile lacks, as text, or None."""
        key = f"micro-batch size {micro_batch_size}, tp {tp}, algorithm {algorithm}"
        table = self.table(micro_batch_size, tp, algorithm)
        if table is None:
            return key
        if table.measured.all():
            return None
        return f"{self.names[int(np.argmin(table.measured))]} at {key}"


def _between(low: OperatorTable, high: OperatorTable, weight: float) -> OperatorTable:
    """Interpolate every value of two tables linearly."""
    values = {
        name: getattr(low, name) + weight * (getattr(high, name) - getattr(low, name))
        for name in VALUES
    }
    return operator_table(values, low.measured & high.measured, interpolated=True)
