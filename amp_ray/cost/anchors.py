"""How measured layer times differ from counted work, layer by layer."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from amp_ray.arrays import IntArray
from amp_ray.cost.roofline import Rank
from amp_ray.inputs.profile import Anchor, Profile
from amp_ray.models.model import Layer, Model
from amp_ray.runtimes.traits import RuntimeTraits


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Seconds of one layer at one (tp, micro-batch size)."""

    forward_s: float  # one run of the forward pass
    backward_s: float | None  # one run of the backward pass; None where it was not measured


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerAnchors:
    """What was measured of one layer on one device."""

    # By micro-batch size, at the rank's own tp
    at_tp: Mapping[int, Measured] = field(default_factory=dict)
    # By micro-batch size, without all-reduces: at tp 1 where the measured times hold all-reduces,
    # else the same as ``at_tp``
    alone: Mapping[int, Measured] = field(default_factory=dict)
    alone_tp: int = 1  # the tp of ``alone``
    # Host seconds of the cheapest kernel launch of all layers; 0 if none was measured
    launch_s: float = 0.0
    extrapolated: bool = False  # whether the rank's micro-batch lies outside of what was measured


def layer_anchors(
    profile: Profile, model: Model, rank: Rank, traits: RuntimeTraits, scale: float = 1.0
) -> tuple[LayerAnchors, ...]:
    """Return what was measured of every distinct layer; empty anchors for an analytic profile.

    Equal layers have equal times: their later half is pooled by the median, because a device
    warms up while a profile runs through a model.

    Args:
        profile: Where times come from.
        model: The chain of layers.
        rank: Device, tp, micro-batch size.
        traits: How many launches a kernel takes.
        scale: Measured times are multiplied by it.

    Raises:
        ValueError: If the profile is measured, but not for this device and tp.
    """
    layers, positions = model.distinct_layers
    at_tp = profile.anchors(rank.device, rank.tp)
    if not at_tp:
        return (LayerAnchors(),) * len(layers)
    alone_tp = 1 if profile.includes_all_reduces else rank.tp
    alone = profile.anchors(rank.device, alone_tp)
    extrapolated = not min(at_tp) <= rank.micro_batch_size <= max(at_tp)
    where = np.array(positions)
    result = []
    for index, layer in enumerate(layers):
        runs = profile.forward_runs if layer.kind == "block" else 1
        warm = _later_half(np.flatnonzero(where == index))
        talks = profile.includes_all_reduces and bool(layer.all_reduce_elements("forward"))
        result.append(
            LayerAnchors(
                at_tp=_pooled(at_tp, warm, runs, scale),
                alone=_pooled(alone if talks else at_tp, warm, runs, scale),
                alone_tp=alone_tp if talks else rank.tp,
                extrapolated=extrapolated,
            )
        )
    launch_s = _cheapest_launch_s(layers, result, traits)
    return tuple(replace(anchors, launch_s=launch_s) for anchors in result)


def _cheapest_launch_s(
    layers: Sequence[Layer], anchors: Sequence[LayerAnchors], traits: RuntimeTraits
) -> float:
    """Return host seconds per launch: no layer can be faster than the host launches its kernels."""
    prices = [
        measured.forward_s / (layer.num_kernels * traits.launches_per_kernel)
        for layer, found in zip(layers, anchors, strict=True)
        if layer.num_kernels
        for measured in found.alone.values()
    ]
    return min(prices, default=0.0)


def interpolate(ratios: Mapping[int, float], micro_batch_size: int) -> float:
    """Interpolate a ratio between measured micro-batch sizes, linearly in their logarithm.

    Outside of them the nearest one counts.

    Example:
        >>> interpolate({1: 1.0, 4: 2.0}, 2)
        1.5
    """
    sizes = sorted(ratios)
    logs = [math.log(size) for size in sizes]
    return float(np.interp(math.log(micro_batch_size), logs, [ratios[size] for size in sizes]))


def _later_half(positions: IntArray) -> IntArray:
    """Return the positions of the layers that ran on a warm device."""
    return positions[len(positions) // 2 :]


def _pooled(
    anchors: Mapping[int, Anchor], positions: IntArray, runs: int, scale: float
) -> dict[int, Measured]:
    """Pool equal layers, divide by the number of runs that the time holds, and scale."""
    return {
        size: Measured(
            forward_s=scale * float(np.median(anchor.forward_s[positions])) / runs,
            backward_s=None
            if anchor.backward_s is None
            else scale * float(np.median(anchor.backward_s[positions])),
        )
        for size, anchor in anchors.items()
    }
