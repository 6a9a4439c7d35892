"""Lower bounds on the time of grid candidates, so that many of them need not be planned.

A bound holds for every placement and all cuts of a candidate, as the cost model simulates them.
"""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

import numpy as np

from amp_ray.cost.collective import Path
from amp_ray.cost.model import CostModel
from amp_ray.cost.topology import FloatArray, IntArray
from amp_ray.search.cuts import may_fit
from amp_ray.search.recompute import patterns
from amp_ray.search.whole_layers import WholeLayers
from amp_ray.spec.candidate import Candidate, StageOptions, with_kind
from amp_ray.spec.recompute import AUTO, NO_RECOMPUTE, Recompute

TINY_S: Final = 1e-30
"""In place of no time, where it divides."""

Kind = tuple[int, Path]
"""Type of a device, and what a tensor-parallel group in its node meets."""


SlowestStage = Callable[[FloatArray, IntArray, Candidate, int], float]


@dataclass(frozen=True, kw_only=True, eq=False)
class GridBounds:
    """Bounds candidates of one tp and dp for all stages.

    Args:
        cost_model: Of the experiment.
    """

    cost_model: CostModel
    _kinds: dict[int, dict[Kind, int]] = field(init=False, default_factory=dict)
    _tables: dict[tuple[object, ...], FloatArray] = field(init=False, default_factory=dict)
    _cuts: dict[tuple[int, int], tuple[float, float]] = field(init=False, default_factory=dict)
    _tails: dict[tuple[StageOptions, int], tuple[float, float]] = field(
        init=False, default_factory=dict
    )

    def least_s(self, candidate: Candidate, limit_s: float = float("inf")) -> float:
        """Return what no strategy of a candidate undercuts.

        A stage goes at the pace of its slowest group and is occupied by every micro-batch in turn.
        Before the first backward pass of a stage has ended, one micro-batch has gone through the
        whole pipeline, and all but the first backward passes of the stage are still to come, with
        the forward passes of ``m - pp`` micro-batches at least. A transfer goes as if it were alone
        on the fastest link; between nodes are as many as the largest node makes necessary.

        Args:
            candidate: Its tensor-parallel groups are inside nodes.
            limit_s: A bound above it need not be the best that is known.

        Returns:
            Seconds; infinite where the devices are too few.

        Raises:
            ValueError: If the profile is measured, but not for this tp.
        """
        if self.cost_model.experiment.limits.tp_across_nodes:
            return 0.0
        count = np.array(list(self._units(candidate.options.tp).values()), dtype=np.int64)
        if count.sum() < candidate.options.dp * candidate.pp:
            return float("inf")
        if len(count) == 1 and candidate.options.recompute == AUTO:
            return self._alike_s(candidate)
        if candidate.options.recompute == AUTO:
            candidate = with_kind(candidate, NO_RECOMPUTE)
        if len(count) == 1:
            even_s = self._even_s(candidate, candidate.options.recompute, 0)
            if candidate.virtual_stages > 1 or even_s > limit_s:
                return even_s
        simple_s = self._pipeline_s(candidate, count, self._average_s) + self._rest_s(candidate)
        if simple_s > limit_s:
            return simple_s
        whole_s = self._pipeline_s(candidate, count, self._whole_s) + self._rest_s(candidate)
        return max(simple_s, whole_s)

    def _alike_s(self, candidate: Candidate) -> float:
        """Return what no strategy of a candidate undercuts whose recompute is to be chosen.

        Of each kind stages compute as few blocks again as lets them hold all blocks between them.
        """
        choices = patterns(self.cost_model)
        found = [self._even_s(candidate, NO_RECOMPUTE, 0)]
        given = self.cost_model.experiment
        for kind in dict.fromkeys(own.whole for own in choices):
            num_again = self._least_again(with_kind(candidate, kind))
            if num_again == 0:
                return found[0]
            if num_again is not None:
                parts = any(own.kind == kind.kind and own.layers for own in choices)
                number = 0 if given.traits.recompute_per_stage else num_again if parts else given.model.num_layers
                found.append(self._even_s(candidate, kind, number))
        return min(found[1:], default=float("inf"))

    def _least_again(self, candidate: Candidate) -> int | None:
        """Return how many like blocks each stage computes again at least, to fit; None without any.

        Args:
            candidate: All its blocks are computed again, or none.
        """
        places, memory = np.array(self._most_frequent), self.cost_model.memory(candidate)
        types = self.cost_model.experiment.cluster.device_types
        limit = float(max(own.memory_bytes for own in types))

        def fits(num_again: int) -> bool:
            return int(memory.most_blocks(limit, places, num_again).sum()) >= len(places)

        most = 0 if candidate.options.recompute == NO_RECOMPUTE else len(places)
        if not fits(most):
            return None
        return bisect_left(range(most), True, key=fits)  # noqa: FBT003 - the first that fits

    def _even_s(self, candidate: Candidate, kind: Recompute, num_again: int) -> float:
        """Return what no strategy of a candidate undercuts, on devices of one kind.

        One stage has as many of the most frequent blocks as an even share, or more. Where stages
        have several chunks, the last stage waits for the first chunks of all others to begin, and
        they for it to end: either it has few blocks, and another has more, or it takes that long.

        Args:
            candidate: Degrees.
            kind: What may be computed again.
            num_again: Such blocks that each stage computes again at least.
        """
        pp, chunks, batches = candidate.pp, candidate.virtual_stages, candidate.num_micro_batches
        (plain,) = self._layer_s(with_kind(candidate, NO_RECOMPUTE))
        (whole,) = self._layer_s(with_kind(candidate, kind))
        given, places = self.cost_model.experiment, self._most_frequent
        host_s, num_others = given.constants.host_s_per_micro_batch, self._num_other_blocks
        both, extra = plain.sum(axis=0), np.maximum((whole - plain).sum(axis=0), 0.0)
        block_s, extra_s = float(both[places].min()), float(extra[places].min())
        number = np.arange(len(places) + 1)
        stage_s = number * block_s + np.minimum(number, max(num_again - num_others, 0)) * extra_s
        even = -(-len(places) // pp)
        busy_s = batches * max(float(both.sum()) / pp, float(stage_s[even]))
        if chunks == 1:
            late = max(batches - pp, 0)
            forward_s = float(plain[0, places].min())
            later_s = (batches - 1) * (stage_s[even] - even * forward_s) + late * even * forward_s
            through_s = float(both.sum()) + pp * host_s + self._cuts_s(candidate)
            busy_s = max(busy_s + batches * host_s, through_s + later_s + late * host_s)
            return busy_s + self._rest_s(candidate)
        most = len(places) - max(chunks * (pp - 1) - num_others, 0)
        last = number[max(chunks - num_others, 0) : most + 1]
        others = len(places) - last
        first = np.ceil((others - (pp - 1) * (chunks - 1)) / chunks) - num_others
        head_s = float(both[given.model.indices("block")[-1] + 1 :].sum())
        waits_s = np.maximum(first, 0) * block_s
        last_s = batches * (stage_s[last] + head_s) + waits_s
        other_s = batches * stage_s[-(-others // (pp - 1))]
        least_s = float(np.maximum(last_s, other_s).min(initial=np.inf))
        return max(busy_s, least_s) + batches * host_s + self._rest_s(candidate)

    @cached_property
    def _num_other_blocks(self) -> int:
        """Blocks that are not of the most frequent kind; all where that is no block."""
        model = self.cost_model.experiment.model
        if model.layers[self._most_frequent[0]].kind != "block":
            return model.num_layers
        return model.block_counts[-1] - len(self._most_frequent)

    def _pipeline_s(self, candidate: Candidate, count: IntArray, slowest: SlowestStage) -> float:
        """Return what the pipeline takes at least.

        Args:
            candidate: Degrees.
            count: Shape ``(num_kinds,)``. Tensor-parallel groups of each kind.
            slowest: Bounds what the slowest stage takes for some of its work.
        """
        table, given = self._layer_s(candidate), self.cost_model.experiment
        forward, backward = table[:, 0], table[:, 1]
        both, batches = forward + backward, candidate.num_micro_batches
        late = max(batches - candidate.pp, 0)
        host_s = given.constants.host_s_per_micro_batch
        blocks = given.traits.blocking_transfers and candidate.virtual_stages == 1
        busy_s = slowest(batches * both, count, candidate, batches * blocks) + batches * host_s
        if candidate.virtual_stages > 1:
            return busy_s
        through_s = float(both.min(axis=0).sum()) + candidate.pp * host_s + self._cuts_s(candidate)
        later = (batches - 1) * backward + late * forward
        later_s = slowest(later, count, candidate, max(late - 1, 0) * blocks) + late * host_s
        return max(busy_s, through_s + later_s)

    def _average_s(
        self, layer_s: FloatArray, count: IntArray, candidate: Candidate, transfers: int
    ) -> float:
        """Return what the slowest stage takes at least, by what all of them take.

        Let ``w`` be the reciprocal of what all layers take on the slowest kind of a stage. The
        slowest stage takes at least the average of what stages take, weighted by ``w``; that sum
        is least if every layer is where its share of all layers is least, and all that blocks
        stages is where ``w`` is least.

        Args:
            layer_s: Shape ``(num_kinds, num_layers)``.
            count: Shape ``(num_kinds,)``. Tensor-parallel groups of each kind.
            candidate: Tells how many stages of how many groups there are.
            transfers: Micro-batches whose transfers block both stages of a cut.
        """
        total_s = np.maximum(layer_s.sum(axis=1), TINY_S)
        stages = _fast_first(total_s, count, candidate)
        blocked_s = 2 * transfers * self._cuts_s(candidate)
        shares = (layer_s / total_s[:, None]).min(axis=0).sum() + blocked_s / total_s.max()
        return float(shares / (stages / total_s).sum())

    def _whole_s(
        self, layer_s: FloatArray, count: IntArray, candidate: Candidate, transfers: int
    ) -> float:
        """Return what the slowest stage takes at least, as layers are not divided.

        Arguments as of `_average_s`.
        """
        same = self._most_frequent
        each_s = np.maximum(layer_s[:, same].min(axis=1), TINY_S)
        stages = _fast_first(each_s, count, candidate)
        used = stages > 0
        others = np.delete(layer_s, same, axis=1)
        num_across = self._num_across(candidate) if transfers else 0
        more = (others / each_s[:, None]).min(axis=0, initial=np.inf)
        room = WholeLayers(
            each_s=each_s[used],
            stages=stages[used],
            num_layers=len(same) + int(np.floor(more).sum()),
            num_others=others.shape[1],
            across_s=transfers * self._cut_s(candidate)[1] if num_across else 0.0,
            num_ends=2 * num_across,
        )
        return max(room.least_s(), float(others.min(axis=0).max(initial=0.0)))

    def _cuts_s(self, candidate: Candidate) -> float:
        """Return what all cuts take at least for one micro-batch of a replica that is alone."""
        if candidate.pp == 1:
            return 0.0
        num_across = self._num_across(candidate)
        inside_s, across_s = self._cut_s(candidate)
        num_inside = candidate.pp - 1 - num_across
        total_s = num_inside * min(inside_s, across_s) if num_inside else 0.0
        return total_s + num_across * across_s if num_across else total_s

    def _num_across(self, candidate: Candidate) -> int:
        """Return how many cuts of a replica lie between nodes at least."""
        slots = max(node.num_slots for node in self.cost_model.experiment.cluster.nodes)
        return -(-candidate.pp // (slots // candidate.options.tp)) - 1

    def _cut_s(self, candidate: Candidate) -> tuple[float, float]:
        """Return the least time of both messages of a cut inside a node, and between nodes."""
        key = candidate.options.tp, candidate.micro_batch_size
        if key not in self._cuts:
            self._cuts[key] = self._least_cuts_s(*key)
        return self._cuts[key]

    def _least_cuts_s(self, tp: int, samples: int) -> tuple[float, float]:
        """Find what `_cut_s` returns; infinite where there can be no such cut."""
        model = self.cost_model.messages
        rates, steps = model.links
        nodes = self.cost_model.experiment.cluster.nodes
        roomy = [index for index, node in enumerate(nodes) if node.num_slots >= 2 * tp]
        inside = np.zeros_like(rates, dtype=np.bool_)
        inside[roomy, roomy] = True
        found = []
        for links in (inside, ~np.eye(len(nodes), dtype=np.bool_)):
            if not links.any():
                found.append(float("inf"))
                continue
            met = np.array([[[1.0, steps[links].min(), samples / rates[links].max(), 0.0]]])
            gathers = np.zeros((1, 1, 2)) if model.slices else None
            both = model.messages(np.array([[tp, tp]]), met, gathers).everywhere()
            found.append(float(both[0, 1:-1].min(initial=np.inf)))
        return found[0], found[1]

    @cached_property
    def _most_frequent(self) -> list[int]:
        """Places of the layer that the model has most of."""
        _, positions = self.cost_model.experiment.model.distinct_layers
        most = int(np.argmax(np.bincount(positions)))
        return [place for place, layer in enumerate(positions) if layer == most]

    def _units(self, tp: int) -> dict[Kind, int]:
        """Return how many tensor-parallel groups of each kind there are."""
        if tp not in self._kinds:
            topology = self.cost_model.topology
            cluster, found = topology.cluster, dict[Kind, int]()
            for index, node in enumerate(cluster.nodes):
                if node.num_slots >= tp:
                    ring = topology.ring((index,), tp, {})
                    key = cluster.device_types.index(node.device), ring
                    found[key] = found.get(key, 0) + node.num_slots // tp
            self._kinds[tp] = found
        return self._kinds[tp]

    def _layer_s(self, candidate: Candidate) -> FloatArray:
        """Return forward and backward seconds of every layer, ``(num_kinds, 2, num_layers)``."""
        options = candidate.options
        divided = options.tp, options.sequence_parallel, options.ep, options.etp
        key = divided, options.recompute.kind, candidate.micro_batch_size
        if key not in self._tables:
            tables = self.cost_model.time_tables
            self._tables[key] = np.diff(
                [
                    tables.table((kind,), ring, options, candidate.micro_batch_size)[0][:2]
                    for kind, ring in self._units(candidate.options.tp)
                ],
                axis=2,
            )
        return self._tables[key]

    def may_fit(self, candidate: Candidate) -> bool:
        """Tell whether some cuts fit if every stage had the largest devices."""
        given = self.cost_model.experiment
        types = given.cluster.device_types
        most = float(max(types[kind].memory_bytes for kind, _ in self._units(candidate.options.tp)))
        memory = self.cost_model.memory(candidate)
        if candidate.pp == 1:
            return memory.peak(0, 0, given.model.num_layers) <= most
        if candidate.virtual_stages > 1:
            return True  # memory is that of chunks, whose cuts are not known yet
        return may_fit(given, memory.earliest_starts(np.full(candidate.pp, most)))

    def _rest_s(self, candidate: Candidate) -> float:
        """Return what follows the pipeline at least, for a stage with an even share."""
        key = candidate.options, candidate.pp
        if key not in self._tails:
            self._tails[key] = self._tail_line(*key)
        fixed_s, s_per_parameter = self._tails[key]
        weights = self.cost_model.weights(candidate.options.tp)
        held, shared = weights.prefix, weights.tied
        if candidate.options.spreads_experts:
            held = held - weights.expert_prefix  # other ranks share those
        total = float(held[-1]) - (0.0 if shared is None else shared.parameters)
        host_s = self.cost_model.experiment.constants.host_s_per_iteration
        return fixed_s + s_per_parameter * total / candidate.pp + host_s

    def _tail_line(self, options: StageOptions, pp: int) -> tuple[float, float]:
        """Return the least tail: fixed, and per parameter of a rank."""
        tp, dp = options.tp, options.dp
        topology, step_end = self.cost_model.topology, self.cost_model.step_end
        nodes = topology.cluster.nodes
        fastest = max(topology.cluster.device_types, key=lambda own: own.memory_bytes_per_s)
        paths = [
            topology.ring((index,), dp, {})
            for index, node in enumerate(nodes)
            if node.num_slots >= tp * dp
        ]
        rates, _ = topology.between
        if dp > 1 and len(nodes) > 1:
            others = rates[~np.eye(len(nodes), dtype=np.bool_)]
            steps = topology.ring_step_s
            paths.append(
                Path(bytes_per_s=float(others.max()) / tp, step_s=float(steps.min()), num_nodes=2)
            )
        lines = np.array(
            [step_end.line(options, pp, (path,), fastest) for path in dict.fromkeys(paths)]
        )
        fixed_s, s_per_parameter = lines.min(axis=0).tolist()
        return fixed_s, s_per_parameter


def _fast_first(total_s: FloatArray, count: IntArray, candidate: Candidate) -> IntArray:
    """Return how many stages are no slower than a kind, if the fast kinds come first.

    Args:
        total_s: Shape ``(num_kinds,)``. Seconds of the same layers on each kind.
        count: Shape ``(num_kinds,)``. Tensor-parallel groups of each kind.
        candidate: Tells how many stages of how many groups there are.

    Returns:
        Shape ``(num_kinds,)``. A stage counts for the slowest of its kinds.
    """
    order = np.argsort(total_s, kind="stable")
    ends = np.minimum(np.cumsum(count[order]) // candidate.options.dp, candidate.pp)
    stages = np.zeros_like(count)
    stages[order] = np.diff(ends, prepend=0)
    return stages
