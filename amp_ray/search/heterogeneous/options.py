"""What a group of devices can do as one stage: its tp, dp and shares, and what they cost."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from amp_ray.cost.collective import Path
from amp_ray.cost.topology import FloatArray
from amp_ray.search.heterogeneous.facts import FactTable, GroupFacts
from amp_ray.search.heterogeneous.kinds import DeviceGraph
from amp_ray.search.heterogeneous.shares import (
    Shares,
    all_shares,
    split_by_speed,
    within_pieces,
)
from amp_ray.spec.candidate import GroupsCandidate


class RankKind(NamedTuple):
    """What tells ranks apart that take different times.

    Attributes:
        types: Types of the devices of its tensor-parallel group.
        ring: What the group's all-reduces meet.
        tp: Tensor-parallel degree.
        samples: Of one micro-batch.
    """

    types: tuple[int, ...]
    ring: Path
    tp: int
    samples: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GroupOption:
    """One way in which a group is a stage.

    Args:
        facts: The group.
        shares: Samples per dp index.
        time_row: Row of `GroupCosts.layer_s`.
        needs: Memory of its different ranks: samples and bytes of the device.
    """

    facts: GroupFacts
    shares: Shares
    time_row: int
    needs: tuple[tuple[int, float], ...]

    @property
    def tp(self) -> int:
        """Tensor-parallel degree."""
        return int(self.facts.devices.shape[1])

    @property
    def dp(self) -> int:
        """Data-parallel degree."""
        return len(self.shares)


@dataclass(frozen=True, kw_only=True, eq=False)
class GroupCosts:
    """Prices the groups of one candidate, each kind of rank once.

    Args:
        facts: Of groups.
        candidate: Micro-batch, its number, recompute.
        one_node: Whether plans stay inside one node.
        offers_all: Whether groups that mix kinds are offered all splits, if there are few.
    """

    facts: FactTable
    candidate: GroupsCandidate
    one_node: bool
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

    def options(self, graph: DeviceGraph, edge: int) -> list[GroupOption]:
        """Return every way in which a group of devices is a stage.

        Args:
            graph: Groups of devices.
            edge: The group.
        """
        most = self.candidate.micro_batch_size
        max_dp = self.facts.cost_model.experiment.limits.max_dp
        most = most if max_dp is None else min(most, max_dp)
        return [
            self.option(facts, shares)
            for facts in self.facts.of_edge(graph, edge)
            if len(facts.devices) <= most
            for shares in self._shares(facts)
        ]

    def option(self, facts: GroupFacts, shares: Shares) -> GroupOption:
        """Return a group with shares.

        Args:
            facts: The group.
            shares: Samples per dp index.
        """
        known = self.facts.cost_model.experiment.cluster.device_types
        kinds = self._kinds(facts, shares)
        needs = {
            (kind.samples, float(known[index].memory_bytes))
            for kind in kinds
            for index in kind.types
        }
        for kind in kinds:
            self._steps(kind)
        row = self._rows.setdefault(frozenset(kinds), len(self._rows))
        return GroupOption(facts=facts, shares=shares, time_row=row, needs=tuple(sorted(needs)))

    def tied_s(self, facts: GroupFacts) -> float:
        """Return what tied weights take a stage at an end of the pipeline."""
        inside_s, outside_s = facts.tied_s
        return inside_s if self.one_node else outside_s

    def slowest_s(self, facts: GroupFacts, shares: Shares) -> FloatArray:
        """Return the seconds of every layer on the slowest rank of a stage."""
        kinds = self._kinds(facts, shares)
        slowest: FloatArray = np.max([self._steps(kind) for kind in kinds], axis=0)
        return slowest

    def _shares(self, facts: GroupFacts) -> list[Shares]:
        """Return how the ranks of a group can share a micro-batch."""
        samples, counts = self.candidate.micro_batch_size, [run.count for run in facts.ranks]
        found: list[Shares] = []
        if self.offers_all or len(counts) == 1:
            found = all_shares(samples, counts)
        if not found:
            even = [-(-samples // len(facts.devices))] * len(counts)
            first = self._by_speed(facts, even, counts)
            full = [-(-own // count) for own, count in zip(first, counts, strict=True)]
            splits = (first, self._by_speed(facts, full, counts))
            found = [within_pieces(split, counts) for split in dict.fromkeys(splits)]
        allowed = self.facts.cost_model.experiment.limits.micro_batch_sizes
        return [shares for shares in found if allowed is None or set(shares) <= set(allowed)]

    def _by_speed(self, facts: GroupFacts, samples: Sequence[int], counts: Sequence[int]) -> Shares:
        """Split a micro-batch by the speeds that ranks have with some numbers of samples."""
        tp = facts.devices.shape[1]
        speeds = [
            own / float(self._steps(RankKind(run.types, run.ring, tp, own)).sum())
            for run, own in zip(facts.ranks, samples, strict=True)
        ]
        return split_by_speed(self.candidate.micro_batch_size, counts, speeds)

    def _kinds(self, facts: GroupFacts, shares: Shares) -> list[RankKind]:
        """Return the different kinds of ranks of a stage."""
        tp, first = int(facts.devices.shape[1]), 0
        found: dict[RankKind, None] = {}
        for run in facts.ranks:
            samples = dict.fromkeys(shares[first : first + run.count])
            found.update(dict.fromkeys(RankKind(run.types, run.ring, tp, own) for own in samples))
            first += run.count
        return list(found)

    def _steps(self, kind: RankKind) -> FloatArray:
        """Return the seconds of every layer on one kind of rank."""
        if kind not in self._step_s:
            stages = self.facts.cost_model.stages
            table, _ = stages.groups.table(
                kind.types,
                kind.ring,
                stages.rank(kind.tp, kind.samples),
                self.candidate.recompute,
            )
            self._step_s[kind] = np.diff(table[0] + table[1])
        return self._step_s[kind]
