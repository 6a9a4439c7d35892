"""Lower bounds on the time of grid candidates, so that many of them need not be planned.

A bound holds for every placement and all cuts of a candidate, as the cost model simulates them.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from functools import cached_property
from operator import attrgetter
from typing import Final, NamedTuple

import numpy as np

from amp_ray.arrays import FloatArray, IntArray
from amp_ray.cost.collective import NO_RING, Path, fastest_path
from amp_ray.cost.model import CostModel, SampleCosts
from amp_ray.cost.stages import PlacedStages, prefix_sums
from amp_ray.memo import memoised
from amp_ray.partition.kernels import least_chain_s
from amp_ray.search.cuts import may_fit
from amp_ray.search.space import recompute_choices, with_most_recompute
from amp_ray.strategies.candidate import Candidate, StageOptions, with_kind, with_zero
from amp_ray.strategies.recompute import AUTO, NO_RECOMPUTE, Recompute
from amp_ray.strategies.zero import NO_ZERO

ROUNDING: Final = 1e-9
"""Relative difference between sums of the same terms in another order."""

TINY_S: Final = 1e-30
"""Replaces a time of 0 in divisions."""

_DIVIDES: Final = ("tp", *(part.name for part in fields(StageOptions)[4:]))
_DIVIDED: Final = attrgetter(*_DIVIDES)
"""How a stage divides layers: all its options but dp, recompute and sharding."""

_PASSED: Final = attrgetter(
    *(part.name for part in fields(Candidate) if part.name != "options"),
    *(f"options.{name}" for name in ("dp", *_DIVIDES)),
)
"""All of a candidate but recompute and sharding."""

Kind = tuple[int, Path]
"""Index of a device type, and the path of a tensor-parallel group within its node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Again:
    """Recomputed blocks of a candidate's stages."""

    number: int  # per stage; all blocks of a stage with fewer
    rooms: IntArray  # shape ``(pp,)``. Most blocks of the most frequent kind, by stage.

    @property
    def share(self) -> float:
        """Least share of a stage's most frequent blocks that recompute, if it has no others."""
        return min(1.0, self.number / max(1, int(self.rooms.max())))


class LeastStageTimes(NamedTuple):
    """Least times of stages by their numbers of blocks, for several chunks per stage."""

    times: "LayerTimes"
    num_again: int  # recomputed blocks of a stage
    covers: bool  # whether all blocks of the model recompute
    num_front: int  # blocks not of the most frequent kind that a stage before the last may have
    # Time that those may save where they take the place of the most frequent blocks
    spared_s: float

    def of_likes(self, number: int, num_less: int) -> float:
        """Return the time of a stage with most frequent blocks, beside some of other kinds."""
        most = self.num_again if self.covers else max(self.num_again - num_less, 0)
        return number * self.times.block_s + min(number, most) * self.times.extras_s[0]

    def of_any(self, number: int) -> float:
        """Return the time of a stage with blocks of any kind."""
        recomputed = min(number, self.num_again)
        fast = min(recomputed, self.num_front)
        extra_s, other_extra_s = self.times.extras_s
        again_s = fast * other_extra_s + (recomputed - fast) * extra_s
        return number * self.times.block_s - self.spared_s + again_s


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerTimes:
    """Seconds of a micro-batch in layers, all on devices of one kind."""

    both_s: FloatArray  # shape ``(num_layers,)``. Both passes, without recompute.
    total_s: float  # their sum
    block_s: float  # least of the most frequent blocks
    any_block_s: float  # least of all blocks
    # Least time that recompute adds to one of the most frequent blocks, and to any block
    extras_s: tuple[float, float]
    prefix: FloatArray  # shape ``(4, num_layers + 1)``, as `least_chain_s` takes it


SlowestStage = Callable[[FloatArray, IntArray, Candidate, int], float]


@dataclass(frozen=True, kw_only=True, eq=False)
class GridBounds:
    """Lower bounds for candidates with the same tp and dp in all stages.

    Context-parallel ranks count as data-parallel ones.
    """

    cost_model: CostModel  # of the experiment
    tables: SampleCosts  # costs of the samples that ranks have
    _known_units: dict[int, dict[Kind, int]] = field(init=False, default_factory=dict)
    _tables: dict[tuple[object, ...], FloatArray] = field(init=False, default_factory=dict)
    _times: dict[tuple[object, ...], LayerTimes] = field(init=False, default_factory=dict)
    _exchanges: dict[tuple[int, ...], tuple[Path, ...]] = field(init=False, default_factory=dict)
    _even: dict[Candidate, float] = field(init=False, default_factory=dict)
    _roomy: dict[tuple[object, ...], float] = field(init=False, default_factory=dict)
    _tails: dict[tuple[StageOptions, int], tuple[float, float]] = field(
        init=False, default_factory=dict
    )

    def least_s(self, candidate: Candidate, limit_s: float = float("inf")) -> float:
        """Return a lower bound on the time of any strategy of a candidate.

        A stage runs at the pace of its slowest group, one micro-batch at a time. When the first
        backward pass of a stage ends, one micro-batch has passed through the whole pipeline, and
        the stage still has to run all other backward passes and at least ``m - pp`` forward passes.
        Transfers are timed alone on the fastest link. The number of cuts between nodes is the
        smallest that is possible with the largest node. A bound above ``limit_s`` need not be
        tight.

        Returns:
            Seconds; infinite if there are too few devices.

        Raises:
            ValueError: If the profile is measured, but not for this tp.
        """
        if self.cost_model.experiment.limits.tp_across_nodes:
            return 0.0
        count = np.array(list(self._units(candidate.options.tp).values()), dtype=np.int64)
        if count.sum() < candidate.options.dp * candidate.pp:
            return float("inf")
        if len(count) == 1:
            if limit_s < float("inf"):
                rough_s = self._rough_s(candidate) * (1 - ROUNDING)
                if rough_s > limit_s:
                    return rough_s
            even_s = self._alike_s(candidate, limit_s) * (1 - ROUNDING)
            if self.cost_model.experiment.space == "uniform" or even_s > limit_s:
                return even_s
        if candidate.options.recompute == AUTO:
            candidate = with_kind(candidate, NO_RECOMPUTE)
        simple_s = self._iteration_s(candidate, self._average_s, limit_s)
        if simple_s > limit_s:
            return simple_s
        return max(simple_s, self._iteration_s(candidate, self._whole_s, limit_s))

    def pass_s(self, candidate: Candidate) -> tuple[float, float]:
        """Return the least time of a micro-batch in all layers on any devices, and in a block."""
        both_s = self._layer_s(candidate).sum(axis=1).min(axis=0)
        is_block = np.diff(self.cost_model.experiment.model.block_counts) > 0
        return float(both_s.sum()), float(both_s[is_block].min()) if is_block.any() else 0.0

    def _rough_s(self, candidate: Candidate) -> float:
        """Return a lower bound for equal devices of any memory, where nothing is recomputed."""
        return self._roomy_s(candidate, NO_RECOMPUTE, 0) + self._rest_s(candidate)

    def _roomy_s(self, candidate: Candidate, kind: Recompute, num_again: int) -> float:
        """Return `_passes_s` for devices of any memory; more recompute never lowers it.

        Sharding changes only memory and the step end, so candidates with every ZeRO setting share
        the result.
        """
        key = _PASSED(candidate), kind.kind, num_again
        if key not in self._roomy:
            rooms = np.full(candidate.pp, len(self._most_frequent))
            again = Again(number=num_again, rooms=rooms)
            self._roomy[key] = self._passes_s(with_kind(candidate, kind), again)
        return self._roomy[key]

    def _alike_s(self, candidate: Candidate, limit_s: float) -> float:
        """Return a lower bound for equal devices, over every allowed recompute.

        For each kind, stages recompute the fewest blocks with which they can hold the whole model,
        or more, if the room that these leave may pay. A bound above the limit need not be tight.
        """
        if candidate not in self._even:
            rest_s = self._rest_s(candidate)
            least_s = rest_s + self._least_passes_s(candidate, limit_s - rest_s)
            if least_s > limit_s:
                return least_s
            self._even[candidate] = least_s
        return self._even[candidate]

    def _least_passes_s(self, candidate: Candidate, limit_s: float) -> float:
        recompute = candidate.options.recompute
        least_s, number = float("inf"), recompute.layers or 0
        for kind, fewest, most in (
            self._kinds if recompute == AUTO else [(recompute.whole, number, number)]
        ):
            alike = with_kind(candidate, kind)
            for again in self._ways(alike, fewest, most):
                roomy_s = self._roomy_s(alike, kind, again.number)
                if again.rooms.min() >= len(self._most_frequent) or roomy_s > limit_s:
                    least_s = min(least_s, roomy_s)
                if roomy_s >= least_s:
                    break
                least_s = min(least_s, self._passes_s(alike, again))
        return least_s

    @cached_property
    def _kinds(self) -> list[tuple[Recompute, int, int]]:
        """Kinds of recompute, each with its least and largest number of blocks; 0 means all."""
        numbers_of: dict[Recompute, list[int]] = {}
        for setting in recompute_choices(self.cost_model.experiment):
            numbers_of.setdefault(setting.whole, []).append(setting.layers or 0)
        return [(kind, min(numbers), max(numbers)) for kind, numbers in numbers_of.items()]

    def _ways(self, candidate: Candidate, fewest: int, most: int) -> Iterator[Again]:
        """Yield rising numbers of recomputed blocks, from the fewest that fit; 0 is all or none."""
        places, memory = tuple(self._most_frequent), self.tables.memory(candidate)
        experiment, number = self.cost_model.experiment, len(self._most_frequent)
        limit = float(max(device.memory_bytes for device in experiment.cluster.device_types))

        def rooms(num_again: int) -> IntArray:
            return memory.most_blocks(limit, places, num_again)

        widest = rooms(number)
        if widest.sum() < number:
            return
        if not most or experiment.traits.recompute_per_stage:
            again = candidate.options.recompute != NO_RECOMPUTE
            again = again and not experiment.traits.recompute_per_stage
            yield Again(number=experiment.model.num_layers * again, rooms=widest)
            return
        first = bisect_left(range(number), number, key=lambda count: int(rooms(count).sum()))
        for num_again in range(max(first, fewest), most + 1):
            yield Again(number=num_again, rooms=rooms(num_again))

    def _passes_s(self, candidate: Candidate, again: Again) -> float:
        """Return a lower bound on the time of a candidate's pipeline, on devices of one kind.

        With one chunk per stage, one micro-batch passes through the whole model, and the slowest
        stage adds its other passes (`least_chain_s`). `_interleaved_s` has the other bound.

        For example, two stages run five blocks and a head, 1 s each (forward 1/3 s, backward 2/3 s)
        on four micro-batches. A micro-batch takes 6 s. With three blocks the first stage then runs
        three backward passes and two forward passes, ``3 * 2 + 2 * 1 = 8`` s, and the second one
        with two blocks and the head ``3 * 3 = 9`` s: 15 s. The bound is 15 s, since other cuts take
        longer.
        """
        batches, model = candidate.num_micro_batches, self.cost_model.experiment.model
        times = self._layer_times(candidate)
        if candidate.virtual_stages == 1:
            chain_s: float = least_chain_s(
                times.prefix, again.rooms, again.number, times.extras_s, batches
            )
            through_s = times.total_s + self._again_s(candidate.pp, times, again)
            least_s = through_s + self._cuts_s(candidate) + chain_s
        else:
            least_s = batches * times.total_s / candidate.pp
            if self._num_other_blocks < model.num_layers:
                least_s = max(least_s, self._interleaved_s(candidate, times, again))
        host_s = batches * self.cost_model.experiment.constants.host_s_per_micro_batch
        return least_s + host_s

    def _layer_times(self, candidate: Candidate) -> LayerTimes:
        """Return the times of layers on devices of one kind, cached for equal stages."""
        key = self._key(candidate)
        if key not in self._times:
            plain = with_kind(candidate, NO_RECOMPUTE)
            (passes_s,), (whole_s,) = map(self._layer_s, (plain, candidate))
            more_s = np.maximum((whole_s - passes_s).sum(axis=0), 0.0)
            self._times[key] = self._new_times(passes_s, more_s)
        return self._times[key]

    def _new_times(self, passes_s: FloatArray, more_s: FloatArray) -> LayerTimes:
        """Return the times of layers from those of their passes, and what recompute adds."""
        places, both_s = self._most_frequent, passes_s.sum(axis=0)
        is_block = np.diff(self.cost_model.experiment.model.block_counts) > 0
        is_like = np.zeros(len(both_s), dtype=np.bool_)
        is_like[places] = True
        # `least_chain_s` needs that no block's recompute takes longer than another's backward pass
        most_s = float(passes_s[1, is_block].min(initial=np.inf))
        extra_s = min(float(more_s[places].min()), most_s)
        return LayerTimes(
            both_s=both_s,
            total_s=float(both_s.sum()),
            block_s=float(both_s[places].min()),
            any_block_s=float(both_s[is_block].min(initial=np.inf)),
            extras_s=(extra_s, float(more_s[is_block].min(initial=extra_s))),
            prefix=prefix_sums(np.vstack([passes_s, is_like, is_block & ~is_like])),
        )

    def _again_s(self, pp: int, times: LayerTimes, again: Again) -> float:
        """Return the least time that recompute adds to a micro-batch in the whole model."""
        number, num_others = len(self._most_frequent), self._num_other_blocks
        if pp > 1 and again.number < number + num_others:
            return max(0.0, again.share * number - num_others) * times.extras_s[0]
        first = min(num_others, again.number)
        return first * times.extras_s[1] + min(number, again.number - first) * times.extras_s[0]

    def _interleaved_s(self, candidate: Candidate, times: LayerTimes, again: Again) -> float:
        """Return a lower bound for several chunks per stage: the least over the last stage's size.

        Every chunk has a block, so the last stage has the model's last one and all layers after it.
        Before it starts, a micro-batch passes the first chunks of all other stages, and its
        gradients pass them after it has ended. The last chunk also waits for all chunks of the
        model. If the last stage has few blocks, the others have more.
        """
        pp, chunks, batches = candidate.pp, candidate.virtual_stages, candidate.num_micro_batches
        number, (blocks, less) = len(self._most_frequent), self._blocks
        extra_s, other_extra_s = times.extras_s
        covers = again.number >= len(blocks)  # all blocks recompute
        ends = int(less[-1:] == [blocks[-1]])  # whether the last block is one of them
        # Other blocks that the last stage may have before its last block, and any other stage
        middle = [block for block in less if blocks[pp - 1] <= block < blocks[-1]]
        num_middle, num_front = len(middle), len(less) - ends

        spared_s = sum(max(0.0, times.block_s - float(times.both_s[block])) for block in less)
        stage = LeastStageTimes(times, again.number, covers, num_front, spared_s)
        block_s = times.any_block_s + covers * other_extra_s
        tail_s = float(times.both_s[blocks[-1] + 1 - ends :].sum()) + ends * covers * other_extra_s
        through_s = times.total_s + self._again_s(pp, times, again) + self._cuts_s(candidate)
        host_s = self.cost_model.experiment.constants.host_s_per_micro_batch
        through_s -= max(batches - pp, 0) * host_s
        # Layers that only other stages can have
        front = [*range(blocks[0]), *(block for block in less if block < blocks[pp - 1])]
        front_s = float(times.both_s[front].sum())

        def last_s(last: int) -> float:
            """Bound the time by the last stage, with so many of the most frequent blocks."""
            before = number - last + num_front - num_middle
            num_first = max(-(-(before - (pp - 1) * (chunks - 1)) // chunks), pp - 1)
            num_end = max(-(-(last + ends) // chunks) - ends - num_middle, 0)
            end_s = tail_s + num_end * (times.block_s + covers * extra_s)
            busy_s = batches * (tail_s + stage.of_likes(last, num_middle)) + num_first * block_s
            return max(through_s + (batches - 1) * end_s, busy_s + self._cuts_s(candidate))

        def other_s(last: int) -> float:
            """Bound the time by the other stages: one with an even share, and all on average."""
            before = number - last
            even = -(-before // (pp - 1))
            even = even if even <= rooms.min() else _evened(rooms, before)
            mean = -(-(before + num_front - num_middle) // (pp - 1))
            even_s = max(stage.of_likes(even, num_front), stage.of_any(mean))
            again_s = max(again.share * before - num_front * (not covers), 0.0) * extra_s
            average_s = (front_s + before * times.block_s + again_s) / (pp - 1)
            return max(batches * even_s, batches * average_s + (pp - 2) / 2 * block_s)

        rooms = again.rooms[:-1]
        fewest = max(chunks - ends - num_middle, number - int(rooms.sum()), 0)
        most = min(number - max(chunks * (pp - 1) - num_front, 0), int(again.rooms[-1]))
        return _least_of_longer(range(fewest, most + 1), last_s, other_s)

    @cached_property
    def _blocks(self) -> tuple[tuple[int, ...], list[int]]:
        """Indices of all blocks, and of those not of the most frequent kind."""
        blocks, frequent = self.cost_model.experiment.model.indices("block"), self._most_frequent
        return blocks, sorted({*blocks} - {*frequent})

    @cached_property
    def _num_other_blocks(self) -> int:
        """Blocks not of the most frequent kind; if that kind is no block, the number of layers."""
        model = self.cost_model.experiment.model
        if model.layers[self._most_frequent[0]].kind != "block":
            return model.num_layers
        return model.block_counts[-1] - len(self._most_frequent)

    def _iteration_s(self, candidate: Candidate, slowest: SlowestStage, limit_s: float) -> float:
        """Return a lower bound on the time of pipeline and step end.

        A bound above ``limit_s`` need not be tight.
        """
        experiment, batches = self.cost_model.experiment, candidate.num_micro_batches
        late = max(batches - candidate.pp, 0)
        host_s = experiment.constants.host_s_per_micro_batch
        alike = candidate if candidate.options.zero == NO_ZERO else with_zero(candidate, NO_ZERO)
        busy_s = self._slowest_s(slowest, alike, later=False) + batches * host_s
        rest_s = self._rest_s(candidate)
        if candidate.virtual_stages > 1 or busy_s + rest_s > limit_s:
            return busy_s + rest_s
        through_s = self.pass_s(candidate)[0] + candidate.pp * host_s + self._cuts_s(candidate)
        later_s = self._slowest_s(slowest, alike, later=True) + late * host_s
        return max(busy_s, through_s + later_s) + rest_s

    @memoised
    def _slowest_s(self, slowest: SlowestStage, candidate: Candidate, *, later: bool) -> float:
        """Return the time of the slowest stage for all its passes, or those after its first pass.

        It depends on the degrees alone, so candidates with every ZeRO setting share it.
        """
        table, batches = self._layer_s(candidate), candidate.num_micro_batches
        forward, backward = table[:, 0], table[:, 1]
        count = np.array(list(self._units(candidate.options.tp).values()), dtype=np.int64)
        late = max(batches - candidate.pp, 0)
        blocking = self.cost_model.experiment.traits.blocking_transfers
        blocks = blocking and candidate.virtual_stages == 1
        if later:
            layers_s = (batches - 1) * backward + late * forward
            return slowest(layers_s, count, candidate, max(late - 1, 0) * blocks)
        return slowest(batches * (forward + backward), count, candidate, batches * blocks)

    def _average_s(
        self, layer_s: FloatArray, count: IntArray, candidate: Candidate, transfers: int
    ) -> float:
        """Bound the time of the slowest stage from below by the average of all stages.

        Let ``w`` be the reciprocal of the time of all layers on the slowest kind of a stage. The
        slowest stage takes at least the average of all stages' times, weighted by ``w``. That
        average is least if every layer runs where its share of the time of all layers is least, and
        blocking transfers fall on the stages with the least ``w``. ``layer_s`` has shape
        ``(num_kinds, num_layers)``; ``count`` are the tensor-parallel groups of each kind;
        ``transfers`` are the micro-batches whose transfers block both stages of a cut.
        """
        total_s = np.maximum(layer_s.sum(axis=1), TINY_S)
        stages = _fast_first(total_s, count, candidate)
        blocked_s = 2 * transfers * self._cuts_s(candidate)
        shares = (layer_s / total_s[:, None]).min(axis=0).sum() + blocked_s / total_s.max()
        return float(shares / (stages / total_s).sum())

    def _whole_s(
        self, layer_s: FloatArray, count: IntArray, candidate: Candidate, transfers: int
    ) -> float:
        """Bound the time of the slowest stage from below, given that layers are indivisible.

        Arguments as for `_average_s`.
        """
        same = self._most_frequent
        each_s = np.maximum(layer_s[:, same].min(axis=1), TINY_S)
        stages = _fast_first(each_s, count, candidate)
        used = stages > 0
        other_s = np.delete(layer_s, same, axis=1)
        num_across = self._num_across(candidate) if transfers else 0
        more = (other_s / each_s[:, None]).min(axis=0, initial=np.inf)
        room = WholeLayers(
            each_s=each_s[used],
            stages=stages[used],
            num_layers=len(same) + int(np.floor(more).sum()),
            num_others=other_s.shape[1],
            across_s=transfers * self._cut_s(candidate)[1] if num_across else 0.0,
            num_ends=2 * num_across,
        )
        return max(room.least_s(), float(other_s.min(axis=0).max(initial=0.0)))

    def _cuts_s(self, candidate: Candidate) -> float:
        """Return the least time to send one micro-batch across all cuts of a replica."""
        if candidate.pp == 1:
            return 0.0
        num_across = self._num_across(candidate)
        inside_s, across_s = self._cut_s(candidate)
        num_inside = candidate.pp - 1 - num_across
        total_s = num_inside * min(inside_s, across_s) if num_inside else 0.0
        return total_s + num_across * across_s if num_across else total_s

    def _num_across(self, candidate: Candidate) -> int:
        """Return the least number of a replica's cuts between nodes."""
        return -(-candidate.pp // (self._most_slots // candidate.options.tp)) - 1

    @cached_property
    def _most_slots(self) -> int:
        return max(node.num_slots for node in self.cost_model.experiment.cluster.nodes)

    def _cut_s(self, candidate: Candidate) -> tuple[float, float]:
        """Return the least time of both messages of a cut inside a node, and between nodes."""
        options = candidate.options
        return self._least_cuts_s(
            options.tp, candidate.micro_batch_size, divided=options.sequence_parallel
        )

    @memoised
    def _least_cuts_s(self, tp: int, samples: int, *, divided: bool) -> tuple[float, float]:
        model = self.tables.messages
        topology, links = self.cost_model.topology, model.topology.links
        nodes = zip(topology.cluster.nodes, topology.kind_of_node, strict=True)
        roomy = [kind for node, kind in nodes if node.num_slots >= 2 * tp]
        pairs = topology.has_pair
        least_s = []
        for rates, steps in (
            (links.intra_bytes_per_s[roomy], links.intra_step_s[roomy]),
            (links.inter_bytes_per_s[pairs], links.inter_step_s[pairs]),
        ):
            if not rates.size:
                least_s.append(float("inf"))
                continue
            slowest = np.array([[[1.0, steps.min(), samples / rates.max(), 0.0]]])
            gathers = np.zeros((1, 1, 2)) if model.slices else None
            pair, is_divided = np.array([[tp, tp]]), np.array([int(divided)])
            both = model.messages(pair, slowest, gathers, is_divided).everywhere()
            least_s.append(float(both[0, 1:-1].min(initial=np.inf)))
        return least_s[0], least_s[1]

    @cached_property
    def _most_frequent(self) -> list[int]:
        """Indices of all layers equal to the model's most frequent layer."""
        _, positions = self.cost_model.experiment.model.distinct_layers
        most = int(np.argmax(np.bincount(positions)))
        return [place for place, layer in enumerate(positions) if layer == most]

    def _units(self, tp: int) -> dict[Kind, int]:
        """Return the number of tensor-parallel groups that nodes hold, by kind."""
        if tp not in self._known_units:
            topology = self.cost_model.topology
            cluster, units = topology.cluster, dict[Kind, int]()
            for index, node in enumerate(cluster.nodes):
                if node.num_slots >= tp:
                    ring = topology.ring((index,), tp, {})
                    key = cluster.device_types.index(node.device), ring
                    units[key] = units.get(key, 0) + node.num_slots // tp
            self._known_units[tp] = units
        return self._known_units[tp]

    def _key(self, candidate: Candidate) -> tuple[object, ...]:
        """Return what the times of a candidate's layers depend on."""
        options = candidate.options
        paths = self._exchange_paths(candidate)
        return _DIVIDED(options), options.recompute.kind, candidate.micro_batch_size, paths

    def _layer_s(self, candidate: Candidate) -> FloatArray:
        """Return forward and backward seconds of every layer, ``(num_kinds, 2, num_layers)``."""
        key, options = self._key(candidate), candidate.options
        if key not in self._tables:
            tables, samples = self.tables.time_tables, candidate.micro_batch_size
            paths = self._exchange_paths(candidate)
            layers_s = np.diff(
                [
                    [tables.table((kind,), ring, options, samples, path)[0][:2] for path in paths]
                    for kind, ring in self._units(candidate.options.tp)
                ],
                axis=3,
            )
            self._tables[key] = layers_s.min(axis=1) + self._exchange_s(candidate)
        return self._tables[key]

    def _exchange_paths(self, candidate: Candidate) -> tuple[Path, ...]:
        """Return the different paths of the stages' expert all-to-alls.

        Uniform candidates that use all devices have them in hostfile order, which decides the path
        of each stage; it is the same for all where they fill or share equal nodes evenly. Otherwise
        assume a path that takes no time.
        """
        experiment, options, pp = self.cost_model.experiment, candidate.options, candidate.pp
        size, slots = options.num_ranks, experiment.cluster.nodes[0].num_slots
        is_placed = experiment.space == "uniform" and size <= experiment.cluster.num_devices
        if options.ep == 1 or not is_placed:
            return (NO_RING,)
        if experiment.cluster.is_even and not (size % slots and slots % size):
            pp = 1
        elif size * pp != experiment.cluster.num_devices:
            return (NO_RING,)
        key = options.tp, options.dp, options.ep, options.expert_tp, pp
        if key not in self._exchanges:
            stages = PlacedStages(
                options=(options,) * pp,
                devices=np.arange(size * pp),
                shares=((1,) * options.dp,) * pp,
                num_micro_batches=1,
            )
            times = self.tables.time_tables
            paths = stages.exchanges(times.topology, times.copies)
            self._exchanges[key] = tuple(dict.fromkeys(paths))
        return self._exchanges[key]

    def _exchange_s(self, candidate: Candidate) -> FloatArray:
        """Return the least exchange time of context-parallel ranks, shape ``(2, num_layers)``.

        Where a ring does not fit into a node, the ``tp`` rings of a stage share the link between
        nodes.
        """
        cp, tp = self.tables.cp, candidate.options.tp
        if cp == 1:
            return np.zeros((2, 1))
        topology = self.cost_model.topology
        rate = topology.best_inter_bytes_per_s / tp
        if tp * cp <= self._most_slots:
            rate = max(rate, topology.best_intra_bytes_per_s)
        path = Path(bytes_per_s=rate, step_s=0.0)
        times, samples = self.tables.time_tables, candidate.micro_batch_size
        forward_s, backward_s = times.exchange_s(path, tp, samples)
        again = candidate.options.recompute.kind != "none"
        return np.array([forward_s, backward_s + again * forward_s])

    def may_fit(self, candidate: Candidate) -> bool:
        """Return whether some cuts would fit if every stage had the largest devices."""
        experiment = self.cost_model.experiment
        candidate = with_most_recompute(experiment, candidate)
        types = experiment.cluster.device_types
        most = float(max(types[kind].memory_bytes for kind, _ in self._units(candidate.options.tp)))
        memory = self.tables.memory(candidate)
        if candidate.virtual_stages > 1:
            return True  # memory depends on the chunks, which are not cut yet
        return may_fit(experiment, memory.earliest_starts(np.full(candidate.pp, most)))

    def _rest_s(self, candidate: Candidate) -> float:
        """Return the least step end of a stage with an even share of the parameters."""
        key = candidate.options, candidate.pp
        if key not in self._tails:
            self._tails[key] = self._tail_line(*key)
        fixed_s, s_per_parameter = self._tails[key]
        weights = self.tables.weights(candidate.options.tp)
        held, shared = float(weights.prefix[-1]), weights.tied
        if candidate.options.spreads_experts:
            held -= float(weights.expert_prefix[-1])  # other groups of ranks hold the experts
        total = held - (0.0 if shared is None else shared.parameters)
        host_s = self.cost_model.experiment.constants.host_s_per_iteration
        return fixed_s + s_per_parameter * total / candidate.pp + host_s

    def _tail_line(self, options: StageOptions, pp: int) -> tuple[float, float]:
        """Return the least step end: fixed seconds, and seconds per parameter of a rank."""
        tp, dp = options.tp, options.dp
        topology, step_end = self.cost_model.topology, self.cost_model.step_end
        nodes = topology.cluster.nodes
        fastest = max(topology.cluster.device_types, key=lambda device: device.memory_bytes_per_s)
        paths = [
            topology.ring((index,), dp, {})
            for index, node in enumerate(nodes)
            if node.num_slots >= tp * dp
        ]
        if dp > 1 and len(nodes) > 1:
            paths.append(fastest_path(topology.best_inter_bytes_per_s / tp))
        lines = np.array(
            [step_end.line(options, pp, (path,), fastest) for path in dict.fromkeys(paths)]
        )
        fixed_s, s_per_parameter = lines.min(axis=0).tolist()
        return fixed_s, s_per_parameter


def _least_of_longer(
    sizes: range, rising: Callable[[int], float], falling: Callable[[int], float]
) -> float:
    """Return the least, over sizes, of the larger of a rising and a falling time; else infinity."""
    first = bisect_left(sizes, True, key=lambda size: rising(size) >= falling(size))  # noqa: FBT003
    bounds_s = [rising(size) for size in sizes[first : first + 1]]
    bounds_s += [falling(size) for size in sizes[max(first - 1, 0) : first]]
    return min(bounds_s, default=np.inf)


def _evened(rooms: IntArray, number: int) -> int:
    """Return the least size of the largest stage when all together hold ``number`` blocks."""
    return bisect_left(range(number), number, key=lambda most: int(np.minimum(rooms, most).sum()))


def _fast_first(total_s: FloatArray, count: IntArray, candidate: Candidate) -> IntArray:
    """Return the number of stages per kind when stages use the fastest kinds first.

    ``total_s`` are the seconds of the same layers on each kind, ``count`` its tensor-parallel
    groups. The result has shape ``(num_kinds,)``; a stage of several kinds counts as its slowest.
    """
    order = np.argsort(total_s, kind="stable")
    ends = np.minimum(np.cumsum(count[order]) // candidate.options.dp, candidate.pp)
    stages = np.zeros_like(count)
    stages[order] = np.diff(ends, prepend=0)
    return stages


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WholeLayers:
    """Bound on the slowest stage when stages divide equal layers, each as a whole, between them.

    A stage has two ends; an end at a cut between nodes costs the stage time.
    """

    each_s: FloatArray  # shape ``(num_kinds,)``. Time of a layer, above 0.
    stages: IntArray  # shape ``(num_kinds,)``. Number of stages of each kind.
    num_layers: int  # layers to hold, other layers converted to equal ones
    num_others: int  # stages that may hold none of these layers, but another one
    across_s: float  # time of a cut between nodes
    num_ends: int  # least number of stage ends at such cuts

    def least_s(self) -> float:
        """Return the shortest time within which the stages might hold all layers."""
        layers = np.arange(1, self.num_layers + 1)
        ends_s = self.across_s * np.arange(3)
        times_s = np.unique(np.add.outer(np.outer(layers, self.each_s), ends_s))
        low, high = 0, len(times_s) - 1
        while low < high:
            middle = (low + high) // 2
            if self._is_enough(float(times_s[middle])):
                high = middle
            else:
                low = middle + 1
        return float(times_s[low])

    def _is_enough(self, time_s: float) -> bool:
        """Return whether stages might hold all layers within a time per stage.

        Each end at a cut between nodes is assigned to the stage where it costs the least room.
        """
        left_s = (time_s - self.across_s * np.arange(3)[:, None]) / self.each_s
        room = np.maximum(np.floor(left_s * (1 + ROUNDING)), 0).astype(np.int64)
        lost = np.repeat(room[:-1] - room[1:], self.stages, axis=1).ravel()
        held = int(room[0] @ self.stages) - int(np.sort(lost)[: self.num_ends].sum())
        empty = room[0] == 0
        num_empty = int(self.stages[empty].sum())
        harmless = ((room[1] > 0).astype(np.int64) + (room[2] > 0)) @ self.stages
        harmful = max(self.num_ends - int(harmless) - 2 * num_empty, 0)
        return held >= self.num_layers and num_empty + -(-harmful // 2) <= self.num_others
