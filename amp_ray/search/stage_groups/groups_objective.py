"""The objective by which plans with stage groups are compared before simulation.

A cut has an exact price for a pair of stages, and a lower bound if only one stage is fixed.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np

from amp_ray.arrays import FloatArray, IntArray
from amp_ray.cost.collective import start_s
from amp_ray.cost.kernels.stages import slowest_messages
from amp_ray.cost.messages import MessageModel
from amp_ray.cost.model import CostModel
from amp_ray.cost.stages import PlacedStages
from amp_ray.partition.rows import distinct_rows
from amp_ray.search.stage_groups.device_groups import DeviceGroup, DeviceGroups
from amp_ray.search.stage_groups.group_options import (
    Choices,
    GroupCosts,
    GroupOption,
    Shares,
    placed,
)
from amp_ray.strategies.candidate import GroupsCandidate
from amp_ray.strategies.strategy import Strategy


def objective_s(device_groups: DeviceGroups, strategy: Strategy) -> float:
    """Return the closed form of the time of a plan, the objective of the search.

    It adds up the time of all stages and cuts, the slowest stage once for each further micro-batch,
    and the longest step end. A layer takes as long as on the slowest rank of its stage. If
    transfers block, the time of the slowest stage includes the cut behind it and a lower bound on
    the cut before it. A step end is the gradient sync over the stage's rings plus the optimizer
    step. At both ends of the pipeline it also includes the sync of tied weights, as if the other
    end were equal and on the nearest other node. Parameters count as in `DeviceGroups.parameters`.
    """
    cost_model, stages = device_groups.cost_model, PlacedStages.of_strategy(strategy)
    nodes = set(cost_model.topology.node_of_device[list(strategy.placement)].tolist())
    (options,) = {replace(stage.options, tp=1, dp=1) for stage in strategy.stages}
    costs = GroupCosts(
        device_groups=device_groups,
        candidate=GroupsCandidate(
            micro_batch_size=sum(stages.shares[0]),
            num_micro_batches=strategy.num_micro_batches,
            options=options,
        ),
        one_node=len(nodes) == 1,
    )
    groups = [
        costs.option(costs.device_groups.of_devices(devices), shares)
        for devices, shares in zip(stages.grids, stages.shares, strict=True)
    ]
    experiment = cost_model.experiment
    took = [
        float(costs.slowest_s(group)[stage.first_layer : stage.end_layer].sum())
        + experiment.constants.host_s_per_micro_batch
        for group, stage in zip(groups, strategy.stages, strict=True)
    ]
    cuts = [
        float(cut_s(cost_model, pair)[cut])
        for pair, cut in zip(pairwise(groups), strategy.bounds[1:-1], strict=True)
    ]
    blocked = [0.0] * len(groups)
    if experiment.traits.blocking_transfers:
        blocked = blocked_s(cost_model, groups, strategy.bounds[1:-1], cuts)
    slowest = max(stage_s + cut for stage_s, cut in zip(took, blocked, strict=True))
    pipeline = sum(took) + sum(cuts) + (strategy.num_micro_batches - 1) * slowest
    return (
        pipeline
        + max(step_ends_s(costs, groups, strategy))
        + experiment.constants.host_s_per_iteration
    )


def cut_s(cost_model: CostModel, pair: tuple[GroupOption, GroupOption]) -> FloatArray:
    """Return the time of both messages between two stages, at every boundary.

    ``pair`` is the stage before the cut and the one after it.
    """
    both: FloatArray = cost_model.messages.between(*placed(pair)).everywhere()[0]
    return both


def blocked_s(
    cost_model: CostModel,
    groups: Sequence[GroupOption],
    inner: Sequence[int],
    cuts_s: Sequence[float],
) -> list[float]:
    """Return the time that cuts add to the bottleneck of every stage, if transfers block."""
    bounds = CutBounds(model=cost_model.messages)
    before = [0.0]
    for group, cut in zip(groups[1:], inner, strict=True):
        bound = bounds.bound(
            group.device_group, group.shares, other_nodes=group.device_group.begins_nodes
        )
        before.append(float(bounds.seconds(bound, behind=False)[cut]))
    return [before_s + cut for before_s, cut in zip(before, [*cuts_s, 0.0], strict=True)]


def step_ends_s(
    costs: GroupCosts, groups: Sequence[GroupOption], strategy: Strategy
) -> list[float]:
    """Return the step end of every stage."""
    last = len(groups) - 1
    times_s = []
    for index, (group, stage) in enumerate(zip(groups, strategy.stages, strict=True)):
        fixed_s, s_per_parameter = group.step_end
        held = float(costs.device_groups.parameters[stage.first_layer : stage.end_layer].sum())
        is_end = last > 0 and index in (0, last)
        tied_s = costs.tied_s(group.device_group) if is_end else 0.0
        times_s.append(fixed_s + s_per_parameter * held / stage.options.tp + tied_s)
    return times_s


@dataclass(frozen=True, kw_only=True, eq=False)
class CutPrices:
    """Prices the cuts between choices of one candidate."""

    choices: Choices  # possible stages on both sides
    model: MessageModel  # times messages

    def rows(self, before: IntArray, after: IntArray) -> tuple[FloatArray, IntArray]:
        """Return the times of the cuts between pairs of neighbouring choices.

        Choices have shape ``(N,)``; those after the cuts are on the neighbouring devices.

        Returns:
            Seconds of the different cuts at every boundary, first layer first, shape
            ``(num_rows, num_layers + 1)``; and the row of each cut.
        """
        option, count = self.choices.option, len(self.choices.options)
        _, first, pair = np.unique(
            option[before] * count + option[after], return_index=True, return_inverse=True
        )
        used, index = np.unique(np.concatenate((before[first], after[first])), return_inverse=True)
        pairs = np.ascontiguousarray(index.reshape(2, -1).T)
        ranks = self.choices.rank_table(self.model.topology, used)
        slowest = slowest_messages(pairs, ranks, self.model.topology.links, 1)[:, 0]
        chosen = option[np.stack([before[first], after[first]], axis=1)]
        slowest[:, 3] *= self.model.traits.mask_bytes > 0
        keys = np.concatenate(
            (self._tps[chosen], slowest, self._gathers[chosen].max(axis=1)), axis=1
        )
        columns = [np.unique(column, return_inverse=True)[1] for column in keys.T]
        distinct, row = distinct_rows([column for column in columns if column.any()] or columns[:1])
        keys = keys[distinct]
        gathers = keys[:, None, 6:] if self.model.slices else None
        messages = self.model.messages(keys[:, :2].astype(np.int64), keys[:, None, 2:6], gathers)
        return messages.everywhere(), row[pair.reshape(-1)]

    def least_rows(self, chosen: IntArray, *, behind: bool) -> tuple[FloatArray, IntArray]:
        """Return lower bounds on the times of cuts, given the stages on one side.

        ``behind`` tells whether the cuts come after the choices in the pipeline.

        Returns:
            As for `rows`.
        """
        at_nodes = self.choices.ends_at_nodes if behind else self.choices.begins_at_nodes
        key, row = np.unique(
            self.choices.option[chosen] * 2 + at_nodes[chosen], return_inverse=True
        )
        bounds = CutBounds(model=self.model)
        index: dict[CutBound, int] = {}
        rows = []
        for option, other_nodes in (divmod(value, 2) for value in key.tolist()):
            group = self.choices.options[option]
            bound = bounds.bound(group.device_group, group.shares, other_nodes=bool(other_nodes))
            rows.append(index.setdefault(bound, len(index)))
        seconds = np.array([bounds.seconds(bound, behind=behind) for bound in index])
        return seconds, np.array(rows)[row.reshape(-1)]

    @cached_property
    def _tps(self) -> IntArray:
        return np.array([option.tp for option in self.choices.options])

    @cached_property
    def _gathers(self) -> FloatArray:
        """Per option, latency and seconds per byte of a sample of its slowest gather."""
        if not self.model.slices:
            return np.zeros((len(self.choices.options), 2))
        return self.model.gathers(*placed(self.choices.options))[:, 0]


CutBound = tuple[int, float]
"""tp of a stage, and its seconds per byte of a sample sent or received."""


@dataclass(frozen=True, kw_only=True, eq=False)
class CutBounds:
    """Lower bounds on the messages between a stage and any other stage.

    Each rank must send its activations and receive their gradients, or the reverse.
    """

    model: MessageModel  # times messages

    def bound(self, group: DeviceGroup, shares: Shares, *, other_nodes: bool) -> CutBound:
        """Return the key of the price of a stage's cut.

        ``other_nodes`` tells whether the other stage is certainly on other nodes.
        """
        topology = self.model.topology
        grid = topology.node_of_device[group.devices]
        nodes, tp = grid[:, 0].tolist(), grid.shape[1]
        rates = topology.links.intra_bytes_per_s[topology.kind_of_node[nodes]].tolist()
        least = max(samples / rate for rate, samples in zip(rates, shares, strict=True))
        if other_nodes and (grid == grid[:, :1]).all():
            held: Counter[int] = Counter()
            for node, samples in zip(nodes, shares, strict=True):
                held[node] += tp * samples
            least = max(least, *(held[node] / self._best_rates[node] for node in held))
        return tp, least

    def seconds(self, bound: CutBound, *, behind: bool) -> FloatArray:
        """Return the least time of both messages at every boundary, shape ``(num_layers + 1,)``.

        The cut comes ``behind`` the stage in the pipeline, else before it.
        """
        tp, s_per_sample = bound
        model, traits = self.model, self.model.traits
        sliced = traits.sliced_gradients if behind else traits.sliced_activations
        sent = model.sample_bytes(1) / tp
        other = model.sample_bytes(tp) / (tp if sliced else 1)
        start = start_s(model.constants, traits) + model.topology.least_message_step_s
        both = start + s_per_sample * np.array([sent, other])
        least: FloatArray = both.max(axis=0) if traits.duplex_transfers else both.sum(axis=0)
        return least

    @cached_property
    def _best_rates(self) -> list[float]:
        """Fastest rate of each node to another node; infinite if it is the only node."""
        topology = self.model.topology
        rates = topology.links.inter_bytes_per_s
        between = rates.max(axis=1, where=topology.has_pair, initial=0.0)
        best: list[float] = np.where(between > 0.0, between, np.inf)[topology.kind_of_node].tolist()
        return best
