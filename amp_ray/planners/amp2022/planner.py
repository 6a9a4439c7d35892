"""The planner published as AMP (2022): its predicted times, its cuts and its plans.

Kept to reproduce its published figures and to compare with them. The predicted time is

    T = sum(e) + (B - 1) * max(stage) + sum(boundary at the cuts) + max(gradient sync)

with ``e`` three times the forward time of a micro-batch and ``B`` the number of
micro-batches. As in the artifact, a boundary counts once, forward only, and the all-reduce runs at
the bandwidth of its ring's last hop.

With one micro-batch, the planner splits the transformer layers evenly. With more, it runs a dynamic
programme over (first layers, cuts, slowest stage to the right). That programme is *not* an exact
solver: it stores the value of an alternative without the cost of its last cut, and compares it with
the next alternative including its last cut. The rule is reproduced because the published partitions
follow from it; `amp_ray`'s own planner does not use it.

References:
    Li et al., AMP, arXiv:2210.07297, and its public artifact.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from amp_ray.arrays import FloatArray, IntArray
from amp_ray.cost.estimate import Breakdown, Estimate, Infeasible, Reason, Result
from amp_ray.errors import InputError
from amp_ray.inputs.experiment import Experiment
from amp_ray.planners.amp2022.chain import (
    Chain,
    gpt2_chain,
    list_bounds,
    transgan_chain,
    work_bounds,
)
from amp_ray.planners.published import PublishedPlanner
from amp_ray.search.planner import Candidates
from amp_ray.search.space import uniform_candidates
from amp_ray.strategies.candidate import AnyCandidate, Candidate
from amp_ray.strategies.recompute import FULL, NO_RECOMPUTE
from amp_ray.strategies.strategy import Strategy, candidate_of
from amp_ray.units import BYTES_PER_FP32

FORWARD_AND_BACKWARD = 3
"""The artifact takes the backward pass as twice the forward pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Cluster properties that the published planner uses."""

    node_of_rank: tuple[int, ...]  # shape ``(num_ranks,)``. Index of the node of each rank.
    inter_bytes_per_s: tuple[float, ...]  # shape ``(num_nodes,)``. Between this node and others.
    # Shape ``(num_nodes,)``. Between two devices of this node.
    intra_bytes_per_s: tuple[float, ...]

    def elements_per_s(self, source_node: IntArray, target_node: IntArray) -> FloatArray:
        """Look up the links between nodes, in fp32 elements per second."""
        inter = np.array(self.inter_bytes_per_s)
        intra = np.array(self.intra_bytes_per_s)
        between = np.minimum(inter[source_node], inter[target_node])
        bytes_per_s = np.where(source_node == target_node, intra[source_node], between)
        return np.asarray(bytes_per_s / BYTES_PER_FP32, dtype=np.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class AmpTimes:
    """The published planner's times for one candidate."""

    fill_s: float  # first micro-batch, through all stages, ``sum(e)``
    steady_s: float  # other micro-batches, in the slowest stage, ``(B - 1) * max(stage)``
    pipeline_p2p_s: float  # time across the cuts, once
    gradient_sync_s: float  # data-parallel cost

    @property
    def iteration_time_s(self) -> float:
        """Seconds per global batch."""
        return self.fill_s + self.steady_s + self.pipeline_p2p_s + self.gradient_sync_s


def predict_bounds(
    candidate: Candidate,
    bounds: tuple[int, ...],
    forward_s: FloatArray,
    chain: Chain,
    network: Network,
) -> AmpTimes:
    """Predict the time of a candidate with given bounds.

    ``bounds`` count entries of the published list; ``forward_s``, shape ``(num_entries,)``, is one
    sample's forward at the candidate's ``tp``.

    Raises:
        ValueError: If the bounds do not fit the chain, or the candidate not the network.
    """
    cuts = work_bounds(chain, bounds)
    layer_s = layer_time_s(candidate, forward_s, chain)
    boundary_s = boundary_time_s(candidate, chain, network)
    stage_s = np.add.reduceat(layer_s, cuts[:-1])
    crossed = [boundary_s[cut - 1, stage] for stage, cut in enumerate(cuts[1:-1])]
    return AmpTimes(
        fill_s=float(layer_s.sum()),
        steady_s=float((candidate.num_micro_batches - 1) * stage_s.max()),
        pipeline_p2p_s=float(sum(crossed)),
        gradient_sync_s=_gradient_sync_s(candidate, cuts, chain, network),
    )


def layer_time_s(candidate: Candidate, forward_s: FloatArray, chain: Chain) -> FloatArray:
    """Return both passes of one micro-batch through each work layer, shape ``(num_layers,)``."""
    work_s = forward_s[np.array(chain.work_entries)]
    return np.asarray(candidate.micro_batch_size * FORWARD_AND_BACKWARD * work_s)


def boundary_time_s(candidate: Candidate, chain: Chain, network: Network) -> FloatArray:
    """Return the time of a cut after each layer, for each pair of neighbouring stages.

    Returns:
        Shape ``(num_layers, pp - 1)``. The slowest link of the tp ranks counts; the dp indices are
        averaged.
    """
    node = _node_of_rank(candidate, network)
    slowest = network.elements_per_s(node[:-1], node[1:]).min(axis=2)
    shrink = np.where(chain.boundary_split_by_tp, candidate.options.tp, 1)
    elements = candidate.micro_batch_size * np.array(chain.boundary_elements) / shrink
    return np.asarray((elements[:, None, None] / slowest).mean(axis=2))


def _node_of_rank(candidate: Candidate, network: Network) -> IntArray:
    """Return the node of each rank, shape ``(pp, dp, tp)``."""
    shape = (candidate.pp, candidate.options.dp, candidate.options.tp)
    if np.prod(shape) != len(network.node_of_rank):
        msg = (
            f"pp={shape[0]} * dp={shape[1]} * tp={shape[2]} = {np.prod(shape)} ranks, the network "
            f"has {len(network.node_of_rank)}: every rank needs one device"
        )
        raise ValueError(msg)
    return np.array(network.node_of_rank, dtype=np.intp).reshape(shape)


def _gradient_sync_s(
    candidate: Candidate, cuts: tuple[int, ...], chain: Chain, network: Network
) -> float:
    """Return the ring all-reduce of the largest stage, at the bandwidth of the ring's last hop."""
    node = _node_of_rank(candidate, network)
    last_hop = network.elements_per_s(node[:, -1], node[:, 0])
    parameters = np.add.reduceat(np.array(chain.layer_parameters), cuts[:-1])
    for stage, (first, end) in enumerate(pairwise(cuts)):
        if any(first <= layer < end for layer in chain.embedding_layers):
            parameters[stage] += chain.embedding_parameters
    share = parameters[:, None] / candidate.options.tp
    ring = 2 * (candidate.options.dp - 1) / (candidate.options.dp * last_hop)
    return float((ring * share).max())


def even_bounds(
    num_layers: int, num_stages: int, first_extra: int, last_extra: int
) -> tuple[int, ...]:
    """Split the transformer layers evenly: the rule for one micro-batch.

    The first ``num_layers % num_stages`` stages get one more layer; then the layers outside the
    transformer go to the first and to the last stage.

    Returns:
        Half-open bounds of length ``num_stages + 1``.

    Example:
        >>> even_bounds(24, 4, 2, 4)
        (0, 8, 14, 20, 30)
    """
    share, rest = divmod(num_layers, num_stages)
    inner = (first_extra + stage * share + min(stage, rest) for stage in range(1, num_stages))
    return (0, *inner, first_extra + num_layers + last_extra)


def published_bounds(
    layer_time_s: FloatArray, boundary_time_s: FloatArray, num_micro_batches: int
) -> tuple[int, ...]:
    """Cut a chain by the published dynamic programme: the rule for several micro-batches.

    With ``i`` the layers to the left, ``j`` their cuts and ``m`` the slowest
    stage to their right (0 or the time of any run of layers)::

        value(i, 0, m) = (B - 1) * max(0, time[0:i] - m)
        for k = j, ..., i - 1:             # the last cut, ascending
            kept = value(k, j - 1, max(time[k:i], m)) + (B - 1) * max(0, time[k:i] - m)
            if kept + boundary(k, j) < value(i, j, m):
                value(i, j, m) = kept      # without the boundary: the published quirk

    The function computes only the states that the answer ``(num_layers, num_stages - 1, 0)`` can
    reach, for all ``m`` and all ``i`` of one ``(j, k)`` at a time.

    Args:
        layer_time_s: Shape ``(num_layers,)``. Forward plus backward of one micro-batch.
        boundary_time_s: Shape ``(num_layers, num_stages - 1)``. Entry ``[l, j]`` is the
            time across a cut after layer ``l`` that ends stage ``j``.
        num_micro_batches: ``B``, per data-parallel replica.

    Returns:
        Half-open bounds of length ``num_stages + 1``.


    Example:
        Cuts after layer 1 and after layer 2 have the same stored value 4, so the first one stays,
        although its boundary makes it 10 s slower.

        >>> boundary = np.array([[10.0], [0.0], [0.0]])
        >>> published_bounds(np.array([2.0, 2.0, 2.0]), boundary, 2)
        (0, 1, 3)
    """
    num_layers, num_stages = len(layer_time_s), boundary_time_s.shape[1] + 1
    if num_stages == 1:
        return (0, num_layers)
    tables = _Tables.build(layer_time_s, num_stages, num_micro_batches)
    values = tables.first_level()
    chosen: list[IntArray] = []
    for level in range(1, num_stages - 1):
        values, cuts = _next_level(tables, level, values, boundary_time_s[:, level - 1])
        chosen.append(cuts)
    last_cut = _last_cut(tables, values, boundary_time_s[:, num_stages - 2])
    return _trace_back(tables, chosen, last_cut)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tables:
    num_stages: int  # stages to cut into
    slack: int  # layers beyond one per stage; level ``j`` holds ``i = j + 1 ... j + 1 + slack``.
    num_waits: int  # ``num_micro_batches - 1``
    # Shape ``(num_layers + 1, num_layers + 1)``. Time of layers ``[k, i)``, else 0.
    run_s: FloatArray
    slowest_s: FloatArray  # shape ``(n,)``. Sorted distinct times of all runs, and 0.
    index: IntArray  # shape of ``run_s``. Index of each run's time in ``slowest_s``.

    @classmethod
    def build(cls, layer_time_s: FloatArray, num_stages: int, num_micro_batches: int) -> "_Tables":
        """Sum every run of layers once."""
        num_layers = layer_time_s.shape[0]
        run_s = np.zeros((num_layers + 1, num_layers + 1))
        for first in range(num_layers):
            np.cumsum(layer_time_s[first:], out=run_s[first, first + 1 :])
        slowest_s, index = np.unique(run_s, return_inverse=True)
        return cls(
            num_stages=num_stages,
            slack=num_layers - num_stages,
            num_waits=num_micro_batches - 1,
            run_s=run_s,
            slowest_s=slowest_s,
            index=index.reshape(run_s.shape),
        )

    def first_level(self) -> FloatArray:
        """Value of one stage ``[0, i)`` for each ``i`` of level 0 and each slowest stage."""
        first_stage_s = self.run_s[0, 1 : self.slack + 2, None]
        return self.num_waits * np.maximum(first_stage_s - self.slowest_s, 0.0)


def _next_level(
    tables: _Tables, level: int, before: FloatArray, cut_time_s: FloatArray
) -> tuple[FloatArray, IntArray]:
    """Add one cut: compute values and last cuts of ``level`` from the values of ``level - 1``."""
    width = tables.slack + 1
    slowest_s = tables.slowest_s[: tables.index[level + 1 :].max() + 1]  # of layers to the right
    columns = np.arange(slowest_s.size)
    values = np.full((width, slowest_s.size), np.inf)
    cuts = np.zeros((width, slowest_s.size), dtype=np.intp)
    for row in range(width):
        cut = level + row
        ends = slice(cut + 1, level + 1 + width)
        stage_s = tables.run_s[cut, ends, None]
        kept = before[row][np.maximum(tables.index[cut, ends, None], columns)]
        kept += tables.num_waits * np.maximum(stage_s - slowest_s, 0.0)
        better = kept + cut_time_s[cut - 1] < values[row:]
        np.copyto(values[row:], kept, where=better)
        np.copyto(cuts[row:], cut, where=better)
    return values, cuts


def _last_cut(tables: _Tables, before: FloatArray, cut_time_s: FloatArray) -> int:
    """Choose the cut before the last stage, which has nothing to its right."""
    num_layers = cut_time_s.shape[0]
    value, chosen = np.inf, 0
    for row in range(tables.slack + 1):
        cut = tables.num_stages - 1 + row
        kept = before[row, tables.index[cut, num_layers]]
        kept += tables.num_waits * tables.run_s[cut, num_layers]
        if kept + cut_time_s[cut - 1] < value:
            value, chosen = kept, cut
    return chosen


def _trace_back(tables: _Tables, chosen: list[IntArray], last_cut: int) -> tuple[int, ...]:
    num_layers = tables.run_s.shape[0] - 1
    bounds = [num_layers, last_cut]
    slowest = tables.index[last_cut, num_layers]
    for level in range(tables.num_stages - 2, 0, -1):
        end = bounds[-1]
        cut = int(chosen[level - 1][end - level - 1, slowest])
        slowest = max(slowest, tables.index[cut, end])
        bounds.append(cut)
    return (0, *reversed(bounds))


def mean_forward_s(forward_s: Sequence[FloatArray], num_devices: Sequence[int]) -> FloatArray:
    """Average the layers' times over the device types of a cluster, as the paper does.

    Example:
        >>> mean_forward_s([np.array([1.0, 2.0]), np.array([5.0, 2.0])], [3, 1])
        array([2., 2.])
    """
    total = sum(num_devices)
    mean = np.zeros_like(forward_s[0], dtype=np.float64)
    for times, count in zip(forward_s, num_devices, strict=True):
        mean += count / total * times
    return mean


def planned_bounds(
    candidate: Candidate, forward_s: FloatArray, chain: Chain, network: Network
) -> tuple[int, ...]:
    """Cut one candidate by the published rule, in entries of the published list.

    ``forward_s``, shape ``(num_entries,)``, is one sample's forward at the candidate's ``tp``.
    """
    if candidate.num_micro_batches == 1:
        cuts = even_bounds(chain.num_transformer_layers, candidate.pp, *chain.even_split_extra)
    else:
        cuts = published_bounds(
            layer_time_s(candidate, forward_s, chain),
            boundary_time_s(candidate, chain, network),
            candidate.num_micro_batches,
        )
    return list_bounds(chain, cuts)


@dataclass(frozen=True, kw_only=True, eq=False)
class Amp2022Planner(PublishedPlanner):
    """Plans and scores an experiment with the published planner.

    That planner models neither memory nor failures, and averages the layer times of all devices.

    Raises:
        InputError: If the published planner cannot take the experiment.
    """

    experiment: Experiment  # has a measured profile, and nodes with equal slots

    def __post_init__(self) -> None:
        """Raise if the published formulas do not cover the experiment."""
        slots = {node.num_slots for node in self.experiment.cluster.nodes}
        wrong = (
            "a measured profile (profile: {source: table, ...})"
            if not self.experiment.profile.is_measured
            else "the same number of slots on every node"
            if len(slots) > 1
            else "recompute none or full"
            if self.experiment.recompute not in {NO_RECOMPUTE, FULL}
            else "model.layer_list: amp-2022"
            if self.experiment.model.num_layers != self._chain.num_entries
            else None
        )
        if wrong:
            raise InputError(
                f"cost model amp-2022 needs {wrong}; experiment {self.experiment.name!r} differs"
            )

    def candidates(self, _num_rows: int | None = None) -> Candidates:
        """Return the uniform space; the published planner places ranks in order of the nodes."""
        return Candidates(required=uniform_candidates(self.experiment))

    def plan(self, candidate: AnyCandidate) -> Result:
        """Partition by the published rule, and predict the time."""
        assert isinstance(candidate, Candidate)
        chain = self._chain
        single = candidate.num_micro_batches == 1
        available = chain.num_transformer_layers if single else chain.num_layers
        if candidate.pp > available:
            detail = f"pp {candidate.pp}, {available} layers with work"
            return Infeasible(
                candidate=candidate, reason=Reason(kind="more stages than layers", detail=detail)
            )
        forward_s = self._forward_s(candidate.options.tp)
        bounds = planned_bounds(candidate, forward_s, chain, self._network)
        return self._estimate(candidate, Strategy.uniform(candidate, bounds))

    def score(self, strategy: Strategy) -> Result:
        """Predict the time of a strategy at its own cuts.

        Raises:
            InputError: If its stages differ.
        """
        try:
            candidate = candidate_of(strategy)
        except ValueError as error:
            raise InputError(str(error)) from None
        return self._estimate(candidate, strategy)

    def _estimate(self, candidate: Candidate, strategy: Strategy) -> Estimate:
        forward_s = self._forward_s(candidate.options.tp)
        times = predict_bounds(candidate, strategy.bounds, forward_s, self._chain, self._network)
        busy_s = times.fill_s * strategy.num_micro_batches / strategy.pp
        return Estimate(
            strategy=strategy,
            iteration_time_s=times.iteration_time_s,
            breakdown=Breakdown(
                compute_s=busy_s,
                bubble_s=times.fill_s + times.steady_s - busy_s,
                pipeline_p2p_s=times.pipeline_p2p_s,
                gradient_sync_s=times.gradient_sync_s,
            ),
        )

    @cached_property
    def _chain(self) -> Chain:
        try:
            return self._published_chain()
        except ValueError as error:
            raise InputError(str(error)) from None

    def _published_chain(self) -> Chain:
        shape = self.experiment.model.shape
        if shape.family == "gpt2":
            return gpt2_chain(
                num_layers=shape.num_layers,
                hidden_size=shape.hidden_size,
                sequence_length=shape.sequence_length,
                vocab_size=shape.vocab_size,
            )
        if shape.family == "transgan":
            return transgan_chain(
                depth=shape.depth, hidden_size=shape.hidden_size, bottom_width=shape.bottom_width
            )
        raise InputError(f"cost model amp-2022 knows gpt2 and transgan, not {shape.family!r}")

    @cached_property
    def _network(self) -> Network:
        cluster = self.experiment.cluster
        return Network(
            node_of_rank=cluster.node_of_device,
            inter_bytes_per_s=tuple(node.inter.bandwidth_bytes_per_s for node in cluster.nodes),
            intra_bytes_per_s=tuple(node.intra.bandwidth_bytes_per_s for node in cluster.nodes),
        )

    def _forward_s(self, tp: int) -> FloatArray:
        """Average one sample's forward times over the devices of the cluster."""
        cluster = self.experiment.cluster
        times = []
        for device in cluster.device_types:
            anchors = self.experiment.profile.anchors(device, tp)
            if 1 not in anchors:
                message = f"cost model amp-2022 needs micro_batch_size 1, found {sorted(anchors)}"
                raise InputError(message)
            times.append(anchors[1].forward_s)
        counts = [cluster.type_of_device.count(index) for index in range(len(times))]
        return mean_forward_s(times, counts)
