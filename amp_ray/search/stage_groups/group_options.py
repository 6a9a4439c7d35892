"""Ways to use a group of devices as one stage: tp, dp and shares, with their costs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, chain
from math import comb
from typing import NamedTuple

import numpy as np

from amp_ray.arrays import BoolArray, FloatArray, IntArray
from amp_ray.cost.collective import Path
from amp_ray.cost.kernels.stages import RankTable
from amp_ray.cost.stages import PlacedStages
from amp_ray.cost.topology import Rings, Topology
from amp_ray.memo import memoised
from amp_ray.partition.rows import repeated
from amp_ray.search.stage_groups.device_groups import DeviceGraph, DeviceGroup, DeviceGroups
from amp_ray.strategies.candidate import GroupsCandidate, StageOptions

Shares = tuple[int, ...]


def all_shares(num_samples: int, ranks: Sequence[int], most: int) -> list[Shares]:
    """Return every way to split samples between pieces of equal ranks; within a piece evenly.

    ``ranks`` are the data-parallel ranks of each piece, ``most`` is the largest number of ways.

    Returns:
        Samples of every rank, piece after piece; empty if there are too many ways.

    Example:
        >>> all_shares(5, [2], 16)
        [(3, 2)]
        >>> all_shares(5, [1, 2], 16)
        [(1, 2, 2), (2, 2, 1), (3, 1, 1)]
    """
    if comb(num_samples - sum(ranks) + len(ranks) - 1, len(ranks) - 1) > most:
        return []
    return [within_pieces(split, ranks) for split in _all_splits(num_samples, ranks)]


def split_by_speed(num_samples: int, ranks: Sequence[int], speeds: Sequence[float]) -> Shares:
    """Assign samples one by one to the piece whose fullest rank would then finish first.

    ``speeds`` are the samples per second of a rank of each piece; each has at least one.

    Example:
        >>> split_by_speed(10, [2, 1], [2.0, 1.0])
        (8, 2)
    """
    total = sum(count * speed for count, speed in zip(ranks, speeds, strict=True))
    held = [
        count * max(1, int(num_samples * speed / total))
        for count, speed in zip(ranks, speeds, strict=True)
    ]
    while sum(held) > num_samples:  # as slow ranks need at least one sample
        worst = max(
            (piece for piece, count in enumerate(ranks) if held[piece] > count),
            key=lambda piece: (_full(held[piece], ranks[piece]) / speeds[piece], -piece),
        )
        held[worst] -= 1
    for _ in range(num_samples - sum(held)):
        first = min(
            range(len(ranks)),
            key=lambda piece: (_full(held[piece] + 1, ranks[piece]) / speeds[piece], piece),
        )
        held[first] += 1
    return tuple(held)


def split_into_sizes(
    num_samples: int, sizes: Sequence[int], seconds: Sequence[Sequence[float]]
) -> Shares:
    """Give every rank one of some sizes, so that the last rank finishes as early as possible.

    ``seconds``, shape ``(num_ranks, num_sizes)``, is infinite where a rank may not have a size.

    Returns:
        Samples of each rank; empty if the sizes cannot add up to the samples.

    Example:
        >>> split_into_sizes(6, [1, 2, 4], [[1.0, 2.0, 4.0], [2.0, 4.0, 8.0]])
        (4, 2)
        >>> split_into_sizes(7, [1, 2, 4], [[1.0, 2.0, 4.0], [2.0, 4.0, 8.0]])
        ()
    """
    if not sizes:
        return ()
    least_s = np.full(num_samples + 1, np.inf)  # of the ranks so far, by their samples
    least_s[0] = 0.0
    chosen = []
    for row in seconds:
        ends_s = np.full((len(sizes), num_samples + 1), np.inf)
        for place, (size, rank_s) in enumerate(zip(sizes, row, strict=True)):
            ends_s[place, size:] = np.maximum(least_s[: max(0, num_samples + 1 - size)], rank_s)
        chosen.append(ends_s.argmin(axis=0))
        least_s = ends_s.min(axis=0)
    if least_s[num_samples] == np.inf:
        return ()
    shares: list[int] = []
    for places in reversed(chosen):
        shares.append(sizes[places[num_samples - sum(shares)]])
    return tuple(reversed(shares))


def within_pieces(split: Shares, ranks: Sequence[int]) -> Shares:
    """Split each piece's samples evenly between its ranks.

    Returns:
        Samples of every rank, piece after piece; the first ranks of a piece may have one more.
    """
    shares: list[int] = []
    for samples, count in zip(split, ranks, strict=True):
        share, more = divmod(samples, count)
        shares += [share + 1] * more + [share] * (count - more)
    return tuple(shares)


def _full(samples: int, ranks: int) -> int:
    return -(-samples // ranks)


def _all_splits(num_samples: int, ranks: Sequence[int]) -> Iterator[Shares]:
    """Yield every split with at least one sample per rank."""
    if len(ranks) == 1:
        yield (num_samples,)
        return
    for first in range(ranks[0], num_samples - sum(ranks[1:]) + 1):
        for later in _all_splits(num_samples - first, ranks[1:]):
            yield (first, *later)


class RankKind(NamedTuple):
    """Key of the time of a rank."""

    types: tuple[int, ...]  # types of the devices of its tensor-parallel group
    ring: Path  # path of the group's all-reduces
    tp: int
    samples: int  # of one micro-batch


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GroupOption:
    """One way to use a device group as a stage."""

    device_group: DeviceGroup
    options: StageOptions  # how it is used
    shares: Shares  # samples per dp index
    time_row: int  # row of `GroupCosts.layer_s`
    # Memory needs of its distinct ranks: samples, and bytes of the device
    needs: tuple[tuple[int, float], ...]
    # Seconds of gradient sync and optimizer: fixed, and per parameter of a rank
    step_end: tuple[float, float]

    @property
    def tp(self) -> int:
        """Tensor parallel degree."""
        return self.options.tp

    @property
    def dp(self) -> int:
        """Data parallel degree."""
        return self.options.dp


def placed(groups: Sequence[GroupOption]) -> tuple[PlacedStages, Rings]:
    """Return stages with all samples as one part, and the paths of their tensor-parallel rings."""
    stages = PlacedStages(
        options=[group.options for group in groups],
        devices=np.concatenate([group.device_group.devices for group in groups], axis=None),
        shares=[group.shares for group in groups],
        num_micro_batches=1,
        one_part=True,
    )
    paths = tuple(chain.from_iterable(group.device_group.rings for group in groups))
    return stages, Rings(paths=paths, index=tuple(range(len(paths))))


@dataclass(frozen=True, kw_only=True, eq=False)
class GroupCosts:
    """Computes costs of one candidate's groups; caches times per kind of rank."""

    device_groups: DeviceGroups  # groups before samples are assigned
    candidate: GroupsCandidate  # micro-batch size and number, options of all stages
    one_node: bool  # whether plans stay inside one node
    # Whether groups of several kinds try all splits, if there are few
    offers_all: bool = False
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

    def options(self, groups: Sequence[DeviceGroup]) -> list[GroupOption]:
        """Return every way to use devices as a stage, given their groups with every tp."""
        most = self.candidate.micro_batch_size
        max_dp = self.device_groups.cost_model.experiment.limits.max_dp
        most = most if max_dp is None else min(most, max_dp)
        return [
            self.option(group, shares)
            for group in groups
            if len(group.devices) <= most
            for shares in self._shares(group)
        ]

    def option(self, group: DeviceGroup, shares: Shares) -> GroupOption:
        """Return a group with shares: samples per dp index."""
        device_types = self.device_groups.cost_model.experiment.cluster.device_types
        kinds = self._kinds(group, shares)
        needs = {
            (kind.samples, float(device_types[index].memory_bytes))
            for kind in kinds
            for index in kind.types
        }
        for kind in kinds:
            self._steps(kind)
        row = self._rows.setdefault(frozenset(kinds), len(self._rows))
        options = self._with_degrees(group.tp, len(shares))
        return GroupOption(
            device_group=group,
            options=options,
            shares=shares,
            time_row=row,
            needs=tuple(sorted(needs)),
            step_end=self.device_groups.step_end(group, options),
        )

    @memoised
    def _with_degrees(self, tp: int, dp: int) -> StageOptions:
        return replace(self.candidate.options, tp=tp, dp=dp)

    def tied_s(self, group: DeviceGroup) -> float:
        """Return the time of tied weights for a stage at an end of the pipeline."""
        inside_s, outside_s = group.tied_s
        return inside_s if self.one_node else outside_s

    def slowest_s(self, group: GroupOption) -> FloatArray:
        """Return the seconds of every layer on the slowest rank of a stage."""
        kinds = self._kinds(group.device_group, group.shares)
        slowest: FloatArray = np.max([self._steps(kind) for kind in kinds], axis=0)
        return slowest

    def _shares(self, group: DeviceGroup) -> list[Shares]:
        """Return the ways to split a micro-batch between the ranks of a group."""
        samples, counts = self.candidate.micro_batch_size, [run.count for run in group.ranks]
        offered: list[Shares] = []
        if self.offers_all or len(counts) == 1:
            offered = all_shares(samples, counts, self.device_groups.effort.max_splits)
        if not offered:
            even = [-(-samples // len(group.devices))] * len(counts)
            first = self._by_speed(group, even, counts)
            full = [-(-held // count) for held, count in zip(first, counts, strict=True)]
            splits = (first, self._by_speed(group, full, counts))
            offered = [within_pieces(split, counts) for split in dict.fromkeys(splits)]
        sizes = self.device_groups.cost_model.experiment.limits.micro_batch_sizes
        if sizes is None:
            return offered
        allowed = [shares for shares in offered if set(shares) <= set(sizes)]
        return allowed or [shares for shares in [self._of_sizes(group, sizes)] if shares]

    def _of_sizes(self, group: DeviceGroup, sizes: Sequence[int]) -> Shares:
        """Split a micro-batch into allowed numbers of samples; empty if none add up."""
        samples = self.candidate.micro_batch_size
        able = [size for size in sizes if size <= samples]
        seconds = [
            [
                float(self._steps(RankKind(run.types, run.ring, group.tp, size)).sum())
                for size in able
            ]
            for run in group.ranks
            for _ in range(run.count)
        ]
        return split_into_sizes(samples, able, seconds)

    def _by_speed(
        self, group: DeviceGroup, samples: Sequence[int], counts: Sequence[int]
    ) -> Shares:
        """Split a micro-batch by the ranks' speeds at these numbers of samples."""
        tp = group.tp
        speeds = [
            held / float(self._steps(RankKind(run.types, run.ring, tp, held)).sum())
            for run, held in zip(group.ranks, samples, strict=True)
        ]
        return split_by_speed(self.candidate.micro_batch_size, counts, speeds)

    def _kinds(self, group: DeviceGroup, shares: Shares) -> list[RankKind]:
        tp, first = group.tp, 0
        kinds: dict[RankKind, None] = {}
        for run in group.ranks:
            samples = dict.fromkeys(shares[first : first + run.count])
            kinds.update(dict.fromkeys(RankKind(run.types, run.ring, tp, held) for held in samples))
            first += run.count
        return list(kinds)

    def _steps(self, kind: RankKind) -> FloatArray:
        """Return the seconds of every layer on one kind of rank."""
        if kind not in self._step_s:
            options = replace(self.candidate.options, tp=kind.tp)
            tables = self.device_groups.cost_model.time_tables
            table, _ = tables.table(kind.types, kind.ring, options, kind.samples)
            self._step_s[kind] = np.diff(table[0] + table[1])
        return self._step_s[kind]


@dataclass(frozen=True, kw_only=True, eq=False)
class Choices:
    """Edges of the device graph, once for every way to use the group."""

    graph: DeviceGraph
    options: tuple[GroupOption, ...]  # distinct ways; equal groups on other devices share them
    edge: IntArray  # shape ``(C,)``. Group of each choice.
    option: IntArray  # shape ``(C,)``. Index into ``options``.

    @cached_property
    def from_state(self) -> IntArray:
        """Shape ``(C,)``."""
        return self.graph.from_state[self.edge]

    @cached_property
    def to_state(self) -> IntArray:
        """Shape ``(C,)``."""
        return self.graph.to_state[self.edge]

    @cached_property
    def num_neighbours(self) -> int:
        """Pairs of choices that can follow each other."""
        leading = np.bincount(self.to_state, minlength=self.graph.num_states)
        return int(leading[self.from_state].sum())

    @cached_property
    def ends_at_nodes(self) -> BoolArray:
        """Shape ``(C,)``. Whether the next stage has to be on other nodes."""
        at_end: BoolArray = self.graph.at_node_ends[self.edge]
        return at_end

    @cached_property
    def begins_at_nodes(self) -> BoolArray:
        """Shape ``(C,)``. Whether the stage before has to be on other nodes."""
        at_begin = np.array([option.device_group.begins_nodes for option in self.options])
        return at_begin[self.option]

    def among(self, chosen: IntArray) -> "Choices":
        """Return some of the choices."""
        return replace(self, edge=self.edge[chosen], option=self.option[chosen])

    def devices(self, choice: int) -> tuple[int, ...]:
        """Return the devices of a choice, in the order of its ranks."""
        return tuple(chain.from_iterable(self.graph.devices(int(self.edge[choice]))))

    def rank_table(self, topology: Topology, choices: IntArray) -> RankTable:
        """Return the kernel's table of the ranks of some choices, with all samples as one part."""
        options = [self.options[index] for index in self.option[choices].tolist()]
        devices = [self.devices(choice) for choice in choices.tolist()]
        ends = np.array([end for option in options for end in (0, *accumulate(option.shares))])
        return RankTable(
            nodes=topology.node_of_device[np.array(list(chain.from_iterable(devices)))],
            first_node=np.cumsum([0, *map(len, devices)], dtype=np.int64),
            ends=ends,
            parts=np.zeros_like(ends),
            first_end=np.cumsum([0, *(option.dp + 1 for option in options)], dtype=np.int64),
        )


def all_choices(graph: DeviceGraph, costs: GroupCosts) -> Choices:
    """Enumerate the choices of a candidate."""
    distinct, number = costs.device_groups.of_graph(graph)
    offered = [costs.options(groups) for groups in distinct]
    count = np.array([len(options) for options in offered], dtype=np.int64)
    edge, place = repeated(count[number])
    return Choices(
        graph=graph,
        options=tuple(chain.from_iterable(offered)),
        edge=edge,
        option=(np.cumsum(count) - count)[number[edge]] + place,
    )
