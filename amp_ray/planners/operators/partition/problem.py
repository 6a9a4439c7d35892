"""The problem of a chain of operators whose stages recompute where memory is short."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from amp_ray.arrays import BoolArray, FloatArray, IntArray

_TABLES = (
    "time_s",
    "join_s",
    "recompute_s",
    "state_bytes",
    "weight_bytes",
    "held_bytes",
    "input_bytes",
    "forward_reserved_bytes",
    "backward_reserved_bytes",
)


_STEP_ENDS = ("step_end_s", "step_start_s", "tied_s")


@dataclass(frozen=True, kw_only=True, eq=False)
class OperatorProblem:
    """Cut a chain of ``L`` operators into stages on ``G`` devices, at the least time.

    A stage takes operators ``[a, b)``, a number of devices next to one another, one of ``V``
    options and a set of operators to recompute. With ``q`` stages behind it, it takes::

        time = sum of time_s + sum of join_s[a:b-1] + recompute_s of what is recomputed
               + start_s[a] (unless a = 0) + end_s[b] (unless b = L)
        memory = sum of state_bytes + (q + 1) * (input_bytes[a] + sum of held_bytes - saved)
                 + peak + max(sum of weight_bytes,
                              max forward_reserved_bytes + max backward_reserved_bytes)

    where the two last maxima leave out the stage's last operator unless ``reserves_last``, and
    ``q + 1`` is ``most_in_flight`` at most. An operator is saved if it and
    its successor in the stage are recomputed and the successor does not begin a layer; the peak is
    the most that one run of recomputed operators within a layer saves. Where ``runs_again`` says
    what is recomputed, those operators are saved in every stage, and the peak is their largest run
    in the stage. All memory must fit into ``limit_bytes``, and ``m`` micro-batches take::

        sum over stages of time + (m - 1) * slowest time + the longest step end

    where the step end of a stage is the sum of its ``step_end_s``, ``step_start_s``, and
    ``tied_s`` if it holds one end of the chain only.

    Bytes are whole numbers, in any unit, so that their sums are exact.
    """

    time_s: FloatArray  # shape ``(V, L)``. Forward and backward of one micro-batch.
    join_s: FloatArray  # shape ``(V, L)``. Between an operator and the next one of the same stage.
    recompute_s: FloatArray  # shape ``(V, L)``. Forward alone.
    state_bytes: FloatArray  # shape ``(V, L)``. Weights, gradients and optimizer, for a device.
    weight_bytes: FloatArray  # shape ``(V, L)``
    held_bytes: FloatArray  # shape ``(V, L)``. For the backward pass, per micro-batch.
    input_bytes: FloatArray  # shape ``(V, L)``
    forward_reserved_bytes: FloatArray  # shape ``(V, L)``. Beyond what is held, while it runs.
    backward_reserved_bytes: FloatArray  # shape ``(V, L)``
    start_s: FloatArray  # shape ``(V, K, L + 1)``, by kind of edge
    end_s: FloatArray  # shape ``(V, K, L + 1)``
    starts_layer: BoolArray  # shape ``(L,)``
    # Shape ``(L,)``. Whether the peak of a run that ends a stage with this operator is not counted.
    free_end: BoolArray
    # Whether a run that reaches into the next layer counts the last operator before it in its peak;
    # it then always is counted, which may be more than needed
    counts_last: bool
    devices: IntArray  # shape ``(V,)``
    allowed: BoolArray  # shape ``(V, G)``. Whether an option may begin behind so many devices.
    edge_kind: IntArray  # shape ``(G + 1,)``. Kind of edge behind so many devices.
    limit_bytes: float
    num_micro_batches: int
    most_stages: int  # at most so many
    most_in_flight: int = 1_000_000  # micro-batches that a stage holds at most
    reserves_last: bool = False  # whether what a stage reserves counts its last operator, too
    # Shape ``(V, L)``. After the pipeline; None where nothing follows it.
    step_end_s: FloatArray | None = None
    step_start_s: FloatArray | None = None  # shape ``(V,)``. The same, whatever the operators.
    # Shape ``(V,)``. The same of a weight that both ends of the chain hold.
    tied_s: FloatArray | None = None
    # Shape ``(L,)``. Operators that are recomputed with their successor in every stage, as
    # ``time_s`` has it: no stage begins behind one, and each operator is a layer.
    runs_again: BoolArray | None = None
    # Chains that cost no more than the stages whose operators are used in any way; None where all
    # such stages are options
    relaxed: "OperatorProblem | None" = None

    def __post_init__(self) -> None:
        """Raise if a layer has too many operators."""
        layers = np.diff(np.append(self.layer_begin, self.num_operators))
        if layers.max() > MOST_OPERATORS:
            msg = (
                f"a layer has {layers.max()} operators, expected at most {MOST_OPERATORS}: "
                "mark where layers start"
            )
            raise ValueError(msg)

    def taking(self, options: Sequence[int]) -> "OperatorProblem":
        """Return the problem with these options, in this order."""
        names = (*_TABLES, "start_s", "end_s", "devices", "allowed", *_STEP_ENDS)
        tables = {name: getattr(self, name) for name in names}
        chosen: dict[str, Any] = {
            name: table[list(options)] for name, table in tables.items() if table is not None
        }
        return replace(self, **chosen)

    @property
    def num_operators(self) -> int:
        """``L``."""
        return int(self.time_s.shape[1])

    @property
    def num_devices(self) -> int:
        """``G``."""
        return int(self.allowed.shape[1])

    @cached_property
    def kept_bytes(self) -> FloatArray:
        """What a micro-batch holds where nothing is chosen to recompute, shape ``(V, L)``."""
        return self.held_bytes if self.runs_again is None else self.held_bytes * ~self.runs_again

    @cached_property
    def layer_begin(self) -> IntArray:
        """First operator of each layer, shape ``(Y,)``; the chain begins one."""
        starts = self.starts_layer.copy()
        starts[0] = True
        return np.flatnonzero(starts)


MOST_OPERATORS = 62
"""Of a layer: its recomputed operators are the bits of one number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorStage:
    """A stage of an answer."""

    start: int  # first operator
    end: int  # behind the last
    option: int  # index
    first_device: int  # devices in front of it
    recomputed: tuple[int, ...]  # the operators that are recomputed, ascending
    time_s: float  # of one micro-batch


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorSolution:
    """The best stages of the search."""

    stages: tuple[OperatorStage, ...]
    value_s: float  # the objective, step end included
    slowest_s: float
    lower_bound_s: float  # no stages have a smaller objective; equals ``value_s`` once proven
    step_end_s: float = 0.0  # of the stage where it takes longest
