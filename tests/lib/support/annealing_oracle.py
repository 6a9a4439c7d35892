"""Oracle of mixed clusters: anneals by simulated time over every plan that a file can describe.

A plan gives each stage its layers, any devices in any order, its tp, the samples of each replica
and its recompute; the size of a micro-batch and the ZeRO setting are the same for all stages. The
judge is `CostModel.estimate`. The oracle shares no move with the search.
"""

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise

from amp_ray.cost.estimate import Estimate
from amp_ray.cost.model import CostModel
from amp_ray.cost.stages import PlacedStages
from amp_ray.inputs.experiment import Experiment
from amp_ray.search.cuts import best_bounds
from amp_ray.search.ranking import is_risky
from amp_ray.search.space import group_zero_choices, recompute_choices
from amp_ray.strategies.candidate import StageOptions
from amp_ray.strategies.recompute import AUTO, Recompute
from amp_ray.strategies.strategy import Stage, Strategy
from amp_ray.strategies.zero import Zero
from support.better_clusters import DEVICES
from support.experiments import experiment_from

HOTTEST, COLDEST = 0.04, 0.0003
"""Temperatures at both ends: relative differences of the time that are accepted now and then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """One stage of a plan."""

    num_layers: int
    devices: tuple[int, ...]  # in the order of ranks
    tp: int
    shares: tuple[int, ...]  # samples of each replica
    recompute: Recompute


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A strategy in the form that moves change."""

    uses: tuple[Use, ...]
    zero: Zero

    @property
    def size(self) -> int:
        """Samples of one micro-batch over all replicas."""
        return sum(self.uses[0].shares)

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
                )
                for index, stage in enumerate(strategy.stages)
            ),
            zero=strategy.zero,
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Annealing:
    """Looks for a plan that is faster than any plan of the search."""

    cost_model: CostModel
    safe: bool = False  # whether plans that may run out of memory do not count

    @property
    def experiment(self) -> Experiment:
        """The experiment of the cost model."""
        return self.cost_model.experiment

    @cached_property
    def tps(self) -> tuple[int, ...]:
        """Degrees that limits, nodes and model allow."""
        limits, shape = self.experiment.limits, self.experiment.model.shape
        most = max(node.num_slots for node in self.experiment.cluster.nodes)
        most = min(most, limits.max_tp or most)
        heads = shape.num_heads, shape.num_key_value_heads
        return tuple(
            tp
            for tp in range(limits.min_tp, most + 1)
            if not self.experiment.traits.shards_heads or not any(count % tp for count in heads)
        )

    @cached_property
    def recomputes(self) -> tuple[Recompute, ...]:
        """Kinds that a stage may have."""
        fixed = self.experiment.recompute
        return recompute_choices(self.experiment) if fixed == AUTO else (fixed,)

    def strategy(self, plan: Plan) -> Strategy | None:
        """Return the strategy; None if limits, nodes or the batch forbid it."""
        limits, node_of = self.experiment.limits, self.experiment.cluster.node_of_device
        if len(plan.uses) > (limits.max_pp or len(plan.uses)):
            return None
        steps, more = divmod(self.experiment.global_batch_size, plan.size)
        if more:
            return None
        for use in plan.uses:
            groups = [
                use.devices[first : first + use.tp] for first in range(0, len(use.devices), use.tp)
            ]
            if (
                use.num_layers < 1
                or len(use.devices) != use.tp * len(use.shares)
                or min(use.shares, default=0) < 1
                or sum(use.shares) != plan.size
                or use.tp not in self.tps
                or len(use.shares) > (limits.max_dp or len(use.shares))
                or any(len({node_of[device] for device in group}) > 1 for group in groups)
            ):
                return None
        shares = [use.shares for use in plan.uses]
        sizes = limits.micro_batch_sizes
        if sizes is not None and not {count for row in shares for count in row} <= set(sizes):
            return None
        even = len({len(row) for row in shares}) == len({n for row in shares for n in row}) == 1
        ends = [0, *accumulate(use.num_layers for use in plan.uses)]
        return Strategy(
            stages=tuple(
                Stage(
                    first_layer=first,
                    end_layer=end,
                    options=StageOptions(
                        tp=use.tp, dp=len(use.shares), recompute=use.recompute, zero=plan.zero
                    ),
                    shares=None if even else use.shares,
                )
                for use, (first, end) in zip(plan.uses, pairwise(ends), strict=True)
            ),
            micro_batch_size=shares[0][0] if even else plan.size,
            num_micro_batches=steps,
            placement=tuple(device for use in plan.uses for device in use.devices),
        )

    def value(self, plan: Plan) -> tuple[float, Estimate | None]:
        """Return the logarithm of the time, more where memory lacks; infinite if forbidden."""
        strategy = self.strategy(plan)
        if strategy is None:
            return math.inf, None
        estimate = self.cost_model.estimate(strategy)
        pairs = zip(estimate.peak_memory_bytes, estimate.memory_limit_bytes, strict=True)
        lacks = max(0.0, max(peak / limit for peak, limit in pairs) - 1)
        able = estimate.feasible and not (self.safe and is_risky(estimate))
        penalty = 0.0 if able else 0.05 + 2 * lacks
        return math.log(estimate.iteration_time_s) + penalty, estimate if able else None

    def best(self, starts: Sequence[Strategy], *, seed: int, num_steps: int) -> Estimate | None:
        """Return the fastest plan of a run from each start, and of one from a random plan."""
        rng = random.Random(seed)
        best: Estimate | None = None
        for start in (*map(Plan.of, starts), self._random(rng)):
            plan, (value, estimate) = start, self.value(start)
            for step in range(num_steps):
                if estimate is not None and (
                    best is None or estimate.iteration_time_s < best.iteration_time_s
                ):
                    best = estimate
                heat = HOTTEST * (COLDEST / HOTTEST) ** (step / num_steps)
                moved = self._moved(plan, rng)
                after, judged = (math.inf, None) if moved is None else self.value(moved)
                if moved is not None and (
                    after <= value or rng.random() < math.exp((value - after) / heat)
                ):
                    plan, value, estimate = moved, after, judged
        return best

    def _random(self, rng: random.Random) -> Plan:
        """Return a plan with all layers on one device."""
        device = rng.randrange(self.experiment.cluster.num_devices)
        batch = self.experiment.global_batch_size
        use = Use(
            num_layers=self.experiment.model.num_layers,
            devices=(device,),
            tp=1,
            shares=(rng.choice(_divisors(batch)),),
            recompute=rng.choice(self.recomputes),
        )
        return Plan(uses=(use,), zero=rng.choice(group_zero_choices(self.experiment)))

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
            self._options,
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
        strategy = self.strategy(plan)
        if strategy is None:
            return None
        costs = self.cost_model.stage_costs(PlacedStages.of_strategy(strategy))
        ends = best_bounds(self.experiment, costs)
        uses = (
            replace(use, num_layers=end - first)
            for use, (first, end) in zip(plan.uses, pairwise(ends), strict=True)
        )
        return replace(plan, uses=tuple(uses))

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
        return replace(plan, uses=(*plan.uses[:index], *halves, *plan.uses[index + 1 :]))

    def _merge(self, plan: Plan, rng: random.Random) -> Plan | None:
        """Join two neighbouring stages."""
        if len(plan.uses) < 2:
            return None
        index = rng.randrange(len(plan.uses) - 1)
        one, other = plan.uses[index : index + 2]
        joined = replace(one, num_layers=one.num_layers + other.num_layers)
        whole = self._spread(joined, one.devices + other.devices, plan.size, rng)
        return replace(plan, uses=(*plan.uses[:index], whole, *plan.uses[index + 2 :]))

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

    def _options(self, plan: Plan, rng: random.Random) -> Plan | None:
        """Change the recompute of a stage, or the ZeRO setting."""
        if rng.random() < 0.3:
            return replace(plan, zero=rng.choice(group_zero_choices(self.experiment)))
        index = rng.randrange(len(plan.uses))
        return _with(plan, index, recompute=rng.choice(self.recomputes))

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
        return replace(use, devices=devices, tp=tp, shares=tuple(shares))


def _with(plan: Plan, index: int, **fields: object) -> Plan:
    """Return the plan with other fields of one stage."""
    use = replace(plan.uses[index], **fields)  # type: ignore[arg-type]
    return replace(plan, uses=(*plan.uses[:index], use, *plan.uses[index + 1 :]))


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def small_mixed_experiment(seed: int, *, most_devices: int = 12) -> Experiment:
    """Draw an experiment on two to four kinds of nodes with few devices."""
    rng = random.Random(seed)
    rows = list(_rows(rng, most_devices))
    link = ""
    if rng.random() < 0.25:
        low, high = sorted(rng.sample(range(len(rows)), 2))  # each row has a node or more
        gbit_per_s = rng.choice((1, 5, 100))
        link = f"  links: [{{between: [node{low}, node{high}], gbit_per_s: {gbit_per_s}}}]\n"
    hidden = rng.choice((1024, 2048, 3072))
    model = (
        f"family: gpt2, num_layers: {rng.choice((6, 12, 24))}, hidden_size: {hidden}, "
        f"num_heads: {rng.choice((8, 16))}, sequence_length: {rng.choice((512, 1024, 2048))}, "
        f"vocab_size: {rng.choice((8192, 51200))}, "
        f"tied_embedding: {rng.choice(('true', 'false'))}"
    )
    return experiment_from(
        f"name: small\nmodel: {{{model}}}\ncluster:\n  nodes:\n" + "\n".join(rows) + f"\n{link}"
        f"recompute: {rng.choice(('none', 'full', 'auto'))}\n"
        f"runtime: {rng.choice(('deepspeed', 'torch'))}\n"
        f"global_batch_size: {rng.choice((8, 12, 16, 24, 32, 60))}\n"
        "search: {space: heterogeneous}\n"
    )


def _rows(rng: random.Random, most_devices: int) -> Iterator[str]:
    """Yield the nodes of a cluster, two or more."""
    spare = most_devices
    for device in rng.sample(DEVICES, rng.choice((2, 2, 3, 3, 4))):
        slots, count = rng.choice((1, 2, 2, 4)), rng.choice((1, 1, 2))
        if slots * count <= spare:
            spare -= slots * count
            yield (
                f"    - {{count: {count}, device: {device}, slots: {slots}, "
                f"intra_gbit_per_s: {rng.choice((50, 100, 400, 1200))}, "
                f"inter_gbit_per_s: {rng.choice((5, 10, 25, 100))}}}"
            )
