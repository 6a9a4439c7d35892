"""A lower bound on the time of every plan of a candidate.

Each kind of device has a weight, its capacity. Let ``t(y)`` be a lower bound on the time of a layer
with capacity ``y`` per sample, over every (kind, tp, samples): non-increasing and convex.
By Jensen's inequality, the mean time over a stage's samples is at least ``t(c / samples)`` per
layer, where ``c`` is the stage's capacity, and the stage takes at least this mean. If the samples
are split over parallel pipelines, the mean over these pipelines gives the same bound.

Stage ``j`` of a pipeline with ``q`` stages behind it runs ``q`` forwards ahead, so 1F1B takes at
least ``sum of stages + (m - 1) x time of j - min(m - 1, q) x forward of j``. The partition solver
minimises this over capacities and cuts. A stage that no node can hold also sends its gradients over
a network interface.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np

from amp_ray.arrays import FloatArray, IntArray
from amp_ray.cost.collective import NO_RING, Path, start_s
from amp_ray.cost.model import CostModel
from amp_ray.cost.stages import prefix_sums
from amp_ray.partition import NO_ROW, OptionTable, PartitionProblem, StageTables
from amp_ray.partition.problem import InfeasiblePartition
from amp_ray.partition.step_end import StepEndProblem, StepEndTerm, solve_with_step_end
from amp_ray.search.effort import EFFORT, SearchEffort
from amp_ray.strategies.candidate import GroupsCandidate, StageOptions


@dataclass(frozen=True, kw_only=True, eq=False)
class TimeBound:
    """Lower bounds on the time of plans of one experiment."""

    cost_model: CostModel  # of the experiment
    # Tensor-parallel degrees that its limits, nodes and model allow, ascending
    tps: tuple[int, ...]
    options: StageOptions  # of all stages, except tp and dp
    effort: SearchEffort = EFFORT

    def least_s(self, candidate: GroupsCandidate) -> float:
        """Return a lower bound on the seconds per iteration of any plan of a candidate."""
        experiment = self.cost_model.experiment
        problem = self._problem(candidate)
        solution = solve_with_step_end(problem, most_boxes=self.effort.max_bound_boxes)
        assert not isinstance(solution, InfeasiblePartition), "one stage may hold all layers"
        return solution.lower_bound_s + experiment.constants.host_s_per_iteration

    def _problem(self, candidate: GroupsCandidate) -> StepEndProblem:
        """Build the problem of stages by capacity and count of stages behind, from the last one."""
        experiment = self.cost_model.experiment
        num_layers, num_steps = experiment.model.num_layers, candidate.num_micro_batches
        most = self._most_stages - 1
        behind = [*range(min(self.effort.max_stages_behind, most)), most]
        hidden = np.array([min(num_steps - 1, count) / max(1, num_steps - 1) for count in behind])
        least = self._layer_s(self._sizes[1] / candidate.micro_batch_size)
        rows = np.concatenate([least[1] + (1 - share) * least[0] for share in hidden])
        count, size, ends = self._stages(len(behind))
        return StepEndProblem(
            problem=PartitionProblem(
                tables=StageTables(
                    time_prefix_s=prefix_sums(rows[:, ::-1]),
                    cut_time_s=np.full((1, num_layers + 1), self._cut_s),
                ),
                options=OptionTable(
                    time_row=count * len(self._sizes[0]) + size,
                    from_state=ends[0],
                    to_state=ends[1],
                    cut_row=np.where(count > 0, 0, NO_ROW),
                    overhead_s=experiment.constants.host_s_per_micro_batch * (1 - hidden[count]),
                ),
                num_micro_batches=num_steps,
                final_states=tuple(np.unique(ends[1]).tolist()),
            ),
            terms=(self._sync(size),),
        )

    def _stages(self, num_counts: int) -> tuple[IntArray, IntArray, IntArray]:
        """Return a stage of each size from each state: number of stages behind, size, both states.

        State 0 has no stage; the others hold the number of stages and the capacity that they use.
        """
        low, total = self._sizes[0], self._total
        rows = []
        for count in range(num_counts):
            used = np.arange(count * low[0], total) if count else np.zeros(1, np.int64)
            start, size = (grid.ravel() for grid in np.meshgrid(used, np.arange(len(low))))
            end = start + low[size]
            last = count == num_counts - 1
            repeats = last and num_counts < self._most_stages
            later = count if repeats else count + 1
            kept = end <= total
            ends = start + (total + 1) * count, end + (total + 1) * later
            stages = np.stack([np.full(len(size), count), size, *ends])[:, kept]
            rows.append(stages)
        count_row, size_row, *ends_rows = np.concatenate(rows, axis=1)
        return count_row, size_row, np.array(ends_rows)

    def _sync(self, size: IntArray) -> StepEndTerm:
        """Return the time of gradients between nodes, in a stage that no node can hold."""
        spans = np.zeros(len(size))
        cluster, limits = self.cost_model.experiment.cluster, self.cost_model.experiment.limits
        if len(cluster.nodes) > 1 and not limits.tp_across_nodes:
            held = [
                node.num_slots * self._capacity[self._kind_of_node[index]]
                for index, node in enumerate(cluster.nodes)
            ]
            rates, _ = self.cost_model.topology.between
            best = float(rates[~np.eye(len(rates), dtype=np.bool_)].max())
            ring, free = Path(bytes_per_s=best, step_s=0.0, num_nodes=2), NO_RING
            model, types = self.cost_model.step_end, range(len(cluster.device_types))
            device = model.slowest(types)
            pair = replace(self.options, dp=2)
            slope = model.line(pair, 2, [ring], device)[1] - model.line(pair, 2, [free], device)[1]
            spans[self._sizes[0][size] > max(held)] = max(0.0, slope)
        weights = self.cost_model.weights(1)
        parameters = np.diff(weights.prefix)
        if weights.tied is not None:
            parameters[weights.tied.last] -= weights.tied.parameters
        return StepEndTerm(
            weight_prefix=prefix_sums(parameters[None, ::-1])[0],
            s_per_weight=spans,
            fixed_s=np.zeros(len(size)),
        )

    @cached_property
    def _cut_s(self) -> float:
        """Least time of the messages across a cut."""
        model = self.cost_model.messages
        each_s = start_s(model.constants, model.traits) + float(model.links[1].min())
        return each_s if model.traits.duplex_transfers else 2 * each_s

    @property
    def _most_stages(self) -> int:
        experiment = self.cost_model.experiment
        most = min(experiment.model.num_layers, experiment.cluster.num_devices)
        return min(most, experiment.limits.max_pp or most)

    @cached_property
    def _kind_of_node(self) -> list[int]:
        """Kind of each node: nodes with equal devices and intra-node links are one kind."""
        nodes = self.cost_model.experiment.cluster.nodes
        number: dict[object, int] = {}
        return [number.setdefault((node.device, node.intra), len(number)) for node in nodes]

    @cached_property
    def _points(self) -> tuple[IntArray, FloatArray, FloatArray]:
        """Kinds of nodes, samples per device, and forward and backward seconds of distinct layers.

        Shapes ``(N,)``, ``(N,)`` and ``(2, N, num_distinct_layers)``.
        """
        experiment, topology = self.cost_model.experiment, self.cost_model.topology
        _, places = experiment.model.distinct_layers
        first = [places.index(number) for number in sorted(set(places))]
        points = []
        for kind in dict.fromkeys(self._kind_of_node):
            node = self._kind_of_node.index(kind)
            index = topology.type_of_device[list(topology.node_of_device).index(node)]
            for tp in self.tps:
                if (
                    tp > experiment.cluster.nodes[node].num_slots
                    and not experiment.limits.tp_across_nodes
                ):
                    continue
                ring = topology.ring((node,), tp, {}) if tp > 1 else NO_RING
                if experiment.limits.tp_across_nodes and tp > 1:
                    ring = Path(bytes_per_s=np.inf, step_s=0.0)
                options = replace(self.options, tp=tp)
                if experiment.profile.gap([experiment.cluster.device_types[index]], tp) is not None:
                    continue
                for low, high in pairwise(
                    _sample_counts(experiment.global_batch_size, self.effort)
                ):
                    table, _ = self.cost_model.time_tables.table((int(index),), ring, options, low)
                    steps = np.diff(table[:2], axis=1)[:, first]
                    points.append((kind, (high - 1) / tp, steps))
        kinds, samples, steps_s = zip(*points, strict=True)
        return np.array(kinds), np.array(samples), np.array(steps_s).transpose(1, 0, 2)

    @cached_property
    def _capacity(self) -> IntArray:
        """Capacity of a device of each kind of node: about its best samples per second."""
        kinds, samples, steps_s = self._points
        _, places = self.cost_model.experiment.model.distinct_layers
        counts = np.bincount(places)
        rate = samples / (steps_s.sum(axis=0) @ counts)
        speeds = np.array([rate[kinds == kind].max() for kind in range(kinds.max() + 1)])
        speeds /= speeds.min()
        nodes = self.cost_model.experiment.cluster.nodes
        all_s = sum(
            node.num_slots * speeds[kind]
            for node, kind in zip(nodes, self._kind_of_node, strict=True)
        )
        capacity = np.rint(speeds * max(1.0, self.effort.total_capacity / all_s)).astype(np.int64)
        divided: IntArray = capacity // np.gcd.reduce(capacity)
        return divided

    @cached_property
    def _total(self) -> int:
        nodes = self.cost_model.experiment.cluster.nodes
        held = self._capacity[self._kind_of_node]
        return int(
            sum(node.num_slots * capacity for node, capacity in zip(nodes, held, strict=True))
        )

    @cached_property
    def _sizes(self) -> tuple[IntArray, IntArray]:
        """Ranges of stage capacities: the least and the largest of each."""
        nodes = self.cost_model.experiment.cluster.nodes
        reached = np.zeros(self._total + 1, np.bool_)
        reached[0] = True
        for node, kind in zip(nodes, self._kind_of_node, strict=True):
            capacity = int(self._capacity[kind])
            for _ in range(node.num_slots):
                reached[capacity:] |= reached[:-capacity]
        low: list[int] = []
        high: list[int] = []
        for size in np.flatnonzero(reached)[1:].tolist():
            if len(low) < self.effort.exact_sizes or size > low[-1] * self.effort.sizes_step:
                low.append(size)
                high.append(size)
            high[-1] = size
        return np.array(low), np.array(high)

    @cached_property
    def _hulls(self) -> list[list[FloatArray]]:
        """Per pass and distinct layer, corners of the least time by capacity per sample."""
        kinds, samples, steps_s = self._points
        ratio = self._capacity[kinds] / samples
        return [[_lower_hull(ratio, column) for column in pass_s.T] for pass_s in steps_s]

    def _layer_s(self, ratio: FloatArray) -> FloatArray:
        """Return the least forward and backward seconds of layers, shape ``(2, N, num_layers)``.

        Args:
            ratio: Shape ``(N,)``. Capacity per sample.
        """
        _, places = self.cost_model.experiment.model.distinct_layers
        rows = [[np.interp(ratio, *corners) for corners in hulls] for hulls in self._hulls]
        return np.array(rows)[:, list(places)].transpose(0, 2, 1)


def _sample_counts(most: int, effort: SearchEffort) -> Iterator[int]:
    """Yield the samples of a rank to time, up to ``most`` + 1; times never fall in between."""
    count = 1
    while count <= most:
        yield count
        step = effort.samples_step if count >= effort.exact_samples else 1.0
        count = max(count + 1, int(count * step))
    yield most + 1


def _lower_hull(x: FloatArray, y: FloatArray) -> FloatArray:
    """Return the corners of the largest convex, non-increasing function below some points.

    Returns:
        Shape ``(2, num_corners)``, ascending in the first row.
    """
    corners: list[tuple[float, float]] = []
    for point in sorted(zip(x.tolist(), y.tolist(), strict=True)):
        if corners and point[1] >= corners[-1][1]:
            continue
        while len(corners) > 1 and _turns_up(corners[-2], corners[-1], point):
            corners.pop()
        corners.append(point)
    return np.array(corners).T


def _turns_up(first: Sequence[float], middle: Sequence[float], last: Sequence[float]) -> bool:
    """Return whether the middle of three points is not below the line between the others."""
    rise = (last[1] - first[1]) * (middle[0] - first[0])
    return (middle[1] - first[1]) * (last[0] - first[0]) >= rise
