"""Enumerate the candidates of an experiment's search space."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from itertools import product
from math import gcd
from typing import Final

from amp_ray.clusters.cluster import Cluster
from amp_ray.inputs.experiment import Experiment, SearchLimits
from amp_ray.search.effort import EFFORT
from amp_ray.strategies.candidate import (
    ONE_RANK,
    AnyCandidate,
    Candidate,
    GroupsCandidate,
    StageOptions,
    with_kind,
)
from amp_ray.strategies.recompute import AUTO, NO_RECOMPUTE, Recompute, RecomputeKind
from amp_ray.strategies.zero import AUTO_STAGE, AUTO_ZERO, MOST_ZERO_STAGE, Zero
from amp_ray.units import counted


def candidates_of(experiment: Experiment) -> tuple[AnyCandidate, ...]:
    """Enumerate the required candidates of an experiment.

    Most runtimes cannot launch stages that differ in tp or dp. If plans must be launchable, the
    heterogeneous space then has only placements of uniform stages.

    Raises:
        ValueError: If the limits exclude every candidate; the message names the limit.
    """
    if has_groups(experiment):
        return group_candidates(experiment)
    try:
        return uniform_candidates(experiment)
    except ValueError:
        if idle_candidates(experiment):
            return ()
        raise


def optional_candidates(experiment: Experiment) -> tuple[Candidate, ...]:
    """Enumerate the optional candidates: grids planned only if they may be among the fastest.

    These are grids with idle devices, if allowed; in the uniform space these follow when the time
    of the others is known (`search.run`). In the heterogeneous space they also include grids on all
    devices, since the search of stage groups does not cover all their placements.
    """
    if experiment.space == "uniform":
        return ()
    idle = idle_candidates(experiment)
    if not has_groups(experiment):
        return idle
    with suppress(ValueError):  # the limits may exclude every candidate
        return (*uniform_candidates(experiment), *idle)
    return idle


def has_groups(experiment: Experiment) -> bool:
    """Return whether stages may differ in tp and dp."""
    only_grids = experiment.limits.launchable and not experiment.traits.unequal_stages
    return experiment.space in {"heterogeneous", "operator"} and not only_grids


def group_candidates(experiment: Experiment) -> tuple[GroupsCandidate, ...]:
    """Enumerate the micro-batch sizes for stage groups; the search chooses the rest.

    Returns:
        Candidates by micro-batch size, ascending; none for a runtime that cannot have several
        stages. ``micro_batch_sizes`` limits the size per data-parallel rank, so it does not apply
        here.
    """
    batch, choices = experiment.global_batch_size, group_zero_choices(experiment)
    return tuple(
        GroupsCandidate(
            micro_batch_size=size,
            num_micro_batches=batch // size,
            options=replace(
                ONE_RANK,
                recompute=experiment.recompute,
                zero=choices[0] if len(choices) == 1 else AUTO_ZERO,
            ),
        )
        for size in _divisors(batch)
        if choices
    )


def uniform_candidates(experiment: Experiment) -> tuple[Candidate, ...]:
    """Enumerate all uniform candidates on all devices within the user's limits.

    The product tp x dp x pp is the number of devices, dp times the micro-batch size divides
    the global batch, and tensor-parallel groups stay inside a node unless the limits allow
    more. Order: micro-batch size, tp, dp, each ascending.

    Returns:
        Candidates in that order; none twice.

    Raises:
        ValueError: If the limits exclude every candidate; the message names the limit.
    """
    num_devices = experiment.cluster.num_devices
    tps = [
        tp
        for tp in _divisors(num_devices)
        if _allows_tp(tp, experiment.limits)
        and (experiment.limits.tp_across_nodes or _whole(tp, experiment.cluster) == num_devices)
    ]
    shape, most = experiment.model.shape, experiment.max_cp
    grids = (
        (tp, cp, dp, num_devices // (tp * cp * dp), _divisors(experiment.global_batch_size // dp))
        for tp in tps
        for cp in _divisors(num_devices // tp)
        if cp <= most and shape.divides_context(cp)
        for dp in _divisors(num_devices // (tp * cp))
        if not experiment.global_batch_size % dp
    )
    candidates = _with_batches(experiment, grids)
    if not candidates:
        raise ValueError(_why_empty(experiment, tps))
    return candidates


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleWindow:
    """The grids with idle devices that are worth a look: those of some numbers of devices."""

    least_devices: int = 1
    most_devices: int | None = None  # None for all but one
    limit_s: float = math.inf  # grids that certainly take longer are left out
    # Least seconds of a micro-batch in all layers, and in a block, by tp, cp and micro-batch size;
    # infinite if the model does not divide so
    pass_s: Callable[[int, int, int], tuple[float, float]] = lambda *_degrees: (0.0, 0.0)

    def may_pay(self, passes_s: tuple[float, float], batches: int, pp: int) -> bool:
        """Return whether a pipeline may end within the limit.

        Let ``w`` be the time of a stage for one micro-batch. The stage ``i`` waits until the first
        micro-batch has passed all stages before it, and these wait for the gradients of the last
        one, so a step takes at least ``m w_i + w_0 + ... + w_(i-1)``. On average over the stages
        that is at least the first term below; and where stages have chunks, the first chunks in
        front of stage ``i`` have a block each. Of a single chunk per stage, the largest of these
        sums is least where all are equal, ``w / (1 - (1 - 1/m)^pp)``, which is longer.
        """
        whole_s, block_s = passes_s
        return batches * whole_s / pp + (pp - 1) / 2 * block_s <= self.limit_s


NEAR_BATCH: Final = 1 / 8
"""Largest relative difference of a batch that is proposed instead of another."""

EVERY_IDLE: Final = IdleWindow()


def idle_candidates(
    experiment: Experiment, window: IdleWindow = EVERY_IDLE
) -> tuple[Candidate, ...]:
    """Enumerate the candidates with idle devices; none if that is not allowed.

    Tensor-parallel groups stay inside nodes; devices of a node that fill no group stay idle. In the
    uniform space whole nodes are idle, so that a plan for fewer nodes is one for more nodes, too.

    Returns:
        Candidates in the order of `uniform_candidates`.
    """
    return _with_batches(experiment, _idle_grids(experiment, window))


def _idle_grids(
    experiment: Experiment, window: IdleWindow = EVERY_IDLE
) -> Iterator[tuple[int, int, int, int, list[int]]]:
    """Yield tp, cp, dp, pp and micro-batch sizes of the grids of `idle_candidates`."""
    cluster, batch = experiment.cluster, experiment.global_batch_size
    if not experiment.may_idle:
        return
    most_devices = window.most_devices or cluster.num_devices - 1
    for tp in range(1, max(node.num_slots for node in cluster.nodes) + 1):
        if not _allows_tp(tp, experiment.limits):
            continue
        whole, fills = min(_whole(tp, cluster), most_devices), _filled(tp, experiment)
        for cp, dp in product(_context_degrees(experiment), _divisors(batch)):
            ranks = tp * cp * dp
            most = min(whole // ranks, experiment.model.num_layers)
            passes = [
                (size, passes_s, batch // (dp * size))
                for size in (_divisors(batch // dp) if most else ())
                if (passes_s := window.pass_s(tp, cp, size))[0] < math.inf
            ]
            for pp in range(max(1, math.ceil(window.least_devices / ranks)), most + 1):
                sizes = [
                    size
                    for size, passes_s, batches in passes
                    if window.may_pay(passes_s, batches, pp)
                ]
                if sizes and fills(ranks * pp):
                    yield tp, cp, dp, pp, sizes


def _context_degrees(experiment: Experiment) -> list[int]:
    """Return the context parallel degrees of grids on a part of the devices."""
    shape = experiment.model.shape
    most = experiment.max_cp if experiment.space == "uniform" else 1
    return [cp for cp in range(1, most + 1) if shape.divides_context(cp)]


def _filled(tp: int, experiment: Experiment) -> Callable[[int], bool]:
    """Return whether so many devices are whole nodes, or a part of the only one."""
    slots = {node.num_slots // tp * tp for node in experiment.cluster.nodes}
    if experiment.space != "uniform" or len(slots) > 1:
        return lambda _num_devices: True
    [size] = slots
    return lambda num_devices: num_devices < size or not num_devices % size


def divided_batch(experiment: Experiment) -> int | None:
    """Return the nearest batch that the devices divide, if they do not divide the experiment's.

    Where no multiple of the number of devices is within `NEAR_BATCH` of the batch, so many devices
    may share a replica that one is. Powers of two of them do: tp and pp can have these.
    """
    batch, unit = experiment.global_batch_size, experiment.cluster.num_devices
    if not batch % (unit // (unit & -unit)):
        return None
    while abs(round(batch / unit) * unit - batch) > NEAR_BATCH * batch and not unit % 2:
        unit //= 2
    nearest = round(batch / unit) * unit
    return nearest if nearest and abs(nearest - batch) <= NEAR_BATCH * batch else None


def other_batches(experiment: Experiment) -> tuple[int, ...]:
    """Return global batch sizes within the tolerance that suit the numbers of devices better.

    For all devices, and for each device type, pick a batch that their number divides, if any; then
    the one with the largest common divisor with the odd part of their number, then the one with the
    most divisors, then the nearest.
    """
    batch, cluster = experiment.global_batch_size, experiment.cluster
    slack = int(batch * experiment.limits.batch_tolerance)
    held: Counter[object] = Counter()
    for node in cluster.nodes:
        held[node.device] += node.num_slots
    near = range(max(1, batch - slack), batch + slack + 1)
    odd = {count: count // (count & -count) for count in (cluster.num_devices, *held.values())}
    best = {
        max(
            near,
            key=lambda size: (
                size % count == 0,
                gcd(size, factor),
                len(_divisors(size)),
                -abs(size - batch),
                -size,
            ),
        )
        for count, factor in odd.items()
        if batch % factor
    }
    ordered = sorted(best - {batch}, key=lambda size: (-len(_divisors(size)), size))
    return tuple(ordered[: EFFORT.max_other_batches])


def _with_batches(
    experiment: Experiment, grids: Iterable[tuple[int, int, int, int, Sequence[int]]]
) -> tuple[Candidate, ...]:
    """Return all candidates with these (tp, cp, dp, pp, micro-batch sizes) that limits allow."""
    batch = experiment.global_batch_size
    return tuple(
        sorted(
            Candidate(
                micro_batch_size=size,
                options=with_experts(experiment.stage_options(tp, dp, cp=cp, zero=zero), ep),
                pp=pp,
                num_micro_batches=batch // (dp * size),
                virtual_stages=virtual_stages,
            )
            for tp, cp, dp, pp, sizes in grids
            if experiment.traits.why_no_grid(tp, pp) is None
            for zero in _zero(experiment, tp, dp * cp, pp)
            for virtual_stages in _virtual_stages(pp, experiment)
            for ep in expert_degrees(experiment, tp * cp * dp)
            for size in sizes
            if _allows(dp, pp, size, experiment.limits)
        )
    )


def with_experts(options: StageOptions, ep: int) -> StageOptions:
    """Return the options with expert parallelism and undivided experts."""
    return replace(options, ep=ep, etp=1 if options.tp > 1 else 0) if ep > 1 else options


def expert_degrees(experiment: Experiment, num_ranks: int) -> list[int]:
    """Return the expert parallel degrees of a stage.

    With ``ep`` above 1, experts are not divided by tp (``etp`` is 1): narrower products gain
    nothing, and published recipes do not divide them.
    """
    num_experts, most = experiment.model.shape.num_experts, experiment.limits.max_ep
    able = experiment.traits.expert_parallel and experiment.space == "uniform"
    if not num_experts or not able:
        return [1]
    degrees = _divisors(math.gcd(num_experts, num_ranks))
    return [ep for ep in degrees if most == "auto" or ep <= most]


def _zero(experiment: Experiment, tp: int, dp: int, pp: int) -> tuple[Zero, ...]:
    """Return the only ZeRO setting that is possible, or `AUTO_ZERO` if there are several."""
    choices = zero_choices(experiment, tp, dp, pp)
    return choices if len(choices) <= 1 else (AUTO_ZERO,)


def group_zero_choices(experiment: Experiment) -> tuple[Zero, ...]:
    """Enumerate the ZeRO settings of stage groups.

    At most optimizer states are sharded, unless the runtime always shards weights too.
    """
    fixed = experiment.zero(pp=2)
    if fixed.stage != AUTO_STAGE:
        return (fixed,)
    every = set(experiment.traits.pipeline_zero_stages)
    stages = every - {MOST_ZERO_STAGE} or every
    return tuple(
        Zero(stage=stage, keeps_weights=stage == MOST_ZERO_STAGE) for stage in sorted(stages)
    )


def zero_choices(experiment: Experiment, tp: int, dp: int, pp: int) -> tuple[Zero, ...]:
    """Enumerate the ZeRO settings that the file leaves open.

    If the search chooses, a shard group is all data-parallel ranks, or those within a node. A
    single rank has nothing to shard; only in an optimizer of the runtime's own, which keeps other
    copies of gradients with each stage, may ZeRO still need less memory.

    Returns:
        Settings that the runtime supports, in order. If the file fixes a setting, only that one,
        supported or not; none if the file's shard groups do not divide dp.
    """
    wished = experiment.shard_ranks
    if wished and dp > wished and dp % wished:
        return ()
    fixed = experiment.zero(pp)
    if fixed.stage != AUTO_STAGE:
        return (replace(fixed, shard_ranks=wished if dp > wished else 0),)
    traits, slots = experiment.traits, min(node.num_slots for node in experiment.cluster.nodes)
    within = max(size for size in _divisors(dp) if size <= max(1, slots // tp))
    groups = {wished if dp > wished else 0} if wished else {0, within if 1 < within < dp else 0}
    most = MOST_ZERO_STAGE if dp > 1 or traits.wraps_optimizer else traits.min_zero_stage
    reshard = experiment.reshard_after_forward
    ways = (
        Zero(stage=stage, shard_ranks=ranks if stage else 0, keeps_weights=keeps)
        for stage in range(most + 1)
        for keeps in ((False, True) if stage == MOST_ZERO_STAGE else (False,))
        if stage < MOST_ZERO_STAGE or reshard in {None, not keeps}
        for ranks in sorted(groups)
    )
    choices = dict.fromkeys(zero for zero in ways if traits.why_no_zero(zero, pp) is None)
    return tuple(sorted(choices))


def recompute_choices(experiment: Experiment) -> tuple[Recompute, ...]:
    """Enumerate the recompute settings that the runtime supports, by kind and number of blocks.

    A fused attention core stores no activations to drop, so it has no setting. Blocks whose
    activations wait in the host's memory exclude all but none.
    """
    if experiment.traits.offloaded_blocks:
        return (NO_RECOMPUTE,)
    model, (layers, _) = experiment.model, experiment.model.distinct_layers
    has_core = any(op.core == "inner" for layer in layers for op in layer.core)
    return _settings(model.block_counts[-1], experiment.traits.recompute, has_core=has_core)


@lru_cache(maxsize=64)
def _settings(
    num_blocks: int, supported: Sequence[str], *, has_core: bool
) -> tuple[Recompute, ...]:
    """Return the result of `recompute_choices` for a model with so many blocks."""
    some = num_blocks > 0
    spares: dict[RecomputeKind, bool] = {
        "selective": has_core,
        "per-operator": some,
        "full": some,
    }
    settings = [NO_RECOMPUTE]
    for kind, spares_some in spares.items():
        if spares_some and f"{kind}:n" in supported:
            settings += [Recompute(kind=kind, layers=n + 1) for n in range(num_blocks)]
        elif spares_some and kind in supported:
            settings.append(Recompute(kind=kind))
    return tuple(settings)


def may_be_group(options: StageOptions) -> bool:
    """Return whether a stage with devices of its own may have these options."""
    return options.cp == options.ep == 1


def with_degrees(experiment: Experiment, options: StageOptions, tp: int, dp: int) -> StageOptions:
    """Return the options of a stage with other degrees; what these do not allow is changed."""
    zero, divides = options.zero, options.sequence_parallel
    if tp != options.tp:
        divides = experiment.stage_options(tp, dp).sequence_parallel
    if dp % (zero.shard_ranks or 1):
        zero = replace(zero, shard_ranks=0)
    return replace(options, tp=tp, dp=dp, sequence_parallel=divides, zero=zero)


def with_one_zero(
    experiment: Experiment, stages: Sequence[StageOptions]
) -> tuple[list[StageOptions], ...]:
    """Return stages with one ZeRO setting that the runtime has for them; empty if there is none."""
    settings, every = {options.zero for options in stages}, with_every_zero(experiment, stages)
    if len(settings) == 1 and [*stages] in every:
        return ([*stages],)
    most = max(setting.stage for setting in settings)
    return tuple(able for able in every if able[0].zero.stage <= most)[-1:] or every[:1]


def with_every_zero(
    experiment: Experiment, stages: Sequence[StageOptions]
) -> tuple[list[StageOptions], ...]:
    """Return stages with each ZeRO setting that the runtime has for them."""
    dps, pp = [options.dp for options in stages], len(stages)
    choices = zero_choices(experiment, max(options.tp for options in stages), max(dps), pp)
    return tuple(
        [replace(options, zero=zero) for options in stages]
        for zero in choices
        if not any(dp % (zero.shard_ranks or 1) for dp in dps)
        and experiment.traits.why_no_zero(zero, pp) is None
    )


def with_other_options(
    experiment: Experiment, stages: Sequence[StageOptions]
) -> Iterator[list[StageOptions]]:
    """Yield options of stages with a choice that the file leaves open: of one stage, or of all."""
    settings = recompute_choices(experiment) if experiment.recompute == AUTO else ()
    for kind in dict.fromkeys(setting.whole for setting in settings):
        changed = [replace(options, recompute=kind) for options in stages]
        yield changed
        for index, options in enumerate(changed if experiment.traits.recompute_per_stage else ()):
            yield [*stages[:index], options, *stages[index + 1 :]]
    able = [experiment.stage_options(part.tp, part.dp).sequence_parallel for part in stages]
    if any(able):
        for divides in (able, [False] * len(able)):
            changed = [
                replace(options, sequence_parallel=divided)
                for options, divided in zip(stages, divides, strict=True)
            ]
            yield changed
            for index, options in enumerate(changed):
                yield [*stages[:index], options, *stages[index + 1 :]]
    yield from with_every_zero(experiment, stages)


def with_most_recompute(experiment: Experiment, candidate: Candidate) -> Candidate:
    """Return the candidate with full recompute, if its recompute is open."""
    if candidate.options.recompute != AUTO:
        return candidate
    return with_kind(candidate, max(recompute_choices(experiment)).whole)


def _virtual_stages(pp: int, experiment: Experiment) -> tuple[int, ...]:
    """Return the numbers of chunks per stage to try; every chunk has at least one block.

    A single stage has one chunk. If stages get equal shares of the blocks, so do chunks.
    """
    if pp == 1:
        return (1,)
    num_blocks = experiment.model.block_counts[-1]
    is_even = experiment.traits.partition != "exact"
    return tuple(
        number
        for number in experiment.virtual_stages(num_blocks // pp)
        if number == 1
        or (number * pp <= num_blocks and not (is_even and num_blocks % (number * pp)))
    )


def _whole(tp: int, cluster: Cluster) -> int:
    """Count the devices that fit into tensor-parallel groups within nodes."""
    return sum(node.num_slots // tp * tp for node in cluster.nodes)


def _allows_tp(tp: int, limits: SearchLimits) -> bool:
    return limits.min_tp <= tp and (limits.max_tp is None or tp <= limits.max_tp)


def _allows(dp: int, pp: int, size: int, limits: SearchLimits) -> bool:
    within_dp = limits.max_dp is None or dp <= limits.max_dp
    within_pp = limits.max_pp is None or pp <= limits.max_pp
    within_size = limits.micro_batch_sizes is None or size in limits.micro_batch_sizes
    return within_dp and within_pp and within_size


def _why_empty(experiment: Experiment, tps: list[int]) -> str:
    """Name the limit that excludes every candidate."""
    limits, cluster = experiment.limits, experiment.cluster
    batch = experiment.global_batch_size
    head = (
        f"no candidate for {counted(cluster.num_devices, 'device')} and global_batch_size {batch}"
    )
    if not tps:
        slots = sorted({node.num_slots for node in cluster.nodes})
        limits_text = _limits_text(min_tp=limits.min_tp, max_tp=limits.max_tp)
        return (
            f"{head}: no tp within {limits_text} divides the slots of every node "
            f"({', '.join(map(str, slots))}); widen the limits or set search.tp_across_nodes: true"
        )
    sizes = limits.micro_batch_sizes
    limits_text = _limits_text(
        max_dp=limits.max_dp,
        max_pp=limits.max_pp,
        micro_batch_sizes=None if sizes is None else list(sizes),
    )
    return (
        f"{head}: with tp {', '.join(map(str, tps))} and {limits_text} no dp x micro-batch "
        "size divides the batch; widen the limits or change the batch"
    )


def _limits_text(**limits: object) -> str:
    return ", ".join(f"{name} {value}" for name, value in limits.items() if value is not None)


def _divisors(number: int) -> list[int]:
    low = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return low + [number // d for d in reversed(low) if d * d != number]


def searched_dimensions(experiment: Experiment) -> tuple[str, ...]:
    """Return the keys of the dimensions in which the strategies of an experiment may differ.

    Dimensions that the runtime does not support, or that the file fixes, are left out.

    Returns:
        Sorted keys; none if there are no candidates or another package defines the space.
    """
    values_of: dict[str, set[object]] = {}
    with suppress(ValueError):
        for candidate in (*uniform_candidates(experiment), *optional_candidates(experiment)):
            figures = {part.name: getattr(candidate, part.name) for part in fields(candidate)}
            options = figures.pop("options")
            figures |= {part.name: getattr(options, part.name) for part in fields(options)}
            figures["zero_stage"] = figures.pop("zero").stage
            for name, value in figures.items():
                values_of.setdefault(name, set()).add(value)
    for follows in ("num_micro_batches", "sequence_parallel"):
        values_of.pop(follows, None)
    chosen = {"recompute": AUTO, "zero_stage": AUTO_STAGE}
    names = {name for name, values in values_of.items() if len(values) > 1}
    names |= {name for name, auto in chosen.items() if auto in values_of.get(name, ())}
    if len(recompute_choices(experiment)) == 1:
        names.discard("recompute")
    if experiment.space != "uniform":
        names.add("placement")
    return tuple(sorted(names))
