"""Asynchronous messages between stages: a rank waits only when it needs the tensor."""

from collections import deque
from collections.abc import Sequence
from typing import Any, Final, Literal, NamedTuple

import torch
from torch import Tensor

from amp_ray.training.executor.layout import Piece
from amp_ray.training.grid import shard_range

MessageKind = Literal["activation", "gradient", "tied"]

_TAGS: Final[dict[MessageKind, int]] = {"activation": 0, "gradient": 1, "tied": 2}
"""Between two processes messages of a kind arrive in the order in which they were sent."""


class _Part(NamedTuple):
    """A message under way, and the part of the tensor that it fills."""

    work: Any
    buffer: Tensor
    target: Tensor


class Incoming(NamedTuple):
    """A tensor that is arriving."""

    tensor: Tensor
    # Messages that it is made of; those that fill it directly have themselves as target
    parts: tuple[_Part, ...]

    def wait(self) -> Tensor:
        """Return the tensor once all of it has arrived."""
        for part in self.parts:
            part.work.wait()
            if part.target is not part.buffer:
                part.target.copy_(part.buffer)
        return self.tensor


class Messages:
    """Sends and receives pieces of tensors asynchronously.

    NCCL runs the messages between two processes of one group one after another, so that two that
    cross would wait for each other: every kind and direction has a group of its own there.
    """

    def __init__(self, *, cuda: bool) -> None:
        """Make the groups; every process of the trial has to."""
        self.groups: dict[tuple[MessageKind, bool], Any] = {}
        if cuda:
            for kind in _TAGS:
                for upward in (False, True):
                    self.groups[kind, upward] = torch.distributed.new_group()
        self.process = torch.distributed.get_rank()
        self.sent: deque[tuple[Any, Tensor]] = deque()

    def send(self, tensor: Tensor, pieces: Sequence[Piece], kind: MessageKind) -> None:
        """Begin to send parts of a tensor ``(samples, ..., features)``."""
        for piece in pieces:
            part = _part(tensor, piece).contiguous()
            self._send(part, piece.process, kind)

    def send_rows(self, rows: Tensor, process: int) -> None:
        """Begin to send rows of a table that two stages share."""
        self._send(rows.contiguous(), process, "tied")

    def receive_rows(self, rows: Tensor, process: int) -> Incoming:
        """Begin to receive such rows."""
        buffer = torch.empty_like(rows)
        return Incoming(buffer, (_Part(self._receive(buffer, process, "tied"), buffer, buffer),))

    def receive(self, tensor: Tensor, pieces: Sequence[Piece], kind: MessageKind) -> Incoming:
        """Begin to receive the parts of a tensor."""
        parts = []
        for piece in pieces:
            target = _part(tensor, piece)
            buffer = target if target.is_contiguous() else torch.empty_like(target).contiguous()
            parts.append(_Part(self._receive(buffer, piece.process, kind), buffer, target))
        return Incoming(tensor, tuple(parts))

    def forget_delivered(self) -> None:
        """Let go of tensors that have been sent."""
        while self.sent and self.sent[0][0].is_completed():
            self.sent.popleft()[0].wait()

    def finish(self) -> None:
        """Wait until everything has been sent."""
        while self.sent:
            self.sent.popleft()[0].wait()

    def _send(self, tensor: Tensor, process: int, kind: MessageKind) -> None:
        group = self.groups.get((kind, self.process < process))
        work = torch.distributed.isend(tensor, process, group=group, tag=_TAGS[kind])
        self.sent.append((work, tensor))

    def _receive(self, buffer: Tensor, process: int, kind: MessageKind) -> Any:  # noqa: ANN401
        group = self.groups.get((kind, process < self.process))
        return torch.distributed.irecv(buffer, process, group=group, tag=_TAGS[kind])


def _part(tensor: Tensor, piece: Piece) -> Tensor:
    """Return the part of a tensor that a message carries."""
    part = tensor[piece.first : piece.end]
    if piece.is_whole_width:
        return part
    first, end = shard_range(tensor.shape[-1], piece.feature_part, piece.num_feature_parts)
    return part[..., first:end]
