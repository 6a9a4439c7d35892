"""Oracle of the heterogeneous search: every plan on a small cluster, one by one."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, combinations, pairwise, permutations, product

import numpy as np

from amp_ray.arrays import FloatArray
from amp_ray.cost.model import CostModel
from amp_ray.search.stage_groups.device_groups import DeviceGroups, device_kinds
from amp_ray.search.stage_groups.group_options import GroupCosts, GroupOption
from amp_ray.search.stage_groups.groups_objective import blocked_s, cut_s
from amp_ray.strategies.candidate import GroupsCandidate
from amp_ray.strategies.strategy import Stage, Strategy

Taken = tuple[int, ...]
"""Number of devices of each kind that earlier stages have taken."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PlanOracle:
    """Compares all plans of one candidate: each stage takes the next devices of some kinds.

    The kinds come in any order within a stage. Cuts and shares of samples may be any.

    Args:
        cost_model: Cost model of a small experiment.
        candidate: Size and number of micro-batches, and recompute.
    """

    cost_model: CostModel
    candidate: GroupsCandidate
    _cuts: dict[tuple[int, int], FloatArray] = field(init=False, default_factory=dict)

    def best(self) -> tuple[float, Strategy | None]:
        """Return the smallest objective of a plan that fits, and a strategy that has it."""
        best: tuple[float, Strategy | None] = (math.inf, None)
        for groups in self._pipelines((0,) * len(self._rows), ()):
            for value_s, bounds in self._values(groups):
                if value_s < best[0]:
                    plan = self.plan(groups, bounds)
                    if self.cost_model.estimate(plan).feasible:
                        best = value_s, plan
        return best

    def plan(self, groups: Sequence[GroupOption], bounds: Sequence[int]) -> Strategy:
        """Return the strategy with these stages and cuts."""
        devices = tuple(tuple(group.device_group.devices.ravel().tolist()) for group in groups)
        uses = [(group.tp, group.shares) for group in groups]
        return wide_plan(self.candidate, devices, uses, bounds)

    def _pipelines(
        self, taken: Taken, later: tuple[GroupOption, ...]
    ) -> Iterator[tuple[GroupOption, ...]]:
        """Yield every pipeline that ends in the stages ``later``."""
        if later:
            yield later
        most = min(
            self.cost_model.experiment.limits.max_pp or math.inf,
            self.cost_model.experiment.model.num_layers,
        )
        if len(later) >= most:
            return
        lengths = [range(used, len(row) + 1) for used, row in zip(taken, self._rows, strict=True)]
        for after in product(*lengths):
            if after != taken:
                for group in self._groups(taken, after):
                    yield from self._pipelines(after, (group, *later))

    def _groups(self, taken: Taken, after: Taken) -> list[GroupOption]:
        """Return every stage on the devices between two states of taken devices."""
        if (taken, after) not in self._known:
            pieces = [
                row[len(row) - end : len(row) - used]
                for row, used, end in zip(self._rows, taken, after, strict=True)
                if end > used
            ]
            self._known[taken, after] = [
                use for order in permutations(pieces) for use in self._uses([*chain(*order)])
            ]
        return self._known[taken, after]

    @cached_property
    def _known(self) -> dict[tuple[Taken, Taken], list[GroupOption]]:
        """Cache of `_groups`, by the devices taken before and after the stage."""
        return {}

    def _uses(self, devices: list[int]) -> Iterator[GroupOption]:
        """Yield every tp within nodes, with every split of samples between kinds of devices."""
        node_of_device = self.cost_model.experiment.cluster.node_of_device
        kind_of_device = {device: kind for kind, row in enumerate(self._rows) for device in row}
        for tp in self._device_groups.tps:
            if len(devices) % tp:
                continue
            grid = np.array(devices).reshape(-1, tp)
            nodes = [{node_of_device[device] for device in row} for row in grid.tolist()]
            if any(len(row) > 1 for row in nodes):
                continue
            kinds = [kind_of_device[device] for device in grid[:, 0].tolist()]
            for shares in _splits(self.candidate.micro_batch_size, kinds):
                yield self._costs[False].option(self._device_groups.of_devices(grid), shares)

    def _values(self, groups: tuple[GroupOption, ...]) -> Iterator[tuple[float, tuple[int, ...]]]:
        """Yield the objective of every cut of a pipeline, computed as in `objective_s`."""
        experiment = self.cost_model.experiment
        nodes = self.cost_model.topology.node_of_device
        used = {
            node for group in groups for node in nodes[group.device_group.devices].ravel().tolist()
        }
        costs, num_layers = self._costs[len(used) == 1], experiment.model.num_layers
        times = [costs.slowest_s(group) for group in groups]
        cuts = [self._cut(left, right) for left, right in pairwise(groups)]
        for inner in combinations(range(1, num_layers), len(groups) - 1):
            bounds = (0, *inner, num_layers)
            yield self._value(costs, groups, times, cuts, bounds), bounds

    def _value(
        self,
        costs: GroupCosts,
        groups: tuple[GroupOption, ...],
        times: list[FloatArray],
        cuts: list[FloatArray],
        bounds: tuple[int, ...],
    ) -> float:
        """Return the objective of one plan."""
        experiment = self.cost_model.experiment
        took = [
            float(row[first:end].sum()) + experiment.constants.host_s_per_micro_batch
            for row, (first, end) in zip(times, pairwise(bounds), strict=True)
        ]
        sends = [float(row[cut]) for row, cut in zip(cuts, bounds[1:-1], strict=True)]
        blocked = [0.0] * len(took)
        if experiment.traits.blocking_transfers:
            blocked = blocked_s(self.cost_model, groups, bounds[1:-1], sends)
        slowest = max(own + cut for own, cut in zip(took, blocked, strict=True))
        step_ends = []
        for index, (group, (first, end)) in enumerate(zip(groups, pairwise(bounds), strict=True)):
            fixed_s, per = group.step_end
            is_end = len(groups) > 1 and index in (0, len(groups) - 1)
            held = float(self._device_groups.parameters[first:end].sum()) / group.tp
            step_ends.append(fixed_s + per * held + is_end * costs.tied_s(group.device_group))
        later = (self.candidate.num_micro_batches - 1) * slowest
        return (
            sum(took)
            + sum(sends)
            + later
            + max(step_ends)
            + experiment.constants.host_s_per_iteration
        )

    def _cut(self, left: GroupOption, right: GroupOption) -> FloatArray:
        """Return the times of all cuts between two stages, cached by the groups' identity."""
        key = id(left), id(right)
        if key not in self._cuts:
            self._cuts[key] = cut_s(
                self.cost_model,
                (left, right),
            )
        return self._cuts[key]

    @cached_property
    def _rows(self) -> tuple[tuple[int, ...], ...]:
        """Devices of each kind."""
        return device_kinds(self.cost_model.experiment.cluster, by_links=True)

    @cached_property
    def _device_groups(self) -> DeviceGroups:
        """Groups of devices, with the possible tp."""
        return DeviceGroups(cost_model=self.cost_model)

    @cached_property
    def _costs(self) -> dict[bool, GroupCosts]:
        """Costs of groups, by whether the whole plan is inside one node."""
        one = len(self.cost_model.experiment.cluster.nodes) == 1
        return {
            inside: GroupCosts(
                device_groups=self._device_groups, candidate=self.candidate, one_node=inside or one
            )
            for inside in (False, True)
        }


def _splits(num_samples: int, kinds: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield every way to share samples between kinds of devices, evenly within a kind.

    If a kind's samples are not divisible, its first ranks get one more.
    """
    runs = [(kind, kinds.count(kind)) for kind in dict.fromkeys(kinds)]
    for split in product(range(1, num_samples + 1), repeat=len(runs)):
        counts = [count for _, count in runs]
        if sum(split) == num_samples and all(
            samples >= count for samples, count in zip(split, counts, strict=True)
        ):
            yield tuple(
                samples // count + (place < samples % count)
                for samples, count in zip(split, counts, strict=True)
                for place in range(count)
            )


Groups = tuple[tuple[int, ...], ...]
"""Devices of every stage, in the order of their ranks."""

Use = tuple[int, tuple[int, ...]]
"""tp of a stage, and samples of its data-parallel ranks."""


def wide_plan(
    candidate: GroupsCandidate, groups: Groups, uses: Sequence[Use], bounds: Sequence[int]
) -> Strategy:
    """Return the plan whose stages have these devices, uses and layers."""
    shares = [samples for _, samples in uses]
    even = len(set(shares)) == 1 and len(set(shares[0])) == 1
    return Strategy(
        stages=tuple(
            Stage(
                first_layer=first,
                end_layer=end,
                options=replace(candidate.options, tp=tp, dp=len(samples)),
                shares=None if even else samples,
            )
            for (tp, samples), (first, end) in zip(uses, pairwise(bounds), strict=True)
        ),
        micro_batch_size=shares[0][0] if even else candidate.micro_batch_size,
        num_micro_batches=candidate.num_micro_batches,
        placement=tuple(device for own in groups for device in own),
    )
