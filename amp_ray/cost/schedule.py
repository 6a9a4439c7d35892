"""The 1F1B pipeline schedule: closed form, event simulation, text; times of instruction lists."""

from collections.abc import Callable, Sequence
from itertools import takewhile

import numpy as np

from amp_ray.cost.estimate import Breakdown
from amp_ray.cost.instructions import RECEIVES, SENDS, Instruction, Order, Timed, other_end
from amp_ray.cost.kernels import FloatArray, simulate_blocking, simulate_overlapped, simulate_sliced
from amp_ray.spec.traits import RuntimeTraits


def closed_form_s(
    stage_time_s: FloatArray, cut_time_s: FloatArray, num_micro_batches: int
) -> float:
    """Estimate one synchronous 1F1B iteration, without the gradient all-reduce.

    The first micro-batch fills the pipeline; each later one waits for the
    slowest stage: ``T = sum(t) + sum(c) + (m - 1) * max(t)``.

    Args:
        stage_time_s: Shape ``(pp,)``. Forward plus backward of one micro-batch.
        cut_time_s: Shape ``(pp - 1,)``. Activation plus gradient sent across each cut.
        num_micro_batches: ``m``, per data-parallel replica.

    Returns:
        Seconds per iteration.

    Raises:
        ValueError: If the shapes disagree or ``num_micro_batches < 1``.

    References:
        Li et al., AMP, arXiv:2210.07297. Narayanan et al., arXiv:2104.04473.

    Example:
        >>> closed_form_s(np.array([1.0, 2.0]), np.array([0.5]), 4)
        9.5
    """
    if len(cut_time_s) != len(stage_time_s) - 1 or num_micro_batches < 1:
        raise ValueError(
            f"{len(stage_time_s)} stages need {len(stage_time_s) - 1} cuts and at least one "
            f"micro-batch, found {len(cut_time_s)} cuts and {num_micro_batches} micro-batches"
        )
    return float(
        stage_time_s.sum() + cut_time_s.sum() + (num_micro_batches - 1) * stage_time_s.max()
    )


def simulate_s(
    stage_s: FloatArray,
    send_s: FloatArray,
    num_micro_batches: int,
    *,
    blocking: bool,
    duplex: bool = False,
) -> float:
    """Simulate one 1F1B iteration event by event, in O(pp x m).

    Args:
        stage_s: Shape ``(2, pp)``. Forward and backward of one micro-batch.
        send_s: Shape ``(2, pp - 1)``. Activation and gradient across each cut.
        num_micro_batches: ``m``, per data-parallel replica.
        blocking: Whether a transfer occupies both of its stages (DeepSpeed, which waits for
            every send and receive) or runs beside their computation.
        duplex: Whether an activation and a gradient cross a blocking cut at the same time.

    Returns:
        Seconds until the last backward pass ends.

    Raises:
        ValueError: If the shapes disagree or ``num_micro_batches < 1``.
    """
    if send_s.shape[1] != stage_s.shape[1] - 1 or num_micro_batches < 1:
        raise ValueError(
            f"{stage_s.shape[1]} stages need {stage_s.shape[1] - 1} cuts and at least one "
            f"micro-batch, found {send_s.shape[1]} cuts and {num_micro_batches} micro-batches"
        )
    stages, sends = np.ascontiguousarray(stage_s), np.ascontiguousarray(send_s)
    if blocking:
        return float(simulate_blocking(stages, sends, num_micro_batches, duplex))
    return float(simulate_overlapped(stages, sends, num_micro_batches))


def time_instructions(
    orders: Sequence[Order],
    seconds: Callable[[Instruction], float],
    *,
    blocking: bool = False,
    duplex: bool = False,
) -> tuple[tuple[Timed, ...], ...]:
    """Execute instruction lists one by one; `simulate_s` is the compiled form for 1F1B.

    Args:
        orders: Of every stage; several chunks of a stage are in one list.
        seconds: What a pass takes, or the message that an instruction sends. A stage is not asked
            what receiving takes.
        blocking: Whether both ends of a message meet for it and are busy until it has crossed.
            Else it begins when it is sent, and its receiver waits for its end.
        duplex: Whether blocking messages that follow each other at both ends cross together.

    Returns:
        For every list, each instruction with its begin and end.

    Raises:
        ValueError: If stages wait for each other in a circle.
    """
    execution = _Execution(orders, seconds, blocking=blocking, duplex=duplex)
    while any(execution.advance(stage) for stage in range(len(orders))):
        pass
    stuck = [str(left[0]) for left in execution.left if left]
    if stuck:
        raise ValueError(f"the stages wait for each other at {', '.join(stuck)}")
    return tuple(tuple(timed) for timed in execution.timed)


class _Execution:
    """How far every stage is, and what has been sent."""

    def __init__(
        self,
        orders: Sequence[Order],
        seconds: Callable[[Instruction], float],
        *,
        blocking: bool,
        duplex: bool,
    ) -> None:
        """Begin at time 0."""
        self.seconds, self.blocking, self.duplex = seconds, blocking, duplex
        self.left = [list(order) for order in orders]
        self.timed: list[list[Timed]] = [[] for _ in orders]
        self.clock = [0.0] * len(orders)
        self.arrival_s: dict[Instruction, float] = {}

    def advance(self, stage: int) -> bool:
        """Execute the next instruction of a stage, if it can be; tell whether it could."""
        if not self.left[stage]:
            return False
        instruction = self.left[stage][0]
        if instruction.peer is None:
            self._do(stage, instruction, self.clock[stage], self.seconds(instruction))
        elif self.blocking:
            return self._meet(stage, instruction)
        elif instruction.kind in RECEIVES:
            arrival_s = self.arrival_s.get(other_end(instruction))
            if arrival_s is None:
                return False
            begin_s = self.clock[stage]
            self._do(stage, instruction, begin_s, max(0.0, arrival_s - begin_s))
            self.clock[stage] = max(begin_s, arrival_s)
        else:
            self.arrival_s[instruction] = self.clock[stage] + self.seconds(instruction)
            self._do(stage, instruction, self.clock[stage], 0.0)
        return True

    def _do(self, stage: int, instruction: Instruction, begin_s: float, seconds: float) -> None:
        """Note that a stage is busy with an instruction."""
        assert self.left[stage].pop(0) == instruction
        self.clock[stage] = begin_s + seconds
        self.timed[stage].append(Timed(instruction, begin_s, self.clock[stage]))

    def _meet(self, stage: int, instruction: Instruction) -> bool:
        """Exchange messages with the stage at the other end, if it is there, too."""
        assert instruction.peer is not None
        other = instruction.peer % len(self.left)
        own = self._messages(stage, other)
        theirs = {other_end(message) for message in self._messages(other, stage)}
        together = [message for message in own if message in theirs]
        if instruction not in together:
            return False
        durations = [
            self.seconds(message if message.kind in SENDS else other_end(message))
            for message in together
        ]
        begin_s = max(self.clock[stage], self.clock[other])
        seconds = max(durations) if self.duplex else sum(durations)
        for message in together:
            self._do(stage, message, begin_s, seconds)
        for message in together:
            self._do(other, other_end(message), begin_s, seconds)
        return True

    def _messages(self, stage: int, other: int) -> list[Instruction]:
        """Return the messages between two stages that one of them does next, without a pause."""

        def is_between(instruction: Instruction) -> bool:
            return instruction.peer is not None and instruction.peer % len(self.left) == other

        found = list(takewhile(is_between, self.left[stage]))
        return found if self.duplex else found[:1]


def schedule_text(pp: int, num_micro_batches: int) -> str:
    """Print the schedule: a line per stage, a column per step, ``2F0`` = stage 2, forward 0.

    Every pass takes one step here, as in DeepSpeed's own schedule: stage ``j`` has forward ``i``
    in step ``2 i + j`` and backward ``i`` in step ``2 i + 2 pp - 1 - j``.

    Args:
        pp: Number of stages.
        num_micro_batches: ``m``.

    Returns:
        Comma-separated values; an idle step is empty.

    Example:
        >>> print(schedule_text(2, 2))
        0F0,,0F1,0B0,,0B1
        ,1F0,1B0,1F1,1B1,
    """
    lines = []
    for stage in range(pp):
        steps = [""] * (2 * (num_micro_batches + pp - 1))
        for i in range(num_micro_batches):
            steps[2 * i + stage] = f"{stage}F{i}"
            steps[2 * i + 2 * pp - 1 - stage] = f"{stage}B{i}"
        lines.append(",".join(steps))
    return "\n".join(lines)


def bubble_fraction(pp: int, num_micro_batches: int, virtual_stages: int = 1) -> float:
    """Return the idle share of a pipeline of equal stages with free transfers.

    Args:
        pp: Number of stages.
        num_micro_batches: ``m``.
        virtual_stages: Model chunks per stage, which divide fill and drain.

    References:
        Narayanan et al., arXiv:2104.04473, section 2.2.

    Example:
        >>> bubble_fraction(4, 12)
        0.2
    """
    idle = (pp - 1) / virtual_stages
    return idle / (num_micro_batches + idle)


def slowest_replica(
    stage_s: FloatArray, send_s: FloatArray, num_micro_batches: int, traits: RuntimeTraits
) -> Breakdown:
    """Simulate every distinct replica and take the slowest one apart.

    Args:
        stage_s: Shape ``(3, pp, dp)``. Forward, backward, and the all-reduces within both.
        send_s: Shape ``(2, pp - 1, dp)``. Activation and gradient across each cut.
        num_micro_batches: Per replica.
        traits: How transfers and computation share time.

    Returns:
        The pipeline's part of a breakdown.
    """
    return slowest_of(
        stage_s,
        send_s,
        lambda passes_s, sends_s: _replica(passes_s, sends_s, num_micro_batches, traits),
    )


def longest_replica_s(
    stage_s: FloatArray, send_s: FloatArray, num_micro_batches: int, traits: RuntimeTraits
) -> float:
    """Return the seconds of the pipeline that `slowest_replica` takes apart."""
    return max(
        simulate_s(
            stage_s[:2, :, own],
            send_s[:, :, own],
            num_micro_batches,
            blocking=traits.blocking_transfers,
            duplex=traits.duplex_transfers,
        )
        for own in _distinct(stage_s, send_s)
    )


def slowest_of(
    passes_s: FloatArray,
    sends_s: FloatArray,
    replica: Callable[[FloatArray, FloatArray], Breakdown],
) -> Breakdown:
    """Take every distinct replica apart, and return the one that takes longest.

    Args:
        passes_s: Shape ``(3, num_chunks, dp)``. Forward, backward, and the all-reduces within both.
        sends_s: Shape ``(2, num_chunks - 1, dp)``. Activation and gradient across each cut.
        replica: Takes one apart, by both arrays without their last axis.
    """
    own = _distinct(passes_s, sends_s)
    parts = [replica(passes_s[:, :, index], sends_s[:, :, index]) for index in own]
    return max(parts, key=lambda part: part.total_s)


def _distinct(passes_s: FloatArray, sends_s: FloatArray) -> list[int]:
    """Return one replica of each kind."""
    num_replicas = passes_s.shape[2]
    if num_replicas == 1:
        return [0]
    columns = np.concatenate(
        [passes_s.reshape(-1, num_replicas), sends_s.reshape(-1, num_replicas)]
    )
    return list({row.tobytes(): index for index, row in enumerate(columns.T)}.values())


def slowest_sliced_replica(
    passes_s: FloatArray, sends_s: FloatArray, num_micro_batches: int
) -> Breakdown:
    """Simulate replicas whose micro-batches are cut into slices, and take the slowest one apart.

    Args:
        passes_s: Shape ``(3, pp, dp, num_slices)``. Forward, backward, all-reduces within both.
        sends_s: Shape ``(2, pp - 1, dp, num_slices)``. Activation and gradient across each cut.
        num_micro_batches: Per replica.

    Returns:
        The pipeline's part of a breakdown.
    """
    parts = []
    for replica in range(passes_s.shape[2]):
        own_s = np.ascontiguousarray(passes_s[:, :, replica])
        pipeline_s, still_s = (
            float(simulate_sliced(own_s[:2].copy(), sends, num_micro_batches))
            for sends in (
                np.ascontiguousarray(sends_s[:, :, replica]),
                np.zeros_like(sends_s[:, :, replica]),
            )
        )
        totals = own_s[:2].sum(axis=(0, 2))
        slowest = int(np.argmax(totals))
        busy_s = num_micro_batches * float(totals[slowest])
        talking_s = num_micro_batches * float(own_s[2, slowest].sum())
        parts.append(Breakdown.of_pipeline(pipeline_s, still_s, busy_s, talking_s))
    return max(parts, key=lambda part: part.total_s)


def _replica(
    stage_s: FloatArray, send_s: FloatArray, num_micro_batches: int, traits: RuntimeTraits
) -> Breakdown:
    """Simulate one replica with its transfers and as if they took no time."""
    pipeline_s, still_s = (
        simulate_s(
            stage_s[:2],
            sends,
            num_micro_batches,
            blocking=traits.blocking_transfers,
            duplex=traits.duplex_transfers,
        )
        for sends in (send_s, np.zeros_like(send_s))
    )
    totals = stage_s[:2].sum(axis=0)
    slowest = int(np.argmax(totals))
    busy_s = num_micro_batches * float(totals[slowest])
    talking_s = num_micro_batches * float(stage_s[2, slowest])
    return Breakdown.of_pipeline(pipeline_s, still_s, busy_s, talking_s)
