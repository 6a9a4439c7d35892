"""Oracle of mixed clusters: anneals by simulated time over every plan that a file can describe.

A plan gives each stage its layers, any devices in any order, its tp, the samples of each replica,
its recompute (of all blocks or of some) and whether it divides tokens; the size of a micro-batch
and the ZeRO setting are the same for all stages. Everything that the runtime can run is allowed,
also where the search has no such plans. Chunks, token slices, context and expert parallelism are
not: files allow them in space `uniform` alone. The judge is `CostModel.estimate`. The oracle shares
no move with the search.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Final

import numpy as np

from amp_ray.cost.estimate import Estimate
from amp_ray.cost.model import CostModel, StageCosts
from amp_ray.cost.stages import PlacedStages
from amp_ray.inputs.experiment import Experiment
from amp_ray.memo import memoised
from amp_ray.search.cuts import best_bounds
from amp_ray.search.ranking import is_risky
from amp_ray.search.space import recompute_choices
from amp_ray.strategies.candidate import StageOptions
from amp_ray.strategies.recompute import AUTO, Recompute
from amp_ray.strategies.strategy import Stage, Strategy
from amp_ray.strategies.zero import AUTO_STAGE, MOST_ZERO_STAGE, NO_ZERO, Zero

HOTTEST: Final = 0.05
COLDEST: Final = 0.0003
"""Temperatures at both ends: relative differences of the time that are accepted now and then."""

MOST_CACHED: Final = 20_000
"""Costs of stages that are kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """One stage of a plan."""

    num_layers: int
    devices: tuple[int, ...]  # in the order of ranks
    tp: int
    shares: tuple[int, ...]  # samples of each replica
    recompute: Recompute
    divides_tokens: bool  # sequence parallelism


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A strategy in the form that moves change."""

    uses: tuple[Use, ...]
    zero: Zero

    @property
    def size(self) -> int:
        """Samples of one micro-batch over all replicas."""
        return sum(self.uses[0].shares)

    @property
    def bounds(self) -> tuple[int, ...]:
        """Bounds of the stages."""
        return tuple(accumulate((use.num_layers for use in self.uses), initial=0))

    @classmethod
    def of(cls, strategy: Strategy) -> "Plan":
        """Convert a strategy."""
        return cls(
            uses=tuple(
                Use(
                    num_layers=stage.end_layer - stage.first_layer,
                    devices=strategy.devices(index),
                    tp=stage.options.tp,
                    shares=stage.shares or (strategy.micro_batch_size,) * stage.options.dp,
                    recompute=stage.options.recompute,
                    divides_tokens=stage.options.sequence_parallel,
                )
                for index, stage in enumerate(strategy.stages)
            ),
            zero=strategy.zero,
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Annealing:
    """Looks for a plan that is faster than any plan of the search."""

    cost_model: CostModel
    # The fastest plan of all that were simulated, and the fastest safe one, by ``safe``
    best: dict[bool, Estimate] = field(init=False, default_factory=dict)
    _values: dict[Plan, tuple[float, Estimate]] = field(init=False, default_factory=dict)
    _costs: dict[object, StageCosts] = field(init=False, default_factory=dict)

    @property
    def experiment(self) -> Experiment:
        """The experiment of the cost model."""
        return self.cost_model.experiment

    @property
    def simulated(self) -> list[Estimate]:
        """Estimates of all plans that were simulated."""
        return [estimate for _, estimate in self._values.values()]

    @cached_property
    def tps(self) -> tuple[int, ...]:
        """Degrees that limits, nodes and model allow."""
        experiment, shape = self.experiment, self.experiment.model.shape
        most = max(node.num_slots for node in experiment.cluster.nodes)
        most = min(most, experiment.limits.max_tp or most)
        heads = shape.num_heads, shape.num_key_value_heads
        return tuple(
            tp
            for tp in range(experiment.limits.min_tp, most + 1)
            if experiment.traits.why_no_grid(tp, 1) is None
            and (not experiment.traits.shards_heads or not any(count % tp for count in heads))
        )

    @cached_property
    def recomputes(self) -> tuple[Recompute, ...]:
        """Kinds that a stage may have."""
        fixed = self.experiment.recompute
        return recompute_choices(self.experiment) if fixed == AUTO else (fixed,)

    @memoised
    def zeros(self, pp: int) -> tuple[Zero, ...]:
        """Return the ZeRO settings of so many stages."""
        experiment = self.experiment
        fixed = experiment.zero(pp)
        if fixed.stage != AUTO_STAGE:
            return (fixed,)
        every = (
            Zero(stage=stage, keeps_weights=keeps)
            for stage in range(MOST_ZERO_STAGE + 1)
            for keeps in ((False, True) if stage == MOST_ZERO_STAGE else (False,))
        )
        return tuple(zero for zero in every if experiment.traits.why_no_zero(zero, pp) is None)

    def strategy(self, plan: Plan) -> Strategy | None:
        """Return the strategy; None if limits, runtime, nodes or the batch forbid it."""
        if not self._allows(plan) or not all(self._runs(use, plan.size) for use in plan.uses):
            return None
        shares = [use.shares for use in plan.uses]
        even = len({len(row) for row in shares}) == len({n for row in shares for n in row}) == 1
        strategy = Strategy(
            stages=tuple(
                Stage(
                    first_layer=first,
                    end_layer=end,
                    options=_options(use, plan.zero),
                    shares=None if even else use.shares,
                )
                for use, (first, end) in zip(plan.uses, pairwise(plan.bounds), strict=True)
            ),
            micro_batch_size=shares[0][0] if even else plan.size,
            num_micro_batches=self.experiment.global_batch_size // plan.size,
            placement=tuple(device for use in plan.uses for device in use.devices),
        )
        refusal = self.experiment.traits.why_not([stage.options for stage in strategy.stages])
        return strategy if refusal is None else None

    def _allows(self, plan: Plan) -> bool:
        """Return whether limits and runtime allow the plan as a whole."""
        experiment, pp = self.experiment, len(plan.uses)
        num_devices = sum(len(use.devices) for use in plan.uses)
        return (
            pp <= (experiment.limits.max_pp or pp)
            and (pp == 1 or experiment.traits.why_no_grid(1, pp) is None)
            and plan.zero in self.zeros(pp)
            and plan.size > 0
            and experiment.global_batch_size % plan.size == 0
            and (experiment.may_idle or num_devices == experiment.cluster.num_devices)
        )

    def _runs(self, use: Use, size: int) -> bool:
        """Return whether limits, nodes and model allow a stage."""
        experiment, node_of = self.experiment, self.experiment.cluster.node_of_device
        limits = experiment.limits
        groups = [use.devices[at : at + use.tp] for at in range(0, len(use.devices), use.tp)]
        return (
            use.num_layers > 0
            and len(use.devices) == use.tp * len(use.shares)
            and min(use.shares, default=0) > 0
            and sum(use.shares) == size
            and use.tp in self.tps
            and len(use.shares) <= (limits.max_dp or len(use.shares))
            and set(use.shares) <= set(limits.micro_batch_sizes or use.shares)
            and all(len({node_of[device] for device in group}) == 1 for group in groups)
            and use.divides_tokens in self._divides_tokens(use.tp)
        )

    @memoised
    def _divides_tokens(self, tp: int) -> tuple[bool, ...]:
        """Return whether stages of a tp may use sequence parallelism, and whether they must not."""
        able = self.experiment.stage_options(tp, 1).sequence_parallel
        return (False, True) if able else (False,)

    def value(self, plan: Plan, limit: float, *, safe: bool) -> float:
        """Return the logarithm of the time, more where memory lacks; infinite if forbidden.

        Args:
            plan: Any plan.
            limit: Larger values may be returned as infinite.
            safe: Whether plans that may run out of memory count as lacking it.
        """
        if plan not in self._values:
            strategy = self.strategy(plan)
            if strategy is None:
                return math.inf
            costs = self._stage_costs(plan)
            if not self.cost_model.may_take(costs, plan.bounds, math.exp(limit)):
                return math.inf
            self._keep(plan, self.cost_model.estimate_from(costs, strategy))
        lacks, estimate = self._values[plan]
        able = estimate.feasible and not (safe and is_risky(estimate))
        return math.log(estimate.iteration_time_s) + (0.0 if able else 0.05 + 2 * lacks)

    def _keep(self, plan: Plan, estimate: Estimate) -> None:
        """Note an estimate, and the plan if it is the fastest of its kind."""
        pairs = zip(estimate.peak_memory_bytes, estimate.memory_limit_bytes, strict=True)
        lacks = max(0.0, max(peak / limit for peak, limit in pairs) - 1)
        self._values[plan] = lacks, estimate
        for safe in (False, True):
            able = estimate.feasible and not (safe and is_risky(estimate))
            best_s = self.best[safe].iteration_time_s if safe in self.best else math.inf
            if able and estimate.iteration_time_s < best_s:
                self.best[safe] = estimate

    def _stage_costs(self, plan: Plan) -> StageCosts:
        """Return the costs of a plan's stages, whatever its cuts."""
        key = plan.zero, tuple(replace(use, num_layers=1) for use in plan.uses)
        if key not in self._costs:
            if len(self._costs) >= MOST_CACHED:
                self._costs.clear()
            stages = PlacedStages(
                options=[_options(use, plan.zero) for use in plan.uses],
                devices=np.array([device for use in plan.uses for device in use.devices]),
                shares=[use.shares for use in plan.uses],
                num_micro_batches=self.experiment.global_batch_size // plan.size,
            )
            self._costs[key] = self.cost_model.stage_costs(stages)
        return self._costs[key]

    def run(self, starts: Sequence[Strategy], *, seed: int, num_steps: int, restarts: int) -> None:
        """Anneal from some strategies and from random ones, then from the best plans so far.

        Args:
            starts: Strategies to begin with.
            seed: Seed of all moves.
            num_steps: Moves of each run.
            restarts: Random strategies to begin with.
        """
        rng = random.Random(seed)
        for plan in map(Plan.of, starts):
            self._anneal(plan, rng, num_steps, safe=False)
        for number in range(restarts):
            safe = bool(number % 2)
            self._anneal(self._random(rng), rng, num_steps, safe=safe and self._is_tight)
        for safe in (False, True) if self._is_tight else (False,):
            if safe in self.best:
                plan = Plan.of(self.best[safe].strategy)
                self._anneal(plan, rng, num_steps, safe=safe, hottest=HOTTEST / 5)

    @property
    def _is_tight(self) -> bool:
        """Whether the fastest plan so far may run out of memory."""
        return False not in self.best or is_risky(self.best[False])

    def _anneal(
        self,
        plan: Plan,
        rng: random.Random,
        num_steps: int,
        *,
        safe: bool,
        hottest: float = HOTTEST,
    ) -> None:
        value = self.value(plan, math.inf, safe=safe)
        for step in range(num_steps):
            heat = hottest * (COLDEST / hottest) ** (step / num_steps)
            limit = value - heat * math.log(1 - rng.random())
            moved = self._moved(plan, rng)
            if moved is not None and (after := self.value(moved, limit, safe=safe)) <= limit:
                plan, value = moved, after

    def _random(self, rng: random.Random) -> Plan:
        """Return a plan with random stages; they may be forbidden."""
        experiment, cluster = self.experiment, self.experiment.cluster
        node_rank = [rng.random() for _ in cluster.nodes]
        devices = sorted(
            range(cluster.num_devices), key=lambda device: node_rank[cluster.node_of_device[device]]
        )
        if experiment.may_idle and rng.random() < 0.5:
            devices = devices[: rng.randrange(len(devices)) + 1]
        most = min(len(devices), experiment.model.num_layers, experiment.limits.max_pp or 4)
        pp = rng.randint(1, most)
        ends = (0, *sorted(rng.sample(range(1, len(devices)), pp - 1)), len(devices))
        layers = experiment.model.num_layers
        inner = sorted(rng.sample(range(1, layers), pp - 1))
        zeros = self.zeros(pp) or (NO_ZERO,)
        size = rng.choice(_divisors(experiment.global_batch_size))
        blank = Use(
            num_layers=1,
            devices=(),
            tp=1,
            shares=(),
            recompute=rng.choice(self.recomputes),
            divides_tokens=False,
        )
        rows = zip(pairwise(ends), pairwise((0, *inner, layers)), strict=True)
        uses = tuple(
            self._spread(
                replace(blank, num_layers=end - first, tp=rng.choice(self.tps)),
                tuple(devices[low:high]),
                size,
                rng,
            )
            for (low, high), (first, end) in rows
        )
        plan = Plan(uses=uses, zero=rng.choice(zeros))
        return self._recut(plan) or plan

    def _moved(self, plan: Plan, rng: random.Random) -> Plan | None:
        """Return a random neighbour of a plan; None if the move does not exist."""
        moves = (
            *(self._cut,) * 5,
            *(self._share,) * 3,
            *(self._device,) * 4,
            *(self._swap,) * 3,
            self._divide,
            self._split,
            self._merge,
            self._order,
            self._size,
            self._choose,
            self._choose,
        )
        move = rng.choice(moves)
        moved = move(plan, rng)
        if moved is None or move == self._cut:
            return moved
        chance = rng.random()
        if chance < 0.6:
            return self._recut(moved)
        return self._cut(moved, rng) or moved if chance < 0.8 else moved

    def _recut(self, plan: Plan) -> Plan | None:
        """Return the plan with good cuts; None if it is forbidden."""
        if self.strategy(plan) is None:
            return None
        ends = self._good_bounds(plan.zero, tuple(replace(use, num_layers=1) for use in plan.uses))
        uses = (
            replace(use, num_layers=end - first)
            for use, (first, end) in zip(plan.uses, pairwise(ends), strict=True)
        )
        return replace(plan, uses=tuple(uses))

    @memoised
    def _good_bounds(self, zero: Zero, uses: tuple[Use, ...]) -> tuple[int, ...]:
        return best_bounds(self.experiment, self._stage_costs(Plan(uses=uses, zero=zero)))

    def _cut(self, plan: Plan, rng: random.Random) -> Plan | None:
        """Move layers from one stage to another, so that all cuts between them shift."""
        if len(plan.uses) < 2:
            return None
        uses = list(plan.uses)
        give, take = rng.sample(range(len(uses)), 2)
        count = min(rng.choice((1, 1, 2, 3)), uses[give].num_layers - 1)
        for index, change in ((give, -count), (take, count)):
            uses[index] = replace(uses[index], num_layers=uses[index].num_layers + change)
        return replace(plan, uses=tuple(uses))

    def _share(self, plan: Plan, rng: random.Random) -> Plan | None:
        """Move samples from one replica of a stage to another."""
        index = rng.randrange(len(plan.uses))
        shares = list(plan.uses[index].shares)
        if len(shares) < 2:
            return None
        give, take = rng.sample(range(len(shares)), 2)
        count = rng.choice((1, 1, 2))
        shares[give] -= count
        shares[take] += count
        return _with(plan, index, shares=tuple(shares))

    def _device(self, plan: Plan, rng: random.Random) -> Plan | None:
        """Move a few devices of one node between two stages, or make them work or rest."""
        cluster = self.experiment.cluster
        used = {device: index for index, use in enumerate(plan.uses) for device in use.devices}
        device = rng.randrange(cluster.num_devices)
        source = used.get(device)
        target = rng.choice([None, *range(len(plan.uses))])
        if target == source:
            return None
        alike = [
            other
            for other, node in enumerate(cluster.node_of_device)
            if node == cluster.node_of_device[device] and used.get(other) == source
        ]
        moved = set(rng.sample(alike, min(len(alike), rng.choice((1, 1, 2, 4)))))
        uses = list(plan.uses)
        if source is not None:
            rest = tuple(other for other in uses[source].devices if other not in moved)
            if not rest:
                return None
            uses[source] = self._spread(uses[source], rest, plan.size, rng)
        if target is not None:
            place = rng.randrange(len(uses[target].devices) + 1)
            held = uses[target].devices
            devices = (*held[:place], *sorted(moved), *held[place:])
            uses[target] = self._spread(uses[target], devices, plan.size, rng)
        return replace(plan, uses=tuple(uses))

    def _swap(self, plan: Plan, rng: random.Random) -> Plan | None:
        """Swap two devices, or two replicas of a stage, or shuffle the replicas of a stage."""
        devices = [device for use in plan.uses for device in use.devices]
        index = rng.randrange(len(plan.uses))
        use = plan.uses[index]
        if rng.random() < 0.5 and len(devices) > 1:
            one, other = rng.sample(devices, 2)
            turned = {one: other, other: one}
            uses = (
                replace(part, devices=tuple(turned.get(device, device) for device in part.devices))
                for part in plan.uses
            )
            return replace(plan, uses=tuple(uses))
        order = list(range(len(use.shares)))
        if len(order) < 2:
            return None
        if rng.random() < 0.5:
            rng.shuffle(order)
        else:
            one, other = rng.sample(order, 2)
            order[one], order[other] = order[other], order[one]
        groups = [use.devices[place * use.tp : (place + 1) * use.tp] for place in order]
        return _with(
            plan,
            index,
            devices=tuple(device for group in groups for device in group),
            shares=tuple(use.shares[place] for place in order),
        )

    def _divide(self, plan: Plan, rng: random.Random) -> Plan | None:
        """Change the tp of a stage."""
        index = rng.randrange(len(plan.uses))
        use = replace(plan.uses[index], tp=rng.choice(self.tps))
        devices = tuple(sorted(use.devices)) if rng.random() < 0.7 else use.devices
        spread = self._spread(use, devices, plan.size, rng)
        return replace(plan, uses=(*plan.uses[:index], spread, *plan.uses[index + 1 :]))

    def _split(self, plan: Plan, rng: random.Random) -> Plan | None:
        """Divide the devices and the layers of a stage between two."""
        index = rng.randrange(len(plan.uses))
        use = plan.uses[index]
        if len(use.devices) < 2 or use.num_layers < 2:
            return None
        place, first = rng.randrange(1, len(use.devices)), rng.randrange(1, use.num_layers)
        halves = [
            self._spread(replace(use, num_layers=count), devices, plan.size, rng)
            for count, devices in (
                (first, use.devices[:place]),
                (use.num_layers - first, use.devices[place:]),
            )
        ]
        rng.shuffle(halves)
        return self._with_uses(plan, (*plan.uses[:index], *halves, *plan.uses[index + 1 :]), rng)

    def _merge(self, plan: Plan, rng: random.Random) -> Plan | None:
        """Join two neighbouring stages."""
        if len(plan.uses) < 2:
            return None
        index = rng.randrange(len(plan.uses) - 1)
        one, other = plan.uses[index : index + 2]
        joined = replace(one, num_layers=one.num_layers + other.num_layers)
        whole = self._spread(joined, one.devices + other.devices, plan.size, rng)
        return self._with_uses(plan, (*plan.uses[:index], whole, *plan.uses[index + 2 :]), rng)

    def _with_uses(self, plan: Plan, uses: tuple[Use, ...], rng: random.Random) -> Plan:
        """Return the plan with other stages, and a ZeRO setting that their number allows."""
        zeros = self.zeros(len(uses)) or (plan.zero,)
        return Plan(uses=uses, zero=plan.zero if plan.zero in zeros else rng.choice(zeros))

    def _order(self, plan: Plan, rng: random.Random) -> Plan | None:
        """Swap two stages, with their layers or without."""
        if len(plan.uses) < 2:
            return None
        uses = list(plan.uses)
        one, other = rng.sample(range(len(uses)), 2)
        uses[one], uses[other] = uses[other], uses[one]
        if rng.random() < 0.5:
            counts = uses[one].num_layers, uses[other].num_layers
            uses[one] = replace(uses[one], num_layers=counts[1])
            uses[other] = replace(uses[other], num_layers=counts[0])
        return replace(plan, uses=tuple(uses))

    def _size(self, plan: Plan, rng: random.Random) -> Plan | None:
        """Change the samples of a micro-batch."""
        size = rng.choice(_divisors(self.experiment.global_batch_size))
        uses = tuple(self._spread(use, use.devices, size, rng) for use in plan.uses)
        return replace(plan, uses=uses)

    def _choose(self, plan: Plan, rng: random.Random) -> Plan | None:
        """Change recompute or sequence parallelism of a stage or of all, or the ZeRO setting."""
        index, chance = rng.randrange(len(plan.uses)), rng.random()
        if chance < 0.3:
            return replace(plan, zero=rng.choice(self.zeros(len(plan.uses)) or (plan.zero,)))
        if chance < 0.4:
            return _with(plan, index, divides_tokens=not plan.uses[index].divides_tokens)
        recompute = rng.choice(self.recomputes)
        recompute = recompute.whole if chance < 0.7 else recompute
        if chance < 0.55:
            return replace(plan, uses=tuple(replace(use, recompute=recompute) for use in plan.uses))
        return _with(plan, index, recompute=recompute)

    def _spread(self, use: Use, devices: tuple[int, ...], size: int, rng: random.Random) -> Use:
        """Return a stage on other devices, its samples divided by speed or evenly."""
        tp = use.tp if len(devices) % use.tp == 0 else 1
        cluster = self.experiment.cluster
        speeds = [
            cluster.nodes[cluster.node_of_device[device]].device.peak_flops(
                self.experiment.precision
            )
            for device in devices[::tp]
        ]
        if rng.random() < 0.5:
            speeds = [1.0] * len(speeds)
        shares = [1] * len(speeds)
        for _ in range(size - len(shares)):
            times = [(count + 1) / speed for count, speed in zip(shares, speeds, strict=True)]
            shares[times.index(min(times))] += 1
        able = self._divides_tokens(tp)
        divides = use.divides_tokens if use.tp == tp and use.tp > 1 else able[-1]
        return replace(use, devices=devices, tp=tp, shares=tuple(shares), divides_tokens=divides)


def _options(use: Use, zero: Zero) -> StageOptions:
    return StageOptions(
        tp=use.tp,
        dp=len(use.shares),
        recompute=use.recompute,
        zero=zero,
        sequence_parallel=use.divides_tokens,
    )


def _with(plan: Plan, index: int, **fields: object) -> Plan:
    """Return the plan with other fields of one stage."""
    use = replace(plan.uses[index], **fields)  # type: ignore[arg-type]
    return replace(plan, uses=(*plan.uses[:index], use, *plan.uses[index + 1 :]))


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
