"""Conversion of a strategy to our training program's layers, and reasons why it cannot be launched.

Bounds of published experiments index the artifact's list of layers, which has separate entries for
no-ops and for the loss. Each entry maps to a layer of our list, and a cut between two entries
becomes the cut between their layers.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Final

from amp_ray.errors import InputError
from amp_ray.inputs.experiment import Experiment
from amp_ray.models.families import build_model
from amp_ray.models.model import PLANNED_ONLY, TRAINED, LayerKind, Model, ModelShape
from amp_ray.strategies.recompute import FULL
from amp_ray.strategies.strategy import (
    StageOptions,
    Strategy,
    TokenSlices,
    all_bounds,
    stage_bounds,
)
from amp_ray.strategies.zero import SHARDED_GRADIENTS
from amp_ray.units import NARROW

PLAIN_TORCH: Final = "torch"  # our training program without DeepSpeed; supports all stages
# Runtimes of our training program; the last two are for experiments published by AMP's authors
RUNTIMES: Final = ("deepspeed", PLAIN_TORCH, "amp-2022", "amp-2022-transgan")
# Entries that start no layer of the program: they are dropped or join the previous layer
_NO_LAYER: Final[tuple[LayerKind, ...]] = ("noop", "loss")


def runtime_strategy(experiment: Experiment, strategy: Strategy) -> Strategy:
    """Convert a strategy to the form that our training program runs.

    The result's bounds index the program's list of layers. If the experiment's runtime always
    recomputes blocks, so does every stage of the result.
    """
    reason = why_not_launchable(experiment, strategy)
    if reason is not None:
        message = f"{describe(strategy)} cannot be launched: {reason}"
        raise InputError(message, where=experiment.where())
    bounds = runtime_bounds(experiment.model, strategy.bounds)
    chunks: tuple[int, ...] = ()
    if strategy.is_interleaved:
        chunks = runtime_bounds(experiment.model, all_bounds(experiment.model, strategy))
        bounds = stage_bounds(chunks, strategy.pp)
    again = experiment.traits.forward_runs > 1
    stages = tuple(
        replace(
            stage,
            first_layer=first,
            end_layer=end,
            options=replace(stage.options, recompute=FULL) if again else stage.options,
        )
        for stage, (first, end) in zip(strategy.stages, pairwise(bounds), strict=True)
    )
    return replace(strategy, stages=stages, chunk_bounds=chunks)


def why_not_launchable(experiment: Experiment, strategy: Strategy) -> str | None:
    """Return why our training program cannot run a strategy, with advice; None if it can."""
    return next(_reasons(experiment, strategy), None)


def untrained_part(shape: ModelShape) -> str:
    """Return the name of the part of a model that our training program lacks."""
    if shape.family in PLANNED_ONLY:
        return f"model family {shape.family!r}"
    return f"a {shape.family} with latent attention, windows, other norms or mtp_layers"


def untrained(shape: ModelShape) -> str:
    """Return the message that our training program lacks such a model, with advice."""
    return (
        f"our training program trains {', '.join(TRAINED)}, not {untrained_part(shape)}; run a "
        "program of your own as 'trials: {program: {argv: [...]}}'"
    )


def describe(strategy: Strategy) -> str:
    """Return a short name of a strategy for messages."""

    def degree(name: str) -> str:
        values = list(dict.fromkeys(getattr(stage.options, name) for stage in strategy.stages))
        return f"{name} {'/'.join(map(str, values))}"

    bounds = " ".join(map(str, strategy.given_bounds))
    chunks = f", virtual_stages {strategy.virtual_stages}" if strategy.is_interleaved else ""
    return (
        f"strategy {degree('tp')}, pp {strategy.pp}, {degree('dp')}, micro-batch size "
        f"{strategy.micro_batch_size}{chunks}, bounds {bounds}"
    )


def runtime_bounds(model: Model, bounds: Sequence[int]) -> tuple[int, ...]:
    """Return the bounds as indices of the program's layers; two are equal if a stage is empty."""
    firsts = _first_entries(model)
    return tuple(sum(entry < bound for entry in firsts) for bound in bounds)


def _first_entries(model: Model) -> tuple[int, ...]:
    """Return for each layer of the program the index of the model's first entry in it.

    If the last layer has no entry (the published TransGAN list has no head), its entry is the last
    one that computes something.
    """
    wanted = [layer.kind for layer in build_model(model.shape, layer_list="runtime").layers]
    kept = [
        (entry, layer.kind)
        for entry, layer in enumerate(model.layers)
        if layer.kind not in _NO_LAYER
    ]
    assert [kind for _, kind in kept] == wanted[: len(kept)], "lists of one model differ in order"
    entries = [entry for entry, _ in kept]
    return (*entries, *entries[-1:] * (len(wanted) - len(entries)))


def _reasons(experiment: Experiment, strategy: Strategy) -> Iterator[str]:
    """Yield reasons against a launch, the most fundamental first."""
    model, cluster = experiment.model, experiment.cluster
    if experiment.traits.name not in RUNTIMES:
        yield (
            f"runtime {experiment.traits.name!r} is another program than ours; give its command "
            "as 'trials: {program: {argv: [...]}}', or plan with 'runtime: deepspeed'"
        )
    if not model.shape.is_trained:
        yield untrained(model.shape)
    yield from _runtime_reasons(experiment, strategy)
    spread = any(stage.options.spreads_experts for stage in strategy.stages)
    if strategy.zero.stage >= SHARDED_GRADIENTS and spread:
        yield f"experts over ranks run with zero_stage 0 or 1, found {strategy.zero.stage}"
    no_zero = experiment.traits.why_no_zero(strategy.zero, strategy.pp)
    why_not = experiment.traits.why_not([stage.options for stage in strategy.stages])
    yield from filter(None, (no_zero, why_not))
    if strategy.bounds[-1] != model.num_layers:
        yield f"its bounds end at {strategy.bounds[-1]}, the model has {model.num_layers} layers"
        return
    if strategy.global_batch_size != experiment.global_batch_size:
        yield (
            f"it makes {strategy.global_batch_size} samples per step, global_batch_size is "
            f"{experiment.global_batch_size}"
        )
    if max(strategy.placement) >= cluster.num_devices:
        yield (
            f"it is placed on device {max(strategy.placement)}, the cluster has devices 0 to "
            f"{cluster.num_devices - 1}"
        )
    yield from _undivided(experiment, strategy)
    if experiment.precision in NARROW:
        yield from _odd_widths(experiment, strategy)
    yield from _empty_stages(model, all_bounds(model, strategy), strategy.pp)


def _runtime_reasons(experiment: Experiment, strategy: Strategy) -> Iterator[str]:
    traits = experiment.traits
    if traits.name != PLAIN_TORCH:
        if not strategy.is_uniform:
            yield (
                "its stages have different tp or dp, or shares of samples; DeepSpeed runs one of "
                "each, 'runtime: torch' any"
            )
        if strategy.is_sliced:
            yield (
                "it cuts sequences into token slices, which DeepSpeed's pipeline cannot run; "
                "'runtime: torch' can"
            )
        if strategy.sequence_parallel:
            yield "it divides tokens by sequence_parallel, which only 'runtime: torch' does"
        if strategy.is_interleaved:
            yield (
                f"virtual_stages is {strategy.virtual_stages}, and DeepSpeed does not interleave "
                "chunks; 'runtime: torch' does"
            )
        return
    if traits.sliced_activations or traits.sliced_gradients:
        yield "runtime torch sends whole activations to every rank; leave sliced_* of traits out"
    exchange = traits.context_parallel
    if exchange != "ring" and any(stage.options.cp > 1 for stage in strategy.stages):
        yield f"runtime torch sends keys and values around a ring, found {exchange}; leave it out"
    yield from _undivided_tokens(experiment, strategy)
    bounds = all_bounds(experiment.model, strategy)
    empty = [chunk for chunk, (first, end) in enumerate(pairwise(bounds)) if first == end]
    if empty:
        yield (
            f"stage {empty[0] % strategy.pp} has fewer blocks than virtual_stages "
            f"{strategy.virtual_stages}; use fewer chunks or other bounds"
        )


def _undivided_tokens(experiment: Experiment, strategy: Strategy) -> Iterator[str]:
    """Yield reasons if sequences do not have the tokens of the slices, or cannot be divided."""
    length = experiment.model.shape.sequence_length if experiment.model.shape.is_causal else 0
    wrong = [tokens for _, tokens in strategy.token_slices if sum(tokens) != length]
    if wrong and not length:
        yield "its token_slices need causal attention; pictures attend as a whole"
    elif wrong:
        yield f"its token_slices {list(wrong[0])} must add up to sequence_length {length}"
    cuts = {count for _, tokens in strategy.token_slices for count in tokens} or {length}
    for options in (stage.options for stage in strategy.stages if stage.options.sequence_parallel):
        if not length or any(count % (options.tp * options.cp) for count in cuts):
            yield (
                f"sequence_parallel divides {sorted(cuts)} tokens over tp {options.tp} ranks; set "
                "it to false, or choose what tp divides"
            )


def _undivided(experiment: Experiment, strategy: Strategy) -> Iterator[str]:
    """Yield reasons if ranks cannot divide a size of the model: by tp, cp or experts."""
    shape = experiment.model.shape
    sizes = {
        "num_heads": shape.num_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "feed_forward_size": shape.feed_forward_size,
        "shared_feed_forward_size": shape.shared_feed_forward_size,
    }
    for name, size in sizes.items():
        tps = [stage.options.tp for stage in strategy.stages if size % stage.options.tp]
        if tps:
            yield f"tp {tps[0]} does not divide {name} {size}; choose another tp"
    for options in dict.fromkeys(stage.options for stage in strategy.stages):
        if not shape.divides_context(options.cp):
            yield (
                f"cp {options.cp} needs causal sequences whose length 2 x cp divides, found "
                f"{shape.sequence_length} tokens; choose another cp"
            )
        yield from filter(None, (experiment.why_no_heads(options),))
        if options.spreads_experts:
            yield from _unspread(shape, options, strategy.token_slices)


_NARROW_MULTIPLE: Final = 16  # must divide all widths of products in narrow formats


def _odd_widths(experiment: Experiment, strategy: Strategy) -> Iterator[str]:
    """Yield a reason for each width that kernels for narrow formats do not support."""
    shape, head = experiment.model.shape, f"precision {experiment.precision}"
    if not shape.vocab_size:
        yield f"{head} is for language models, found pictures; use bf16"
        return
    head_size = shape.head_size or shape.hidden_size // shape.num_heads
    for options in dict.fromkeys(stage.options for stage in strategy.stages):
        widths = {
            "hidden_size": shape.hidden_size,
            "heads": shape.num_heads * head_size // options.tp,
            "heads, keys and values": (shape.num_heads + 2 * shape.num_key_value_heads)
            * head_size
            // options.tp,
            "feed_forward_size": shape.feed_forward_size // options.tp,
            "shared_feed_forward_size": shape.shared_feed_forward_size // options.tp,
            "expert_feed_forward_size": shape.expert_feed_forward_size // options.expert_tp,
        }
        for name, width in widths.items():
            if width % _NARROW_MULTIPLE:
                yield (
                    f"{head} needs multiples of {_NARROW_MULTIPLE} on every rank, found {name} "
                    f"{width} with tp {options.tp}; choose another tp, or bf16"
                )


def _unspread(shape: ModelShape, options: StageOptions, token_slices: TokenSlices) -> Iterator[str]:
    """Yield reasons why the experts of a layer cannot be spread over ranks."""
    ep, etp, tp = options.ep, options.expert_tp, options.tp
    if not shape.num_experts or shape.num_experts % ep:
        yield f"ep {ep} divides the experts of a model, found {shape.num_experts}"
    if shape.expert_feed_forward_size % etp:
        yield f"etp {etp} does not divide expert_feed_forward_size {shape.expert_feed_forward_size}"
    cuts = {count for _, tokens in token_slices for count in tokens}
    wrong = [count for count in cuts or {shape.sequence_length // options.cp} if count % tp]
    if wrong:
        yield (
            f"tp {tp} ranks each send a share of {wrong[0]} tokens to the experts of others; "
            "choose a tp that divides them, or ep 1 without etp"
        )


def _empty_stages(model: Model, bounds: Sequence[int], pp: int) -> Iterator[str]:
    ends = pairwise(runtime_bounds(model, bounds))
    for chunk, (first, end) in enumerate(ends):
        if first == end:
            names = dict.fromkeys(
                layer.name for layer in model.layers[bounds[chunk] : bounds[chunk + 1]]
            )
            yield (
                f"stage {chunk % pp} (layers {bounds[chunk]} to {bounds[chunk + 1] - 1}: "
                f"{', '.join(names)}) has no layer of the training program; move the cut"
            )
