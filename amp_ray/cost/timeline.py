"""The predicted timeline of an iteration: begin and end of every instruction of the executor."""

from collections.abc import Callable, Sequence
from itertools import takewhile

from amp_ray.cost.instructions import (
    RECEIVES,
    SENDS,
    Instruction,
    Order,
    Timed,
    other_end,
)
from amp_ray.cost.model import CostModel
from amp_ray.cost.timer import distinct_replicas, strategy_schedule
from amp_ray.strategies.strategy import Strategy

Timeline = tuple[tuple[Timed, ...], ...]
"""Per stage, instructions with begin and end in seconds since the iteration began."""


def predicted_timeline(cost_model: CostModel, strategy: Strategy) -> Timeline:
    """Time the instructions of every stage, for the part of the samples that takes longest.

    Gradient synchronisation and optimizer step begin when the last stage has finished its passes.
    The step includes the host's work per iteration, so that the timeline ends at the estimated
    time. If chunks are interleaved and messages block, a stage's passes include the messages that
    it sends.

    Raises:
        ValueError: If the strategy's bounds count operators, or it does not fit the experiment.
    """
    if strategy.has_operators:
        message = "a plan of operators has no timeline: its stages are priced operator by operator"
        raise ValueError(message)
    traits = cost_model.experiment.traits
    passes_s, sends_s = cost_model.passes(strategy)
    schedule = strategy_schedule(strategy, passes_s.shape[3], traits)
    orders = [
        tuple(
            instruction for instruction in order if instruction.kind not in {"REDUCE_GRAD", "STEP"}
        )
        for order in schedule.lists()
    ]
    waits = traits.blocking_transfers and strategy.is_interleaved

    def timed(part: int) -> Timeline:
        pass_s, cut_s = passes_s[:, :, part], sends_s[:, :, part]

        def seconds(instruction: Instruction) -> float:
            piece, backward = instruction.token_slice or 0, instruction.kind in {"B", "SEND_B"}
            if instruction.peer is not None:
                crossing_s = float(
                    cut_s[int(backward), min(instruction.stage, instruction.peer), piece]
                )
                return 0.0 if waits else crossing_s
            cut = instruction.stage - 1 if backward else instruction.stage
            sent = waits and 0 <= cut < cut_s.shape[1]
            sending_s = float(cut_s[int(backward), cut, piece]) if sent else 0.0
            return float(pass_s[int(backward), instruction.stage, piece]) + sending_s

        return time_instructions(
            orders, seconds, blocking=schedule.blocking, duplex=traits.duplex_transfers
        )

    slowest = max(map(timed, distinct_replicas(passes_s, sends_s)), key=_end_s)
    return _with_step(cost_model, strategy, slowest)


def _with_step(cost_model: CostModel, strategy: Strategy, timeline: Timeline) -> Timeline:
    """Add gradient synchronisation and step to every stage, after the last pass of all."""
    parts = cost_model.estimate(strategy).breakdown
    assert parts is not None
    end_s = _end_s(timeline)
    synced_s = end_s + parts.gradient_sync_s
    done_s = synced_s + parts.optimizer_s + parts.other_s
    return tuple(
        (
            *order,
            Timed(Instruction(kind="REDUCE_GRAD", stage=stage), end_s, synced_s),
            Timed(Instruction(kind="STEP", stage=stage), synced_s, done_s),
        )
        for stage, order in enumerate(timeline)
    )


def _end_s(timeline: Timeline) -> float:
    return max(order[-1].end_s for order in timeline if order)


def time_instructions(
    orders: Sequence[Order],
    seconds: Callable[[Instruction], float],
    *,
    blocking: bool = False,
    duplex: bool = False,
) -> tuple[tuple[Timed, ...], ...]:
    """Execute instruction lists one by one; `timer.pipeline_s` is the compiled form.

    Args:
        orders: Instructions of every stage, all its chunks in one list.
        seconds: Returns the seconds of a pass, or of the message that an instruction sends. It is
            not called for receiving.
        blocking: Whether a message keeps both ends busy until it has arrived. Otherwise it starts
            when it is sent, and only its receiver waits.
        duplex: Whether blocking messages that follow each other at both ends cross together.

    Returns:
        For every list, each instruction with its begin and end.

    Raises:
        ValueError: If stages wait for each other in a circle.
    """
    execution = _Execution(orders, seconds, blocking=blocking, duplex=duplex)
    while any(execution.advance(stage) for stage in range(len(orders))):
        pass
    stuck = [str(order[0]) for order in execution.ahead if order]
    if stuck:
        raise ValueError(f"the stages wait for each other at {', '.join(stuck)}")
    return tuple(tuple(timed) for timed in execution.timed)


class _Execution:
    def __init__(
        self,
        orders: Sequence[Order],
        seconds: Callable[[Instruction], float],
        *,
        blocking: bool,
        duplex: bool,
    ) -> None:
        self.seconds, self.blocking, self.duplex = seconds, blocking, duplex
        self.ahead = [list(order) for order in orders]
        self.timed: list[list[Timed]] = [[] for _ in orders]
        self.clock = [0.0] * len(orders)
        self.arrival_s: dict[Instruction, float] = {}

    def advance(self, stage: int) -> bool:
        """Execute the next instruction of a stage if possible; return whether it was possible."""
        if not self.ahead[stage]:
            return False
        instruction = self.ahead[stage][0]
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
        assert self.ahead[stage].pop(0) == instruction
        self.clock[stage] = begin_s + seconds
        self.timed[stage].append(Timed(instruction, begin_s, self.clock[stage]))

    def _meet(self, stage: int, instruction: Instruction) -> bool:
        """Exchange messages with the stage at the other end, if it is there, too."""
        assert instruction.peer is not None
        other = instruction.peer % len(self.ahead)
        ours = self._messages(stage, other)
        theirs = {other_end(message) for message in self._messages(other, stage)}
        together = [message for message in ours if message in theirs]
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
        """Return the messages with ``other`` that a stage exchanges next, before anything else."""

        def is_between(instruction: Instruction) -> bool:
            return instruction.peer is not None and instruction.peer % len(self.ahead) == other

        messages = list(takewhile(is_between, self.ahead[stage]))
        return messages if self.duplex else messages[:1]
