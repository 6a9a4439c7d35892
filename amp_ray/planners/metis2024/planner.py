"""The planner published as Metis (2024), applied to an experiment: its formulas, solved exactly.

Metis's own search is not reproduced, because it covers only some of the plans and lists some that
cannot run. Its plans are translated into strategies, and strategies into its plans.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from amp_ray.cost.estimate import Breakdown, Estimate, Infeasible, Reason, Result
from amp_ray.errors import InputError
from amp_ray.inputs.experiment import Experiment
from amp_ray.inputs.published_profile import PublishedProfile, layer_groups
from amp_ray.planners.metis2024.groups import UNLIMITED, MetisLimits
from amp_ray.planners.metis2024.plan import (
    MetisCost,
    MetisPlan,
    MetisSetting,
    metis_cost,
    metis_defects,
    rank_memory,
    stage_time_s,
)
from amp_ray.planners.metis2024.profile_export import published_profile
from amp_ray.planners.metis2024.search import MetisSearch
from amp_ray.planners.published import PublishedPlanner, free_groups
from amp_ray.search.planner import Candidates
from amp_ray.search.space import group_candidates
from amp_ray.strategies.candidate import AnyCandidate, GroupsCandidate
from amp_ray.strategies.recompute import NO_RECOMPUTE
from amp_ray.strategies.strategy import Stage, StageOptions, Strategy


@dataclass(frozen=True, kw_only=True, eq=False)
class MetisTranslation:
    """Translates Metis's plans for a cluster into strategies, and back."""

    setting: MetisSetting  # inputs of the published planner
    groups: Sequence[range]  # layers of the model that make up each layer of Metis

    def strategy(self, plan: MetisPlan) -> Strategy:
        """Convert a plan that places every layer and every sample into a strategy.

        A plan whose stages all have the same dp and share samples evenly needs no explicit shares.
        """
        shares = [self._shares(plan, stage) for stage in range(plan.pp)]
        is_even = len({(len(row), share) for row in shares for share in row}) == 1
        edges = [*(group.start for group in self.groups), self.groups[-1].stop]
        stages = tuple(
            Stage(
                first_layer=edges[first],
                end_layer=edges[end],
                options=StageOptions(dp=dp, tp=tp),
                shares=None if is_even else row,
            )
            for (first, end), (dp, tp), row in zip(
                pairwise(plan.bounds), plan.degrees, shares, strict=True
            )
        )
        return Strategy(
            stages=stages,
            micro_batch_size=shares[0][0] if is_even else sum(shares[0]),
            num_micro_batches=plan.num_micro_batches,
            placement=self._devices(plan.type_order),
        )

    def plan(self, strategy: Strategy) -> MetisPlan:
        """Convert a strategy into a plan.

        Raises:
            InputError: If the published planner cannot express it: it recomputes, leaves devices
                idle, returns to an earlier device type, cuts inside one of Metis's layers, or
                shares samples in another proportion.
        """
        if strategy.recompute != NO_RECOMPUTE:
            raise InputError("cost model metis-2024 knows no recompute")
        edges = {group.start: layer for layer, group in enumerate(self.groups)}
        edges[self.groups[-1].stop] = len(self.groups)
        inside = [bound for bound in strategy.bounds if bound not in edges]
        if inside:
            raise InputError(f"the published planner cuts at {sorted(edges)}, not at {inside[0]}")
        for stage in strategy.stages:
            dp, tp = stage.options.dp, stage.options.tp
            if dp * tp != stage.num_ranks:
                raise InputError(
                    f"dp {dp} x tp {tp} must be the {stage.num_ranks} devices of the stage"
                )
        plan = MetisPlan(
            type_order=self._type_order(strategy),
            degrees=tuple((stage.options.dp, stage.options.tp) for stage in strategy.stages),
            num_micro_batches=strategy.num_micro_batches,
            bounds=tuple(edges[bound] for bound in strategy.bounds),
        )
        for index, stage in enumerate(strategy.stages):
            shares = stage.shares or (strategy.micro_batch_size,) * stage.options.dp
            if shares != self._shares(plan, index):
                raise InputError(
                    f"stage {index} shares samples as {shares}, the published planner as "
                    f"{self._shares(plan, index)}"
                )
        return plan

    def _shares(self, plan: MetisPlan, stage: int) -> tuple[int, ...]:
        ranks = self.setting.data_ranks(plan, stage)
        if ranks is None:
            _, tp = plan.degrees[stage]
            raise InputError(f"stage {stage}: tp {tp} was not measured at micro-batch size 1")
        return tuple(rank.samples for rank in ranks)

    def _type_order(self, strategy: Strategy) -> tuple[str, ...]:
        cluster = self.setting.cluster
        kinds = [
            self.setting.node_types[cluster.node_of_device[device]] for device in strategy.placement
        ]
        order = tuple(dict.fromkeys(kinds))
        every = [self._kind(device) for device in self._devices(order)]
        if kinds != every or len(every) != cluster.num_devices:
            raise InputError(
                "the published planner uses every device, all of one type after the other; found "
                f"{len(kinds)} of {cluster.num_devices} devices: {', '.join(kinds)}"
            )
        return order

    def _devices(self, type_order: Sequence[str]) -> tuple[int, ...]:
        devices = range(self.setting.cluster.num_devices)
        return tuple(
            device for kind in type_order for device in devices if self._kind(device) == kind
        )

    def _kind(self, device: int) -> str:
        return self.setting.node_types[self.setting.cluster.node_of_device[device]]


@dataclass(frozen=True, kw_only=True, eq=False)
class Metis2024Planner(PublishedPlanner):
    """Plans and scores an experiment by the published formulas.

    The formulas know neither recompute nor ZeRO; the profile says how much memory a device needs.

    Raises:
        InputError: If the published formulas do not cover the experiment.
    """

    experiment: Experiment

    def __post_init__(self) -> None:
        """Raise if the published formulas do not cover the experiment."""
        experiment, limits = self.experiment, self.experiment.limits
        wrong = (
            "recompute: none"
            if experiment.recompute != NO_RECOMPUTE
            else "zero_stage: 0"
            if experiment.zero_stage
            else "no limits but search.max_tp and search.micro_batch_sizes"
            if limits.min_tp > 1 or limits.max_pp is not None or limits.max_dp is not None
            else f"a model of {self.published.num_layers} layers"
            if layer_groups(experiment.model, self.published.num_layers) is None
            else None
        )
        if wrong:
            message = f"cost model metis-2024 needs {wrong}; experiment {experiment.name!r} differs"
            raise InputError(message)

    @cached_property
    def published(self) -> PublishedProfile:
        """The profile in the published planner's form."""
        return published_profile(self.experiment)

    def candidates(self, _num_rows: int | None = None) -> Candidates:
        """Return one candidate per number of micro-batches; the formulas choose everything else."""
        return Candidates(required=group_candidates(self.experiment), are_whole_space=True)

    def plan(self, candidate: AnyCandidate) -> Result:
        """Return the best plan for a candidate's number of micro-batches, with a lower bound.

        Raises:
            InputError: If tp, dp and pp are chosen already.
        """
        groups = free_groups(candidate, "metis-2024")
        best = self.search.solve(groups.num_micro_batches)
        if isinstance(best, Reason):
            return Infeasible(candidate=candidate, reason=best)
        estimate = self._estimate(best.plan, best.cost)
        return replace(estimate, lower_bound_s=best.lower_bound_s)

    def score(self, strategy: Strategy) -> Result:
        """Estimate a strategy by the published formulas.

        Raises:
            InputError: If the published planner cannot express it.
        """
        plan = self.translation.plan(strategy)
        cost = metis_cost(self.setting, plan)
        if isinstance(cost, MetisCost):
            return self._estimate(plan, cost)
        batch, number = self.experiment.global_batch_size, plan.num_micro_batches
        candidate = GroupsCandidate(micro_batch_size=batch // number, num_micro_batches=number)
        return Infeasible(candidate=candidate, reason=cost)

    @cached_property
    def setting(self) -> MetisSetting:
        """The inputs of the published planner, from the experiment.

        Model-level values come from the first profile file in alphabetical order.
        """
        shape = self.experiment.model.shape
        return MetisSetting(
            cluster=self.experiment.cluster,
            profile=self.published,
            hidden_size=shape.hidden_size,
            sequence_length=shape.sequence_length,
            vocab_size=shape.vocab_size,
            global_batch_size=self.experiment.global_batch_size,
            listed_first=min(self.published.entries),
            first_node_counts=self.experiment.limits.first_node_counts,
        )

    @cached_property
    def search(self) -> MetisSearch:
        """The exact search within the limits of the experiment."""
        limits = self.experiment.limits
        slots = max(node.num_slots for node in self.experiment.cluster.nodes)
        return MetisSearch(
            setting=self.setting,
            limits=MetisLimits(
                max_tp=slots if limits.max_tp is None else limits.max_tp,
                max_size=max(limits.micro_batch_sizes or (UNLIMITED,)),
            ),
        )

    @cached_property
    def translation(self) -> MetisTranslation:
        """Converter between Metis's plans and our strategies."""
        groups = layer_groups(self.experiment.model, self.published.num_layers)
        assert groups is not None, "refused at the start"
        return MetisTranslation(setting=self.setting, groups=groups)

    def _estimate(self, plan: MetisPlan, cost: MetisCost) -> Estimate:
        setting, strategy = self.setting, self.translation.strategy(plan)
        times = [stage_time_s(setting, plan, stage) for stage in range(plan.pp)]
        slowest_s = max(time_s for time_s in times if not isinstance(time_s, Reason))
        busy_s = plan.num_micro_batches * slowest_s
        held = [_tightest(setting, plan, stage) for stage in range(plan.pp)]
        return Estimate(
            strategy=strategy,
            iteration_time_s=cost.total_s,
            breakdown=Breakdown(
                compute_s=busy_s + cost.rest_s,
                bubble_s=cost.execution_s - busy_s,
                pipeline_p2p_s=cost.pipeline_p2p_s,
                gradient_sync_s=cost.gradient_sync_s,
                optimizer_s=cost.optimizer_s,
                other_s=cost.batch_generator_s,
            ),
            peak_memory_bytes=tuple(needed for needed, _ in held),
            memory_limit_bytes=tuple(limit for _, limit in held),
            reasons=metis_defects(setting, plan),
            launchable=strategy.is_uniform,
        )


def _tightest(setting: MetisSetting, plan: MetisPlan, stage: int) -> tuple[float, float]:
    """Return need and memory in bytes of the devices of a stage with the least memory to spare."""
    ranks = setting.data_ranks(plan, stage) or ()
    holdings = [
        (needed, float(limit))
        for rank in ranks
        for held in [rank_memory(setting, plan, stage, rank)]
        if held is not None
        for needed, _, limit in [held]
    ]
    return min(holdings, key=lambda pair: pair[1] - pair[0], default=(0.0, 0.0))
