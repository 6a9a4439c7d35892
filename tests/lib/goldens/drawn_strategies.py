"""Random strategies that an experiment's runtime and model allow: drawn by seed alone."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, pairwise
from math import gcd
from typing import Any

from amp_ray.cost.model import CostModel
from amp_ray.errors import InputError
from amp_ray.inputs.experiment import Experiment
from amp_ray.strategies.candidate import Candidate, StageOptions
from amp_ray.strategies.recompute import NO_RECOMPUTE, Recompute, RecomputeKind
from amp_ray.strategies.strategy import Strategy, TokenSlices
from amp_ray.strategies.zero import MOST_ZERO_STAGE, Zero
from goldens.documents import short_record, strategy_of

TRIES = 200
"""Draws of a strategy until one is allowed."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Drawing:
    """Draws strategies of one experiment."""

    experiment: Experiment
    rng: random.Random

    def strategies(self, number: int) -> Iterator[Strategy]:
        """Yield so many allowed strategies, fewer if draws find none."""
        for _ in range(number):
            draws = (self._draw() for _ in range(TRIES))
            allowed = next((own for own in draws if own is not None), None)
            if allowed is not None:
                yield allowed

    def _draw(self) -> Strategy | None:
        """Return a strategy, or None if the draw is not allowed."""
        way = self.rng.random()
        try:
            if way < 0.25 and len(self.experiment.cluster.nodes) > 1:
                strategy = self._of_groups()
            elif way < 0.4 and self.experiment.model.shape.is_causal:
                strategy = self._sliced()
            else:
                strategy = self._grid()
            if not self._allows(strategy):
                return None
            self._cost_model.estimate(strategy)  # refuses what it cannot price
        except (InputError, ValueError):
            return None
        return strategy

    def _allows(self, strategy: Strategy) -> bool:
        """Return whether the runtime can run the strategy, apart from who launches it."""
        experiment, options = self.experiment, [stage.options for stage in strategy.stages]
        traits, types = experiment.traits, experiment.cluster.device_types
        tps = {stage.tp for stage in options}
        refusals = (
            traits.why_not(options),
            traits.why_no_zero(strategy.zero, strategy.pp),
            traits.why_no_grid(max(tps), strategy.pp),
            traits.why_no_chunks(strategy.virtual_stages),
            *map(experiment.why_no_heads, options),
            *(experiment.profile.gap(types, tp) for tp in tps),
        )
        if any(refusals) or not all(map(self._divides, options)):
            return False
        return strategy_of(short_record(strategy, experiment), experiment) == strategy

    def _divides(self, options: StageOptions) -> bool:
        """Return whether the degrees divide heads and experts."""
        shape, traits = self.experiment.model.shape, self.experiment.traits
        heads = (shape.num_heads, shape.num_key_value_heads) if traits.shards_heads else ()
        whole = not shape.expert_bias or options.expert_tp == 1 or traits.divides_biased_experts
        return whole and not any(count % options.tp for count in heads)

    @cached_property
    def _cost_model(self) -> CostModel:
        return CostModel(experiment=self.experiment)

    @cached_property
    def _recompute_choices(self) -> list[Recompute]:
        """Kinds of recompute that the runtime has, for all blocks of a stage and for some."""
        experiment = self.experiment
        if experiment.traits.offloaded_blocks:
            return [NO_RECOMPUTE]
        some = range(1, min(4, experiment.model.block_counts[-1]) + 1)
        kinds: list[RecomputeKind] = ["selective", "per-operator", "full"]
        able = experiment.traits.recompute
        whole = [Recompute(kind=kind) for kind in kinds if kind in able]
        parts = [
            Recompute(kind=kind, layers=layers)
            for kind in kinds
            for layers in some
            if f"{kind}:n" in able
        ]
        return [NO_RECOMPUTE, *whole, *parts]

    # ------------------------------------------------------------------------------- grids

    def _grid(self) -> Strategy:
        """Return a strategy of equal stages."""
        experiment, rng, traits = self.experiment, self.rng, self.experiment.traits
        cp = rng.choice((1, 1, 2, 4)) if traits.context_parallel != "none" else 1
        options, pp = self._degrees(cp)
        chunks = self._chunks(pp)
        batch = experiment.global_batch_size
        sizes = [size for size in (1, 2, 3, 4, 8) if batch % (options.dp * size) == 0]
        size = rng.choice(sizes)
        candidate = Candidate(
            micro_batch_size=size,
            options=options,
            pp=pp,
            num_micro_batches=batch // (options.dp * size),
            virtual_stages=chunks,
        )
        uneven = chunks > 1 and rng.random() < 0.5
        return Strategy.uniform(
            candidate,
            self._bounds(pp * chunks if uneven else pp),
            self._placement(candidate.num_devices, options.tp),
            self._recomputes(pp),
        )

    def _degrees(self, cp: int = 1) -> tuple[StageOptions, int]:
        """Return the options of equal stages, and their number."""
        experiment, rng = self.experiment, self.rng
        devices, traits = experiment.cluster.num_devices, experiment.traits
        tp = rng.choice((1, 1, 2, 2, 4, 8)) if traits.tensor_parallel else 1
        pp = rng.choice((1, 1, 2, 2, 3, 4, 6, 8)) if traits.pipeline_parallel else 1
        most = devices // (tp * cp * pp)
        fits = [dp for dp in range(1, most + 1) if experiment.global_batch_size % dp == 0]
        if not fits:
            raise ValueError("fewer devices than tp x cp x pp")
        dp = rng.choice((*fits, *fits[-1:]))
        zero = self._zero(dp * cp, pp)
        options = StageOptions(tp=tp, dp=dp, cp=cp, zero=zero, **self._experts(tp * cp * dp, tp))
        divides = traits.sequence_parallel and tp > 1 and rng.random() < 0.5
        return replace(options, sequence_parallel=divides), pp

    def _experts(self, num_ranks: int, tp: int) -> dict[str, Any]:
        """Return how a stage's ranks divide experts."""
        shape = self.experiment.model.shape
        if not shape.num_experts or not self.experiment.traits.expert_parallel:
            return {}
        most = gcd(shape.num_experts, num_ranks)
        ep = self.rng.choice([ep for ep in range(1, most + 1) if most % ep == 0])
        etp = self.rng.choice([0, 1, *(ranks for ranks in (2, 4) if tp % ranks == 0)])
        return {"ep": ep, "etp": etp}

    def _zero(self, dp: int, pp: int) -> Zero:
        """Return a ZeRO setting that the runtime has; of one rank or group as of several."""
        traits, rng = self.experiment.traits, self.rng
        groups = sorted({0, *(ranks for ranks in (2, 4, 8) if dp % ranks == 0 and ranks < dp)})
        every = [
            Zero(stage=stage, shard_ranks=rng.choice(groups) if stage else 0, keeps_weights=keeps)
            for stage in range(MOST_ZERO_STAGE + 1)
            for keeps in ((False, True) if stage == MOST_ZERO_STAGE else (False,))
        ]
        able = [zero for zero in every if traits.why_no_zero(zero, pp) is None]
        plain = [replace(zero, shard_ranks=0) for zero in every]
        whole = [zero for zero in plain if traits.why_no_zero(zero, pp) is None]
        return rng.choice(able or whole or [Zero(stage=traits.min_zero_stage)])

    def _chunks(self, pp: int) -> int:
        """Return the number of chunks per stage."""
        able = pp > 1 and self.experiment.traits.why_no_chunks(2) is None
        return self.rng.choice((1, 1, 2, 3)) if able else 1

    def _bounds(self, num_parts: int) -> tuple[int, ...]:
        """Return cuts: any, or nearly even ones."""
        num_layers, rng = self.experiment.model.num_layers, self.rng
        if rng.random() < 0.5:
            inner = sorted(rng.sample(range(1, num_layers), num_parts - 1))
        else:
            inner = [num_layers * part // num_parts for part in range(1, num_parts)]
        return (0, *inner, num_layers)

    def _recomputes(self, pp: int) -> list[Recompute]:
        """Return the recompute of each stage."""
        rng, choices = self.rng, self._recompute_choices
        kinds = sorted({choice.whole for choice in choices})
        one = rng.choice((NO_RECOMPUTE, rng.choice(kinds), rng.choice(choices)))
        if self.experiment.traits.recompute_per_stage and rng.random() < 0.4:
            return [rng.choice((one, rng.choice(choices))) for _ in range(pp)]
        return [one] * pp

    def _placement(self, num_ranks: int, tp: int) -> tuple[int, ...]:
        """Return devices: in order, any groups within nodes, or all in any order."""
        rng, cluster = self.rng, self.experiment.cluster
        way = rng.random()
        if way < 0.45:
            return tuple(range(num_ranks))
        if way < 0.55:
            return tuple(rng.sample(range(cluster.num_devices), num_ranks))
        groups = list(self._groups_in_nodes(tp))
        if way < 0.8:
            rng.shuffle(groups)
        return tuple(chain.from_iterable(groups))[:num_ranks]

    def _groups_in_nodes(self, tp: int) -> Iterator[tuple[int, ...]]:
        """Yield groups of so many devices of a node."""
        first = 0
        for node in self.experiment.cluster.nodes:
            for start in range(0, node.num_slots - tp + 1, tp):
                yield tuple(range(first + start, first + start + tp))
            first += node.num_slots

    # ------------------------------------------------- stages with devices of their own, slices

    def _of_groups(self) -> Strategy:
        """Return a strategy whose stages have devices, degrees and shares of their own."""
        experiment, rng = self.experiment, self.rng
        batch = experiment.global_batch_size
        size = rng.choice([size for size in range(2, batch + 1) if batch % size == 0])
        devices = list(range(experiment.cluster.num_devices))
        if rng.random() < 0.3:
            rng.shuffle(devices)
        pp = rng.choice((1, 2, 2, 3, 4))
        recomputes, zero = self._recomputes(pp), self._zero(1, pp)
        stages = []
        for recompute in recomputes:
            tp, dp = rng.choice((1, 1, 2, 2, 4)), rng.choice((1, 2, 3, 4))
            able = experiment.traits.sequence_parallel and tp > 1
            options = StageOptions(
                tp=tp,
                dp=dp,
                recompute=recompute,
                zero=zero,
                sequence_parallel=able and rng.random() < 0.4,
            )
            own, devices = devices[: tp * dp], devices[tp * dp :]
            stages.append((options, self._shares(size, dp), tuple(own)))
        bounds = self._bounds(pp)
        return Strategy.of_groups(bounds, stages, num_micro_batches=batch // size)

    def _shares(self, samples: int, dp: int) -> tuple[int, ...]:
        """Divide samples among replicas: evenly if possible, or in any way."""
        if samples % dp == 0 and self.rng.random() < 0.5:
            return (samples // dp,) * dp
        cuts = sorted(self.rng.sample(range(1, samples), dp - 1))
        return _sizes((0, *cuts, samples))

    def _sliced(self) -> Strategy:
        """Return a strategy whose micro-batches are cut into token slices."""
        strategy = self._grid()
        if strategy.is_interleaved or strategy.stages[0].options.cp > 1:
            raise ValueError("no slices beside chunks or context parallelism")
        sequences = self._shares(strategy.micro_batch_size, self._parts(strategy))
        slices: TokenSlices = tuple((count, self._tokens()) for count in sequences)
        stages = tuple(
            replace(stage, options=replace(stage.options, sequence_parallel=False))
            for stage in strategy.stages
        )
        return replace(strategy, stages=stages, token_slices=slices)

    def _parts(self, strategy: Strategy) -> int:
        return self.rng.choice([1, 1, min(2, strategy.micro_batch_size)])

    def _tokens(self) -> tuple[int, ...]:
        """Divide a sequence at multiples of an eighth of it."""
        length = self.experiment.model.shape.sequence_length
        step = max(1, length // 8)
        cuts = sorted(self.rng.sample(range(step, length, step), self.rng.choice((0, 1, 2, 3))))
        return _sizes((0, *cuts, length))


def _sizes(bounds: Sequence[int]) -> tuple[int, ...]:
    return tuple(end - first for first, end in pairwise(bounds))
