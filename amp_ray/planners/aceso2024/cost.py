"""The published planner's formulas for a plan: seconds of an iteration and memory.

Kept for comparison, and to check that plans are read as Aceso reads them. The formulas are restated
with their errors: the gradient all-reduce, the optimizer and layout changes between stages are
free, each transfer is charged to both of its ends, and the largest recomputed run is left out if a
stage ends with it.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate
from typing import Final

import numpy as np

from amp_ray.arrays import BoolArray, FloatArray
from amp_ray.cost.estimate import Reason
from amp_ray.inputs.operator_profile import (
    VALUES,
    CollectiveKind,
    OperatorFamily,
    OperatorKey,
    OperatorProfile,
    OperatorTable,
    TransferTable,
    operator_table,
)
from amp_ray.planners.operators.cost import NOT_PROFILED, run_sums
from amp_ray.planners.operators.resharding import stage_exchanges
from amp_ray.planners.operators.strategy import operator_uses, refuse_uneven
from amp_ray.strategies.operator_run import OperatorUse
from amp_ray.strategies.strategy import Strategy
from amp_ray.units import MEGA, MIB

MIXED_PRECISION_COPIES: Final = 8
"""Weights and gradients in half precision; a master copy and two moments of twice the width."""

SINGLE_PRECISION_COPIES: Final = 4
"""A ResNet trains in single precision: weights, gradients and two moments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AcesoPlan:
    """A published plan: the use of each operator in each stage, and the micro-batches."""

    stages: Sequence[Sequence[OperatorUse]]  # cover all operators
    micro_batch_size: int  # samples of one micro-batch over all replicas
    num_micro_batches: int  # per iteration


def aceso_plan(strategy: Strategy, profile: OperatorProfile) -> AcesoPlan:
    """Return a strategy as a plan of operators.

    Raises:
        ValueError: If the strategy's layers do not match the profile's chain, or replicas share
            samples unevenly.
    """
    refuse_uneven(strategy, "cost model aceso-2024 divides")
    return AcesoPlan(
        stages=operator_uses(strategy, profile),
        micro_batch_size=strategy.samples_per_micro_batch,
        num_micro_batches=strategy.num_micro_batches,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """Parts of the memory of a stage's device."""

    states_bytes: float  # weights, gradients and optimizer
    in_flight_bytes: float  # activations of one micro-batch that waits for its backward pass
    num_in_flight: int  # micro-batches that wait at once
    recomputed_bytes: float  # the largest run of operators that is recomputed at once
    reserved_bytes: float  # held by the allocator beyond the other parts
    # Need of a recomputed run at the end of the stage. The published model omits it, and so
    # promises too little memory
    omitted_bytes: float

    @property
    def normal_bytes(self) -> float:
        """Sum of the parts without the allocator's reserve."""
        return self.states_bytes + self.num_in_flight * self.in_flight_bytes + self.recomputed_bytes

    @property
    def total_bytes(self) -> float:
        """Sum of all parts, to compare with the memory of a device."""
        return self.normal_bytes + self.reserved_bytes


def stage_memory(
    profile: OperatorProfile, first: int, table: OperatorTable, again: BoolArray, num_in_flight: int
) -> StageMemory:
    """Return the memory of a stage.

    An operator that recomputes together with its successor need not keep its activation, unless the
    successor starts a block, whose input is kept. ``table`` has the measurements of each operator
    at its own setting; ``again``, shape ``(n,)``, tells which operators recompute.
    """
    here = slice(first, first + len(again))
    share = profile.kept_share[here]
    kept = share * table.activation_bytes
    before_block = np.append(profile.starts_block[here][1:], False)
    both = np.append(again[:-1] & again[1:], False)
    saved = float(kept[both & ~before_block].sum())
    runs = run_sums(kept, both, before_block)
    counted = runs[:-1] if _omits_last_run(both, share) else runs
    largest = float(counted.max(initial=0.0))
    weights = float(table.weight_bytes.sum())
    return StageMemory(
        states_bytes=copies_of_weights(profile.family) * weights,
        in_flight_bytes=float(table.input_bytes[0] + kept.sum()) - saved,
        num_in_flight=num_in_flight,
        recomputed_bytes=largest,
        reserved_bytes=_reserved_bytes(table, weights),
        omitted_bytes=float(runs.max()) - largest,
    )


def copies_of_weights(family: OperatorFamily) -> int:
    """Return the memory of weights, gradients and optimizer, as a multiple of the weights."""
    return SINGLE_PRECISION_COPIES if family == "resnet" else MIXED_PRECISION_COPIES


def _omits_last_run(both: BoolArray, share: FloatArray) -> bool:
    """Return whether the published model forgets a run of recomputed operators at a stage's end.

    It does so if the last operator but one shares a buffer or holds a mask.
    """
    return len(both) > 1 and bool(both[-2]) and share[-2] != 1.0


def _reserved_bytes(table: OperatorTable, weights: float) -> float:
    """Return the allocator's reserve, which depends on all operators but the last."""
    forward, backward = table.forward_reserved_bytes[:-1], table.backward_reserved_bytes[:-1]
    most = float(forward.max(initial=0.0) + backward.max(initial=0.0))
    return max(most, weights)


NOT_EXPRESSIBLE: Final = "not a plan of Aceso's"

MISSING_COLLECTIVE_S: Final = 100.0
"""The planner's charge for a collective whose size was not measured."""

BYTES_COUNTED_PER_MIB: Final = MEGA
"""Bytes that the planner counts for a MiB of a transfer: 10^6."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTime:
    """Times of one micro-batch in a stage, by the published formulas."""

    forward_s: float  # all operators
    backward_s: float
    recompute_s: float  # forward passes that run a second time
    transfer_s: float  # what the stage receives and sends, each counted once
    resharding_s: float  # exchanges within the stage, in both passes
    num_missing: int  # exchanges of a size that was not measured

    @property
    def total_s(self) -> float:
        """Sum of forward and backward time of one micro-batch."""
        compute_s = self.forward_s + self.backward_s + self.recompute_s
        return compute_s + self.transfer_s + self.resharding_s


@dataclass(frozen=True, slots=True, kw_only=True)
class AcesoCost:
    """The published planner's predictions for a plan."""

    times: tuple[StageTime, ...]
    memory: tuple[StageMemory, ...]
    num_micro_batches: int

    @property
    def iteration_s(self) -> float:
        """``sum(t) + (N - 1) max(t)`` for stage times ``t`` and ``N`` micro-batches."""
        times = [time.total_s for time in self.times]
        return sum(times) + (self.num_micro_batches - 1) * max(times)


def aceso_cost(
    profile: OperatorProfile, plan: AcesoPlan, *, devices_per_node: int
) -> AcesoCost | Reason:
    """Compute the time and memory of a plan by the published formulas.

    Returns:
        The cost, or a reason that names the setting of an operator without a measurement.

    References:
        Liu et al., Aceso: Efficient Parallel DNN Training through Iterative Bottleneck
        Alleviation, EuroSys 2024, and its public artifact.
    """
    times, memory = [], []
    edges = (0, *accumulate(uses[0][0] * uses[0][1] for uses in plan.stages))
    links = [
        profile.inter if edge % devices_per_node == 0 and 0 < edge < edges[-1] else profile.intra
        for edge in edges
    ]
    first = 0
    for index, uses in enumerate(plan.stages):
        table = stage_table(profile, first, uses, plan.micro_batch_size)
        if isinstance(table, Reason):
            return Reason(kind=table.kind, detail=f"stage {index}: {table.detail}")
        again = np.array([use[3] for use in uses], dtype=np.bool_)
        sent_bytes = _sent_bytes(profile, first, uses, table, plan.micro_batch_size)
        steps = list(resharding_s(profile, first, uses, table.input_bytes))
        times.append(
            StageTime(
                forward_s=float(table.forward_s.sum()),
                backward_s=float(table.backward_s.sum()),
                recompute_s=float(table.forward_s[again].sum()),
                transfer_s=transfer_s(links[index], float(table.input_bytes[0]))
                + transfer_s(links[index + 1], sent_bytes),
                resharding_s=sum(seconds for _, seconds, _ in steps),
                num_missing=sum(not measured for *_, measured in steps),
            )
        )
        memory.append(stage_memory(profile, first, table, again, len(plan.stages) - index))
        first += len(uses)
    return AcesoCost(
        times=tuple(times), memory=tuple(memory), num_micro_batches=plan.num_micro_batches
    )


def stage_table(
    profile: OperatorProfile, first: int, uses: Sequence[OperatorUse], micro_batch_size: int
) -> OperatorTable | Reason:
    """Return the measurements of each operator of a stage at its setting.

    ``micro_batch_size`` counts samples over all replicas.
    """
    values = {name: np.empty(len(uses)) for name in VALUES}
    measured = np.empty(len(uses), dtype=np.bool_)
    for degrees in sorted({use[:3] for use in uses}):
        tp, dp, algorithm = degrees
        samples, rest = divmod(micro_batch_size, dp)
        source = None if rest else profile.tables.get(OperatorKey(samples, tp, algorithm))
        if source is None:
            detail = f"micro-batch {micro_batch_size} / dp {dp}, tp {tp}, algorithm {algorithm}"
            return Reason(kind=NOT_PROFILED, detail=detail)
        chosen = np.array([index for index, use in enumerate(uses) if use[:3] == degrees])
        for name, array in values.items():
            array[chosen] = getattr(source, name)[first + chosen]
        measured[chosen] = source.measured[first + chosen]
    if not measured.all():
        worst = int(np.argmin(measured))
        tp, dp, algorithm, _ = uses[worst]
        detail = f"{profile.names[first + worst]} at micro-batch {micro_batch_size} / dp {dp}"
        return Reason(kind=NOT_PROFILED, detail=f"{detail}, tp {tp}, algorithm {algorithm}")
    return operator_table(values, measured)


def transfer_s(link: TransferTable, size_bytes: float) -> float:
    """Return the time of a transfer, at the rate of the size before the next smaller measured one.

    As published, sizes below 1 MiB get a rate from the other end of the table: the index is
    negative.
    """
    size_mib = size_bytes / MIB
    if size_mib <= 0:
        return 0.0
    index = math.floor(math.log2(size_mib))
    index -= index >= 1
    last = len(link.bytes_per_s) - 1
    rate = link.bytes_per_s[max(min(index, last), -last - 1)]
    return float(size_mib * BYTES_COUNTED_PER_MIB / rate)


def _sent_bytes(
    profile: OperatorProfile,
    first: int,
    uses: Sequence[OperatorUse],
    table: OperatorTable,
    micro_batch_size: int,
) -> float:
    """Return the bytes that a stage sends: its last operator's output, at its first one's tp."""
    _, dp, algorithm, _ = uses[-1]
    key = OperatorKey(micro_batch_size // dp, uses[0][0], algorithm)
    sender = profile.tables.get(key)
    if sender is None:
        return float(table.output_bytes[-1])
    return float(sender.output_bytes[first + len(uses) - 1])


def resharding_s(
    profile: OperatorProfile,
    first_operator: int,
    uses: Sequence[OperatorUse],
    input_bytes: FloatArray,
) -> Iterator[tuple[int, float, bool]]:
    """Yield the time of each exchange within a stage; the planner's T5 has none.

    Yields:
        The operator that follows the exchange, its seconds, and whether its size was measured.
    """
    if profile.family == "t5":
        return
    price = cache(partial(collective_s, profile))
    for operator, step in stage_exchanges(profile, first_operator, uses):
        size_bytes = float(input_bytes[operator - first_operator])
        for kind in (step.forward, step.backward):
            if kind is not None:
                price_s = price(kind, step.num_devices, size_bytes)
                if price_s is None:
                    yield operator, MISSING_COLLECTIVE_S, False
                else:
                    yield operator, price_s, True


def collective_s(
    profile: OperatorProfile, kind: CollectiveKind, num_devices: int, size_bytes: float
) -> float | None:
    """Look up a collective at its size in whole MiB, or one MiB less; None if not measured."""
    table = profile.collectives.get((kind, num_devices))
    if table is None:
        return None
    whole = round(size_bytes / MIB)
    measured_s = (table.exact_s(size * MIB) for size in (whole, whole - 1))
    return next((seconds for seconds in measured_s if seconds is not None), None)
