"""Points to measure for a profile: layers by tp and micro-batch size, messages by size.

The program on the hosts shares this module with the controller.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal, Self

from amp_ray.models.model import Layer, Model

SMALLEST_MESSAGE_BYTES: Final = 1024
LARGEST_MESSAGE_BYTES: Final = 64 * 1024 * 1024
MESSAGE_STEP: Final = 4

_CONTEXT_EIGHTHS: Final = ((1, 2, 4), (2, 4, 6))
"""Lengths of slices measured with context, and of contexts, in eighths of a sequence."""

MIN_SIZE_RATIO: Final = 1.8
"""Least ratio of measured micro-batch sizes; the cost model interpolates in their logarithm."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class LayerPoint:
    """A layer, or the loss, at one tp and micro-batch size; smaller points sort first."""

    micro_batch_size: int
    tp: int
    layer: int  # position of the first equal layer; for the loss, the number of layers
    tokens: int = 0  # tokens per slice; 0 for whole sequences
    context: int = 0  # earlier tokens that the slice attends to

    def is_as_large_as(self, other: Self) -> bool:
        """Return whether this point needs at least as much memory as ``other``."""
        tokens, others = (point.tokens or math.inf for point in (self, other))
        return (
            self.tp == other.tp
            and self.micro_batch_size >= other.micro_batch_size
            and tokens >= others
            and self.context >= other.context
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkPoint:
    """A message or an all-reduce of one size."""

    what: Literal["p2p", "all_reduce"]
    num_ranks: int
    num_bytes: int  # size of the message or of the reduced tensor


def equal_layers(model: Model) -> tuple[int, ...]:
    """Return for each layer the position of the first layer that does the same work.

    A block whose sizes differ from the previous block's counts as a separate layer: it also
    up-samples, and the model's operators do not include that.
    """
    first: dict[tuple[Layer, Layer | None], int] = {}
    positions = []
    for position, layer in enumerate(model.layers):
        before = model.layers[position - 1] if position else None
        changes = before is not None and before.kind == layer.kind and before != layer
        positions.append(first.setdefault((layer, before if changes else None), position))
    return tuple(positions)


def first_positions(model: Model) -> tuple[int, ...]:
    """Return the first position of each distinct layer; equal layers are measured once."""
    return tuple(sorted(set(equal_layers(model))))


def loss_position(model: Model) -> int | None:
    """Return the layer index that denotes the loss; None if the last layer includes the loss."""
    return model.num_layers if model.layers[-1].added else None


def fitting_tps(model: Model, tps: Iterable[int], num_slots: int) -> tuple[int, ...]:
    """Return the tp degrees that divide the slots of a host and all split sizes of the model."""
    shape = model.shape
    parts = [num_slots, shape.num_heads, shape.num_key_value_heads]
    if shape.family != "transgan":
        parts += [shape.feed_forward_size, shape.shared_feed_forward_size]
        parts.append(shape.expert_feed_forward_size)
    return tuple(tp for tp in sorted(set(tps)) if all(part % tp == 0 for part in parts))


def thinned(sizes: Iterable[int]) -> tuple[int, ...]:
    """Drop sizes close to the previous smaller size; keep the first and the last.

    Example:
        >>> thinned([1, 2, 3, 4, 5, 6, 10, 12, 15, 20, 30, 60])
        (1, 2, 4, 10, 20, 60)
    """
    ordered = sorted(set(sizes))
    kept = ordered[:1]
    for size in ordered[1:]:
        if size >= MIN_SIZE_RATIO * kept[-1]:
            kept.append(size)
    if kept and kept[-1] != ordered[-1]:
        # Replace the last kept size by the largest one, so that no time has to be extrapolated.
        kept = [*(kept[:-1] if len(kept) > 1 else kept), ordered[-1]]
    return tuple(kept)


def layer_points(model: Model, pairs: Iterable[tuple[int, int]]) -> tuple[LayerPoint, ...]:
    """Return the points of all distinct layers at each pair, the largest sizes last."""
    loss = loss_position(model)
    layers = (*first_positions(model), *(() if loss is None else (loss,)))
    return tuple(
        sorted(
            LayerPoint(micro_batch_size=size, tp=tp, layer=layer)
            for tp, size in set(pairs)
            for layer in layers
        )
    )


def slice_points(
    model: Model, granularity: int, pairs: Iterable[tuple[int, int]]
) -> tuple[LayerPoint, ...]:
    """Return the slices to measure: all lengths without context, a few lengths with context.

    The cost of context is fitted by two coefficients, for which three lengths with three contexts
    suffice. Only blocks are measured: the cost of other layers does not depend on the context.
    """
    length = model.shape.sequence_length
    count = -(-length // granularity)
    alone = {*range(granularity, length + 1, granularity), length, length % granularity} - {0}
    sizes, contexts = (
        {max(1, count * part // 8) * granularity for part in parts} for parts in _CONTEXT_EIGHTHS
    )
    behind = {(size, before) for size in sizes for before in contexts if size + before <= length}
    places = {(size, 0) for size in alone} | behind
    layer = model.indices("block")[0]
    return tuple(
        sorted(
            LayerPoint(micro_batch_size=size, tp=tp, layer=layer, tokens=tokens, context=before)
            for tp, size in set(pairs)
            for tokens, before in places
        )
    )


def link_points(num_ranks: int) -> tuple[LinkPoint, ...]:
    """Return the points of all message sizes and group sizes, smallest messages first.

    Example:
        >>> {(point.what, point.num_ranks) for point in link_points(4)} == {
        ...     ("p2p", 2),
        ...     ("all_reduce", 2),
        ...     ("all_reduce", 4),
        ... }
        True
    """
    groups: list[tuple[Literal["p2p", "all_reduce"], int]] = [
        ("all_reduce", number) for number in range(2, num_ranks + 1) if num_ranks % number == 0
    ]
    if num_ranks > 1:
        groups.insert(0, ("p2p", 2))
    sizes = []
    size = SMALLEST_MESSAGE_BYTES
    while size <= LARGEST_MESSAGE_BYTES:
        sizes.append(size)
        size *= MESSAGE_STEP
    return tuple(
        LinkPoint(what=what, num_ranks=number, num_bytes=size)
        for size in sizes
        for what, number in groups
    )
