"""Slices of sequences in the cost model: their places, the model of one, and what was measured."""

from collections.abc import Iterable
from dataclasses import replace
from itertools import accumulate
from typing import Final

import numpy as np

from amp_ray.arrays import FloatArray
from amp_ray.errors import InputError
from amp_ray.inputs.profile import Anchor, DeviceTable, Profile
from amp_ray.inputs.slice_table import SlicePoints
from amp_ray.models.blocks import Kernels
from amp_ray.models.families import build_model
from amp_ray.models.model import LAYER_LISTS, Model
from amp_ray.runtimes.traits import RuntimeTraits, kernels_of
from amp_ray.strategies.strategy import TokenSlices

PASSES: Final = ("forward", "backward")


def slice_places(token_slices: TokenSlices) -> list[tuple[int, int, int]]:
    """Return sequences, tokens and tokens of context of every slice, in order.

    Example:
        >>> slice_places(((2, (6, 2)),))
        [(2, 6, 0), (2, 2, 6)]
    """
    return [
        (sequences, size, end - size)
        for sequences, tokens in token_slices
        for end, size in zip(accumulate(tokens), tokens, strict=True)
    ]


def largest_share(token_slices: TokenSlices) -> float:
    """Return the part of a micro-batch that its largest slice is.

    Example:
        >>> largest_share(((2, (6, 2)), (1, (4, 4))))
        0.5
    """
    whole = sum(sequences * sum(tokens) for sequences, tokens in token_slices)
    return max(sequences * max(tokens) for sequences, tokens in token_slices) / whole


def slice_model(model: Model, traits: RuntimeTraits, *, tokens: int, context: int) -> Model:
    """Return a model whose sequences are as long as a slice and attend to a context.

    Raises:
        InputError: If the model has no tokens, or was built in a way that cannot be repeated.
    """
    if not model.shape.is_causal:
        message = f"model family {model.shape.family!r} has no sequence to cut into token slices"
        raise InputError(message)
    kernels = kernels_of(traits, context)
    return shorter_model(model, traits, tokens=tokens, kernels=kernels)


def shorter_model(model: Model, traits: RuntimeTraits, *, tokens: int, kernels: Kernels) -> Model:
    """Return a model as another one, with sequences of so many tokens.

    Raises:
        InputError: If it was built in a way that cannot be repeated.
    """
    for layer_list in LAYER_LISTS:
        built = build_model(
            replace(model.shape, sequence_length=tokens),
            layer_list=layer_list,
            vocabulary_multiple=traits.vocabulary_multiple,
            kernels=kernels,
        )
        if [layer.kind for layer in built.layers] == [layer.kind for layer in model.layers]:
            return built
    raise InputError(
        f"the layers of {model.name} are no list of its family: parts of sequences have no times"
    )


def covers_slices(profile: Profile, devices: Iterable[str], tps: Iterable[int]) -> bool:
    """Tell whether slices were measured on all devices at all degrees."""
    degrees = set(tps)
    return all((device, tp) in profile.slices for device in devices for tp in degrees)


def slice_profile(profile: Profile, model: Model, *, tokens: int, context: int) -> Profile:
    """Return a profile of slices instead of sequences, made of what was measured of slices.

    Blocks take what slices took; layers without attention, a part of what sequences took. The
    profile has slices, and the model whole sequences.
    """
    blocks = np.array([layer.kind == "block" for layer in model.layers])
    tables: dict[str, DeviceTable] = {}
    for (device, tp), points in profile.slices.items():
        whole = {size: each for (at, size), each in profile.tables[device].items() if at == tp}
        places, anchors = points.places, dict(tables.get(device, {}))
        for sequences in np.unique(places[places[:, 2] == 0, 0]).tolist():
            near = min(whole, key=lambda size: (abs(np.log(size / sequences)), size))
            part = sequences * tokens / (near * model.shape.sequence_length)
            times = whole[near]
            assert times.backward_s is not None, "refused where the profile is read"
            forward_s, backward_s = (
                np.where(
                    blocks,
                    measured_s(points, way, (sequences, tokens, context)),
                    part * whole_s,
                )
                for way, whole_s in enumerate((times.forward_s, times.backward_s))
            )
            anchors[tp, sequences] = Anchor(forward_s=forward_s, backward_s=backward_s)
        tables[device] = anchors
    return replace(profile, tables=tables, slices={}, forward_runs=1, includes_all_reduces=False)


def measured_s(points: SlicePoints, way: int, place: tuple[int, int, int]) -> float:
    """Return what a slice takes: between measured lengths without context, and what context adds.

    Args:
        points: Some of as many sequences without context.
        way: 0 forward, 1 backward.
        place: Sequences, tokens and tokens of context.
    """
    sequences, tokens, context = place
    own = (points.places[:, 0] == sequences) & (points.places[:, 2] == 0)
    sizes, order = np.unique(points.places[own, 1], return_index=True)
    alone_s = float(np.interp(tokens, sizes, points.times_s[own, way][order]))
    longer = max(1.0, tokens / float(sizes[-1]))
    read, scored = context_costs(points, way)
    return longer * alone_s + read * sequences * context + scored * sequences * tokens * context


def context_costs(points: SlicePoints, way: int) -> tuple[float, float]:
    """Fit what context adds to a pass: seconds per ``b c`` and per ``b s c``.

    Args:
        points: Some with context; without any it costs nothing.
        way: 0 forward, 1 backward.
    """
    alone = {
        (sequences, tokens): time_s
        for (sequences, tokens, before), time_s in zip(
            points.places.tolist(), points.times_s[:, way].tolist(), strict=True
        )
        if not before
    }
    rows = [
        (sequences * before, sequences * tokens * before, time_s - alone[sequences, tokens])
        for (sequences, tokens, before), time_s in zip(
            points.places.tolist(), points.times_s[:, way].tolist(), strict=True
        )
        if before and (sequences, tokens) in alone
    ]
    if not rows:
        return 0.0, 0.0
    matrix = np.array(rows, dtype=np.float64)
    return non_negative(matrix[:, :2], matrix[:, 2])


def non_negative(columns: FloatArray, target: FloatArray) -> tuple[float, float]:
    """Solve least squares in two columns whose coefficients may not be negative.

    If both are positive without that limit, this is the answer; else one of them is 0.

    Args:
        columns: Shape ``(P, 2)``, none of them 0.
        target: Shape ``(P,)``.

    Example:
        >>> non_negative(np.array([[1.0, 0.0], [0.0, 1.0]]), np.array([2.0, -1.0]))
        (2.0, 0.0)
    """
    scale = np.linalg.norm(columns, axis=0)
    both, *_ = np.linalg.lstsq(columns / scale, target, rcond=None)
    if (both >= 0).all():
        return float(both[0] / scale[0]), float(both[1] / scale[1])
    alone = np.maximum(0.0, target @ columns / scale**2)
    errors = [float(((target - alone[i] * columns[:, i]) ** 2).sum()) for i in range(2)]
    better = int(errors[1] < errors[0])
    return (float(alone[0]), 0.0) if better == 0 else (0.0, float(alone[1]))
