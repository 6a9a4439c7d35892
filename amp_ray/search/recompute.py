"""Choose the recompute of stages in a given order together with their cuts, exactly.

Recomputing the first ``n`` blocks of a stage adds a time that depends only on its first layer, and
lets the stage start at earlier layers. So each kind of recompute with each ``n`` is an option of
the stage in the partition problem. The solver weighs time against memory and recomputes only as
much as memory requires.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, groupby, pairwise
from typing import Final

import numpy as np

from amp_ray.arrays import FloatArray, IntArray
from amp_ray.cost.estimate import Estimate
from amp_ray.cost.memory import StageMemory
from amp_ray.cost.model import CostModel, StageCosts
from amp_ray.cost.stages import PlacedStages, prefix_sums
from amp_ray.cost.verdict import safe_memory_fraction
from amp_ray.partition.exact import solve
from amp_ray.partition.problem import PartitionProblem, PartitionSolution
from amp_ray.partition.tables import NO_ROW, OptionTable, StageTables
from amp_ray.search.cuts import (
    best_bounds,
    fitting_bounds,
    latest_starts,
    partition_problem,
    ruled_bounds,
)
from amp_ray.search.ranking import is_risky, leader_order
from amp_ray.search.space import recompute_choices
from amp_ray.strategies.recompute import NO_RECOMPUTE, Recompute, RecomputeKind
from amp_ray.strategies.strategy import Strategy

ROUNDING: Final = 1e-9
"""Relative difference up to which times count as equal."""


def with_recompute(cost_model: CostModel, strategy: Strategy) -> Estimate:
    """Choose the cuts of a strategy and the recompute of its stages.

    Safe strategies come first: they are searched with the memory that a safe one may need, and the
    whole memory counts only if none of them is safe. So the result may be slower than a risky
    strategy; no lower bound of the candidate exceeds it, since such bounds hold for both.

    Returns:
        Estimate of the safe strategy with the least closed form; if none is safe, of the one that
        fits. If none fits, of the one that recomputes all blocks, with the cuts that enough memory
        would have.
    """
    experiment = cost_model.experiment
    whole = RecomputeSearch(cost_model=cost_model, stages=PlacedStages.of_strategy(strategy))
    safe = replace(whole, memory_scale=safe_memory_fraction(experiment.constants))
    choose = _way_to_choose(cost_model)
    fitting: list[Estimate] = []
    for search in (safe, whole) if whole.may_fit() else ():
        fitting += choose(search, strategy)
        if not all(map(is_risky, fitting)):
            break
    return min(fitting, key=leader_order) if fitting else _without_limits(whole, strategy)


def with_least_recompute(
    cost_model: CostModel, strategy: Strategy, memory_scale: float = 1.0
) -> list[Estimate]:
    """Choose cuts and recompute for a part of the memory: with all of it, a plan may be risky."""
    stages = PlacedStages.of_strategy(strategy)
    choose = _way_to_choose(cost_model)
    search = RecomputeSearch(cost_model=cost_model, stages=stages, memory_scale=memory_scale)
    return choose(search, strategy)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Choice:
    """One recompute setting for one stage."""

    stage: int  # its index
    recompute: Recompute
    time_row: int  # row of the stage's times without recompute
    # Shape ``(num_layers + 1,)``. Extra time by the stage's first layer; None if it recomputes all
    # its blocks: then a separate time row has the sum.
    extra_s: FloatArray | None
    earliest_start: IntArray  # shape ``(num_layers + 1,)``. As in `StageTables`.


@dataclass(frozen=True, kw_only=True, eq=False)
class RecomputeSearch:
    """Cuts and recompute of stages in a given order, as a partition problem."""

    cost_model: CostModel  # of the experiment
    stages: PlacedStages  # with their devices; their recompute is ignored
    memory_scale: float = 1.0  # every device's memory is multiplied by it
    # These do not depend on the scale, so copies for another one share them
    _costs: dict[Recompute, StageCosts] = field(default_factory=dict)
    _memory: dict[Recompute, StageMemory] = field(default_factory=dict)
    _most_blocks: dict[RecomputeKind, IntArray | None] = field(init=False, default_factory=dict)
    _blocks: dict[RecomputeKind, tuple[float, float, int]] = field(init=False, default_factory=dict)

    def solve(self) -> tuple[tuple[int, ...], tuple[Recompute, ...]] | None:
        """Return bounds and the recompute of each stage; None if nothing fits."""
        problem, choices = self.problem
        solution = solve(problem)
        if not isinstance(solution, PartitionSolution):
            return None
        counts = self.cost_model.experiment.model.block_counts
        chosen = []
        for (first, end), option in zip(pairwise(solution.bounds), solution.options, strict=True):
            recompute, num_blocks = choices[option].recompute, counts[end] - counts[first]
            covers = recompute.layers is not None and recompute.layers >= num_blocks
            chosen.append(
                (recompute.whole if covers else recompute) if num_blocks else NO_RECOMPUTE
            )
        return solution.bounds, tuple(chosen)

    @cached_property
    def problem(self) -> tuple[PartitionProblem, list[Choice]]:
        """The problem, and the choice behind each of its options.

        A choice is left out if another choice of its stage is never slower and fits wherever it
        fits.
        """
        by_stage: list[list[Choice]] = [[] for _ in range(self.stages.pp)]
        for setting in recompute_choices(self.cost_model.experiment):
            for choice in self._choices(setting):
                by_stage[choice.stage].append(choice)
        choices = [choice for row in by_stage for choice in undominated(row)]
        return self._posed(choices), choices

    def costs(self, recompute: Recompute) -> StageCosts:
        """Return the costs of the stages with one recompute setting for all."""
        if recompute not in self._costs:
            stages, memory = self._with(recompute), self.memory(recompute)
            self._costs[recompute] = (
                self.cost_model.costs_like(next(iter(self._costs.values())), stages, memory)
                if self._costs
                else self.cost_model.stage_costs(stages, memory)
            )
        return self._costs[recompute]

    def may_fit(self) -> bool:
        """Return False only if no cuts fit, whatever is recomputed."""
        experiment = self.cost_model.experiment
        most_of = {setting.kind: setting for setting in recompute_choices(experiment)}
        if not experiment.traits.recompute_per_stage:
            wholes = reversed(most_of.values())
            return any(self.fits(self.memory(most.whole), most) for most in wholes)
        memory_of = {kind: self.memory(most.whole) for kind, most in most_of.items()}
        models = (memory.models for kind, memory in memory_of.items() if kind != "none")
        if not all(model.spares_by_block for model in chain.from_iterable(models)):
            return True  # with some of its blocks recomputed, a stage may need less
        starts = [memory.earliest_starts(self.memory_scale) for memory in memory_of.values()]
        return fitting_bounds(np.min(starts, axis=0), self._latest) is not None

    def unlimited_bounds(self) -> tuple[int, ...] | None:
        """Return the best cuts without recompute if they are best without limits, too, or None."""
        experiment, scale = self.cost_model.experiment, self.memory_scale
        if not self.fits(self.memory(NO_RECOMPUTE), NO_RECOMPUTE):
            return None
        costs = self.costs(NO_RECOMPUTE)
        bounds = best_bounds(experiment, costs, memory_scale=scale)
        unlimited = best_bounds(experiment, costs, memory_scale=math.inf)
        return bounds if bounds == unlimited else None

    def first_that_fits(
        self, among: Sequence[Recompute], under_s: float = math.inf
    ) -> Recompute | None:
        """Return the setting with the fewest blocks with which all stages fit, or None.

        Every stage must take less than ``under_s``, recompute excluded.
        """
        memory = self.memory(among[-1].whole)
        short = self._short_starts(under_s) if under_s < math.inf else 0

        def fits(recompute: Recompute) -> bool:
            return self.fits(memory, recompute, short)

        if not fits(among[-1]):
            return None
        if not all(memory_model.spares_by_block for memory_model in memory.models):
            return next(filter(fits, among))
        model = self.cost_model.experiment.model
        _, positions = model.distinct_layers
        most = int(np.argmax(np.bincount(positions)))
        places = tuple(np.flatnonzero(np.array(positions) == most).tolist())

        def has_room(recompute: Recompute) -> bool:
            number = model.num_layers if recompute.layers is None else recompute.layers
            again = number * (recompute.kind != "none")
            return memory.most_blocks(places, again, self.memory_scale) >= len(places)

        # Usually the fewest blocks that leave room for the whole model fit.
        low, high = bisect_left(among, True, key=has_room), len(among) - 1  # noqa: FBT003
        probe = low
        while probe < high:
            if fits(among[probe]):
                high = probe
            else:
                low, probe = probe + 1, 2 * probe - low + 2
        while low < high:
            middle = (low + high) // 2
            if fits(among[middle]):
                high = middle
            else:
                low = middle + 1
        return among[low]

    def fits(self, memory: StageMemory, recompute: Recompute, starts: IntArray | int = 0) -> bool:
        """Return whether some cuts fit with one recompute setting for all stages.

        ``memory`` is that of stages that recompute all blocks; ``starts``, shape ``(pp, num_layers
        + 1)``, are the smallest allowed ones.
        """
        experiment = self.cost_model.experiment
        bounds = ruled_bounds(experiment, self.stages.pp)
        if bounds is not None:
            peaks = self.memory(recompute).peaks(bounds)
            return all(peak <= self.memory_scale * device.memory_bytes for peak, device in peaks)
        fitting = memory.earliest_starts(self.memory_scale, recompute.layers)
        return fitting_bounds(np.maximum(starts, fitting), self._latest) is not None

    def slowest_s(self, bounds: Sequence[int]) -> float:
        """Return the time of the slowest stage, without recompute."""
        prefix_s, row = self.costs(NO_RECOMPUTE).times.rows()
        return float(max(prefix_s[row, bounds[1:]] - prefix_s[row, bounds[:-1]]))

    def least_s(self, recompute: Recompute, num_blocks: int = 0) -> float:
        """Return a lower bound on the slowest stage: it has at least an even share of blocks.

        Some stage recomputes at least ``num_blocks`` blocks.
        """
        plain_s, more_s, share = self._of_blocks(recompute.kind)
        share = max(share, num_blocks)
        number = share if recompute.layers is None else min(recompute.layers, share)
        return share * plain_s + max(number, num_blocks) * more_s

    def _of_blocks(self, kind: RecomputeKind) -> tuple[float, float, int]:
        """Return the least time of a block, its least extra time, and an even share of blocks."""
        if kind not in self._blocks:
            blocks = np.flatnonzero(np.diff(self.cost_model.experiment.model.block_counts))
            plain_s, whole_s = (
                np.diff(self.costs(recompute).times.rows()[0])[:, blocks]
                for recompute in (NO_RECOMPUTE, Recompute(kind=kind))
            )
            more_s = max(0.0, float((whole_s - plain_s).min()))
            share = -(-len(blocks) // self.stages.pp)
            self._blocks[kind] = float(plain_s.min()), more_s, share
        return self._blocks[kind]

    def _short_starts(self, under_s: float) -> IntArray:
        """Return the smallest start with which a stage takes less than a time, by stage and end."""
        prefix_s, row = self.costs(NO_RECOMPUTE).times.rows()
        starts = [np.searchsorted(prefix, prefix - under_s, side="right") for prefix in prefix_s]
        of_stages: IntArray = np.array(starts)[row]
        return of_stages

    def memory(self, recompute: Recompute) -> StageMemory:
        """Return the memory of the stages with one recompute setting for all."""
        if recompute not in self._memory:
            self._memory[recompute] = self.cost_model.stage_memory(self._with(recompute))
        return self._memory[recompute]

    def _with(self, recompute: Recompute) -> PlacedStages:
        distinct, numbers = self.stages.distinct_options
        alike = [replace(options, recompute=recompute) for options in distinct]
        return replace(self.stages, options=[alike[number] for number in numbers])

    @cached_property
    def _latest(self) -> IntArray:
        return latest_starts(self.cost_model.experiment, self.stages)

    @cached_property
    def _plain(self) -> PartitionProblem:
        traits = self.cost_model.experiment.traits
        return partition_problem(self.costs(NO_RECOMPUTE), traits, self._latest, self.memory_scale)

    @cached_property
    def _prefix_s(self) -> dict[RecomputeKind, FloatArray]:
        """Time rows of stages that recompute all their blocks, by kind."""
        kinds = {setting.kind for setting in recompute_choices(self.cost_model.experiment)}
        return {kind: self.costs(Recompute(kind=kind)).times.rows()[0] for kind in sorted(kinds)}

    def _choices(self, recompute: Recompute) -> Iterator[Choice]:
        """Yield the choices of each stage with one recompute setting."""
        time_row = self._plain.options.time_row.tolist()
        memory = self.costs(recompute.whole).memory
        widest = self._widest(recompute.kind) if recompute.layers else None
        if widest is not None and recompute.layers > widest.max():
            return
        starts = memory.earliest_starts(self.memory_scale, recompute.layers)
        extra_s = None
        if recompute.layers is not None:
            extra_s = self._extra_s(recompute.kind, recompute.layers)
        elif recompute.kind == "none":
            extra_s = np.zeros_like(self._plain.tables.time_prefix_s)
        for stage, row in enumerate(time_row):
            if widest is not None and recompute.layers > widest[stage]:
                continue
            yield Choice(
                stage=stage,
                recompute=recompute,
                time_row=row,
                extra_s=None if extra_s is None else extra_s[row],
                earliest_start=starts[stage],
            )

    def _widest(self, kind: RecomputeKind) -> IntArray | None:
        """Return the most blocks that each stage can hold if it recomputes all of them.

        A larger number of recomputed blocks would be the same choice. None if recomputing only some
        blocks may fit where recomputing all does not.
        """
        if kind not in self._most_blocks:
            memory = self.costs(Recompute(kind=kind)).memory
            widest = None
            if all(model.spares_by_block for model in memory.models):
                counts = np.array(self.cost_model.experiment.model.block_counts)
                widest = (counts - counts[memory.earliest_starts(self.memory_scale)]).max(axis=1)
            self._most_blocks[kind] = widest
        return self._most_blocks[kind]

    def _extra_s(self, kind: RecomputeKind, num_again: int) -> FloatArray:
        """Return the recompute time of the first blocks, by time row and first layer of a stage.

        A stage with fewer blocks is also charged for those behind it; recomputing all of its blocks
        is a separate choice.
        """
        more_s = np.diff(self._prefix_s[kind]) - np.diff(self._prefix_s["none"])
        prefix_s = prefix_sums(np.maximum(more_s, 0.0))
        counts = np.array(self.cost_model.experiment.model.block_counts)
        counts_after = np.minimum(counts + num_again, counts[-1])
        last = np.maximum(np.searchsorted(counts, counts_after), np.arange(len(counts)))
        return np.maximum(prefix_s[:, last] - prefix_s, 0.0)

    def _posed(self, choices: Sequence[Choice]) -> PartitionProblem:
        """Build the problem; the extra time of a choice is charged at the cut before its stage."""
        plain, kinds = self._plain, sorted(self._prefix_s)
        tables, options = plain.tables, plain.options
        stage = np.array([choice.stage for choice in choices])
        width = tables.time_prefix_s.shape[1]
        extra_s = np.array(
            [np.zeros(width) if choice.extra_s is None else choice.extra_s for choice in choices]
        )
        cut_s, start_s, end_s = (
            np.vstack([table, np.zeros(width)])[row[stage]]
            for table, row in (
                (tables.cut_time_s, options.cut_row),
                (tables.bottleneck_start_s, options.bottleneck_row),
                (tables.bottleneck_end_s, options.bottleneck_row),
            )
        )
        later = (stage > 0)[:, None]
        rows = np.arange(len(choices))
        whole = [
            kinds.index("none" if choice.extra_s is not None else choice.recompute.kind)
            for choice in choices
        ]
        own_row = np.array([choice.time_row for choice in choices])
        return PartitionProblem(
            tables=StageTables(
                time_prefix_s=np.vstack([self._prefix_s[kind] for kind in kinds]),
                cut_time_s=cut_s + later * extra_s,
                bottleneck_start_s=start_s + later * extra_s,
                bottleneck_end_s=end_s,
                earliest_start=np.array([choice.earliest_start for choice in choices]),
                latest_start=tables.latest_start,
            ),
            options=OptionTable(
                time_row=own_row + np.array(whole) * len(tables.time_prefix_s),
                from_state=stage,
                to_state=stage + 1,
                cut_row=np.where(stage > 0, rows, NO_ROW),
                bottleneck_row=rows,
                memory_row=rows,
                overhead_s=np.where(stage > 0, 0.0, extra_s[:, 0]),
            ),
            num_micro_batches=plain.num_micro_batches,
        )


def undominated(choices: Sequence[Choice]) -> list[Choice]:
    """Return the Pareto front of a stage's choices in time and memory.

    Args:
        choices: Choices of one stage. The first of equal ones is kept; choices that recompute every
            block are all kept.
    """
    priced = [choice for choice in choices if choice.extra_s is not None]
    extra_s = np.array([choice.extra_s for choice in priced])
    starts = np.array([choice.earliest_start for choice in priced])
    kept: list[int] = []
    for index in np.lexsort((np.arange(len(priced)), extra_s.sum(axis=1))).tolist():
        cheaper = (extra_s[kept] <= extra_s[index]).all(axis=1)
        roomier = (starts[kept] <= starts[index]).all(axis=1)
        if not (cheaper & roomier).any():
            kept.append(index)
    return [priced[index] for index in sorted(kept)] + [
        choice for choice in choices if choice.extra_s is None
    ]


def _applied(strategy: Strategy, bounds: Sequence[int], recompute: Sequence[Recompute]) -> Strategy:
    options_of = {
        pair: replace(pair[0], recompute=pair[1])
        for pair in {*zip([stage.options for stage in strategy.stages], recompute, strict=True)}
    }
    stages = tuple(
        replace(stage, first_layer=first, end_layer=end, options=options_of[stage.options, again])
        for stage, (first, end), again in zip(
            strategy.stages, pairwise(bounds), recompute, strict=True
        )
    )
    return replace(strategy, stages=stages, chunk_bounds=())


def _way_to_choose(
    cost_model: CostModel,
) -> Callable[[RecomputeSearch, Strategy], list[Estimate]]:
    """Return the way to choose the recompute of a runtime's stages."""
    return _per_stage if cost_model.experiment.traits.recompute_per_stage else _alike


def _unlimited(search: RecomputeSearch, strategy: Strategy) -> Estimate | None:
    """Return the strategy without recompute and with the best cuts, if no memory limits them."""
    bounds = search.unlimited_bounds()
    if bounds is None:
        return None
    applied = _applied(strategy, bounds, [NO_RECOMPUTE] * len(strategy.stages))
    return search.cost_model.estimate_from(search.costs(NO_RECOMPUTE), applied)


def _per_stage(search: RecomputeSearch, strategy: Strategy) -> list[Estimate]:
    """Choose the recompute of each stage; return an estimate if some choice fits."""
    if plain := _unlimited(search, strategy):
        return [plain]
    chosen = search.solve()
    return [] if chosen is None else [search.cost_model.estimate(_applied(strategy, *chosen))]


def _alike(search: RecomputeSearch, strategy: Strategy) -> list[Estimate]:
    """Try one recompute setting for all stages: for each kind, few blocks with which all fit.

    The fewest may fit only if the last stages, which hold fewer micro-batches, get more blocks and
    become the bottleneck. So settings with more blocks are tried too, as long as they make the
    slowest stage faster. Once a setting recomputes all blocks of its best cuts, a larger one
    changes only cuts with more blocks in some stage. If the best cuts fit without recompute,
    nothing is recomputed.
    """
    if plain := _unlimited(search, strategy):
        return [plain]
    cost_model, fitting = search.cost_model, list[Estimate]()
    experiment = cost_model.experiment
    settings = recompute_choices(experiment)
    for _, group in groupby(settings, key=lambda setting: setting.kind):
        among, under_s, best_s, more_s = list(group), math.inf, math.inf, 0.0
        while among and (first := search.first_that_fits(among, under_s)):
            costs = search.costs(first)
            bounds = best_bounds(experiment, costs, memory_scale=search.memory_scale)
            kept = _canonical(cost_model, first, bounds)
            if first.layers is not None and kept != first:
                more_s = search.least_s(first, first.layers + 1)
            applied = _applied(strategy, bounds, [kept] * len(strategy.stages))
            if not fitting or fitting[-1].strategy != applied:
                fitting.append(cost_model.estimate_from(search.costs(kept), applied))
            passes_s = search.costs(kept).times.at(bounds)[:2].sum(axis=0)
            best_s = min(best_s, float(passes_s.max()))
            among = [
                setting
                for setting in among[among.index(first) + 1 :]
                if max(search.least_s(setting), more_s) < best_s
            ]
            under_s = min(under_s, (1 - ROUNDING) * search.slowest_s(bounds))
    return fitting


def _canonical(cost_model: CostModel, recompute: Recompute, bounds: Sequence[int]) -> Recompute:
    """Return the setting without a number if it recomputes all blocks of every stage."""
    counts = cost_model.experiment.model.block_counts
    most = max(counts[end] - counts[first] for first, end in pairwise(bounds))
    return (
        recompute.whole if recompute.layers is not None and recompute.layers >= most else recompute
    )


def _without_limits(search: RecomputeSearch, strategy: Strategy) -> Estimate:
    """Estimate a strategy with full recompute and the cuts that enough memory would have."""
    experiment = search.cost_model.experiment
    whole = recompute_choices(experiment)[-1].whole
    costs = search.costs(whole)
    bounds = best_bounds(experiment, costs, memory_scale=math.inf)
    applied = _applied(strategy, bounds, [whole] * len(strategy.stages))
    return search.cost_model.estimate_from(costs, applied)
