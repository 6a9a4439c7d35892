"""Local search by simulated time, from the fastest plans of all candidates.

The search of stage groups compares plans by a closed form, which is off where stages share network
interfaces or wait for each other. This search simulates every plan instead. A move changes the
devices, tp, samples, options or order of one or two stages, joins or splits stages, or changes
the size of a micro-batch; then the cuts are chosen again.

Plans that take nodes in another order, or have another number of stages, are first moved by
themselves for a while: no sequence of faster plans may lead from one kind to the other. Then the
next plan to move is always the fastest one whose moves have not all been tried. Every plan keeps
the limits of the user, and the result depends on nothing but the plans to begin with.
"""

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from heapq import heapify, heappop, heappush, heapreplace
from itertools import (
    accumulate,
    chain,
    combinations,
    groupby,
    islice,
    pairwise,
    permutations,
    product,
)
from typing import Final, NamedTuple

import numpy as np

from amp_ray.cost.collective import NO_RING
from amp_ray.cost.estimate import Estimate
from amp_ray.cost.model import CostModel
from amp_ray.cost.stages import PlacedStages
from amp_ray.cost.verdict import safe_memory_fraction
from amp_ray.inputs.experiment import Experiment
from amp_ray.memo import memoised
from amp_ray.search.cuts import best_bounds
from amp_ray.search.effort import EFFORT, SearchEffort
from amp_ray.search.placement.local_search import climb
from amp_ray.search.ranking import is_risky, leader_order
from amp_ray.search.recompute import with_least_recompute, with_recompute
from amp_ray.search.space import (
    may_be_group,
    recompute_choices,
    with_degrees,
    with_every_zero,
    with_one_zero,
    with_other_options,
    zero_choices,
)
from amp_ray.search.stage_groups.group_options import split_into_sizes
from amp_ray.strategies.candidate import ONE_RANK, Candidate, StageOptions
from amp_ray.strategies.recompute import AUTO, NO_RECOMPUTE
from amp_ray.strategies.strategy import Strategy


class Use(NamedTuple):
    """A stage without its layers."""

    replicas: tuple[tuple[int, ...], ...]  # devices of each tensor-parallel group
    shares: tuple[int, ...]  # samples of one micro-batch by replica
    options: StageOptions

    @property
    def devices(self) -> tuple[int, ...]:
        """Devices in the order of ranks."""
        return tuple(chain.from_iterable(self.replicas))

    def ordered(self, order: Sequence[int]) -> "Use":
        """Return the stage with its replicas in another order."""
        replicas = tuple(self.replicas[place] for place in order)
        return self._replace(replicas=replicas, shares=tuple(self.shares[at] for at in order))


Layout = tuple[Use, ...]
"""The stages of a plan, without its cuts."""

END: Final = Use((), (), ONE_RANK)
"""Stands for a stage that a move ends."""

Changed = tuple[Use | None, ...]
"""The stages after a move; None where limits forbid a stage."""

CUT_STEPS: Final = (1, 2, 4)
"""Layers by which cuts move. Between two good cuts all may be slower, so that longer steps follow
where short ones have ended."""


def moved_plans(
    cost_model: CostModel,
    tps: tuple[int, ...],
    plans: Sequence[Estimate],
    effort: SearchEffort = EFFORT,
) -> list[Estimate]:
    """Return faster plans that moves of the fastest ones reach.

    Returns:
        The fastest plan, and the fastest that is not likely to run out of memory; without plans
        that are not faster than the given ones.
    """
    moves = Moves(experiment=cost_model.experiment, cost_model=cost_model, tps=tps)
    able = [plan for plan in plans if moves.covers(plan)]
    starts = [*able, *_with_less_recompute(cost_model, able, effort)]
    starts += _improved_kinds(moves, able, effort)
    if not able:  # replicas with unequal shares may still fit if they shard everything
        starts = [plan for plan in moves.single_stages() if moves.covers(plan)]
    fastest = SimulatedSearch(moves=moves, effort=effort, spare=effort.max_moved_devices)
    fastest.run(starts)
    best = [fastest.best, fastest.safe]
    if fastest.best is not fastest.safe:
        safest = replace(fastest, only_safe=True, best=None, seen=set(), climbed=set(), waiting=[])
        safest.spare = fastest.spare + effort.max_moved_devices * 3 // 4
        safest.run([*starts, *([fastest.safe] if fastest.safe else [])])
        if safest.safe is not None:  # with all the memory it may lead to faster plans
            before, start = fastest.best, fastest.climb(safest.safe)
            for plan in (safest.safe, start):
                fastest.note(plan)
            if fastest.best is not before:
                # New cuts to keep: layouts that it has seen may now be faster
                fastest.seen, fastest.spare = set(), safest.spare + effort.max_moved_devices // 3
                fastest.run([start])
        best = [fastest.best, fastest.safe]
    return [plan for plan in dict.fromkeys(best) if plan is not None and plan not in able]


def _with_less_recompute(
    cost_model: CostModel, plans: Sequence[Estimate], effort: SearchEffort
) -> list[Estimate]:
    """Return the fastest plans that recompute, with as little of it as the whole memory allows.

    Candidates have the recompute of a safe plan, if there is one.
    """
    if cost_model.experiment.recompute != AUTO:
        return []
    recompute = [
        plan
        for plan in plans
        if any(stage.options.recompute != NO_RECOMPUTE for stage in plan.strategy.stages)
    ]
    recompute.sort(key=lambda plan: leader_order(plan)[1:])
    fastest = recompute[: effort.max_moved_starts]
    return [less for plan in fastest for less in with_least_recompute(cost_model, plan.strategy)]


def _improved_kinds(
    moves: "Moves", starts: Sequence[Estimate], effort: SearchEffort
) -> list[Estimate]:
    """Return what short searches make of the fastest start of every kind, each by itself.

    Beside a much faster plan of another kind, most would not be moved at all. By successive halving
    (Jamieson and Talwalkar 2016), the better half of the searches shares as much effort again.
    """
    fastest: dict[object, Estimate] = {}
    for plan in sorted(starts, key=leader_order):
        fastest.setdefault(moves.kind(plan.strategy), plan)
    searches = []
    for plan in islice(fastest.values(), effort.max_moved_kinds):
        search = SimulatedSearch(moves=moves, effort=effort, spare=0)
        search.run([plan])
        searches.append(search)
    going = searches
    while len(going) > 1:
        for search in going:
            search.spare = effort.max_kind_devices // len(going)
            search.run([])
        going = sorted(going, key=lambda search: search.rank)[: len(going) // 2]
    improved = (plan for search in searches for plan in (search.best, search.safe))
    return [plan for plan in improved if plan is not None]


@dataclass(slots=True, kw_only=True)
class SimulatedSearch:
    """Best-first search over layouts."""

    moves: "Moves"
    effort: SearchEffort
    only_safe: bool = False  # whether plans that are likely to run out of memory do not count
    best: Estimate | None = None
    safe: Estimate | None = None  # the best that is not likely to run out of memory
    num_moved: int = 0  # plans whose moves were or are tried
    spare: int  # devices of the plans that may still be simulated
    seen: set[object] = field(default_factory=set)  # keys of the layouts, by `Moves.key`
    # Rounded times and options of plans with moved cuts: alike plans on like devices have the same
    climbed: set[object] = field(default_factory=set)
    # Lower bounds of the layouts that were too slow, by `Moves.key`; less memory makes none faster
    too_slow_s: dict[object, float] = field(default_factory=dict)
    # Plans whose moves are not all tried: time, number of the plan, its moves
    waiting: list[tuple[float, int, Estimate, Iterator[tuple[Layout, int]]]] = field(
        default_factory=list
    )

    def run(self, starts: Sequence[Estimate]) -> None:
        """Find the fastest plan that moves reach from the fastest starts."""
        able = sorted(filter(self._counts, starts), key=self._order)
        for start in able[: self.effort.max_moved_starts]:
            self.note(start)
            layout = layout_of(start.strategy)
            key = self.moves.key(layout)
            self.seen.add(key)
            # A start may have cuts for less memory than there is
            recut = self._simulate(key, layout, start.strategy.num_micro_batches, start.strategy)
            self._wait(start if recut is None else min(start, recut, key=self._order))
        while self.waiting and self.spare > 0:
            _, _, plan, moves = self.waiting[0]
            moved = next(moves, None)
            if moved is None:
                heappop(self.waiting)
                continue
            key = self.moves.key(moved[0])
            if key not in self.seen:
                self.seen.add(key)
                estimate = self._simulate(key, *moved, plan.strategy)
                if estimate is not None:
                    self._wait(estimate)

    @property
    def rank(self) -> tuple[object, ...]:
        """Sort key of searches that have a plan: that of their best one."""
        assert self.best is not None
        return self._order(self.best)

    def _order(self, plan: Estimate) -> tuple[object, ...]:
        """Return the sort key of plans that count: rounded time, then the strategy's values."""
        return leader_order(plan)[1:]

    def note(self, plan: Estimate) -> None:
        """Keep a plan if it is the best one."""
        if self.best is None or self._order(plan) < self._order(self.best):
            self.best = plan
        if not is_risky(plan) and (self.safe is None or self._order(plan) < self._order(self.safe)):
            self.safe = plan

    def _wait(self, plan: Estimate) -> None:
        """Keep a plan whose moves are to be tried."""
        self.note(plan)
        moves = self.moves.of(layout_of(plan.strategy), self._memory_scale)
        self.num_moved += 1
        heappush(self.waiting, (plan.iteration_time_s, self.num_moved, plan, moves))

    def _simulate(
        self, key: object, layout: Layout, num_steps: int, moved: Strategy
    ) -> Estimate | None:
        """Return the estimate of a layout with good cuts; None if it is not near the best.

        The cuts of ``moved``, the plan that was moved, are tried too, as far as they remain.
        """
        assert self.best is not None
        model, limit_s = self.moves.cost_model, self.best.iteration_time_s
        limit_s *= 1 + self.effort.near_moved_fraction
        if self.too_slow_s.get(key, 0.0) > limit_s:
            return None
        self.spare -= self.effort.devices_of_plan + sum(len(use.devices) for use in layout)
        stages = PlacedStages(
            options=[use.options for use in layout],
            devices=np.array(list(chain.from_iterable(use.devices for use in layout))),
            shares=[use.shares for use in layout],
            num_micro_batches=num_steps,
        )
        costs = model.stage_costs(stages)
        prefix_s, row = costs.times.rows()
        # The slowest stage if all stages had the same share of every layer's time
        least_s = num_steps / float((1 / prefix_s[row, -1]).sum())
        if least_s > limit_s:
            self.too_slow_s[key] = least_s
            return None
        experiment = self.moves.experiment
        every = [best_bounds(experiment, costs, memory_scale=self._memory_scale)]
        every += [bounds for bounds in kept_bounds(layout, moved) if bounds not in every]
        least = {bounds: model.least_s(costs, bounds) for bounds in every}
        near = [bounds for bounds in every if least[bounds] <= limit_s]
        if not near:
            self.too_slow_s[key] = min(least.values())
        plans = [
            model.estimate_from(costs, strategy_of(layout, num_steps, bounds)) for bounds in near
        ]
        plans = [plan for plan in plans if self._counts(plan)]
        if not plans:
            return None
        plan = min(plans, key=self._order)
        near_s = self.best.iteration_time_s * (1 + self.effort.near_climbed_fraction)
        kind = leader_order(plan)[1], tuple(use.options for use in layout)
        if plan.iteration_time_s > near_s or kind in self.climbed:
            return plan
        self.climbed.add(kind)
        self.note(plan)  # a faster one may be risky
        return self.climb(plan)

    def climb(self, plan: Estimate) -> Estimate:
        """Move the cuts of a plan as long as that makes it faster."""
        self.spare -= self.effort.devices_of_plan + len(plan.strategy.placement)
        return climb(
            self.moves.cost_model,
            plan,
            most_stages=self.effort.max_climbed_stages_of_moves,
            counts=self._counts,
            steps=CUT_STEPS,
        )

    @property
    def _memory_scale(self) -> float:
        """Part of every device's memory that plans may need."""
        return safe_memory_fraction(self.moves.experiment.constants) if self.only_safe else 1.0

    def _counts(self, plan: Estimate) -> bool:
        return plan.feasible and not (self.only_safe and is_risky(plan))


@dataclass(frozen=True, kw_only=True, eq=False)
class Moves:
    """The neighbours of a layout that the limits allow."""

    experiment: Experiment
    cost_model: CostModel
    tps: tuple[int, ...]  # tensor-parallel degrees that a stage may have

    def covers(self, plan: Estimate) -> bool:
        """Return whether moves are defined for a plan."""
        strategy = plan.strategy
        odd = strategy.is_sliced or strategy.is_interleaved or strategy.has_operators
        return (
            plan.feasible
            and not odd
            and all(may_be_group(stage.options) for stage in strategy.stages)
            and self.experiment.traits.partition == "exact"
        )

    def single_stages(self) -> Iterator[Estimate]:
        """Yield plans of one stage on all devices, for each tp, ZeRO setting and micro-batch."""
        experiment, batch = self.experiment, self.experiment.global_batch_size
        is_open = experiment.recompute == AUTO
        most = recompute_choices(experiment)[-1].whole if is_open else experiment.recompute
        for tp, size in product(self.tps, range(1, batch + 1)):
            dp = len(self._devices) // tp
            for zero in () if batch % size else zero_choices(experiment, tp, dp, 1):
                options = experiment.stage_options(tp, dp, recompute=most, zero=zero)
                by_speed = self._spread(Use((), (), options), self._devices, tp, size)
                fitting = by_speed and self._within_memory(by_speed, 1)
                for use in dict.fromkeys(filter(None, (by_speed, fitting))):
                    if self._within_limits((use,)):
                        bounds = 0, experiment.model.num_layers
                        plan = strategy_of((use,), batch // size, bounds)
                        model = self.cost_model
                        yield with_recompute(model, plan) if is_open else model.estimate(plan)

    def key(self, layout: Layout) -> object:
        """Return a key that layouts share if they differ only in equal nodes and slots."""
        nodes = self._nodes(chain.from_iterable(use.devices for use in layout))
        return self._places(nodes), tuple((use.options, use.shares) for use in layout)

    def _places(self, nodes: Iterable[int]) -> tuple[tuple[int, int], ...]:
        """Return the kind of each node, and how many nodes of its kind come first before it."""
        place: dict[int, tuple[int, int]] = {}
        held = [0] * len(self._kind_of_node)
        places = []
        for node in nodes:
            if node not in place:
                kind = self._kind_of_node[node]
                place[node] = kind, held[kind]
                held[kind] += 1
            places.append(place[node])
        return tuple(places)

    def kind(self, strategy: Strategy) -> object:
        """Return the number of stages, and the nodes along the pipeline.

        A node counts once in a row, and equal nodes count alike.
        """
        rows = (self._nodes(strategy.devices(index)) for index in range(strategy.pp))
        path = [node for node, _ in groupby(chain.from_iterable(rows))]
        return strategy.pp, self._places(path)

    def of(self, layout: Layout, memory_scale: float = 1.0) -> Iterator[tuple[Layout, int]]:
        """Yield the neighbours of a layout: their stages and numbers of micro-batches.

        Moves that seldom make a plan faster come last. Only those that choose recompute for what
        memory there is look at ``memory_scale``, by which every device's memory is multiplied.
        """
        moves = (
            self._resized,
            self._other_degrees,
            self._joined,
            self._without_replica,
            self._begun,
            self._with_other_options,
            self._split,
            self._reordered,
            self._device_moves,
            self._exchanged,
            self._reshared,
            self._shifted,
        )
        shards = any(use.options.dp > 1 for use in layout)
        # Where nothing could be sharded, the plan's ZeRO setting was no choice
        choices = self._with_one_zero if shards else self._with_every_zero
        for changed in chain.from_iterable(move(layout) for move in moves):
            moved = tuple(use for use in changed if use is not None)
            if moved and len(moved) == len(changed) and self._within_limits(moved):
                for options in choices(tuple(use.options for use in moved)):
                    able = _with_options(moved, options)
                    for row in (able, *self._meeting(able, layout)):
                        yield row, self._num_steps(row)
        if self._within_limits(layout):
            for able in self._with_other_zero(layout, memory_scale):
                yield able, self._num_steps(able)

    def _meeting(self, layout: Layout, before: Layout) -> Iterator[Layout]:
        """Yield a moved layout in which replicas of a changed stage meet those of a neighbour.

        Shares by speed on unequal devices seldom end at the same sample as those of another stage,
        and then more replicas wait for each other.
        """
        ends = [set(accumulate(use.shares)) for use in layout]
        neighbours = map(permutations, pairwise(range(len(layout))))
        for one, other in chain.from_iterable(neighbours):
            use, types = layout[other], self._types_of(layout[other].replicas)
            if use in before or len(set(types)) == 1:
                continue
            for end in sorted(ends[one] - ends[other]):
                if shares := self._divided_at(end, use, types):
                    yield (*layout[:other], use._replace(shares=shares), *layout[other + 1 :])

    def _divided_at(
        self, end: int, use: Use, types: tuple[tuple[int, ...], ...]
    ) -> tuple[int, ...] | None:
        """Return shares by speed of which some end at a sample, or None if limits forbid it."""
        size, number = sum(use.shares), len(types)
        options = with_degrees(self.experiment, use.options, use.options.tp, 1)
        best_s, best = math.inf, None
        for place in range(max(1, number - size + end), min(number, end + 1)):
            parts = (types[:place], end), (types[place:], size - end)
            by_speed = [self.by_speed(kinds, options, samples) for kinds, samples in parts]
            if all(by_speed):
                shares = tuple(chain.from_iterable(by_speed))
                pairs = zip(types, shares, strict=True)
                longest_s = max(self.seconds(kind, options, samples) for kind, samples in pairs)
                if longest_s < best_s:
                    best_s, best = longest_s, shares
        return best

    def _num_steps(self, layout: Layout) -> int:
        return self.experiment.global_batch_size // sum(layout[0].shares)

    @cached_property
    def _sizes(self) -> list[int]:
        """All sizes of a micro-batch, summed over replicas."""
        batch = self.experiment.global_batch_size
        return [size for size in range(1, batch + 1) if batch % size == 0]

    @memoised
    def _with_one_zero(self, stages: tuple[StageOptions, ...]) -> tuple[list[StageOptions], ...]:
        return with_one_zero(self.experiment, stages)

    @memoised
    def _with_every_zero(self, stages: tuple[StageOptions, ...]) -> tuple[list[StageOptions], ...]:
        return with_every_zero(self.experiment, stages)

    def _begun(self, layout: Layout) -> Iterator[Changed]:
        """Make a stage of resting devices of one node, beside the stages or instead of one."""
        parts = self._parts(self._resting(layout))
        for moved, tp, at in product(parts, self.tps, range(len(layout) + 1)):
            begun = self._spread(layout[min(at, len(layout) - 1)], moved, tp)
            yield (*layout[:at], begun, *layout[at:])
            yield (*layout[:at], begun, *layout[at + 1 :])

    def _resting(self, layout: Layout) -> list[int]:
        used = {device for use in layout for device in use.devices}
        return [device for device in self._devices if device not in used]

    def _device_moves(self, layout: Layout) -> Iterator[Changed]:
        """Move devices of one node from a stage to another, let some rest, or use resting ones."""
        for moved in self._parts(self._resting(layout)):
            for target in range(len(layout)):
                for use in self._refitted(layout[target], (*layout[target].devices, *moved)):
                    yield _with(layout, {target: use})
        for source, use in enumerate(layout):
            for moved in self._parts(use.devices):
                rest = [device for device in use.devices if device not in moved]
                # Without devices the stage ends
                for smaller in self._refitted(use, rest) if rest else (END,):
                    yield _with(layout, {source: smaller})
                    for target, other in enumerate(layout):
                        if target != source:
                            for larger in self._refitted(other, (*other.devices, *moved)):
                                yield _with(layout, {source: smaller, target: larger})

    def _other_degrees(self, layout: Layout) -> Iterator[Changed]:
        for index, use in enumerate(layout):
            for tp in self.tps:
                if tp != use.options.tp:
                    yield _with(layout, {index: self._spread(use, use.devices, tp)})

    def _joined(self, layout: Layout) -> Iterator[Changed]:
        """Join two neighbouring stages; a micro-batch grows if it has too few samples for both."""
        batch = self.experiment.global_batch_size
        for index, (use, other) in enumerate(pairwise(layout)):
            devices = (*use.devices, *other.devices)
            for tp in self.tps:
                least = max(sum(use.shares), len(devices) // tp)
                size = next((size for size in range(least, batch + 1) if batch % size == 0), batch)
                rest: Changed = layout
                if size > sum(use.shares):
                    rest = tuple(self._spread(part, part.devices, size=size) for part in layout)
                yield (*rest[:index], self._spread(use, devices, tp, size), *rest[index + 2 :])

    def _split(self, layout: Layout) -> Iterator[Changed]:
        """Divide the devices of a stage between two."""
        for index, use in enumerate(layout):
            devices = use.devices
            for place in range(1, len(devices)):
                for one in self._refitted(use, devices[:place]):
                    for other in self._refitted(use, devices[place:]):
                        for halves in ((one, other), (other, one)):
                            yield (*layout[:index], *halves, *layout[index + 1 :])

    def _reordered(self, layout: Layout) -> Iterator[Changed]:
        for one, other in combinations(range(len(layout)), 2):
            yield _with(layout, {one: layout[other], other: layout[one]})
        for one, place in permutations(range(len(layout)), 2):
            rest = (*layout[:one], *layout[one + 1 :])
            yield (*rest[:place], layout[one], *rest[place:])

    def _reshared(self, layout: Layout) -> Iterator[Changed]:
        """Swap two replicas of a stage, or pass one sample from one to another."""
        for index, use in enumerate(layout):
            kinds = [self._nodes(replica) for replica in use.replicas]
            places = range(len(kinds))
            for one, other in combinations(places, 2):
                if (kinds[one], use.shares[one]) != (kinds[other], use.shares[other]):
                    order = list(places)
                    order[one], order[other] = other, one
                    yield _with(layout, {index: use.ordered(order)})
            passed = set()
            for give, take in permutations(places, 2):
                shares = list(use.shares)
                shares[give] -= 1
                shares[take] += 1
                key = kinds[give], use.shares[give], kinds[take], use.shares[take]
                if key not in passed and shares[give] and self._allows(shares):
                    passed.add(key)
                    yield _with(layout, {index: use._replace(shares=tuple(shares))})

    def _shifted(self, layout: Layout) -> Iterator[Changed]:
        """Pass one sample on in all stages whose replicas meet at the same sample."""
        ends = [tuple(accumulate(use.shares)) for use in layout]
        for end, count in sorted(Counter(chain.from_iterable(row[:-1] for row in ends)).items()):
            for shift in (-1, 1) if count > 1 else ():
                changed = {}
                for index, use in enumerate(layout):
                    if end in ends[index][:-1]:
                        place = ends[index].index(end)
                        shares = list(use.shares)
                        shares[place] += shift
                        shares[place + 1] -= shift
                        able = min(shares) and self._allows(shares)
                        changed[index] = use._replace(shares=tuple(shares)) if able else None
                yield _with(layout, changed)

    def _with_other_options(self, layout: Layout) -> Iterator[Changed]:
        for changed in with_other_options(self.experiment, [use.options for use in layout]):
            yield _with_options(layout, changed)

    def _with_other_zero(self, layout: Layout, memory_scale: float) -> Iterator[Layout]:
        """Change the ZeRO setting, and all that depends on the memory which it leaves.

        That is the size of a micro-batch, whose samples replicas have by speed or as many as fit,
        and recompute where it is open: as little as then fits. Choosing it takes longer, so then
        only the next smaller and larger size are tried.
        """
        sizes, before = self._sizes, sum(layout[0].shares)
        if self.experiment.recompute == AUTO:
            place = sizes.index(before)
            sizes = sizes[max(0, place - 1) : place + 2]
        for size in sizes:
            resized: Changed = layout
            if size != before:
                resized = tuple(self._spread(use, use.devices, size=size) for use in layout)
            every = tuple(use for use in resized if use is not None)
            if len(every) < len(layout):
                continue
            for options in self._with_every_zero(tuple(use.options for use in every)):
                able = _with_options(every, options)
                fitting = [self._within_memory(use, len(able), memory_scale) for use in able]
                for row in dict.fromkeys((able, tuple(filter(None, fitting)))):
                    if len(row) == len(able):
                        yield from self._least_recompute(row, memory_scale)

    def _least_recompute(self, layout: Layout, memory_scale: float) -> list[Layout]:
        """Return a layout, with as little recompute as the memory allows if that is open."""
        if self.experiment.recompute != AUTO:
            return [layout]
        plain = [replace(use.options, recompute=NO_RECOMPUTE) for use in layout]
        return self._recomputed(_with_options(layout, plain), memory_scale)

    @memoised
    def _recomputed(self, layout: Layout, memory_scale: float) -> list[Layout]:
        """Return a layout with as little recompute as the memory allows, in a few ways."""
        cuts = *range(len(layout)), self.experiment.model.num_layers  # stand for any cuts
        strategy = strategy_of(layout, self._num_steps(layout), cuts)
        fitting = with_least_recompute(self.cost_model, strategy, memory_scale)
        return [layout_of(plan.strategy) for plan in fitting]

    def _exchanged(self, layout: Layout) -> Iterator[Changed]:
        for one, other in combinations(range(len(layout)), 2):
            use, second = layout[one], layout[other]
            for mine, theirs in product(self._parts(use.devices), self._parts(second.devices)):
                if self._nodes(mine) != self._nodes(theirs) and len(mine) == len(theirs):
                    to_other = dict(zip((*mine, *theirs), (*theirs, *mine), strict=True))
                    turned = [
                        self._spread(part, [to_other.get(at, at) for at in part.devices])
                        for part in (use, second)
                    ]
                    yield _with(layout, {one: turned[0], other: turned[1]})

    def _resized(self, layout: Layout) -> Iterator[Changed]:
        for size in self._sizes:
            by_speed = tuple(self._spread(use, use.devices, size=size) for use in layout)
            yield by_speed
            fitting = tuple(use and self._within_memory(use, len(layout)) for use in by_speed)
            if fitting != by_speed:
                yield fitting

    def _without_replica(self, layout: Layout) -> Iterator[Changed]:
        """Let a stage lose a replica with its samples: it rests, or is a stage by itself."""
        size, batch = sum(layout[0].shares), self.experiment.global_batch_size
        for use in layout:
            kinds = set()
            for place, replica in enumerate(use.replicas):
                rest, kind = size - use.shares[place], (self._nodes(replica), use.shares[place])
                if not rest or batch % rest or kind in kinds:
                    continue
                kinds.add(kind)
                devices = [device for device in use.devices if device not in replica]
                smaller = [
                    self._spread(other, devices if other is use else other.devices, size=rest)
                    for other in layout
                ]
                yield tuple(smaller)
                alone = self._spread(use, replica, size=rest)
                for at in range(len(layout) + 1):
                    yield (*smaller[:at], alone, *smaller[at:])

    def _within_memory(self, use: Use, num_stages: int, memory_scale: float = 1.0) -> Use | None:
        """Return a stage whose replicas have no more samples than fit, with equal stages.

        The samples are again divided by speed; None if too few fit.
        """
        options, size = use.options, sum(use.shares)
        most = tuple(
            self._most_samples(types, options, num_stages, size, memory_scale)
            for types in self._types_of(use.replicas)
        )
        if sum(most) < size or not all(most):
            return None
        return self._shared(use.replicas, options, size, most)

    @memoised
    def _most_samples(
        self,
        types: tuple[int, ...],
        options: StageOptions,
        num_stages: int,
        size: int,
        memory_scale: float,
    ) -> int:
        """Return how many of ``size`` samples fit on a replica that has an equal part of layers."""
        model, experiment = self.cost_model, self.experiment
        least = min(experiment.cluster.device_types[kind].memory_bytes for kind in types)
        limit = memory_scale * least
        end = math.ceil(experiment.model.num_layers / num_stages)

        def fits(samples: int) -> bool:
            candidate = Candidate(
                micro_batch_size=samples,
                options=options,
                pp=num_stages,
                num_micro_batches=experiment.global_batch_size // size,
            )
            return model.samples_of(options).memory(candidate).peak(0, 0, end) <= limit

        return bisect_left(range(1, size + 1), 1, key=lambda samples: int(not fits(samples)))

    def _parts(self, devices: Iterable[int]) -> Iterator[tuple[int, ...]]:
        """Yield the last devices of every node: powers of two of them, and all."""
        held: dict[int, list[int]] = {}
        for device in devices:
            held.setdefault(self._node_of_device[device], []).append(device)
        for row in held.values():
            for count in sorted({len(row), *(1 << bit for bit in range(len(row).bit_length()))}):
                yield tuple(row[-count:])

    def _refitted(self, use: Use, devices: Sequence[int]) -> Iterator[Use]:
        """Yield a stage on other devices: with its tp, or else every smaller one."""
        whole = self._spread(use, devices)
        if whole is not None:
            yield whole
            return
        for tp in self.tps:
            if tp < use.options.tp and (smaller := self._spread(use, devices, tp)) is not None:
                yield smaller

    def _spread(self, use: Use, devices: Sequence[int], tp: int = 0, size: int = 0) -> Use | None:
        """Return a stage on these devices, with samples by speed; None if limits forbid it.

        ``devices`` are in the order in which nodes come; tp and samples are by default the stage's.
        """
        tp, size = tp or use.options.tp, size or sum(use.shares)
        replicas = self._replicas(tuple(devices), tp)
        max_dp = self.experiment.limits.max_dp
        if not replicas or len(replicas) > min(size, max_dp or size):
            return None
        options = with_degrees(self.experiment, use.options, tp, len(replicas))
        return self._shared(replicas, options, size)

    def _shared(
        self,
        replicas: tuple[tuple[int, ...], ...],
        options: StageOptions,
        size: int,
        most: tuple[int, ...] = (),
    ) -> Use | None:
        """Return a stage with samples by speed, at most ``most``; None if limits forbid it."""
        one = with_degrees(self.experiment, options, options.tp, 1)
        shares = self.by_speed(self._types_of(replicas), one, size, most)
        return Use(replicas, shares, options) if shares else None

    def _types_of(self, replicas: Iterable[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(sorted({self._types[at] for at in row})) for row in replicas)

    @memoised
    def _replicas(self, devices: tuple[int, ...], tp: int) -> tuple[tuple[int, ...], ...]:
        """Return the tensor-parallel groups of some devices; empty if there are none."""
        held: dict[int, list[int]] = {}
        for device in devices:
            node = self._node_of_device[device]
            across = self.experiment.limits.tp_across_nodes
            held.setdefault(-1 if across else node, []).append(device)
        types = {self._types[device] for device in devices}
        every = [self.experiment.cluster.device_types[index] for index in sorted(types)]
        if any(len(row) % tp for row in held.values()):
            return ()
        if self.experiment.profile.gap(every, tp) is not None:
            return ()
        return tuple(
            tuple(row[first : first + tp])
            for row in held.values()
            for first in range(0, len(row), tp)
        )

    @memoised
    def by_speed(
        self,
        types: tuple[tuple[int, ...], ...],
        options: StageOptions,
        size: int,
        most: tuple[int, ...] = (),
    ) -> tuple[int, ...]:
        """Give samples one by one to the replica that would then finish first.

        ``most`` are the most samples of each replica; empty for no limit. Where the limits list
        sizes of a micro-batch, every replica has one of them, and the last one finishes as early
        as possible; empty if no such sizes add up.
        """
        sizes = self.experiment.limits.micro_batch_sizes
        if sizes is not None:
            limits = most or (size,) * len(types)
            sizes_s = [
                [self.seconds(kind, options, n) if n <= limit else math.inf for n in sizes]
                for kind, limit in zip(types, limits, strict=True)
            ]
            return split_into_sizes(size, sizes, sizes_s)
        if len(set(types)) == 1:
            whole, more = divmod(size, len(types))
            return (whole + 1,) * more + (whole,) * (len(types) - more)
        shares = [1] * len(types)
        able = range(len(types)) if not most else [at for at, limit in enumerate(most) if limit > 1]
        next_ends = [(self.seconds(types[at], options, 2), at) for at in able]
        heapify(next_ends)
        for _ in range(size - len(types)):
            first = next_ends[0][1]
            shares[first] += 1
            if most and shares[first] == most[first]:
                heappop(next_ends)
            else:
                seconds = self.seconds(types[first], options, shares[first] + 1)
                heapreplace(next_ends, (seconds, first))
        return tuple(shares)

    @memoised
    def seconds(self, types: tuple[int, ...], options: StageOptions, samples: int) -> float:
        """Return the time of all layers on a replica, without its all-reduces."""
        table, _ = self.cost_model.time_tables.table(types, NO_RING, options, samples)
        return float(table[0, -1] + table[1, -1])

    def _within_limits(self, layout: Layout) -> bool:
        experiment, num_stages = self.experiment, len(layout)
        most = min(experiment.model.num_layers, experiment.limits.max_pp or num_stages)
        num_devices = sum(len(use.replicas) * use.options.tp for use in layout)
        return (
            num_stages <= most
            and (experiment.may_idle or num_devices == experiment.cluster.num_devices)
            and all(
                experiment.traits.why_no_grid(use.options.tp, num_stages) is None for use in layout
            )
        )

    def _allows(self, shares: Iterable[int]) -> bool:
        sizes = self.experiment.limits.micro_batch_sizes
        return sizes is None or set(shares) <= set(sizes)

    def _nodes(self, devices: Iterable[int]) -> tuple[int, ...]:
        return tuple(self._node_of_device[device] for device in devices)

    @cached_property
    def _devices(self) -> range:
        return range(self.experiment.cluster.num_devices)

    @cached_property
    def _node_of_device(self) -> tuple[int, ...]:
        return self.experiment.cluster.node_of_device

    @cached_property
    def _kind_of_node(self) -> tuple[int, ...]:
        """Number of each node's kind; a node with a link of its own is a kind."""
        cluster = self.experiment.cluster
        number: dict[object, int] = {}
        return tuple(
            number.setdefault((node.kind, link_key), len(number))
            for node, link_key in zip(cluster.nodes, cluster.link_keys, strict=True)
        )

    @cached_property
    def _types(self) -> tuple[int, ...]:
        return self.experiment.cluster.type_of_device


def layout_of(strategy: Strategy) -> Layout:
    """Return the stages of a strategy without their layers."""
    layout = []
    for index, stage in enumerate(strategy.stages):
        devices, tp = strategy.devices(index), stage.options.tp
        replicas = tuple(devices[first : first + tp] for first in range(0, len(devices), tp))
        shares = stage.shares or (strategy.micro_batch_size,) * len(replicas)
        layout.append(Use(replicas, shares, stage.options))
    return tuple(layout)


def strategy_of(layout: Layout, num_steps: int, bounds: Sequence[int]) -> Strategy:
    """Return the strategy with these stages."""
    return Strategy.of_groups(
        bounds,
        [(use.options, use.shares, use.devices) for use in layout],
        num_micro_batches=num_steps,
    )


def _with_options(layout: Layout, options: Sequence[StageOptions]) -> Layout:
    pairs = zip(layout, options, strict=True)
    return tuple(use._replace(options=of_stage) for use, of_stage in pairs)


def _with(layout: Layout, changed: Mapping[int, Use | None]) -> Changed:
    uses = (changed.get(index, use) for index, use in enumerate(layout))
    return tuple(use for use in uses if use is not END)


def kept_bounds(layout: Layout, moved: Strategy) -> Iterator[tuple[int, ...]]:
    """Yield the cuts of a moved plan; if two stages are joined or one ended, one cut fewer."""
    if len(layout) == moved.pp:
        yield moved.bounds
    elif len(layout) == moved.pp - 1:
        uses = enumerate(layout[:-1])
        changed = (index for index, use in uses if use.devices != moved.devices(index))
        place = next(changed, len(layout) - 1)
        yield (*moved.bounds[: place + 1], *moved.bounds[place + 2 :])
