"""Changes of a recipe that make a strategy fit into memory, and what they cost in time.

Each change is estimated by the cost model itself: a few estimates for a strategy that is shown, not
a search. If no single change is enough, changes are added up, the one that saves most first.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import Any, Final

from amp_ray.cost.estimate import Estimate, Remedy
from amp_ray.cost.model import CostModel
from amp_ray.cost.verdict import OUT_OF_MEMORY
from amp_ray.inputs.experiment import Experiment
from amp_ray.memo import memoised
from amp_ray.runtimes.traits import RECOMPUTED, Formats
from amp_ray.search.cuts import best_bounds
from amp_ray.strategies.candidate import Candidate, StageOptions
from amp_ray.strategies.recompute import KINDS, NO_RECOMPUTE, Recompute, RecomputeModule
from amp_ray.strategies.strategy import Strategy, candidate_of
from amp_ray.strategies.zero import MOST_ZERO_STAGE, Zero

_MOST_TOGETHER: Final = 3  # changes that are added up
_MOST_SHOWN: Final = 4  # remedies of a strategy
_DOUBLED: Final = 2
_DEGREES: Final = ("tp", "cp", "pp", "dp", "ep")

_Recipe = tuple[Experiment, Strategy]


@dataclass(frozen=True, kw_only=True, eq=False)
class Remedies:
    """Finds the changes for strategies of an experiment, planned by our cost model."""

    experiment: Experiment

    def add(self, estimate: Estimate) -> Estimate:
        """Return an estimate with its remedies, if its strategy lacks nothing but memory."""
        if not self._is_too_large(estimate):
            return estimate
        return replace(estimate, remedies=self.of(estimate))

    def of(self, estimate: Estimate) -> tuple[Remedy, ...]:
        """Return the changes that make a strategy fit, the fastest first; none if none does."""
        names: tuple[str, ...] = ()
        recipe = self.experiment, estimate.strategy
        for _ in range(_MOST_TOGETHER):
            tried = [
                (name, changed, self._models(changed[0]).estimate(changed[1]))
                for name, changed in self._changes(*recipe)
            ]
            fitting = [(name, result) for name, _, result in tried if result.feasible]
            if fitting or not tried:
                remedies = (self._remedy((*names, name), result) for name, result in fitting)
                ordered = sorted(remedies, key=lambda remedy: remedy.iteration_time_s)
                return tuple(ordered[:_MOST_SHOWN])
            name, recipe, _ = min(tried, key=lambda change: change[2].memory_share)
            names = *names, name
        return ()

    @staticmethod
    def _remedy(names: Sequence[str], estimate: Estimate) -> Remedy:
        return Remedy(change=_together(names), iteration_time_s=estimate.iteration_time_s)

    @staticmethod
    def _is_too_large(estimate: Estimate) -> bool:
        strategy = estimate.strategy
        return (
            [reason.kind for reason in estimate.reasons] == [OUT_OF_MEMORY]
            and not (strategy.is_sliced or strategy.has_operators)
            and strategy.is_uniform
            and _alike(strategy).options is not None
        )

    @memoised
    def _models(self, experiment: Experiment) -> CostModel:
        return CostModel(experiment=experiment)

    def _changes(self, experiment: Experiment, strategy: Strategy) -> Iterator[tuple[str, _Recipe]]:
        """Yield one change after another, with what it makes of a recipe."""
        traits, candidate = experiment.traits, candidate_of(_alike(strategy))
        for name, changed in self._other_options(experiment, candidate):
            if traits.why_not([changed.options]) is None:
                yield name, (experiment, _strategy(changed, strategy))
        if candidate.micro_batch_size > 1 and not candidate.micro_batch_size % _DOUBLED:
            size = candidate.micro_batch_size // _DOUBLED
            batches = candidate.num_micro_batches * _DOUBLED
            smaller = replace(candidate, micro_batch_size=size, num_micro_batches=batches)
            yield f"micro-batch size {size}", (experiment, _strategy(smaller, strategy))
        yield from self._degrees(experiment, candidate)
        for number in _offloads(experiment, candidate):
            offloading = replace(experiment, traits=traits.with_offloaded(number))
            yield f"offloaded_blocks {number}", (offloading, strategy)
        for module in _modules(experiment, candidate):
            again = traits.with_modules((*traits.recompute_modules, module))
            yield f"recompute of {module}", (replace(experiment, traits=again), strategy)
        for change, switched in traits.other_settings():
            yield change, (replace(experiment, traits=switched), strategy)
        for formats in _narrower(experiment):
            changed_traits = traits.with_formats(formats)
            has_shards = candidate.options.dp == 1 or (
                strategy.zero.stage >= changed_traits.min_zero_stage
            )
            if traits.why_no_formats(formats) is None and has_shards:
                (key, name), *_ = formats.kept.items() - traits.formats.kept.items()
                changed_experiment = replace(experiment, traits=changed_traits)
                yield f"{key} in {name}", (changed_experiment, strategy)

    def _other_options(
        self, experiment: Experiment, candidate: Candidate
    ) -> Iterator[tuple[str, Candidate]]:
        """Yield more sharding and more recompute."""
        options, traits = candidate.options, experiment.traits
        for stage in range(options.zero.stage + 1, MOST_ZERO_STAGE + 1):
            keeps = stage == MOST_ZERO_STAGE and candidate.pp > 1
            zero = Zero(stage=stage, shard_ranks=options.zero.shard_ranks, keeps_weights=keeps)
            if options.dp > 1 and traits.why_no_zero(zero, candidate.pp) is None:
                yield f"ZeRO {zero}", replace(candidate, options=replace(options, zero=zero))
        for kind in KINDS[KINDS.index(options.recompute.kind) + 1 : -1]:
            again = replace(options, recompute=Recompute(kind=kind))
            yield f"recompute {kind}", replace(candidate, options=again)

    def _degrees(
        self, experiment: Experiment, candidate: Candidate
    ) -> Iterator[tuple[str, _Recipe]]:
        """Yield twice the tp, cp or pp on the same devices, with half the replicas."""
        options, models = candidate.options, self._models(experiment)
        if options.dp % _DOUBLED or experiment.profile.is_measured:
            return
        for degree in _DEGREES[:3]:
            grown = replace(
                candidate,
                options=_regrouped(experiment, options, degree),
                pp=candidate.pp * (_DOUBLED if degree == "pp" else 1),
                num_micro_batches=candidate.num_micro_batches * _DOUBLED,
            )
            if _has(experiment, grown):
                degrees = {**grown.options.degrees, "pp": grown.pp}
                experts = f", ep {grown.options.ep}" if grown.options.ep != options.ep else ""
                strategy = Strategy.uniform(grown, best_bounds(experiment, models.costs(grown)))
                name = f"{degree} {degrees[degree]}, dp {degrees['dp']}{experts}"
                yield name, (experiment, strategy)


def _has(experiment: Experiment, candidate: Candidate) -> bool:
    shape, traits, options = experiment.model.shape, experiment.traits, candidate.options
    num_blocks, divided = experiment.model.block_counts[-1], [shape.num_heads]
    divided += [shape.num_key_value_heads, *(node.num_slots for node in experiment.cluster.nodes)]
    refused = (
        traits.why_not([options])
        or traits.why_no_grid(options.tp, candidate.pp)
        or traits.why_no_zero(options.zero, candidate.pp)
    )
    is_even = traits.partition == "even-blocks"
    return (
        refused is None
        and not any(number % options.tp for number in divided)
        and shape.divides_context(options.cp)
        and experiment.why_no_heads(options) is None
        and num_blocks >= candidate.num_chunks
        and not (is_even and num_blocks % candidate.num_chunks)
    )


def _regrouped(experiment: Experiment, options: StageOptions, degree: str) -> StageOptions:
    """Return options with half the dp and twice the tp or cp; with half the dp alone for pp.

    Experts are spread over as many ranks as before, or over the most that are left.
    """
    dp = options.dp // _DOUBLED
    tp, cp = (getattr(options, name) * (_DOUBLED if degree == name else 1) for name in ("tp", "cp"))
    etp = 1 if options.ep > 1 and options.tp == 1 < tp else options.etp
    zero = options.zero
    if dp * cp % (zero.shard_ranks or 1):
        zero = replace(zero, shard_ranks=0)
    divides = options.sequence_parallel or (degree == "tp" and bool(experiment.sequence_parallel))
    return replace(
        options,
        tp=tp,
        cp=cp,
        dp=dp,
        ep=gcd(options.ep, tp * cp * dp // (etp or tp)),
        etp=etp,
        zero=zero,
        sequence_parallel=divides and experiment.model.shape.divides_tokens(tp * cp),
    )


def _together(names: Sequence[str]) -> str:
    """Name changes that are made one after another by the last value of each dimension.

    Example:
        >>> _together(["ZeRO 3", "tp 2, dp 4", "tp 4, dp 2"])
        'ZeRO 3 and tp 4, dp 2'
    """
    last = {part.split(" ")[0]: part for name in names for part in name.split(", ")}
    degrees = [part for word, part in last.items() if word in _DEGREES]
    settings = [part for word, part in last.items() if word not in _DEGREES]
    return " and ".join(filter(None, [*settings, ", ".join(degrees)]))


def _alike(strategy: Strategy) -> Strategy:
    """Return a strategy whose stages recompute as the first one does."""
    recompute = strategy.stages[0].options.recompute
    stages = (
        replace(stage, options=replace(stage.options, recompute=recompute))
        for stage in strategy.stages
    )
    return replace(strategy, stages=tuple(stages))


def _strategy(candidate: Candidate, strategy: Strategy) -> Strategy:
    bounds = strategy.chunk_bounds or strategy.bounds
    return Strategy.uniform(candidate, bounds, strategy.placement)


def _offloads(experiment: Experiment, candidate: Candidate) -> tuple[int, ...]:
    """Return numbers of blocks whose activations may wait in the host's memory: half, most."""
    traits = experiment.traits
    able = traits.offloads_activations and not traits.offloaded_blocks and candidate.pp == 1
    if not able or candidate.options.recompute != NO_RECOMPUTE:
        return ()
    most = len(experiment.model.indices("block")) - 1
    return tuple(number for number in dict.fromkeys((most // _DOUBLED, most)) if number)


def _modules(experiment: Experiment, candidate: Candidate) -> Iterator[RecomputeModule]:
    """Yield modules of the model's blocks that the runtime can recompute, and does not yet.

    Positions are rotated in blocks without latents, too.
    """
    traits = experiment.traits
    if "modules" not in traits.recompute or candidate.options.recompute != NO_RECOMPUTE:
        return
    names = {op.name for layer in experiment.model.distinct_layers[0] for op in layer.operators}
    for module, (again, _) in RECOMPUTED.items():
        if names & ({*again} - {"rotary"}) and module not in traits.recompute_modules:
            yield module


def _narrower(experiment: Experiment) -> Iterator[Formats]:
    """Yield the formats with one of what the runtime can keep in a narrower one."""
    formats = replace(experiment.traits.formats, compute=experiment.precision)
    for words in experiment.traits.keeps:
        key, name = words.split()
        if key not in formats.kept:
            change: dict[str, Any] = {key: name}
            yield replace(formats, **change)
