"""Every plan of a few operators: tp, dp and algorithm by stage or operator, and recompute.

For each stage, all ways to use it are priced at once; then stages are combined in every way. If
operators of a stage may differ, this includes plans that the searches do not consider.
"""

import math
import random
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import product

import numpy as np

from amp_ray.arrays import BoolArray, FloatArray, IntArray
from amp_ray.cost.step_end import Beside
from amp_ray.inputs.experiment import Experiment
from amp_ray.inputs.operator_profile import OperatorKey, OperatorProfile, OperatorTable
from amp_ray.planners.aceso2024.cost import resharding_s, transfer_s
from amp_ray.planners.aceso2024.planner import STAGE_DEVICES
from amp_ray.planners.operators.cost import OperatorCostModel, OperatorFigures
from amp_ray.planners.operators.strategy import operator_strategy, recomputed_operators
from amp_ray.strategies.candidate import GroupsCandidate
from amp_ray.strategies.operator_run import OperatorUse
from amp_ray.strategies.recompute import AUTO
from amp_ray.strategies.strategy import Strategy
from amp_ray.strategies.zero import Zero
from support.aceso import HEADER
from support.experiments import experiment_from
from support.operator_space import OPERATORS

_CLUSTERS = ((1, 2), (2, 1), (1, 3), (1, 4), (1, 4), (2, 2))


Degrees = tuple[int, int, int]
"""tp, dp and algorithm of an operator."""


@dataclass(frozen=True, kw_only=True)
class Span:
    """Operators, devices and position of a stage."""

    first: int  # first operator
    end: int  # index after the last operator
    place: int  # number of devices of earlier stages
    size: int  # number of devices of the stage
    behind: int  # number of later stages


@dataclass(frozen=True, kw_only=True)
class Way:
    """A way to use a stage; no other way is better in both of its times."""

    seconds: float
    end_s: float
    uses: tuple[OperatorUse, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class MixedOracle(ABC):
    """All plans of an experiment with one micro-batch size."""

    experiment: Experiment
    candidate: GroupsCandidate

    @property
    def num_mixes(self) -> int:
        """Maximum number of ways to use a chain's operators on some devices; 1 if used alike."""
        if not self.experiment.limits.per_operator:
            return 1
        everyone = self.num_devices
        spans = [
            Span(first=0, end=1, place=place, size=size, behind=0)
            for place, size in product(range(everyone), range(1, everyone + 1))
            if place + size <= everyone
        ]
        most = max(len(self.uses(span)) for span in spans)
        return int(most**self.profile.num_operators)

    def best(self) -> tuple[float, Strategy | None]:
        """Return the least time of an iteration, without the host's part, and a plan with it."""
        best_s, best = math.inf, None
        later = self.candidate.num_micro_batches - 1
        for stages in self._plans(self.profile.num_operators, self.num_devices, 0):
            times = [way.seconds for way in stages]
            total_s = sum(times) + later * max(times) + max(way.end_s for way in stages)
            if total_s < best_s:
                best_s, best = total_s, stages
        return best_s, None if best is None else self.strategy([own.uses for own in best])

    def strategy(self, uses: list[tuple[OperatorUse, ...]]) -> Strategy:
        """Return the plan whose stages have operators with these uses."""
        return operator_strategy(
            uses,
            samples_per_micro_batch=self.candidate.micro_batch_size,
            num_micro_batches=self.candidate.num_micro_batches,
            zero=Zero(stage=self.experiment.zero_stage),
        )

    def _plans(self, end: int, devices: int, behind: int) -> Iterator[tuple[Way, ...]]:
        """Yield every plan of operators ``[0, end)`` on the first ``devices`` devices."""
        if not end and not devices:
            yield ()
        for first, size in product(range(end), range(1, devices + 1)):
            span = Span(first=first, end=end, place=devices - size, size=size, behind=behind)
            if (first == 0) == (devices == size) and self.may_begin[first]:
                for way in self._ways(span):
                    for rest in self._plans(first, devices - size, behind + 1):
                        yield (*rest, way)

    @cached_property
    def _known(self) -> dict[Span, list[Way]]:
        """Cache of `_ways`."""
        return {}

    def _ways(self, span: Span) -> list[Way]:
        """Return the ways to use a stage that fit, without those that are worse in both times."""
        if span not in self._known:
            self._known[span] = list(self._new_ways(span))
        return self._known[span]

    def _new_ways(self, span: Span) -> Iterator[Way]:
        """Try every use of every operator with every set of recomputed operators."""
        uses = self.uses(span)
        if not uses:
            return
        number = span.end - span.first
        rows = np.repeat(np.arange(len(uses))[:, None], number, axis=1)
        if self.experiment.limits.per_operator:
            rows = np.array(list(product(range(len(uses)), repeat=number)))
        again = self._again(span)
        seconds, end_s, fits = self.priced(span, uses, rows, again)
        seconds = np.where(fits, seconds, np.inf)
        best = seconds.argmin(axis=1)
        row_s, least_s = seconds[np.arange(len(rows)), best], math.inf
        for row in np.lexsort((row_s, end_s)).tolist():
            if row_s[row] < least_s:
                least_s = float(row_s[row])
                bits = again[best[row]].tolist()
                own = zip([uses[index] for index in rows[row]], bits, strict=True)
                yield Way(
                    seconds=least_s,
                    end_s=float(end_s[row]),
                    uses=tuple((*use, bit) for use, bit in own),
                )

    def _again(self, span: Span) -> BoolArray:
        """Return the possible sets of recomputed operators of a stage, shape ``(patterns, n)``."""
        if self.any_again:
            return np.array(list(product((False, True), repeat=span.end - span.first)))
        kind = self.experiment.recompute.kind
        return np.array([recomputed_operators(self.profile, kind)[span.first : span.end]])

    @cached_property
    def may_begin(self) -> list[bool]:
        """Whether stages may begin with an operator: not between two that are always recomputed."""
        if self.any_again:
            return [True] * self.profile.num_operators
        again = recomputed_operators(self.profile, self.experiment.recompute.kind)
        starts = self.profile.starts_block.tolist()
        return [
            starts[index] or not (index and again[index - 1] and own)
            for index, own in enumerate(again)
        ]

    def joins_s(
        self, span: Span, uses: Sequence[Degrees], rows: IntArray, reads: FloatArray
    ) -> FloatArray:
        """Return the time of exchanges between neighbouring operators, shape ``(rows,)``.

        ``reads`` has the input bytes of each operator by use, shape ``(uses, n)``.
        """
        total_s = np.zeros(len(rows))
        for index in range(1, rows.shape[1]):
            table = np.zeros((len(uses), len(uses)))
            for one, two in product(range(len(uses)), repeat=2):
                pair = [(*uses[one], False), (*uses[two], False)]
                own = np.array([reads[one, index - 1], reads[two, index]])
                table[one, two] = self.exchange_s(span.first + index - 1, pair, own)
            total_s += table[rows[:, index - 1], rows[:, index]]
        return total_s

    @property
    def profile(self) -> OperatorProfile:
        """The measured times and sizes."""
        profile = self.experiment.profile.operators
        assert profile is not None
        return profile

    @property
    def num_devices(self) -> int:
        """Number of devices of the cluster."""
        return self.experiment.cluster.num_devices

    @property
    @abstractmethod
    def any_again(self) -> bool:
        """Whether any set of operators may be recomputed."""

    @abstractmethod
    def uses(self, span: Span) -> list[Degrees]:
        """Return the possible tp, dp and algorithm of operators of a stage."""

    @abstractmethod
    def exchange_s(self, first: int, pair: Sequence[OperatorUse], input_bytes: FloatArray) -> float:
        """Return what exchanges take between an operator and the next one."""

    @abstractmethod
    def priced(
        self, span: Span, uses: Sequence[Degrees], rows: IntArray, again: BoolArray
    ) -> tuple[FloatArray, FloatArray, BoolArray]:
        """Return seconds ``(rows, patterns)``, step ends ``(rows,)``, and whether each fits."""


@dataclass(frozen=True, kw_only=True, eq=False)
class OwnMixedOracle(MixedOracle):
    """The oracle with our cost model."""

    @cached_property
    def cost_model(self) -> OperatorCostModel:
        """Cost model of the experiment."""
        return OperatorCostModel(experiment=self.experiment)

    @property
    def any_again(self) -> bool:
        return self.experiment.recompute == AUTO

    def uses(self, span: Span) -> list[Degrees]:
        profile, samples = self.profile, self.candidate.micro_batch_size
        devices = range(span.place, span.place + span.size)
        return [
            (tp, dp, algorithm)
            for tp, dp in product(profile.tps, range(1, span.size + 1))
            if tp * dp == span.size and samples % dp == 0
            if self.cost_model.rings(devices, tp) is not None
            for algorithm in (profile.algorithms if tp > 1 else (0,))
            if isinstance(
                self.cost_model.figures(samples // dp, tp, dp, algorithm), OperatorFigures
            )
        ]

    def exchange_s(self, first: int, pair: Sequence[OperatorUse], input_bytes: FloatArray) -> float:
        """Return what exchanges take between an operator and the next one."""
        return float(self.cost_model.joins_s(first, pair, input_bytes).sum())

    def priced(
        self, span: Span, uses: Sequence[Degrees], rows: IntArray, again: BoolArray
    ) -> tuple[FloatArray, FloatArray, BoolArray]:
        model, here = self.cost_model, slice(span.first, span.end)
        figures = [self._figures(use) for use in uses]
        of = partial(_of_each, figures, span, rows)
        forward_s, read = of("forward_s"), of("input_bytes")
        seconds = (forward_s + of("backward_s")).sum(axis=1)
        seconds += self.experiment.constants.host_s_per_micro_batch
        reads = np.array([own.input_bytes[here] for own in figures])
        seconds += self.joins_s(span, uses, rows, reads)
        devices = range(span.place, span.place + span.size)
        if span.first:
            sharers = model.sharers(devices, span.place - 1)
            seconds += model.transfers_s(read[:, 0], sharers)
        if span.behind:
            sharers = model.sharers(devices, span.place + span.size)
            seconds += model.transfers_s(of("output_bytes")[:, -1], sharers)
        starts = self.profile.starts_block[here]
        spared = again[:, :-1] & again[:, 1:] & ~starts[None, 1:]
        spared = np.pad(spared, ((0, 0), (0, 1)))
        held = of("held_bytes")
        kept = (read[:, 0] + held.sum(axis=1))[:, None] - held @ spared.T
        peak = _largest_runs(held, spared, np.zeros(len(starts), np.bool_))
        most = of("forward_reserved_bytes").max(axis=1) + of("backward_reserved_bytes").max(axis=1)
        fixed = of("state_bytes").sum(axis=1) + np.maximum(of("step_bytes").sum(axis=1), most)
        flying = min(span.behind + 1, self.candidate.num_micro_batches)
        fits = fixed[:, None] + flying * kept + peak <= model.limit_bytes
        return (
            seconds[:, None] + forward_s @ again.T,
            self._ends_s(span, uses, rows, of("parameters")),
            fits,
        )

    def _figures(self, use: Degrees) -> OperatorFigures:
        tp, dp, algorithm = use
        result = self.cost_model.figures(self.candidate.micro_batch_size // dp, tp, dp, algorithm)
        assert isinstance(result, OperatorFigures)
        return result

    def _ends_s(
        self,
        span: Span,
        uses: Sequence[Degrees],
        rows: IntArray,
        parameters: FloatArray,
    ) -> FloatArray:
        """Return the time of gradient synchronisation and optimizer, summed per degree."""
        model, devices = self.cost_model, range(span.place, span.place + span.size)
        num_stages = 1 if span.first == 0 and span.behind == 0 else 2
        end_s = np.zeros(len(rows))
        for tp, dp in dict.fromkeys(use[:2] for use in uses):
            options = model.options(tp, dp)
            rings = model.rings(devices, tp) or ()
            paths = model.step_end.whole_rings(options, rings, model.device)

            shards = options.zero.shards(dp)
            own = np.array([use[:2] == (tp, dp) for use in uses])[rows]
            sums = (parameters * own).sum(axis=1)
            distinct, which = np.unique(sums, return_inverse=True)
            ends = np.array(
                [
                    model.step_end.sync_s(number, options, paths, Beside(pp=num_stages))
                    + model.step_end.optimizer_s(number, shards, model.device)
                    for number in distinct.tolist()
                ]
            )
            end_s += np.where(own.any(axis=1), ends[which.reshape(-1)], 0.0)
        if (span.first == 0) != (span.behind == 0):
            tied_s = [model.tied_s(span.size, self._figures(use)) for use in uses]
            end_s += np.array(tied_s)[rows[:, 0 if span.first == 0 else -1]]
        return end_s


@dataclass(frozen=True, kw_only=True, eq=False)
class AcesoMixedOracle(MixedOracle):
    """The oracle with the published formulas."""

    @property
    def any_again(self) -> bool:
        return True

    def uses(self, span: Span) -> list[Degrees]:
        slots, samples = self.experiment.cluster.nodes[0].num_slots, self.candidate.micro_batch_size
        if span.size not in STAGE_DEVICES or span.place % slots + span.size > slots:
            return []
        return [
            (tp, span.size // tp, algorithm)
            for tp in self.profile.tps
            if span.size % tp == 0 and samples % (span.size // tp) == 0
            for algorithm in (self.profile.algorithms if tp > 1 else (0,))
            if OperatorKey(samples // (span.size // tp), tp, algorithm) in self.profile.tables
        ]

    def exchange_s(self, first: int, pair: Sequence[OperatorUse], input_bytes: FloatArray) -> float:
        """Return what exchanges take between an operator and the next one."""
        steps = resharding_s(self.profile, first, pair, input_bytes)
        return sum(seconds for _, seconds, _ in steps)

    def _table(self, use: Degrees) -> OperatorTable:
        tp, dp, algorithm = use
        return self.profile.tables[
            OperatorKey(self.candidate.micro_batch_size // dp, tp, algorithm)
        ]

    def _link_s(self, edge: int, size_bytes: float) -> float:
        """Return the seconds of a transfer after the first ``edge`` devices."""
        slots, profile = self.experiment.cluster.nodes[0].num_slots, self.profile
        inside = edge % slots or edge in {0, self.num_devices}
        return transfer_s(profile.intra if inside else profile.inter, size_bytes)

    def priced(
        self, span: Span, uses: Sequence[Degrees], rows: IntArray, again: BoolArray
    ) -> tuple[FloatArray, FloatArray, BoolArray]:
        here, share = slice(span.first, span.end), self.profile.kept_share[span.first : span.end]
        tables = [self._table(use) for use in uses]
        of = partial(_of_each, tables, span, rows)
        forward_s, read = of("forward_s"), of("input_bytes")
        seconds = (forward_s + of("backward_s")).sum(axis=1)
        reads = np.array([own.input_bytes[here] for own in tables])
        seconds += self.joins_s(span, uses, rows, reads)
        seconds += [self._link_s(span.place, size) for size in read[:, 0].tolist()]
        sent_s = self._sent_s(span, uses)
        seconds += sent_s[rows[:, 0], rows[:, -1]]
        kept = share * of("activation_bytes")
        stops = np.append(self.profile.starts_block[here][1:], False)
        both = np.pad(again[:, :-1] & again[:, 1:], ((0, 0), (0, 1)))
        peak = _largest_runs(kept, both, stops, forgets=len(share) > 1 and share[-2] != 1.0)
        flying = read[:, 0] + kept.sum(axis=1)
        weights = of("weight_bytes").sum(axis=1)
        reserved = sum(
            of(name)[:, :-1].max(axis=1, initial=0.0)
            for name in ("forward_reserved_bytes", "backward_reserved_bytes")
        )
        total = (4 * weights + np.maximum(weights, reserved))[:, None] + peak
        total += (span.behind + 1) * (flying[:, None] - kept @ (both & ~stops).T)
        limit = self.experiment.cluster.device_types[0].memory_bytes
        return seconds[:, None] + forward_s @ again.T, np.zeros(len(rows)), total <= limit

    def _sent_s(self, span: Span, uses: Sequence[Degrees]) -> FloatArray:
        """Return the time to send the output on, by the uses of the first and last operator."""
        result = np.zeros((len(uses), len(uses)))
        for one, two in product(range(len(uses)), repeat=2):
            own = (uses[one][0], *uses[two][1:])
            key = OperatorKey(self.candidate.micro_batch_size // own[1], own[0], own[2])
            table = self.profile.tables.get(key) or self._table(uses[two])
            size_bytes = float(table.output_bytes[span.end - 1])
            result[one, two] = self._link_s(span.place + span.size, size_bytes)
        return result


def _of_each(
    tables: Sequence[OperatorFigures | OperatorTable], span: Span, rows: IntArray, name: str
) -> FloatArray:
    """Return the figure ``name`` of each operator of a stage by use; ``rows`` as in `priced`."""
    table = np.array([getattr(own, name)[span.first : span.end] for own in tables])
    result: FloatArray = table[rows, np.arange(rows.shape[1])]
    return result


def _largest_runs(
    held: FloatArray, chosen: BoolArray, stops: BoolArray, *, forgets: bool = False
) -> FloatArray:
    """Return the largest sum over a run of chosen operators, shape ``(rows, patterns)``.

    Args:
        held: Bytes of each operator, shape ``(rows, n)``.
        chosen: Whether each operator is in the set, shape ``(patterns, n)``.
        stops: Whether a run ends after each operator, shape ``(n,)``.
        forgets: Whether to ignore a run that includes the last but one operator.
    """
    number = held.shape[1]
    run = np.zeros((len(held), len(chosen)))
    peaks = []
    for operator in range(number):
        run = run + held[:, operator, None] * chosen[None, :, operator]
        ends = ~chosen[:, operator] | stops[operator]
        counts = np.ones(len(chosen), np.bool_)
        if forgets and operator == number - 1:
            counts = ~chosen[:, -2]
        peaks.append(np.where(ends & counts, run, 0.0))
        run = np.where(ends, 0.0, run)
    largest: FloatArray = np.max(peaks, axis=0)
    return largest


def mixed_experiment(seed: int, most_operators: int = 6, *, published: bool = False) -> Experiment:
    """Draw nodes, memory, batch, and operators that tp and algorithms divide well or badly."""
    chance = random.Random(seed)
    names = (*OPERATORS[: chance.randrange(1, most_operators)], OPERATORS[-1])
    nodes, slots = chance.choice(_CLUSTERS)
    tps = chance.choice([(1, 2), (1, 2), (1, 2, 4)])
    files = _files(chance, names, tps)
    context = 0 if published else 2.5
    memory = context + chance.uniform(0.02, 0.08) * len(names)
    recompute = "none" if published else chance.choice(["auto", "auto", "none", "full"])
    text = f"""
name: mixed
model:
  {{family: gpt2, num_layers: 1, hidden_size: 64, num_heads: 4, sequence_length: 64,
   vocab_size: 512}}
cluster:
  nodes:
    - {{count: {nodes}, device: T4, slots: {slots}, memory_gib: {memory:.4f},
       intra_gbit_per_s: 50, inter_gbit_per_s: 10}}
profile: {{source: aceso, path: p, model: resnet_x}}
global_batch_size: {chance.choice([2, 4, 4, 8])}
search: {{space: operator, per_operator: {str(chance.random() < 0.7).lower()}}}
recompute: {recompute}
zero_stage: {0 if published else chance.choice([0, 1])}
"""
    return experiment_from(text, {f"p/{name}": file for name, file in files.items()})


def _files(chance: random.Random, names: tuple[str, ...], tps: tuple[int, ...]) -> dict[str, str]:
    """Make a profile whose operators differ in the gain of dividing their matrices."""
    algorithms = chance.choice([(0,), (0, 1)])
    files = {}
    base = {
        name: [chance.randrange(20, 400) for _ in range(2)]
        + [chance.randrange(1, 17) for _ in range(2)]
        + [chance.randrange(0, 6), 4 * chance.randrange(1, 12), 8, chance.randrange(0, 40)]
        for name in names
    }
    sizes_shrink = {name: [chance.random() < 0.5 for _ in range(2)] for name in names}
    for tp, algorithm in product(tps, algorithms):
        share = {name: [chance.uniform(0.3, 1.4) / tp for _ in range(8)] for name in names}
        for name in names if tp == 1 else ():
            share[name] = [1.0] * 8
        for size in (1, 2, 4):
            lines = []
            for name, values in base.items():
                own = list(share[name])
                for column, shrinks in zip((2, 3), sizes_shrink[name], strict=True):
                    own[column] = 1 / tp if shrinks else 1.0
                # A part of the time does not depend on the samples.
                times = [
                    value * part * (1 + 0.7 * (size - 1))
                    for value, part in zip(values[:2], own[:2], strict=True)
                ]
                rest = [
                    value * part * (1 if column == 2 else size)
                    for column, (value, part) in enumerate(zip(values[2:], own[2:], strict=True))
                ]
                cells = ",".join(f"{value:.3f}" for value in (*times, *rest))
                lines.append(f"{name},{cells}")
            key = f"resnet_x_mbs{size}_tp{tp}_algo{algorithm}.csv"
            files[key] = "\n".join([HEADER, *lines]) + "\n"
    scale = 10 ** chance.uniform(-4, -2)
    for kind, number in product(
        ("all_gather", "all_reduce", "reduce_scatter", "all_to_all"), (2, 4)
    ):
        lines = [f"{mib},{scale * (mib * number / 2 + 0.2):.7f}" for mib in range(1, 65)]
        files[f"prim_resnet_x_{kind}_{number}gpus.csv"] = "\n".join(
            ["data_size(MB),time(ms)", *lines]
        )
    files["p2p_intra_node.csv"] = "1,2,4,8,16,32\n40.0,50.0,60.0,70.0,80.0,90.0\n"
    files["p2p_inter_node.csv"] = "1,2,4,8,16,32\n10.0,15,20,25,30,35\n"
    return files
