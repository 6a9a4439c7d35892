"""What a group of devices can do as one stage: its tp, dp and shares, and what they cost."""

from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, chain
from typing import Final

import numpy as np

from amp_ray.cost.collective import Path
from amp_ray.cost.crossings import StageGroup
from amp_ray.cost.model import CostModel
from amp_ray.cost.topology import FloatArray, IntArray
from amp_ray.search.heterogeneous.kinds import DeviceGraph
from amp_ray.search.heterogeneous.shares import (
    Shares,
    all_shares,
    split_by_speed,
    within_pieces,
)
from amp_ray.spec.candidate import GroupsCandidate

MANY_PARAMETERS: Final = 1e9
"""Where the time of a tail, which grows linearly, is looked at a second time."""

RankKind = tuple[tuple[int, ...], Path, int, int]
"""Types of the devices of a tensor-parallel group, its ring, tp, and samples."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GroupOption:
    """One way in which a group is a stage.

    Args:
        group: Devices, shares and rings.
        time_row: Row of `GroupCosts.layer_s`.
        needs: Memory of its different ranks: samples and bytes of the device.
        tail: Seconds of gradient sync and optimizer: fixed, and per parameter.
        tied_s: What is added at the ends of a pipeline, where both hold one weight.
    """

    group: StageGroup
    time_row: int
    needs: tuple[tuple[int, float], ...]
    tail: tuple[float, float]
    tied_s: float


@dataclass(frozen=True, kw_only=True, eq=False)
class GroupCosts:
    """Prices the groups of one candidate, each kind of rank once.

    Args:
        cost_model: Tells what ranks take.
        candidate: Micro-batch, its number, recompute.
        one_node: Whether plans stay inside one node.
        all_shares: Whether groups that mix kinds are offered all splits, if there are few.
    """

    cost_model: CostModel
    candidate: GroupsCandidate
    one_node: bool
    all_shares: bool = False
    _step_s: dict[RankKind, FloatArray] = field(init=False, default_factory=dict)
    _rows: dict[frozenset[RankKind], int] = field(init=False, default_factory=dict)

    @property
    def layer_s(self) -> FloatArray:
        """Seconds of every layer by time row, shape ``(num_rows, num_layers)``.

        A stage goes at the pace of its slowest rank, layer by layer.
        """
        return np.array(
            [np.max([self._step_s[kind] for kind in kinds], axis=0) for kinds in self._rows]
        )

    def group(self, devices: IntArray, shares: Shares) -> StageGroup:
        """Return a stage on its own.

        Args:
            devices: Shape ``(dp, tp)``.
            shares: Samples per dp index.
        """
        rings = self.cost_model.topology.unequal_rings(devices.tolist())
        paths = tuple(rings.paths[index] for index in rings.index)
        return StageGroup(devices=devices, shares=shares, rings=paths)

    def needs(self, group: StageGroup) -> tuple[tuple[int, float], ...]:
        """Return what a stage's different ranks need: samples, and bytes of the device."""
        known = self.cost_model.topology.cluster.device_types
        types = self.cost_model.topology.type_of_device[group.devices].tolist()
        found = {
            (share, float(known[index].memory_bytes))
            for share, row in zip(group.shares, types, strict=True)
            for index in row
        }
        return tuple(sorted(found))

    def slowest_s(self, group: StageGroup) -> FloatArray:
        """Return the seconds of every layer on the slowest rank of a stage."""
        slowest: FloatArray = np.max([self._steps(kind) for kind in self._kinds(group)], axis=0)
        return slowest

    @cached_property
    def parameters(self) -> FloatArray:
        """Parameters of every layer; a weight that two layers share counts in the first one.

        A part that tensor parallelism does not divide is taken as if it did.
        """
        weights = self.cost_model.stages.weights(1)
        held: FloatArray = np.diff(weights.prefix)
        if weights.tied is not None:
            held[weights.tied.last] -= weights.tied.parameters
        return held

    def options(self, graph: DeviceGraph, edge: int) -> list[GroupOption]:
        """Return every way in which a group of devices is a stage.

        Args:
            graph: Groups of devices.
            edge: The group.
        """
        pieces = graph.devices(edge)
        return [option for tp in self.tps for option in self._options(pieces, tp)]

    @cached_property
    def tps(self) -> tuple[int, ...]:
        """Tensor-parallel degrees that the limits, the nodes, the model and the profile allow."""
        given = self.cost_model.experiment
        limits, shape = given.limits, given.model.shape
        slots = [node.num_slots for node in given.cluster.nodes]
        most = sum(slots) if limits.tp_across_nodes else max(slots)
        most = most if limits.max_tp is None else min(most, limits.max_tp)
        heads = (shape.num_heads, shape.num_key_value_heads)
        return tuple(
            tp
            for tp in range(limits.min_tp, most + 1)
            if not given.traits.shards_heads or not any(count % tp for count in heads)
        )

    def _options(self, pieces: tuple[tuple[int, ...], ...], tp: int) -> list[GroupOption]:
        """Return the options of one tp."""
        given, limits = self.cost_model.experiment, self.cost_model.experiment.limits
        if not self._divides(pieces, tp):
            return []
        devices = np.array(list(chain.from_iterable(pieces))).reshape(-1, tp)
        if len(devices) > min(self.candidate.micro_batch_size, limits.max_dp or len(devices)):
            return []
        topology = self.cost_model.topology
        held = sorted(set(topology.type_of_device[devices].ravel().tolist()))
        known = [given.cluster.device_types[index] for index in held]
        if given.profile.gap(known, tp) is not None:
            return []
        tail, tied_s = self.tail(devices), self.tied_s(devices)
        groups = [self.group(devices, shares) for shares in self._shares(devices)]
        return [
            GroupOption(
                group=group,
                time_row=self._row(self._kinds(group)),
                needs=self.needs(group),
                tail=tail,
                tied_s=tied_s,
            )
            for group in groups
        ]

    def _divides(self, pieces: tuple[tuple[int, ...], ...], tp: int) -> bool:
        """Tell whether groups of this size use all devices, and stay inside nodes if they must."""
        devices = list(chain.from_iterable(pieces))
        if len(devices) % tp:
            return False
        if self.cost_model.experiment.limits.tp_across_nodes or tp == 1:
            return True
        nodes = self.cost_model.topology.cluster.node_of_device
        firsts, lasts = devices[::tp], devices[tp - 1 :: tp]
        return all(
            nodes[first] == nodes[last] and last - first == tp - 1
            for first, last in zip(firsts, lasts, strict=True)
        )

    def _shares(self, devices: IntArray) -> list[Shares]:
        """Return how the ranks of a group can share a micro-batch."""
        samples = self.candidate.micro_batch_size
        even = (-(-samples // len(devices)),) * len(devices)
        ranks = tuple(Counter(self._rank_kinds(self.group(devices, even))).values())
        found = all_shares(samples, ranks) if self.all_shares or len(ranks) == 1 else []
        if not found:
            by_speed = self._by_speed(devices, even, ranks)
            found = [by_speed, self._by_speed(devices, by_speed, ranks)]
        allowed = self.cost_model.experiment.limits.micro_batch_sizes
        return [
            shares
            for shares in dict.fromkeys(found)
            if allowed is None or set(shares) <= set(allowed)
        ]

    def _by_speed(self, devices: IntArray, shares: Shares, ranks: tuple[int, ...]) -> Shares:
        """Share samples out by the speeds that ranks have with given shares."""
        kinds = self._rank_kinds(self.group(devices, shares))
        firsts = [0, *accumulate(ranks[:-1])]
        speeds = [kinds[first][-1] / float(self._steps(kinds[first]).sum()) for first in firsts]
        samples = self.candidate.micro_batch_size
        return within_pieces(split_by_speed(samples, ranks, speeds), ranks)

    def _rank_kinds(self, group: StageGroup) -> list[RankKind]:
        """Return the kind of every data-parallel rank of a stage."""
        types = self.cost_model.topology.type_of_device[group.devices].tolist()
        return [
            (tuple(sorted(set(row))), path, group.tp, share)
            for row, path, share in zip(types, group.rings, group.shares, strict=True)
        ]

    def _kinds(self, group: StageGroup) -> frozenset[RankKind]:
        """Return the different kinds of ranks of a stage."""
        return frozenset(self._rank_kinds(group))

    def _row(self, kinds: frozenset[RankKind]) -> int:
        """Number the time row of a group with these kinds of ranks."""
        for kind in kinds:
            self._steps(kind)
        return self._rows.setdefault(kinds, len(self._rows))

    def _steps(self, kind: RankKind) -> FloatArray:
        """Return the seconds of every layer on one kind of rank."""
        if kind not in self._step_s:
            types, path, tp, samples = kind
            table, _ = self.cost_model.stages.groups.table(
                types, path, self.cost_model.stages.rank(tp, samples), self.candidate.recompute
            )
            self._step_s[kind] = np.diff(table[0] + table[1])
        return self._step_s[kind]

    @cached_property
    def tied_parameters(self) -> float:
        """Parameters of the weight that both ends of the model hold; 0 if there is none."""
        tied = self.cost_model.stages.weights(1).tied
        return 0.0 if tied is None else tied.parameters

    def tied_s(self, devices: IntArray) -> float:
        """Return what a stage at an end of the pipeline takes to meet the one at the other end.

        Every rank meets one on the node that is nearest, which is never faster than inside its
        node, where plans that stay in one meet.

        Args:
            devices: Shape ``(dp, tp)``.
        """
        if not self.tied_parameters:
            return 0.0
        tail, topology = self.cost_model.stages.tail, self.cost_model.topology
        ranks = Counter(topology.node_of_device[devices].ravel().tolist())
        parameters = self.tied_parameters / devices.shape[1]
        times_s = []
        for node, count in ranks.items():
            places: list[tuple[int, ...]] = [(node,)]
            if not self.one_node:
                places.append(tuple(sorted((node, self._nearest[node]))))
            for ends in places:
                path = topology.ring(ends, 2, dict.fromkeys(ends, count))
                times_s.append(tail.tied_s(parameters, path))
        return max(times_s)

    @cached_property
    def _nearest(self) -> list[int]:
        """Per node the other node with the fastest link to it."""
        rates, steps = self.cost_model.topology.between
        others = np.where(np.eye(len(rates), dtype=np.bool_), 0.0, rates)
        order = np.lexsort((steps, -others), axis=1)
        nearest: list[int] = order[:, 0].tolist()
        return nearest

    def tail(self, devices: IntArray) -> tuple[float, float]:
        """Return what the tail of a stage takes by its own rings: fixed, and per parameter.

        Args:
            devices: Shape ``(dp, tp)``.
        """
        model, dp = self.cost_model.stages.tail, len(devices)
        device = model.slowest(devices[None])[0]
        paths = model.topology.unequal_rings(devices.T.tolist()).paths
        none, many = (
            max(model.sync_s(parameters, dp, path, device) for path in paths)
            + model.optimizer_s(parameters, dp, device)
            for parameters in (0.0, MANY_PARAMETERS)
        )
        return none, (many - none) / MANY_PARAMETERS
