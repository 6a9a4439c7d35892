"""Short chains of layers on few devices: try every plan by its simulated time.

Plans are tried in ascending order of a lower bound, the time of their slowest stage for all
micro-batches; plans whose bound is above the best simulated time are skipped. Each stage recomputes
by the cheapest pattern that fits, since a slower stage never makes a plan faster.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, combinations, pairwise
from math import comb
from typing import Final

import numpy as np

from amp_ray.arrays import FloatArray, IntArray
from amp_ray.cost.estimate import Estimate
from amp_ray.cost.stages import split_after
from amp_ray.search.ranking import leader_order
from amp_ray.search.space import recompute_choices
from amp_ray.search.stage_groups import DeviceGroups
from amp_ray.search.stage_groups.group_options import Choices, GroupCosts, GroupOption, all_choices
from amp_ray.strategies.candidate import Candidate, GroupsCandidate, with_kind
from amp_ray.strategies.recompute import AUTO, NO_RECOMPUTE, Recompute
from amp_ray.strategies.strategy import Stage, Strategy

MOST_PLANS: Final = 4_000
"""Limit on the number of plans; if there are more, the closed form plans instead."""

Path = tuple[int, ...]
"""Indices of choices of devices, one per stage from the first stage on."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ShortChains:
    """All plans of one candidate."""

    device_groups: DeviceGroups
    candidate: GroupsCandidate
    _chosen: dict[tuple[int, int, int, int, int], tuple[Recompute, ...]] = field(
        init=False, default_factory=dict
    )

    def best(self) -> Estimate | None:
        """Return the fastest plan that fits; None if none fits or there are too many to try."""
        plans = self._plans()
        best: Estimate | None = None
        for least_s, path, bounds in sorted(plans or ()):
            if best is not None and least_s > best.iteration_time_s:
                break
            for recompute in self._recomputes(path, bounds):
                estimate = self.device_groups.cost_model.estimate(
                    self._strategy(path, bounds, recompute)
                )
                # By time alone, safe or not: the bound holds for all of them.
                if estimate.feasible and (
                    best is None or leader_order(estimate)[1:] < leader_order(best)[1:]
                ):
                    best = estimate
        return best and replace(best, lower_bound_s=best.iteration_time_s)

    def _plans(self) -> list[tuple[float, Path, tuple[int, ...]]] | None:
        """List lower bound, devices and cuts of each plan; None if there are too many."""
        num_layers = self.device_groups.cost_model.experiment.model.num_layers
        paths: list[Path] = []
        number = 0
        for path in self._paths(0, ()):
            paths.append(path)
            number += comb(num_layers - 1, len(path) - 1)
            if number > MOST_PLANS:
                return None
        number = self.candidate.num_micro_batches
        plans = []
        for path in paths:
            took_s = [self._prefix_s[index] for index in self.choices.option[list(path)].tolist()]
            for inner in combinations(range(1, num_layers), len(path) - 1):
                bounds = (0, *inner, num_layers)
                stages = zip(took_s, pairwise(bounds), strict=True)
                least_s = max(float(row[end] - row[first]) for row, (first, end) in stages)
                plans.append((number * least_s, path, bounds))
        return plans

    def _paths(self, state: int, later: Path) -> Iterator[Path]:
        """Yield every path that ends with the stages of ``later``, by adding stages in front."""
        experiment = self.device_groups.cost_model.experiment
        most = min(
            experiment.limits.max_pp or experiment.model.num_layers, experiment.model.num_layers
        )
        if state in self.choices.graph.final_states:
            yield later
        if len(later) < most:
            for choice in np.flatnonzero(self.choices.from_state == state).tolist():
                yield from self._paths(int(self.choices.to_state[choice]), (choice, *later))

    @cached_property
    def choices(self) -> Choices:
        """Choices of devices for a stage."""
        return all_choices(self._costs.device_groups.graphs[0][0], self._costs)

    @cached_property
    def _costs(self) -> GroupCosts:
        graph, _ = self.device_groups.graphs[0]
        return GroupCosts(
            device_groups=self.device_groups,
            candidate=with_kind(self.candidate, NO_RECOMPUTE),
            one_node=False,
            offers_all=graph.is_small,
        )

    @cached_property
    def _prefix_s(self) -> list[FloatArray]:
        return [
            np.concatenate(([0.0], np.cumsum(self._costs.slowest_s(option))))
            for option in self.choices.options
        ]

    @cached_property
    def _settings(self) -> tuple[Recompute, ...]:
        recompute = self.candidate.options.recompute
        experiment = self.device_groups.cost_model.experiment
        return recompute_choices(experiment) if recompute == AUTO else (recompute,)

    def _recomputes(self, path: Path, bounds: tuple[int, ...]) -> Iterator[tuple[Recompute, ...]]:
        """Yield the recompute settings of a plan's stages; nothing if a stage does not fit."""
        options = self.choices.option[list(path)].tolist()
        fitting = [
            self._fitting(option, stage, len(path), first, end)
            for stage, (option, (first, end)) in enumerate(
                zip(options, pairwise(bounds), strict=True)
            )
        ]
        if not all(fitting):
            return
        if self._differs:
            yield tuple(setting[0] for setting in fitting)
            return
        for setting in fitting[0]:
            if all(setting in other for other in fitting):
                yield (setting,) * len(path)

    def _fitting(
        self, option: int, stage: int, pp: int, first: int, end: int
    ) -> tuple[Recompute, ...]:
        key = option, stage, pp, first, end
        if key not in self._chosen:
            group, blocks = self.choices.options[option], self._blocks
            most = int(blocks[end] - blocks[first])
            fitting = self._settings
            if self._differs:
                fitting = tuple(
                    dict.fromkeys(
                        setting
                        if setting.layers is None or setting.layers < most
                        else setting.whole
                        for setting in fitting
                    )
                )
            order = sorted(
                fitting, key=lambda setting: (self._extra_s(group, setting, first, end), setting)
            )
            self._chosen[key] = tuple(
                setting
                for setting in order
                if self._fits(group, setting, (stage, pp), (first, end))
            )
        return self._chosen[key]

    def _fits(
        self, group: GroupOption, setting: Recompute, place: tuple[int, int], ends: tuple[int, int]
    ) -> bool:
        stage, pp = place
        for samples, limit_bytes in group.needs:
            candidate = Candidate(
                micro_batch_size=samples,
                options=replace(group.options, recompute=setting),
                pp=pp,
                num_micro_batches=self.candidate.num_micro_batches,
            )
            memory = self.device_groups.cost_model.memory(candidate)
            if memory.peak(stage, *ends) > limit_bytes:
                return False
        return True

    def _extra_s(self, group: GroupOption, setting: Recompute, first: int, end: int) -> float:
        if setting == NO_RECOMPUTE:
            return 0.0
        costs = replace(self._costs, candidate=with_kind(self.candidate, setting.whole))
        more_s = costs.slowest_s(group) - self._costs.slowest_s(group)
        split = int(split_after(self._blocks, first, end, setting))
        return float(more_s[first:split].sum())

    @property
    def _differs(self) -> bool:
        return self.device_groups.cost_model.experiment.traits.recompute_per_stage

    @cached_property
    def _blocks(self) -> IntArray:
        return np.array(self.device_groups.cost_model.experiment.model.block_counts)

    def _strategy(
        self, path: Path, bounds: tuple[int, ...], recompute: tuple[Recompute, ...]
    ) -> Strategy:
        groups = [self.choices.options[index] for index in self.choices.option[list(path)].tolist()]
        shares = [group.shares for group in groups]
        even = len({len(row) for row in shares}) == len(set(chain(*shares))) == 1
        stages = tuple(
            Stage(
                first_layer=first,
                end_layer=end,
                options=replace(group.options, recompute=setting),
                shares=None if even else group.shares,
            )
            for (first, end), group, setting in zip(
                pairwise(bounds), groups, recompute, strict=True
            )
        )
        return Strategy(
            stages=stages,
            micro_batch_size=shares[0][0] if even else self.candidate.micro_batch_size,
            num_micro_batches=self.candidate.num_micro_batches,
            placement=tuple(device for choice in path for device in self.choices.devices(choice)),
        )
