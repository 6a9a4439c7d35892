"""The placements of a candidate as a partition problem of limited size.

A cap on the step end becomes a limit on the start of stages.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

import numpy as np

from amp_ray.arrays import FloatArray, IntArray
from amp_ray.cost.model import CostModel
from amp_ray.partition.kernels import Programme
from amp_ray.partition.layout import laid_out, limited
from amp_ray.partition.problem import PartitionProblem
from amp_ray.partition.rows import distinct_rows
from amp_ray.partition.tables import NO_ROW, OptionTable, StageTables
from amp_ray.search.cuts import latest_starts, ruled_bounds
from amp_ray.search.effort import EFFORT, SearchEffort
from amp_ray.search.placement.node_moves import ClassMoves, Parts, Scope, class_moves, node_classes
from amp_ray.search.placement.placement_graph import FlatGraph, Grower
from amp_ray.search.placement.placement_prices import DevicePrices, Prices
from amp_ray.strategies.candidate import Candidate


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageNeeds:
    """Memory and layers that the stages of a candidate need, for any placement."""

    # Per memory size of a device, in bytes: the smallest start with which each stage fits, by its
    # end. Shape ``(pp, num_layers + 1)``.
    earliest_start: dict[float, IntArray]
    # Shape ``(num_layers + 1,)``. Latest start of a stage that has parameters; empty if stages need
    # none.
    latest_start: IntArray
    parameters: FloatArray  # shape ``(num_layers + 1,)``. Prefix sums over the layers, of one rank.
    tied_counts: bool  # whether the time of tied weights depends on the stages at both ends


def stage_needs(
    cost_model: CostModel, candidate: Candidate, memory_scale: float = 1.0, *, tied_counts: bool
) -> StageNeeds:
    """Return the memory and layers that the stages of a candidate need.

    Every device's memory is multiplied by ``memory_scale``; ``tied_counts`` tells whether the time
    of tied weights depends on the stages at both ends.
    """
    memory = cost_model.memory(candidate)
    sizes = {float(device.memory_bytes) for device in cost_model.experiment.cluster.device_types}
    starts = {
        size: memory.earliest_starts(np.full(candidate.pp, memory_scale * size))
        for size in sorted(sizes)
    }
    ruled = ruled_bounds(cost_model.experiment, candidate.pp)
    if ruled is not None:
        starts = {size: _only(ruled, start) for size, start in starts.items()}
    parameters = memory.weights.prefix.copy()
    if memory.weights.tied is not None and candidate.pp == 1:
        parameters[-1] -= memory.weights.tied.parameters
    return StageNeeds(
        earliest_start=starts,
        latest_start=latest_starts(cost_model.experiment),
        parameters=parameters,
        tied_counts=tied_counts,
    )


def _only(bounds: Sequence[int], earliest_start: IntArray) -> IntArray:
    """Restrict each stage to its end in ``bounds``."""
    ends = np.arange(earliest_start.shape[1])
    allowed = ends == np.array(bounds[1:])[:, None]
    return np.where(allowed, np.maximum(earliest_start, np.array(bounds[:-1])[:, None]), ends)


@dataclass(frozen=True, kw_only=True, eq=False)
class PlacementProblem:
    """All placements of one candidate, as a partition problem."""

    graph: FlatGraph  # places and options of every stage
    moves: tuple[ClassMoves, ...]  # steps of every class
    prices: Prices  # of devices and cuts
    needs: StageNeeds
    blocking: bool  # whether transfers block their stages

    @property
    def work(self) -> int:
        """Options times possible ends of their stages: the work per cap on the bottleneck."""
        return len(self.graph.source) * (self.problem.num_layers + 1 - len(self.graph.levels))

    def capped(self, cap_s: float, tied_s: float) -> Programme:
        """Return the programme in which no stage's step end exceeds a cap.

        Placements whose tied weights take longer than ``tied_s``, one of `tied_times_s`, are
        dropped; both ends of the pipeline are charged this time.
        """
        _, _, step_ends, ends = self._memory_keys[0].T
        tied = np.concatenate((self.tied_times_s, (0.0, 0.0)))
        middle, charged = (self._step_end_starts(cap_s, extra_s) for extra_s in (0.0, tied_s))
        limits = np.where(
            (ends == len(self.tied_times_s) + 1)[:, None], middle[step_ends], charged[step_ends]
        )
        nowhere = np.arange(limits.shape[1])
        limits = np.where((tied[ends] > tied_s)[:, None], nowhere, limits)
        return limited(self._programme, np.maximum(self._memory_rows, limits))

    @cached_property
    def _programme(self) -> Programme:
        return laid_out(self.problem)

    @cached_property
    def problem(self) -> PartitionProblem:
        """The problem without a cap on the step end."""
        priced, cuts = self._priced_devices[0], self.prices.cut_time_s
        num_layers = priced.time_prefix_s.shape[1] - 1
        cuts = cuts if len(cuts) else np.zeros((0, num_layers + 1))
        before, after = self.graph.cut_rows
        pairs, bottleneck_row = self._bottlenecks(before, after)
        padded = np.vstack([cuts, np.zeros((1, num_layers + 1))])
        # The outer columns stand for no cut. The solver is faster if they repeat their neighbours.
        padded[:, [0, -1]] = padded[:, [1, -2]]
        from_state, to_state = self.graph.ends
        return PartitionProblem(
            tables=StageTables(
                time_prefix_s=priced.time_prefix_s,
                cut_time_s=cuts,
                bottleneck_start_s=padded[pairs[:, 0]],
                bottleneck_end_s=padded[pairs[:, 1]],
                earliest_start=self._memory_rows,
                latest_start=self.needs.latest_start,
            ),
            options=OptionTable(
                time_row=priced.time_row[self._devices_of_option],
                from_state=from_state,
                to_state=to_state,
                cut_row=before,
                bottleneck_row=bottleneck_row,
                memory_row=self._memory_keys[1],
            ),
            num_micro_batches=self.prices.candidate.num_micro_batches,
        )

    def step_end_s(self, bounds: Sequence[int], options: Sequence[int], tied_s: float) -> float:
        """Return the longest step end of any stage; tied weights are charged to both ends."""
        kinds = self._step_end_of_devices[self._devices_of_option[list(options)]]
        step_ends = self._step_end_table[kinds, bounds[:-1], bounds[1:]]
        return float(max(step_ends.max(), step_ends[[0, -1]].max() + tied_s))

    @cached_property
    def tied_times_s(self) -> FloatArray:
        """Distinct times of the tied weights, ascending; 0 if no weight is tied."""
        return np.unique(self._tied_of_vertex)

    @cached_property
    def least_step_end_s(self) -> float:
        """Lower bound on the step end: one stage has an even share, one the largest layer."""
        held = self.needs.parameters
        most = max(float(np.diff(held).max()), float(held[-1]) / len(self.graph.levels))
        kinds = self._step_end_kinds
        return float((kinds[:, 0] + kinds[:, 1] * most).min())

    @cached_property
    def _tied_of_vertex(self) -> FloatArray:
        """Time of the tied weights by the last stage's vertex."""
        vertices = self.graph.levels[-1].states
        if not self.needs.tied_counts:
            return np.zeros(len(vertices))
        columns = [moves.ends_of_state[vertices[:, c]] for c, moves in enumerate(self.moves)]
        first, kind = distinct_rows(columns)
        kinds = np.stack(columns, axis=1)[first]
        times_s = [
            self.prices.tied_s(
                tuple(moves.ends[index] for moves, index in zip(self.moves, row, strict=True))
            )
            for row in kinds.tolist()
        ]
        return np.array(times_s)[kind]

    def _bottlenecks(self, before: IntArray, after: IntArray) -> tuple[IntArray, IntArray]:
        """Return the different pairs of cuts around a stage, and each option's pair."""
        if not self.blocking:
            return np.empty((0, 2), np.int64), np.full(len(before), NO_ROW)
        first, row = distinct_rows([before, after])
        return np.stack([before, after], axis=1)[first], row

    @cached_property
    def _priced_devices(self) -> tuple[DevicePrices, IntArray]:
        """Prices of the different sets of devices, and the set of each vertex."""
        vertices = np.concatenate([level.states for level in self.graph.levels])
        columns = [moves.devices_of_state[vertices[:, c]] for c, moves in enumerate(self.moves)]
        first, kind = distinct_rows(columns)
        kinds = np.stack(columns, axis=1)[first]
        sets = [
            tuple(moves.stage_devices[index] for moves, index in zip(self.moves, row, strict=True))
            for row in kinds.tolist()
        ]
        return self.prices.stage_devices(sets), kind

    @cached_property
    def _devices_of_option(self) -> IntArray:
        return self._priced_devices[1][self.graph.vertex]

    @cached_property
    def _step_end_kinds(self) -> FloatArray:
        """The different step ends, shape ``(num_step_ends, 2)``."""
        return np.unique(self._priced_devices[0].step_ends, axis=0)

    @cached_property
    def _step_end_of_devices(self) -> IntArray:
        _, kind = np.unique(self._priced_devices[0].step_ends, axis=0, return_inverse=True)
        return kind.reshape(-1).astype(np.int64)

    @cached_property
    def _step_end_table(self) -> FloatArray:
        """Seconds by step end, first layer and end, shape ``(num_step_ends, L + 1, L + 1)``."""
        held = self.needs.parameters
        inside = np.maximum(held[None, :] - held[:, None], 0.0)
        kinds = self._step_end_kinds
        return kinds[:, 0, None, None] + kinds[:, 1, None, None] * inside

    def _step_end_starts(self, cap_s: float, extra_s: float) -> IntArray:
        """Return the first start within the cap, by step end and end; the end if none is."""
        within = self._step_end_table + extra_s <= cap_s
        ends = np.arange(within.shape[1])
        within |= ends[:, None] >= ends
        starts: IntArray = within.argmax(axis=1)
        return starts

    @cached_property
    def _memory_keys(self) -> tuple[IntArray, IntArray]:
        """Distinct (stage, memory, step end, end) tuples, and each option's index into them."""
        priced = self._priced_devices[0]
        sizes = np.array(sorted(self.needs.earliest_start))
        size = np.searchsorted(sizes, priced.memory_bytes)[self._devices_of_option]
        step_end = self._step_end_of_devices[self._devices_of_option]
        ends = np.full(len(size), len(self.tied_times_s) + 1)
        if len(self.graph.levels) > 1:
            ends[self.graph.depth == 0] = len(self.tied_times_s)
        last = len(self.graph.levels[-1].states)
        ends[-last:] = np.searchsorted(self.tied_times_s, self._tied_of_vertex)
        columns = [self.graph.depth, size, step_end, ends]
        first, row = distinct_rows(columns)
        return np.stack([column[first] for column in columns], axis=1), row

    @cached_property
    def _memory_rows(self) -> IntArray:
        """Earliest starts by memory alone, a row per (stage, memory, step end, end)."""
        starts = [self.needs.earliest_start[size] for size in sorted(self.needs.earliest_start)]
        keys = self._memory_keys[0]
        return np.array(starts)[keys[:, 1], keys[:, 0]]


NARROWER: Final[tuple[tuple[Parts, bool], ...]] = (
    ("any", False),
    ("even", False),
    ("even", True),
    ("row", False),
    ("row", True),
)
"""Pairs of `Scope.parts` and `Scope.pure`, from all placements to the fewest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltProblem:
    """A partition problem, and the scope of its placements."""

    problem: PlacementProblem
    scope: Scope


def build_problem(
    cost_model: CostModel, candidate: Candidate, effort: SearchEffort = EFFORT
) -> BuiltProblem | None:
    """Build the problem of the placements of a candidate.

    Returns:
        The problem with the widest scope that is not too large. None if tensor-parallel groups do
        not fit into nodes, or if every scope is too large.
    """
    slots = [node.num_slots for node in cost_model.experiment.cluster.nodes]
    if (
        sum(count // candidate.options.tp * candidate.options.tp for count in slots)
        < candidate.num_devices
    ):
        return None
    for scope in _scopes(cost_model, candidate, effort):
        problem = build_within(cost_model, candidate, scope, effort)
        if problem is None:
            continue
        built = BuiltProblem(problem=problem, scope=scope)
        return _with_ends(cost_model, candidate, built, effort) or built
    return None


def build_within(
    cost_model: CostModel, candidate: Candidate, scope: Scope, effort: SearchEffort = EFFORT
) -> PlacementProblem | None:
    """Build the problem of a candidate's placements within a scope; None if there are too many."""
    cluster = cost_model.experiment.cluster
    classes = node_classes(cluster, candidate.options.tp, pairs_matter=scope.pairs)
    moves: list[ClassMoves] = []
    for node_class in classes:
        explored = class_moves(node_class, candidate.options.dp, scope, effort.max_class_steps)
        if explored is None:
            return None
        moves.append(explored)
    prices = Prices(cost_model=cost_model, candidate=candidate, classes=classes, effort=effort)
    grower = Grower(
        moves=tuple(moves),
        dp=candidate.options.dp,
        cut_rows=prices.cut_rows,
        scope=scope,
        effort=effort,
    )
    levels = grower.levels(candidate.pp)
    if levels is None:
        return None
    return PlacementProblem(
        graph=FlatGraph(levels=levels),
        moves=tuple(moves),
        prices=prices,
        needs=stage_needs(cost_model, candidate, tied_counts=scope.ends),
        blocking=cost_model.experiment.traits.blocking_transfers,
    )


def _scopes(cost_model: CostModel, candidate: Candidate, effort: SearchEffort) -> Iterator[Scope]:
    """Yield scopes, from all placements to fewer and fewer of them."""
    pairs = bool(cost_model.experiment.cluster.pair_links)
    num_ends = cost_model.experiment.model.num_layers + 1 - candidate.pp
    most = min(effort.max_options, effort.max_work_per_cap // num_ends)
    for parts, pure in NARROWER:
        for exact in dict.fromkeys((True, not pairs)):
            yield Scope(parts=parts, pure=pure, pairs=exact, max_options=most)


def _with_ends(
    cost_model: CostModel, candidate: Candidate, built: BuiltProblem, effort: SearchEffort
) -> BuiltProblem | None:
    """Rebuild the problem with the nodes of both ends in its states, if a weight is tied."""
    tied = cost_model.weights(candidate.options.tp).tied is not None and candidate.pp > 1
    if not tied or len(built.problem.graph.source) > effort.max_options_with_ends:
        return None
    most = min(built.scope.max_options, effort.max_options_with_ends)
    scope = replace(built.scope, ends=True, max_options=most)
    problem = build_within(cost_model, candidate, scope, effort)
    return None if problem is None else BuiltProblem(problem=problem, scope=scope)
