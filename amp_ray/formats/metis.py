"""Metis's profiles as profiles of ours: its layers on the model's, its totals on two passes.

Metis knows one input layer, equal layers in the middle and one output layer. Ours are embedding,
blocks, final norm, head. The input layer's values belong to what stands before the blocks, the
output layer's to what stands behind them, divided by counted work. What both passes of the whole
model take beyond the layers is the output embedding and the loss, so it belongs to the end too.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import numpy as np

from amp_ray.arrays import FloatArray
from amp_ray.clusters.device import Device
from amp_ray.errors import InputError, Where
from amp_ray.formats.metis_profile import parse_metis_profile
from amp_ray.inputs.profile import Anchor, DeviceTable, Profile
from amp_ray.inputs.published_profile import PublishedEntry, PublishedProfile, layer_groups
from amp_ray.models.model import Layer, Model

FORWARD_SHARE: Final = 1 / 3  # a backward pass makes two products for each of the forward pass

FLOPS_PER_ELEMENT: Final = 200.0
"""What an accelerator computes in the time in which it moves one element of two bytes; from 30
(P100) to 400 (T4, H100). Only weighs the layers at the ends of a chain against each other."""

_ENDS: Final = 2  # input and output layer


def read_metis_profile(
    files: Mapping[str, str], *, folder: str, model: Model, devices: Iterable[Device]
) -> Profile:
    """Read a folder of Metis's profile files, given as text by name, for an experiment."""
    published = parse_metis_profile(files, folder=folder)
    return metis_profile(published, folder=folder, model=model, devices=devices)


def metis_profile(
    published: PublishedProfile, *, folder: str, model: Model, devices: Iterable[Device]
) -> Profile:
    """Turn a published profile into one that anchors the cost model, with a table per device.

    Its times include tensor-parallel all-reduces. A profile of another number of layers, or without
    one of the device types, is refused.
    """
    groups = _groups(model, published.num_layers, folder)
    tables: dict[str, DeviceTable] = {}
    for device in devices:
        kind = profiled_type(published, device, folder=folder)
        tables[device.name] = _table(published, kind, model, groups)
    return Profile(
        source=published.source,
        tables=tables,
        includes_all_reduces=True,
        published=published,
    )


def profiled_type(published: PublishedProfile, device: Device, *, folder: str) -> str:
    """Return the measured type that a device is of; refuse a device without a profile."""
    kind = published.type_of(device)
    if kind is None:
        message = f"no profile of {device.name!r} in it, only of {', '.join(published.types)}"
        raise InputError(message, where=Where(file=folder))
    return kind


def _groups(model: Model, num_layers: int, folder: str) -> tuple[range, ...]:
    """Fit a published chain to a model's, or say what does not fit."""
    groups = layer_groups(model, num_layers)
    if groups is not None:
        return groups
    num_blocks = len(model.indices("block"))
    message = (
        f"found {num_layers} layers: an input layer, {num_layers - _ENDS} in the middle and an "
        f"output layer; the model has {num_blocks} blocks, so {num_blocks + _ENDS} are expected. "
        "model.num_layers counts blocks only"
    )
    raise InputError(message, where=Where(file=folder))


def _table(
    published: PublishedProfile, kind: str, model: Model, groups: Sequence[range]
) -> DeviceTable:
    """Return the anchors of one device type."""
    table = {}
    for (of, tp, size), entry in sorted(published.entries.items()):
        if of != kind:
            continue
        alone = published.entries.get((kind, 1, size), entry)
        alone_tp = 1 if (kind, 1, size) in published.entries else tp
        table[tp, size] = _anchor(
            _spread(entry, model, groups),
            _spread(alone, model, groups) * alone_tp / tp,
            model.layers,
        )
    return table


def _spread(entry: PublishedEntry, model: Model, groups: Sequence[range]) -> FloatArray:
    """Return seconds of both passes of every layer of the model, shape ``(model.num_layers,)``.

    ``groups`` are its layers for each measured one.
    """
    measured_s = entry.layer_s.copy()
    measured_s[-1] += max(0.0, entry.rest_s or 0.0)
    seconds = np.zeros(model.num_layers)
    for time_s, group in zip(measured_s, groups, strict=True):
        weights = np.array([_counted_work(model.layers[index]) for index in group])
        if not weights.any():
            weights = np.ones(len(group))
        seconds[group] = time_s * weights / weights.sum()
    return seconds


def _counted_work(layer: Layer) -> float:
    """Count a layer's work in both passes, in elements that are moved in the same time."""
    moved = sum(op.forward_elements + op.backward_elements for op in layer.elementwise)
    return moved + sum(gemm.flops for gemm in layer.gemms) / FORWARD_SHARE / FLOPS_PER_ELEMENT


def _anchor(both_s: FloatArray, compute_s: FloatArray, layers: Sequence[Layer]) -> Anchor:
    """Divide measured times of both passes, shape ``(num_layers,)``, over the two.

    What they take beyond ``compute_s``, the same work without tensor parallelism over tp, is
    all-reduces, divided over the passes as the layer has them; the rest is computation.
    """
    forward_s = np.empty_like(both_s)
    for index, layer in enumerate(layers):
        forward, backward = (
            sum(layer.all_reduce_elements(direction)) for direction in ("forward", "backward")
        )
        talks = forward + backward > 0
        computed_s = min(both_s[index], compute_s[index]) if talks else both_s[index]
        talk_s = both_s[index] - computed_s
        share = forward / (forward + backward) if talks else 0.0
        forward_s[index] = FORWARD_SHARE * computed_s + share * talk_s
    return Anchor(forward_s=forward_s, backward_s=both_s - forward_s)
