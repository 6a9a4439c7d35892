"""Layer times of the tensor-parallel groups of a grid: all stages and replicas at once."""

from dataclasses import dataclass, field, replace

import numpy as np

from amp_ray.cost.collective import Path
from amp_ray.cost.layers import LayerCosts, LayerTable
from amp_ray.cost.roofline import Rank
from amp_ray.cost.topology import FloatArray, IntArray, Rings
from amp_ray.spec.candidate import Candidate, Recompute
from amp_ray.spec.device import Device
from amp_ray.units import Precision


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankKinds:
    """The different kinds of tensor-parallel groups of a grid, and where each stands.

    Args:
        tables: Shape ``(num_kinds, 3, num_layers + 1)``. Prefix sums over the layers: forward,
            backward, and the all-reduces within both.
        kind: Shape ``(pp, dp)``. Index into ``tables``.
        extrapolated: Whether any table lies outside of what was measured.
    """

    tables: FloatArray
    kind: IntArray
    extrapolated: bool

    def stage_rows(self) -> tuple[FloatArray, IntArray]:
        """Return time rows for the partition and the row of each stage.

        A stage goes at the pace of its slowest replica, layer by layer.

        Returns:
            Prefix sums of shape ``(num_rows, num_layers + 1)`` and rows of shape ``(pp,)``.
        """
        step_s = np.diff(self.tables[:, 0] + self.tables[:, 1], axis=1)
        rows: dict[tuple[int, ...], int] = {}
        of_stage = [
            rows.setdefault(tuple(sorted(set(kinds))), len(rows)) for kinds in self.kind.tolist()
        ]
        slowest = np.array([step_s[list(kinds)].max(axis=0) for kinds in rows])
        return prefix_sums(slowest), np.array(of_stage, dtype=np.int64)

    def stage_times(self, bounds: tuple[int, ...]) -> FloatArray:
        """Return forward, backward and all-reduce seconds, shape ``(3, pp, dp)``."""
        cuts = np.array(bounds)
        first, end = cuts[:-1, None], cuts[1:, None]
        tables = self.tables.transpose(1, 0, 2)
        return tables[:, self.kind, end] - tables[:, self.kind, first]


def prefix_sums(rows: FloatArray) -> FloatArray:
    """Return prefix sums of shape ``(num_rows, num_layers + 1)`` of ``(num_rows, num_layers)``."""
    prefix = np.zeros((rows.shape[0], rows.shape[1] + 1))
    np.cumsum(rows, axis=1, out=prefix[:, 1:])
    return prefix


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """One kind of group: types of its devices, its ring, and what of a candidate matters."""

    types: tuple[int, ...]
    ring: Path
    tp: int
    micro_batch_size: int
    recompute: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GroupTables:
    """Finds the kinds of a grid's groups and keeps their tables, which many candidates share.

    Args:
        layer_costs: Fills a table.
        device_types: The cluster's.
        precision: Of activations and weights.
    """

    layer_costs: LayerCosts
    device_types: tuple[Device, ...]
    precision: Precision
    _known: dict[_Group, tuple[FloatArray, bool]] = field(init=False, default_factory=dict)

    def kinds(self, candidate: Candidate, types: IntArray, rings: Rings) -> RankKinds:
        """Return the layer times of a grid's groups.

        Args:
            candidate: Degrees.
            types: Shape ``(pp, dp, tp)``. Device type of each rank.
            rings: Of the ``pp * dp`` groups, in the grid's order.

        Raises:
            ValueError: If the profile is measured, but not for this tp on these devices.
        """
        groups = types.reshape(-1, candidate.tp).tolist()
        index: dict[tuple[tuple[int, ...], int], int] = {}
        kind = [
            index.setdefault((tuple(sorted(set(group))), ring), len(index))
            for group, ring in zip(groups, rings.index, strict=True)
        ]
        rank = self.rank(candidate)
        found = [
            self.table(group, rings.paths[ring], rank, candidate.recompute) for group, ring in index
        ]
        return RankKinds(
            tables=np.array([table for table, _ in found]),
            kind=np.array(kind, dtype=np.int64).reshape(candidate.pp, candidate.dp),
            extrapolated=any(extrapolated for _, extrapolated in found),
        )

    def rank(self, candidate: Candidate) -> Rank:
        """Return one rank's share of a candidate's work."""
        return Rank(
            device=self.device_types[0],
            tp=candidate.tp,
            micro_batch_size=candidate.micro_batch_size,
            precision=self.precision,
        )

    def table(
        self, types: tuple[int, ...], ring: Path, rank: Rank, recompute: Recompute
    ) -> tuple[FloatArray, bool]:
        """Return the times of one kind of group.

        Args:
            types: Device types in the group, ascending.
            ring: What its all-reduces meet.
            rank: A rank's share of the work; its device does not matter.
            recompute: What blocks compute again.

        Returns:
            Prefix sums as in `RankKinds.tables`, and whether they extrapolate.

        Raises:
            ValueError: If the profile is measured, but not for this tp on these devices.
        """
        group = _Group(
            types=types,
            ring=ring,
            tp=rank.tp,
            micro_batch_size=rank.micro_batch_size,
            recompute=recompute,
        )
        if group not in self._known:
            ranks = [replace(rank, device=self.device_types[index]) for index in types]
            tables = [self.layer_costs.table(each, ring, recompute) for each in ranks]
            extrapolated = any(table.extrapolated for table in tables)
            self._known[group] = prefix_sums(_slowest(tables)), extrapolated
        return self._known[group]


def _slowest(tables: list[LayerTable]) -> FloatArray:
    """Return the slowest device's times, layer by layer: the all-reduces keep devices in step."""
    rows = [(table.forward_s, table.backward_s, table.tensor_parallel_s) for table in tables]
    slowest: FloatArray = np.max(np.array(rows), axis=0)
    return slowest
