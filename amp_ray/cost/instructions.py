"""Instruction lists: the work of every stage of a pipeline in one iteration, in order.

The simulator times these lists, the training program executes them, a timeline draws them. This
module needs nothing but the standard library: it travels to the hosts with the training program.
"""

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final, Literal, NamedTuple

Kind = Literal["F", "B", "SEND_F", "RECV_F", "SEND_B", "RECV_B", "REDUCE_GRAD", "STEP"]
"""In the letters of ``torch.distributed.pipelining``: F forward, B backward (input and weight
gradients), messages of an activation (``_F``) or a gradient (``_B``), the gradient sync and the
optimizer step."""

Order = tuple["Instruction", ...]

SENDS: Final = ("SEND_F", "SEND_B")
RECEIVES: Final = ("RECV_F", "RECV_B")


class Unit(NamedTuple):
    """The chunk, micro-batch and token slice of one pass."""

    chunk: int  # which of the stage's chunks
    micro_batch: int  # index in the iteration
    token_slice: int  # index in the micro-batch; 0 where it is not sliced


Pass = tuple[Literal["F", "B"], Unit]


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    """One instruction of a stage: a pass, a message, the gradient sync or the step."""

    kind: Kind
    stage: int  # chunk ``c`` of stage ``p`` counts as stage ``c * pp + p``: the model's order
    micro_batch: int | None = None  # None for the gradient sync and the step
    token_slice: int | None = None  # None where the micro-batch is not sliced
    peer: int | None = None  # the other end of a message, counted as ``stage``

    def __str__(self) -> str:
        """Print as ``2F0``: stage 2, forward of micro-batch 0; ``2F0.1`` is its slice 1."""
        number = "" if self.micro_batch is None else str(self.micro_batch)
        piece = "" if self.token_slice is None else f".{self.token_slice}"
        return f"{self.stage}{self.kind}{number}{piece}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A synchronous pipeline schedule: 1F1B, interleaved, token-sliced.

    Raises:
        ValueError: If a count is below 1, or one stage has several chunks.

    References:
        1F1B: Narayanan et al., arXiv:2006.09503. Interleaved: Narayanan et al., arXiv:2104.04473.
        Slices within 1F1B: Sun et al., Seq1F1B, arXiv:2406.03488.
    """

    pp: int  # number of stages
    num_slices: tuple[int, ...]  # token slices of every micro-batch; 1 where it is whole
    # Chunks per stage. Above 1, micro-batches pass in groups of ``pp`` through one chunk after the
    # other; if ``pp`` does not divide them, some groups are larger.
    virtual_stages: int = 1
    # Whether a stage does its messages between two passes, both ends at once, as DeepSpeed does;
    # else it sends when a pass ends and receives when one begins
    blocking: bool = False

    def __post_init__(self) -> None:
        """Raise if the counts form no pipeline."""
        counts = (self.pp, self.virtual_stages, len(self.num_slices), *self.num_slices)
        if min(counts) < 1 or (self.pp == 1 and self.virtual_stages > 1):
            raise ValueError(
                "a schedule needs stages, micro-batches and slices, and several stages to "
                f"interleave, found pp {self.pp}, virtual_stages {self.virtual_stages} and slices "
                f"{list(self.num_slices)}"
            )
        if self.blocking and (self.virtual_stages > 1 or max(self.num_slices) > 1):
            raise ValueError("a blocking schedule has one chunk per stage and whole micro-batches")

    @property
    def num_stages(self) -> int:
        """Chunks of all stages together."""
        return self.pp * self.virtual_stages

    def passes(self, stage: int) -> tuple[Pass, ...]:
        """List the passes of a stage, in order.

        A backward pass needs the whole micro-batch, and begins with its last slice, whose keys
        and values no other slice reads.
        """
        forward = tuple(map(Unit, *self.columns(backward=False)))
        backward = tuple(map(Unit, *self.columns(backward=True)))
        ahead = self.num_ahead(stage)
        order: list[Pass] = [("F", unit) for unit in forward[:ahead]]
        for i, unit in enumerate(backward):
            order += [("F", unit) for unit in forward[ahead + i : ahead + i + 1]]
            order.append(("B", unit))
        return tuple(order)

    def instructions(self, stage: int) -> Order:
        """List the instructions of a stage: passes, messages, gradient sync, step."""
        done: list[Instruction] = []
        for before, after in pairwise((None, *self.passes(stage), None)):
            sends = [] if before is None else self._send(stage, *before)
            receives = [] if after is None else self._receive(stage, *after)
            messages = [*sends, *receives]
            if self.blocking and before and after and self._are_adjacent(stage, before, after):
                # Both ends do gradients first, or they would wait in a circle.
                messages.sort(key=lambda message: message.kind not in {"SEND_B", "RECV_B"})
            done += messages
            if after is not None:
                done.append(self._instruction(after[0], stage, after[1]))
        places = (stage + chunk * self.pp for chunk in reversed(range(self.virtual_stages)))
        syncs = (Instruction(kind="REDUCE_GRAD", stage=place) for place in places)
        return (*done, *syncs, Instruction(kind="STEP", stage=stage))

    def lists(self) -> tuple[Order, ...]:
        """List the instructions of every stage."""
        return tuple(self.instructions(stage) for stage in range(self.pp))

    def text(self) -> str:
        """Print the lists: a line per stage, instructions separated by commas.

        Example:
            >>> print(Schedule(pp=2, num_slices=(1,)).text())
            0F0,0SEND_F0,0RECV_B0,0B0,0REDUCE_GRAD,0STEP
            1RECV_F0,1F0,1B0,1SEND_B0,1REDUCE_GRAD,1STEP
        """
        return "\n".join(",".join(map(str, order)) for order in self.lists())

    def columns(self, *, backward: bool) -> tuple[list[int], list[int], list[int]]:
        """List chunk, micro-batch and token slice of all forward or backward passes, in order."""
        step = -1 if backward else 1
        chunks, slices = range(self.virtual_stages)[::step], self.num_slices
        units = [
            (chunk, micro_batch, piece)
            for first, end in pairwise(self._groups)
            for chunk in chunks
            for micro_batch in range(first, end)
            for piece in range(slices[micro_batch])[::step]
        ]
        chunk_column, micro_batches, pieces = map(list, zip(*units, strict=True))
        return chunk_column, micro_batches, pieces

    @property
    def _groups(self) -> tuple[int, ...]:
        """Return the first micro-batch of each group that passes through one chunk after the other.

        Stages would wait for each other in a group of fewer than ``pp``, so a remainder makes
        groups larger.
        """
        num_micro_batches = len(self.num_slices)
        if self.virtual_stages == 1:
            return tuple(range(num_micro_batches + 1))
        num_groups = max(1, num_micro_batches // self.pp)
        return tuple(i * num_micro_batches // num_groups for i in range(num_groups + 1))

    def num_ahead(self, stage: int) -> int:
        """Return the forward passes before the first one that alternates with a backward pass."""
        most = max(self.num_slices)
        behind = self.pp - 1 - stage
        num_passes = self.virtual_stages * sum(self.num_slices)
        if self.virtual_stages == 1:
            return min(behind + most - 1, num_passes)
        # Twice the necessary number, so that messages in both directions have one step to travel
        # (Narayanan et al., section 2.2).
        group = max(end - first for first, end in pairwise(self._groups))
        ahead = 2 * behind + (self.virtual_stages - 1) * group * most + most - 1
        return min(ahead, num_passes)

    def _are_adjacent(self, stage: int, before: Pass, after: Pass) -> bool:
        """Return whether no empty step lies between two passes of a blocking stage.

        Steps count the passes of all stages: forward pass ``i`` of stage ``j`` is in step ``2 i +
        j``, its backward pass ``i`` in step ``2 i + 2 pp - 1 - j``, as in DeepSpeed.
        """
        steps = [
            2 * unit.micro_batch + (stage if kind == "F" else 2 * self.pp - 1 - stage)
            for kind, unit in (before, after)
        ]
        return steps[1] == steps[0] + 1

    def _instruction(
        self, kind: Kind, stage: int, unit: Unit, peer: int | None = None
    ) -> Instruction:
        """Return the instruction for a unit; ``peer`` counts from the unit's stage."""
        place = stage + unit.chunk * self.pp
        return Instruction(
            kind=kind,
            stage=place,
            micro_batch=unit.micro_batch,
            token_slice=unit.token_slice if self.num_slices[unit.micro_batch] > 1 else None,
            peer=None if peer is None else place + peer,
        )

    def _send(self, stage: int, kind: Literal["F", "B"], unit: Unit) -> list[Instruction]:
        place = stage + unit.chunk * self.pp
        if kind == "F":
            last = place == self.num_stages - 1
            return [] if last else [self._instruction("SEND_F", stage, unit, 1)]
        return [] if place == 0 else [self._instruction("SEND_B", stage, unit, -1)]

    def _receive(self, stage: int, kind: Literal["F", "B"], unit: Unit) -> list[Instruction]:
        place = stage + unit.chunk * self.pp
        if kind == "F":
            return [] if place == 0 else [self._instruction("RECV_F", stage, unit, -1)]
        last = place == self.num_stages - 1
        return [] if last else [self._instruction("RECV_B", stage, unit, 1)]


def other_end(message: Instruction) -> Instruction:
    """Return the peer's instruction for a message: the receive of a send, or the reverse."""
    assert message.peer is not None
    word, _, letter = message.kind.partition("_")
    ends: dict[str, dict[str, Kind]] = {
        "SEND": {"F": "RECV_F", "B": "RECV_B"},
        "RECV": {"F": "SEND_F", "B": "SEND_B"},
    }
    return replace(message, kind=ends[word][letter], stage=message.peer, peer=message.stage)


class Timed(NamedTuple):
    """When an instruction runs, in seconds since the iteration began."""

    instruction: Instruction
    begin_s: float
    end_s: float
