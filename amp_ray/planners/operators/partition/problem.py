"""The problem of cutting a chain of operators into stages, with recompute if memory is short."""

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
    """Cut a chain of ``L`` operators into stages on ``G`` devices, in the least time.

    A stage has operators ``[a, b)``, a number of adjacent devices, one of ``V`` options and a set
    of operators to recompute. With ``q`` stages behind it, its time and memory are::

        time = sum of time_s + sum of join_s[a:b-1] + sum of recompute_s of recomputed operators
               + start_s[a] (unless a = 0) + end_s[b] (unless b = L)
        memory = sum of state_bytes + (q + 1) * (input_bytes[a] + sum of held_bytes - saved)
                 + peak + max(sum of weight_bytes,
                              max forward_reserved_bytes + max backward_reserved_bytes)

    The last two maxima leave out the stage's last operator unless ``reserves_last``, and ``q + 1``
    is at most ``most_in_flight``. ``saved`` sums the held bytes of the operators that are
    recomputed together with their successor in the stage, where the successor does not begin a
    layer. The peak is the largest sum that one run of recomputed operators within a layer saves. If
    ``runs_again`` fixes the recomputed operators, they are saved in every stage, and the peak is
    their largest run in the stage. All memory must fit into ``limit_bytes``, and ``m``
    micro-batches take::

        sum over stages of time + (m - 1) * slowest time + the longest step end

    The step end of a stage is the sum of its ``step_end_s``, its ``step_start_s``, and, if it holds
    exactly one end of the chain, ``tied_s``.

    Bytes are whole numbers in any unit, so their sums are exact.
    """

    time_s: FloatArray  # shape ``(V, L)``. Forward and backward of one micro-batch.
    join_s: FloatArray  # shape ``(V, L)``. Exchange with the next operator of the same stage.
    recompute_s: FloatArray  # shape ``(V, L)``. Forward pass alone.
    state_bytes: FloatArray  # shape ``(V, L)``. Weights, gradients and optimizer, per device.
    weight_bytes: FloatArray  # shape ``(V, L)``
    held_bytes: FloatArray  # shape ``(V, L)``. Kept for the backward pass, per micro-batch.
    input_bytes: FloatArray  # shape ``(V, L)``
    forward_reserved_bytes: FloatArray  # shape ``(V, L)``. Beyond the held bytes, while it runs.
    backward_reserved_bytes: FloatArray  # shape ``(V, L)``
    start_s: FloatArray  # shape ``(V, K, L + 1)``, ``K`` kinds of edges
    end_s: FloatArray  # shape ``(V, K, L + 1)``
    starts_layer: BoolArray  # shape ``(L,)``
    # Shape ``(L,)``. Whether a run that ends the stage with this operator has no peak.
    free_end: BoolArray
    # Whether a run that continues in the next layer counts the last operator before that layer in
    # its peak. If so, the solver may count it where it need not
    counts_last: bool
    devices: IntArray  # shape ``(V,)``
    allowed: BoolArray  # shape ``(V, G)``. By option and number of devices in front.
    edge_kind: IntArray  # shape ``(G + 1,)``. Kind of edge, by number of devices in front.
    limit_bytes: float
    num_micro_batches: int
    most_stages: int  # largest number of stages
    most_in_flight: int = 1_000_000  # most micro-batches that a stage holds at once
    reserves_last: bool = False  # whether the reserve of a stage counts its last operator, too
    # Shape ``(V, L)``. Step end per operator; None if nothing follows the pipeline.
    step_end_s: FloatArray | None = None
    step_start_s: FloatArray | None = None  # shape ``(V,)``. Step end per stage.
    # Shape ``(V,)``. Step end of a weight that both ends of the chain hold.
    tied_s: FloatArray | None = None
    # Shape ``(L,)``. Operators that are recomputed with their successor in every stage; ``time_s``
    # includes it. No stage begins after such an operator, and every operator is a layer.
    runs_again: BoolArray | None = None
    # Problem whose best chain costs no more than any chain with mixed operators; None if all mixes
    # are options
    relaxed: "OperatorProblem | None" = None

    def __post_init__(self) -> None:
        """Raise if a layer has too many operators."""
        if self.largest_layer > MOST_OPERATORS:
            msg = (
                f"a layer has {self.largest_layer} operators, expected at most {MOST_OPERATORS}: "
                "mark where layers start"
            )
            raise ValueError(msg)

    def taking(self, options: Sequence[int]) -> "OperatorProblem":
        """Return the problem with these options only, in this order."""
        names = (*_TABLES, "start_s", "end_s", "devices", "allowed", *_STEP_ENDS)
        tables = {name: getattr(self, name) for name in names}
        chosen: dict[str, Any] = {
            name: table[list(options)] for name, table in tables.items() if table is not None
        }
        return replace(self, **chosen)

    @property
    def num_operators(self) -> int:
        """``L``, the number of operators."""
        return int(self.time_s.shape[1])

    @property
    def num_devices(self) -> int:
        """``G``, the number of devices."""
        return int(self.allowed.shape[1])

    @property
    def largest_layer(self) -> int:
        """Operators of the largest layer."""
        return int(np.diff(np.append(self.layer_begin, self.num_operators)).max())

    @property
    def is_long(self) -> bool:
        """Whether the chain has so many layers that cuts within them need a plan to start from."""
        return len(self.layer_begin) > USUAL_LAYERS

    @cached_property
    def gap(self) -> float:
        """Relative gap between plan and bound at which the search may end: 0 for usual chains."""
        return MOST_GAP if self.is_long or self.largest_layer > USUAL_OPERATORS else 0.0

    @cached_property
    def kept_bytes(self) -> FloatArray:
        """Bytes that a micro-batch holds without chosen recompute, shape ``(V, L)``."""
        return self.held_bytes if self.runs_again is None else self.held_bytes * ~self.runs_again

    @cached_property
    def layer_begin(self) -> IntArray:
        """First operator of each layer, shape ``(Y,)``; the first one is 0."""
        starts = self.starts_layer.copy()
        starts[0] = True
        return np.flatnonzero(starts)


USUAL_LAYERS = 64
USUAL_OPERATORS = 16  # larger layers have too many patterns of recompute to try every combination
MOST_GAP = 1e-3  # relative gap between plan and bound at which their search may end

MOST_OPERATORS = 62
"""Most operators of a layer, since its recomputed operators are the bits of one integer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorStage:
    """A stage of a solution."""

    start: int  # first operator
    end: int  # one past the last operator
    option: int  # index of the option
    recomputed: tuple[int, ...]  # recomputed operators, ascending
    time_s: float  # of one micro-batch


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorSolution:
    """The best stages that the search found."""

    stages: tuple[OperatorStage, ...]
    value_s: float  # the objective, step end included
    slowest_s: float
    lower_bound_s: float  # no stages have a smaller objective; equals ``value_s`` once proven
    step_end_s: float = 0.0  # longest step end of a stage
