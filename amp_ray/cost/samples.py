"""Parts of samples on a rank: token slices, and context parallelism.

A slice of a sequence attends to the tokens before it. A context-parallel rank has equal numbers of
tokens from the front and the end of a sequence, so that all ranks have equal work in attention
(zigzag). Outside attention both count as shorter sequences. The ``cp`` ranks of a sample count as
data-parallel ranks, since they hold the same weights and sum their gradients. Their additional
cost is the exchange of keys and values, as every rank needs those of all tokens; or all-to-alls
before and after attention, where ranks divide its heads instead.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Final

import numpy as np

from amp_ray.arrays import FloatArray
from amp_ray.clusters.constants import Constants
from amp_ray.cost.collective import Path, all_gather_s, exchange_s, start_s
from amp_ray.cost.roofline import Rank, elementwise_phases
from amp_ray.errors import InputError
from amp_ray.inputs.experiment import Experiment
from amp_ray.inputs.profile import ANALYTIC, Anchor, DeviceTable, Profile
from amp_ray.inputs.slice_table import SlicePoints
from amp_ray.models.blocks import Kernels
from amp_ray.models.families import build_model
from amp_ray.models.model import LAYER_LISTS, Layer, Model
from amp_ray.runtimes.traits import RuntimeTraits, kernels_of
from amp_ray.strategies.strategy import TokenSlices

PASSES: Final = ("forward", "backward")

GRADIENT_BLOCKS: Final = 2
"""Factor of bytes in the backward pass: keys and values travel with their gradients."""


Place = tuple[int, int, int]
"""Sequences of a token slice, its tokens, and the tokens of context before it."""


def slice_places(slices: TokenSlices) -> list[Place]:
    """Return the place of each slice, in order.

    Example:
        >>> slice_places(((2, (6, 2)),))
        [(2, 6, 0), (2, 2, 6)]
    """
    return [
        (sequences, size, end - size)
        for sequences, tokens in slices
        for end, size in zip(accumulate(tokens), tokens, strict=True)
    ]


def largest_share(slices: TokenSlices) -> float:
    """Return the size of the largest slice as a share of its micro-batch.

    Example:
        >>> largest_share(((2, (6, 2)), (1, (4, 4))))
        0.5
    """
    whole = sum(sequences * sum(tokens) for sequences, tokens in slices)
    return max(sequences * max(tokens) for sequences, tokens in slices) / whole


def context_experiment(experiment: Experiment, cp: int, head_ranks: int = 1) -> Experiment:
    """Return an experiment whose samples are the parts of sequences on one of ``cp`` ranks.

    ``head_ranks`` of them divide the heads of attention.

    Raises:
        InputError: If ``cp`` ranks cannot divide the model's sequences evenly.
    """
    shape, traits = experiment.model.shape, experiment.traits
    if not shape.divides_context(cp):
        raise InputError(
            f"cp {cp} needs a model of causal sequences whose length 2 x cp divides, found family "
            f"{shape.family!r} with sequence_length {shape.sequence_length}"
        )
    tokens = shape.sequence_length // cp
    kernels = replace(
        kernels_of(traits, (shape.sequence_length - tokens) // 2),
        fused_attention=True,
        cp=cp,
        head_ranks=head_ranks,
        gathers_context=traits.context_parallel == "all-gather",
    )
    model = shorter_model(experiment.model, traits, tokens=tokens, kernels=kernels)
    return replace(experiment, model=model, profile=ANALYTIC)


def slice_experiment(
    experiment: Experiment, tokens: int, context: int, *, measured: bool
) -> Experiment:
    """Return an experiment whose samples are slices of ``tokens`` tokens after ``context`` others.

    ``measured`` uses times of measured slices instead of data sheets.
    """
    profile, model = ANALYTIC, experiment.model
    if measured:
        profile = slice_profile(experiment.profile, model, tokens=tokens, context=context)
    model = slice_model(model, experiment.traits, tokens=tokens, context=context)
    return replace(experiment, model=model, profile=profile)


def slice_model(model: Model, traits: RuntimeTraits, *, tokens: int, context: int) -> Model:
    """Return a model whose sequences have the length of a slice and attend to a context.

    Raises:
        InputError: If the model has no tokens, or cannot be rebuilt from its shape.
    """
    if not model.shape.is_causal:
        message = f"model family {model.shape.family!r} has no sequence to cut into token slices"
        raise InputError(message)
    kernels = kernels_of(traits, context)
    return shorter_model(model, traits, tokens=tokens, kernels=kernels)


def shorter_model(model: Model, traits: RuntimeTraits, *, tokens: int, kernels: Kernels) -> Model:
    """Return a copy of a model with sequences of ``tokens`` tokens.

    Raises:
        InputError: If the model cannot be rebuilt from its shape.
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
    """Return whether slices were measured on all ``devices`` at all ``tps``."""
    degrees = set(tps)
    return all((device, tp) in profile.slices for device in devices for tp in degrees)


def slice_profile(profile: Profile, model: Model, *, tokens: int, context: int) -> Profile:
    """Return a profile whose samples are slices, based on measured slices.

    Blocks get the times of measured slices; layers without attention get a share of the time of
    whole sequences. ``profile`` must have slices; ``model`` has whole sequences.
    """
    blocks = np.array([layer.kind == "block" for layer in model.layers])
    tables: dict[str, DeviceTable] = {}
    for (device, tp), points in profile.slices.items():
        whole = {size: anchor for (at, size), anchor in profile.tables[device].items() if at == tp}
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


def measured_s(points: SlicePoints, way: int, place: Place) -> float:
    """Return the seconds of a slice: interpolated without context, plus the cost of its context.

    ``way`` is 0 forward, 1 backward.
    """
    sequences, tokens, context = place
    alone = (points.places[:, 0] == sequences) & (points.places[:, 2] == 0)
    sizes, order = np.unique(points.places[alone, 1], return_index=True)
    alone_s = float(np.interp(tokens, sizes, points.times_s[alone, way][order]))
    longer = max(1.0, tokens / float(sizes[-1]))
    read, scored = context_costs(points, way)
    return longer * alone_s + read * sequences * context + scored * sequences * tokens * context


def context_costs(points: SlicePoints, way: int) -> tuple[float, float]:
    """Fit the time that context adds to a pass: seconds per ``b c`` and per ``b s c``.

    Args:
        points: Measured slices; if none has context, both costs are 0.
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
    """Solve a least-squares problem with two non-negative coefficients.

    If the unconstrained solution is positive, return it; else one coefficient is 0.

    Args:
        columns: Shape ``(P, 2)``; no column is all 0.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextGroup:
    """Ranks that divide a sequence."""

    ring_ranks: int  # those with the same heads of attention
    ring: Path  # between these
    exchange: Path  # between those that divide the heads


def context_exchange_s(
    layer: Layer, rank: Rank, group: ContextGroup, traits: RuntimeTraits, constants: Constants
) -> tuple[float, float]:
    """Return the time that exchanges between ranks of a sequence add to both passes of one layer.

    In a ring each block of keys and values moves on while attention to the previous block is
    computed; only the excess of the transfer over this computation is visible, ``cp - 1`` times.
    The backward pass also moves their gradients, which need one more step to return to their rank.
    If keys and values are gathered instead, the whole gather is visible. The backward pass gathers
    them again and scatters their gradients. If ranks divide heads, queries, keys, values and the
    result have an all-to-all each, in the backward pass their gradients. The layer has one rank's
    tokens.

    References:
        Liu et al., Ring Attention, arXiv:2310.01889; Dubey et al., Llama 3, arXiv:2407.21783,
        section 3.3.2 (all-gather); Jacobs et al., DeepSpeed Ulysses, arXiv:2309.14509.
    """
    forward_s = backward_s = 0.0
    start, path, cp = start_s(constants, traits), group.ring, group.ring_ranks
    width = rank.micro_batch_size * rank.bytes_per_element / rank.tp
    for op in layer.elementwise:
        exchanged_s = sum(exchange_s(n * width, group.exchange, start) for n in op.head_exchanges)
        forward_s += exchanged_s
        backward_s += exchanged_s
        if not op.context_elements:
            continue
        block = op.context_elements * width
        if traits.context_parallel == "all-gather":
            gathered_s = all_gather_s(block * cp, cp, path, start)
            forward_s += gathered_s
            backward_s += GRADIENT_BLOCKS * gathered_s
            continue
        attention = elementwise_phases(op, rank, constants)
        fixed_s, block_s = start + path.step_s, block / path.bytes_per_s
        behind_s = fixed_s + block_s - attention.forward_s / cp
        forward_s += (cp - 1) * max(0.0, behind_s)
        behind_s = fixed_s + GRADIENT_BLOCKS * block_s - attention.backward_s / cp
        backward_s += (cp - 1) * max(0.0, behind_s) + fixed_s + block_s
    return forward_s, backward_s
