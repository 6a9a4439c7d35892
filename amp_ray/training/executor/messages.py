"""Asynchronous messages between stages: a rank waits for a tensor only when it uses it."""

from collections import deque
from collections.abc import Sequence
from typing import Any, Final, Literal, NamedTuple

import torch
from torch import Tensor

from amp_ray.training.grid import Piece, shard_range

MessageKind = Literal["activation", "gradient", "tied"]

_TAGS: Final[dict[MessageKind, int]] = {"activation": 0, "gradient": 1, "tied": 2}
"""Tag of each kind of message; between two processes, messages with one tag arrive in order."""


class _Part(NamedTuple):
    """A message being received, and the part of the tensor that it fills."""

    work: Any
    buffer: Tensor
    target: Tensor


class Incoming(NamedTuple):
    """A tensor that is being received."""

    tensor: Tensor
    # Messages with the tensor's parts; buffer and target are the same if no copy is needed
    parts: tuple[_Part, ...]

    def wait(self) -> Tensor:
        """Wait for all messages and return the tensor."""
        for part in self.parts:
            part.work.wait()
            if part.target is not part.buffer:
                part.target.copy_(part.buffer)
        return self.tensor


class Messages:
    """Sends and receives pieces of tensors asynchronously.

    NCCL serialises the messages between two processes of a group, so two messages in opposite
    directions would deadlock. With NCCL, each kind and direction therefore has a separate group.
    """

    def __init__(self, *, cuda: bool) -> None:
        """Create the groups; collective over all processes of the trial."""
        self.groups: dict[tuple[MessageKind, bool], Any] = {}
        if cuda:
            for kind in _TAGS:
                for upward in (False, True):
                    self.groups[kind, upward] = torch.distributed.new_group()
        self.process = torch.distributed.get_rank()
        self.sent: deque[tuple[Any, Tensor]] = deque()

    def send(self, tensor: Tensor, pieces: Sequence[Piece], kind: MessageKind) -> None:
        """Start to send parts of a tensor ``(samples, ..., features)``."""
        for piece in pieces:
            part = _part(tensor, piece).contiguous()
            self._send(part, piece.process, kind)

    def send_rows(self, rows: Tensor, process: int) -> None:
        """Start to send rows of a table that two stages share."""
        self._send(rows.contiguous(), process, "tied")

    def receive_rows(self, rows: Tensor, process: int) -> Incoming:
        """Start to receive rows of a table that two stages share."""
        buffer = torch.empty_like(rows)
        return Incoming(buffer, (_Part(self._receive(buffer, process, "tied"), buffer, buffer),))

    def receive(self, tensor: Tensor, pieces: Sequence[Piece], kind: MessageKind) -> Incoming:
        """Start to receive the parts of a tensor."""
        parts = []
        for piece in pieces:
            target = _part(tensor, piece)
            buffer = target if target.is_contiguous() else torch.empty_like(target).contiguous()
            parts.append(_Part(self._receive(buffer, piece.process, kind), buffer, target))
        return Incoming(tensor, tuple(parts))

    def forget_delivered(self) -> None:
        """Release the tensors that have been sent."""
        while self.sent and self.sent[0][0].is_completed():
            self.sent.popleft()[0].wait()

    def finish(self) -> None:
        """Wait until all messages have been sent."""
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
    part = tensor[piece.first : piece.end]
    if piece.num_feature_parts == 1:
        return part
    first, end = shard_range(tensor.shape[-1], piece.feature_part, piece.num_feature_parts)
    return part[..., first:end]
