"""Context parallelism: ranks that divide the tokens of every sequence.

A rank has as many tokens from the front of a sequence as from its end, so that all attend to as
much (zigzag). For everything but attention it is a rank with shorter sequences: its model is one of
a ``cp``-th of the tokens. The ``cp`` ranks of a sample count as ``cp`` data-parallel ones, since
they hold the same weights and add up their gradients. What is priced here is the exchange of keys
and values, of which every rank needs all.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import numpy as np

from amp_ray.arrays import FloatArray
from amp_ray.clusters.constants import Constants
from amp_ray.cost.collective import Path, all_gather_s, start_s
from amp_ray.cost.estimate import Infeasible, Result
from amp_ray.cost.roofline import Rank, elementwise_phases
from amp_ray.cost.slices import shorter_model
from amp_ray.cost.stages import PlacedStages, StageTimes, prefix_sums
from amp_ray.cost.topology import Rings, Topology
from amp_ray.errors import InputError
from amp_ray.inputs.experiment import Experiment
from amp_ray.inputs.profile import ANALYTIC
from amp_ray.models.model import Layer
from amp_ray.runtimes.traits import RuntimeTraits, kernels_of
from amp_ray.strategies.candidate import Candidate, StageOptions
from amp_ray.strategies.strategy import Strategy

GRADIENT_BLOCKS = 2
"""In the backward pass a block of keys and values travels with its gradients."""

C = TypeVar("C", Candidate, Strategy)


def rank_experiment(experiment: Experiment, cp: int) -> Experiment:
    """Return an experiment whose samples are what one of ``cp`` ranks has of a sequence.

    Raises:
        InputError: If the model has no sequences that so many ranks can share out evenly.
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
        gathers_context=traits.context_parallel == "all-gather",
    )
    model = shorter_model(experiment.model, traits, tokens=tokens, kernels=kernels)
    flops = experiment.model.forward_flops / cp
    return replace(experiment, model=replace(model, forward_flops=flops), profile=ANALYTIC)


def without_context(plan: C) -> C:
    """Return a candidate or a strategy whose context-parallel ranks count as data-parallel ones."""
    if isinstance(plan, Candidate):
        return replace(plan, options=_flat(plan.options))
    stages = tuple(replace(stage, options=_flat(stage.options)) for stage in plan.stages)
    return replace(plan, stages=stages)


def _flat(options: StageOptions) -> StageOptions:
    """Return options in which cp is part of dp."""
    return replace(options, dp=options.dp * options.cp, cp=1)


def with_context(result: Result, cp: int, traits: RuntimeTraits) -> Result:
    """Return a result of `without_context` for what it was made of.

    Args:
        result: Of the experiment of one rank.
        cp: Context parallel degree.
        traits: Whether the runtime has any.
    """

    def own(options: StageOptions) -> StageOptions:
        return replace(options, dp=options.dp // cp, cp=cp)

    if isinstance(result, Infeasible):
        assert isinstance(result.candidate, Candidate)
        candidate = replace(result.candidate, options=own(result.candidate.options))
        return replace(result, candidate=candidate)
    stages = tuple(replace(stage, options=own(stage.options)) for stage in result.strategy.stages)
    refused = traits.why_no_context(cp)
    return replace(
        result,
        strategy=replace(result.strategy, stages=stages),
        warnings=(*result.warnings, *([] if refused is None else [refused])),
        launchable=result.launchable and refused is None,
    )


def exposed_s(
    layer: Layer, rank: Rank, cp: int, path: Path, traits: RuntimeTraits, constants: Constants
) -> tuple[float, float]:
    """Return what the exchange of keys and values adds to both passes of one layer.

    In a ring a block of them moves on while the attention to the one before it is computed: what it
    takes longer than that is seen, ``cp - 1`` times. The backward pass moves gradients with them,
    which have one step more to go home. Gathered, they are all waited for, and their gradients are
    scattered in the backward pass, which gathers them again.

    Args:
        layer: Of the model of one rank.
        rank: Its device, tp, micro-batch size and precision.
        cp: Ranks in the ring.
        path: What the ring meets.
        traits: Which of both the runtime does.
        constants: Efficiencies.

    References:
        Liu et al., Ring Attention, arXiv:2310.01889; Dubey et al., Llama 3, arXiv:2407.21783,
        section 3.3.2 (all-gather).
    """
    forward_s = backward_s = 0.0
    start = start_s(constants, traits)
    for op in layer.elementwise:
        if not op.context_elements:
            continue
        block = op.context_elements * rank.micro_batch_size * rank.bytes_per_element / rank.tp
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


def exchange_rings(stages: PlacedStages, cp: int, topology: Topology) -> Rings:
    """Return the slowest ring of keys and values of every tensor-parallel group, all at once.

    Args:
        stages: With cp as part of dp, its index fastest.
        cp: Ranks in a ring.
        topology: Links.
    """
    rows = [grid.reshape(-1, cp, grid.shape[1]).swapaxes(1, 2) for grid in stages.grids]
    rings = topology.rings(np.concatenate([row.reshape(-1, cp) for row in rows]))
    order = sorted(rings.paths, key=lambda path: (path.bytes_per_s, -path.step_s))
    place = np.array([order.index(path) for path in rings.paths])[list(rings.index)]
    ends = np.cumsum([row.shape[0] * row.shape[1] for row in rows])
    slowest = [
        np.repeat(own.reshape(len(row), -1).min(axis=1), cp)
        for own, row in zip(np.split(place, ends[:-1]), rows, strict=True)
    ]
    return Rings(paths=tuple(order), index=tuple(np.concatenate(slowest).tolist()))


def with_exchange(
    times: StageTimes,
    rings: Rings,
    price: Callable[[Path, int, int], tuple[FloatArray, FloatArray]],
) -> StageTimes:
    """Add the exchange of keys and values to layer times.

    Args:
        times: Without it.
        rings: Of every tensor-parallel group.
        price: Tells forward and backward seconds of every layer by path, tp and samples.
    """
    stages = times.stages
    distinct, of_stage = stages.distinct_options
    index: dict[tuple[int, int, int], int] = {}
    of_group = [of_stage[stage] for stage in stages.stage_of_group.tolist()]
    keys = list(zip(times.kind.tolist(), rings.index, of_group, strict=True))
    kind = [index.setdefault(key, len(index)) for key in keys]
    samples = dict(zip(keys, stages.samples.tolist(), strict=True))
    tables, plain = [], []
    for key in index:
        own, ring, number = key
        options = distinct[number]
        forward_s, backward_s = price(rings.paths[ring], options.tp, samples[key])
        alone = prefix_sums(np.array([forward_s, backward_s, forward_s + backward_s]))
        again_s = np.zeros_like(forward_s) if options.recompute.kind == "none" else forward_s
        again = prefix_sums(np.array([0 * again_s, again_s, again_s]))
        tables.append(times.tables[own] + alone + again)
        plain.append(times.plain[own] + alone)
    return replace(
        times, tables=np.array(tables), plain=np.array(plain), kind=np.array(kind, dtype=np.int64)
    )
