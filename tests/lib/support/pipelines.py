"""Oracles of the pipeline simulation: instruction lists, executed one by one."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]

Direction = Literal["forward", "backward"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """A stage computes one pass of one micro-batch."""

    direction: Direction
    micro_batch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """A stage meets a neighbour to hand over tensors.

    Attributes:
        cut: The lower of the two stages.
        tensors: What crosses, as the passes that made it.
    """

    cut: int
    tensors: frozenset[Pass]


Instruction = Pass | Exchange


def passes(stage: int, pp: int, num_micro_batches: int) -> list[Pass]:
    """List what a stage computes under 1F1B.

    One forward pass ahead for every stage behind it, then one forward and one backward pass in
    turn, then the remaining backward passes.

    Args:
        stage: From 0.
        pp: Number of stages.
        num_micro_batches: Per replica.
    """
    ahead = min(pp - stage - 1, num_micro_batches)
    order = [Pass(direction="forward", micro_batch=i) for i in range(ahead)]
    for i in range(num_micro_batches - ahead):
        order.append(Pass(direction="forward", micro_batch=ahead + i))
        order.append(Pass(direction="backward", micro_batch=i))
    rest = range(num_micro_batches - ahead, num_micro_batches)
    return order + [Pass(direction="backward", micro_batch=i) for i in rest]


def instructions(stage: int, pp: int, num_micro_batches: int) -> list[Instruction]:
    """List what a stage of a blocking runtime does: passes, and exchanges between them.

    Between two passes it hands over what the first one made and takes what the second one needs,
    activations first.

    Args:
        stage: From 0.
        pp: Number of stages.
        num_micro_batches: Per replica.
    """
    order = passes(stage, pp, num_micro_batches)
    done: list[Instruction] = []
    for before, after in pairwise((None, *order, None)):
        wanted: list[tuple[Pass, int]] = []
        if before is not None:  # an activation goes to the stage behind, a gradient before
            wanted.append((before, stage if before.direction == "forward" else stage - 1))
        if after is not None:
            wanted.append((after, stage - 1 if after.direction == "forward" else stage))
        done += [
            Exchange(cut=cut, tensors=frozenset({tensor}))
            for tensor, cut in sorted(wanted, key=lambda pair: pair[0].direction != "forward")
            if 0 <= cut < pp - 1
        ]
        done += [] if after is None else [after]
    return done


def merged(lists: list[list[Instruction]]) -> list[list[Instruction]]:
    """Make one exchange of two that follow each other at both ends of a cut.

    Args:
        lists: Instructions of each stage.
    """
    pairs = [
        {
            (one, other)
            for one, other in pairwise(todo)
            if isinstance(one, Exchange) and isinstance(other, Exchange) and one.cut == other.cut
        }
        for todo in lists
    ]
    result: list[list[Instruction]] = []
    for stage, todo in enumerate(lists):
        neighbours = [pairs[other] for other in (stage - 1, stage + 1) if 0 <= other < len(lists)]
        common = {pair for pair in pairs[stage] if any(pair in known for known in neighbours)}
        seconds: set[Instruction] = {other for _, other in common}
        whole: dict[Instruction, Instruction] = {
            one: Exchange(cut=one.cut, tensors=one.tensors | other.tensors) for one, other in common
        }
        result.append([whole.get(item, item) for item in todo if item not in seconds])
    return result


def run_blocking(
    stage_s: FloatArray, send_s: FloatArray, num_micro_batches: int, *, duplex: bool
) -> float:
    """Execute the instruction lists; both ends of an exchange wait for each other and for it.

    Args:
        stage_s: Shape ``(2, pp)``. Forward and backward of one micro-batch.
        send_s: Shape ``(2, pp - 1)``. Activation and gradient across each cut.
        num_micro_batches: Per replica.
        duplex: Whether two tensors of one exchange cross at the same time.

    Returns:
        Seconds until the last stage has ended.
    """
    pp = stage_s.shape[1]
    lists = [instructions(stage, pp, num_micro_batches) for stage in range(pp)]
    lists = merged(lists) if duplex else lists
    at, clock = [0] * pp, [0.0] * pp
    while any(at[stage] < len(lists[stage]) for stage in range(pp)):
        stages, instruction = next(ready_steps(lists, at))  # none left would be a deadlock
        if isinstance(instruction, Pass):
            seconds = float(stage_s[_row(instruction), stages[0]])
        else:
            parts = [float(send_s[_row(tensor), instruction.cut]) for tensor in instruction.tensors]
            seconds = max(parts) if duplex else sum(parts)
        end = max(clock[stage] for stage in stages) + seconds
        for stage in stages:
            clock[stage] = end
            at[stage] += 1
    return max(clock)


def ready_steps(
    lists: list[list[Instruction]], at: list[int]
) -> Iterator[tuple[tuple[int, ...], Instruction]]:
    """Find what can be executed now: a pass, or an exchange that both ends have come to.

    Args:
        lists: Instructions of each stage.
        at: How many of them each stage has done.

    Yields:
        The stages that take part, and the instruction.
    """
    current = [todo[i] if i < len(todo) else None for todo, i in zip(lists, at, strict=True)]
    for stage, instruction in enumerate(current):
        if isinstance(instruction, Pass):
            yield (stage,), instruction
        elif (
            instruction is not None
            and instruction.cut == stage
            and current[stage + 1] == instruction
        ):
            yield (stage, stage + 1), instruction


def _row(tensor: Pass) -> int:
    """Return the row of a direction in the arrays."""
    return 0 if tensor.direction == "forward" else 1


def run_overlapped(stage_s: FloatArray, send_s: FloatArray, num_micro_batches: int) -> float:
    """Find the longest path of the event graph where transfers run beside computation.

    A pass starts when its stage has ended the one before and its tensor has arrived.

    Args:
        stage_s: Shape ``(2, pp)``. Forward and backward of one micro-batch.
        send_s: Shape ``(2, pp - 1)``. Activation and gradient across each cut.
        num_micro_batches: Per replica.

    Returns:
        Seconds until the last pass has ended.
    """
    pp = stage_s.shape[1]
    order = [passes(stage, pp, num_micro_batches) for stage in range(pp)]
    ends: dict[tuple[int, Pass], float] = {}

    def end_s(stage: int, work: Pass) -> float:
        """Return when a stage ends a pass."""
        if (stage, work) not in ends:
            position = order[stage].index(work)
            free_s = end_s(stage, order[stage][position - 1]) if position else 0.0
            source = stage - 1 if work.direction == "forward" else stage + 1
            arrived_s = 0.0
            if 0 <= source < pp:
                sent_s = float(send_s[_row(work), min(stage, source)])
                arrived_s = end_s(source, work) + sent_s
            duration_s = float(stage_s[_row(work), stage])
            ends[stage, work] = max(free_s, arrived_s) + duration_s
        return ends[stage, work]

    return max(end_s(stage, order[stage][-1]) for stage in range(pp))
