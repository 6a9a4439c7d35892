"""Profiles of other planners: whole models by device type, tp and micro-batch size."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from amp_ray.arrays import FloatArray
from amp_ray.clusters.device import Device
from amp_ray.models.model import Model

Key = tuple[str, int, int]  # device type, tp, micro-batch size


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PublishedEntry:
    """Measurements of a model on one device type at one (tp, micro-batch size)."""

    layer_s: FloatArray  # shape ``(num_layers,)``. Forward plus backward of one micro-batch.
    # Shape ``(num_layers,)``. Weights, states and activations of a layer.
    layer_memory_bytes: FloatArray
    # Shape ``(num_layers,)``. Weights of a layer, before tp divides them.
    layer_parameter_bytes: FloatArray
    # Both passes of the whole model; None if not published
    forward_backward_s: float | None
    optimizer_s: float  # the optimizer step of the whole model
    batch_generator_s: float  # making one micro-batch

    def __post_init__(self) -> None:
        arrays = (self.layer_s, self.layer_memory_bytes, self.layer_parameter_bytes)
        lengths = [len(array) for array in arrays]
        if min(lengths) != max(lengths) or not lengths[0]:
            message = f"times, memory and parameters need one value per layer, found {lengths}"
            raise ValueError(message)
        scalars = [self.optimizer_s, self.batch_generator_s, self.forward_backward_s or 0.0]
        values = np.concatenate([*arrays, scalars])
        if not (np.isfinite(values).all() and (values >= 0).all()):
            wrong = values[~(np.isfinite(values) & (values >= 0))]
            message = f"published values must be finite and not negative, found {wrong.tolist()}"
            raise ValueError(message)
        for array in arrays:
            array.setflags(write=False)

    @property
    def num_layers(self) -> int:
        """Number of layers of the measured chain."""
        return len(self.layer_s)

    @property
    def rest_s(self) -> float | None:
        """Time of both passes beyond the sum of the layers; None if it is not known.

        In Metis's files this is the time of the output embedding and the loss: it grows with the
        micro-batch and shrinks with tp as they do, and the output layer has next to no time.
        """
        if self.forward_backward_s is None:
            return None
        return self.forward_backward_s - float(self.layer_s.sum())


@dataclass(frozen=True, kw_only=True, eq=False)
class PublishedProfile:
    """All entries of a published profile."""

    source: str
    # At least one; all with the same chain of layers, in any order.
    entries: Mapping[Key, PublishedEntry]
    notes: tuple[str, ...] = ()  # remarks of the reader, to be shown to the user

    def __post_init__(self) -> None:
        lengths = sorted({entry.num_layers for entry in self.entries.values()})
        if len(lengths) != 1:
            raise ValueError(f"{self.source}: a profile is of one chain of layers, found {lengths}")

    @cached_property
    def num_layers(self) -> int:
        """Number of layers of the measured chain."""
        return next(iter(self.entries.values())).num_layers

    @cached_property
    def types(self) -> tuple[str, ...]:
        """Measured device types, in alphabetical order."""
        return tuple(sorted({kind for kind, _, _ in self.entries}))

    def tps(self, kind: str) -> tuple[int, ...]:
        """Return the tensor parallel degrees measured on a device type, ascending."""
        return tuple(sorted({tp for of, tp, _ in self.entries if of == kind}))

    def sizes(self, kind: str, tp: int) -> tuple[int, ...]:
        """Return the micro-batch sizes measured on a device type at a tp, ascending."""
        return tuple(sorted(size for of, at, size in self.entries if (of, at) == (kind, tp)))

    def type_of(self, device: Device) -> str | None:
        """Return the measured type of a device; None if there is none.

        Other planners distinguish device types but not memory sizes: ``A100`` covers ``A100-40``
        and ``A100-80``. Case does not matter; an entry with the device's whole name comes first.
        """
        names = {kind.casefold(): kind for kind in self.types}
        name = device.name.casefold()
        return names.get(name) or names.get(name.partition("-")[0])


def layer_groups(model: Model, num_layers: int | None = None) -> tuple[range, ...] | None:
    """Return the layers of a model that each layer of a published chain represents.

    They represent the layers before the blocks, each block, and the layers behind the blocks; or
    single layers, if that form does not fit and the chain has as many layers as the model. None if
    neither form fits: the first one needs blocks in a row, and layers at both ends.
    """
    blocks = model.indices("block")
    if blocks and blocks == tuple(range(blocks[0], blocks[-1] + 1)):
        groups = (
            range(blocks[0]),
            *(range(block, block + 1) for block in blocks),
            range(blocks[-1] + 1, model.num_layers),
        )
        if all(groups) and num_layers in (None, len(groups)):
            return groups
    if model.num_layers == num_layers:
        return tuple(range(layer, layer + 1) for layer in range(num_layers))
    return None


def gaps(entries: Iterable[Key]) -> tuple[tuple[str, int, tuple[int, ...]], ...]:
    """Return, per device type and tp, the micro-batch sizes that only other pairs have measured.

    Rows are in ascending order; pairs that lack none are left out.

    Example:
        >>> gaps([("T4", 1, 1), ("T4", 1, 2), ("T4", 2, 1)])
        (('T4', 2, (2,)),)
    """
    sizes_of: dict[tuple[str, int], set[int]] = {}
    for kind, tp, size in entries:
        sizes_of.setdefault((kind, tp), set()).add(size)
    every = set().union(*sizes_of.values())
    return tuple(
        (kind, tp, tuple(sorted(every - sizes)))
        for (kind, tp), sizes in sorted(sizes_of.items())
        if every - sizes
    )
