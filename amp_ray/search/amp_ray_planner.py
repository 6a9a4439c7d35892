"""Our planner: it cuts each candidate into stages by its costs, and estimates the result.

Workers map `AmpRayPlanner.plan` over all candidates; the search then ranks the results
(`runtime.ray.searching`).

`SpacePlanner` chooses cuts and devices of a candidate. The experiment's space decides between
uniform stages on devices in hostfile order, uniform stages on any devices, and stage groups.
`ChooseRecompute` and `ChooseZero` are wrappers that each choose one further dimension: if the
candidate leaves it open, the wrapper plans every value and keeps the best plan; a fixed value is
passed on.
"""

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar, Final, Protocol, Self

from amp_ray.clusters.cluster import Cluster
from amp_ray.cost.estimate import Estimate, Infeasible, Reason, Result
from amp_ray.cost.model import CostModel, SampleCosts
from amp_ray.cost.stages import without_context
from amp_ray.cost.timeline import Timeline, predicted_timeline
from amp_ray.inputs.experiment import Experiment
from amp_ray.memo import memoised
from amp_ray.partition.problem import even_bounds
from amp_ray.search.cuts import best_bounds, roomiest_bounds, ruled_bounds
from amp_ray.search.effort import EFFORT, SearchEffort
from amp_ray.search.grid_bounds import GridBounds
from amp_ray.search.placement import plan_listed, plan_placements, reorder, simple_plans
from amp_ray.search.planner import Candidates, OptionalCandidates, PlannerTraits
from amp_ray.search.ranking import is_risky, leader_order, why_none
from amp_ray.search.recompute import with_recompute
from amp_ray.search.remedies import Remedies
from amp_ray.search.space import (
    IdleWindow,
    candidates_of,
    expert_degrees,
    group_zero_choices,
    has_groups,
    idle_candidates,
    may_be_group,
    optional_candidates,
    recompute_choices,
    uniform_candidates,
    with_experts,
    with_most_recompute,
    zero_choices,
)
from amp_ray.search.stage_groups import DeviceGroups, plan_stage_groups
from amp_ray.search.stage_groups.simulated_moves import moved_plans
from amp_ray.search.token_slices import plan_slices
from amp_ray.search.variants import plans_for_other_clusters
from amp_ray.strategies.candidate import (
    AnyCandidate,
    C,
    Candidate,
    GroupsCandidate,
    StageOptions,
    with_kind,
    with_zero,
)
from amp_ray.strategies.recompute import AUTO, NO_RECOMPUTE
from amp_ray.strategies.strategy import Strategy, named
from amp_ray.strategies.zero import AUTO_ZERO, Zero

ENOUGH_BYTES: Final = int(1e16)
"""Memory of a device that holds every model."""


@dataclass(frozen=True, kw_only=True, eq=False)
class SpacePlanner:
    """Plans candidates in the experiment's space; caches tables that candidates share."""

    cost_model: CostModel
    effort: SearchEffort = EFFORT
    _bounds: dict[SampleCosts, GridBounds] = field(init=False, default_factory=dict)
    _simple_plans: dict[Candidate, tuple[Estimate, float]] = field(init=False, default_factory=dict)

    @property
    def experiment(self) -> Experiment:
        """The experiment to plan."""
        return self.cost_model.experiment

    def plans(self, candidate: AnyCandidate) -> Sequence[Result]:
        """Choose the cuts and devices of a candidate, and estimate the result.

        Args:
            candidate: Its recompute and ZeRO setting are fixed.

        Returns:
            The best plan; of a grid perhaps also a worse one, which may be better with other
            recompute.
        """
        if isinstance(candidate, GroupsCandidate):
            return [self._plan_groups(candidate)]
        refused = self.refuse(candidate)
        if refused is not None:
            return [Infeasible(candidate=candidate, reason=refused)]
        if self.experiment.space != "uniform" and may_be_group(candidate.options):
            start = self._simple(candidate)[0] if has_groups(self.experiment) else None
            return plan_placements(self.cost_model, candidate, start, self.effort)
        plans = plan_listed(self.cost_model, candidate, self.effort)
        if not self.cuts_sequences:
            return plans
        costs = self.cost_model.costs(candidate)
        bounds = best_bounds(self.experiment, costs)
        sliced = plan_slices(self.cost_model, candidate, costs, bounds, self.effort)
        return sorted([*plans, *filter(None, [sliced])], key=leader_order)

    @cached_property
    def device_groups(self) -> DeviceGroups:
        """Device groups that stages can use, shared by all candidates."""
        return DeviceGroups(cost_model=self.cost_model, effort=self.effort)

    def _plan_groups(self, candidate: GroupsCandidate) -> Result:
        """Plan stage groups; if nothing fits, estimate the plan that enough memory would have."""
        plan = plan_stage_groups(self.device_groups, candidate)
        if isinstance(plan, Infeasible) or plan.feasible:
            return plan
        roomy = plan_stage_groups(self._roomy_groups, candidate)
        return self.cost_model.estimate(roomy.strategy) if isinstance(roomy, Estimate) else plan

    @cached_property
    def _roomy_groups(self) -> DeviceGroups:
        """Device groups as if every device had enough memory."""
        cluster = self.experiment.cluster
        nodes = tuple(
            replace(node, device=replace(node.device, memory_bytes=ENOUGH_BYTES))
            for node in cluster.nodes
        )
        roomy = replace(self.experiment, cluster=replace(cluster, nodes=nodes))
        return DeviceGroups(cost_model=CostModel(experiment=roomy), effort=self.effort)

    @property
    def cuts_sequences(self) -> bool:
        """Whether plans may have token slices."""
        limits = self.experiment.limits
        able = self.experiment.traits.token_slices or not limits.launchable
        return limits.token_slices and able

    @property
    def bounds_are_tight(self) -> bool:
        """Whether lower bounds hold for all plans, and can exclude most candidates."""
        limits = self.experiment.limits
        covers = not (limits.token_slices or limits.tp_across_nodes)
        return covers and self.experiment.space == "uniform"

    def is_listed(self, candidate: Candidate) -> bool:
        """Return whether a candidate can only use the first devices in hostfile order."""
        cluster = self.experiment.cluster
        is_whole = candidate.num_devices == cluster.num_devices
        fills = cluster.is_even and not cluster.nodes[0].num_slots % candidate.options.tp
        return self.experiment.space == "uniform" and (is_whole or fills)

    def _bounds_of(self, candidate: Candidate) -> tuple[GridBounds, Candidate]:
        """Return the bounds of a candidate, and the candidate as they take it: with cp in dp."""
        tables = self.cost_model.samples_of(candidate.options)
        if tables not in self._bounds:
            self._bounds[tables] = GridBounds(cost_model=self.cost_model, tables=tables)
        options = without_context(candidate.options)
        if options is not candidate.options:
            candidate = replace(candidate, options=options)
        return self._bounds[tables], candidate

    @memoised
    def pass_s(self, tp: int, cp: int, size: int) -> tuple[float, float]:
        """Return the least time of a micro-batch in all layers, and in one of the blocks.

        Both are infinite if no stage can run so.
        """
        least_s = math.inf, math.inf
        zero = Zero(stage=self.experiment.traits.min_zero_stage)
        for ep in expert_degrees(self.experiment, self.experiment.cluster.num_devices):
            options = with_experts(self.experiment.stage_options(tp, ep, cp=cp, zero=zero), ep)
            candidate = Candidate(micro_batch_size=size, options=options, pp=1, num_micro_batches=1)
            if self.refuse(candidate) is None:
                bounds, folded = self._bounds_of(candidate)
                here_s = bounds.pass_s(with_kind(folded, NO_RECOMPUTE))
                least_s = min(least_s[0], here_s[0]), min(least_s[1], here_s[1])
        return least_s

    def least_s(self, candidate: Candidate, limit_s: float) -> float:
        """Return a lower bound on the time of a candidate; infinite if it has no strategy.

        A bound above ``limit_s`` need not be tight.
        """
        if self.refuse(candidate) is not None:
            return math.inf
        bounds, candidate = self._bounds_of(candidate)
        least_s = bounds.least_s(candidate, limit_s)
        if least_s > limit_s or math.isinf(least_s) or self.experiment.space == "uniform":
            return least_s
        return least_s if bounds.may_fit(candidate) else math.inf

    def expected_s(self, candidate: Candidate) -> float:
        """Return an unproven estimate of the least time of a candidate's strategies.

        If its recompute is open, the estimate assumes none, which is fastest.
        """
        if candidate.options.recompute == AUTO:
            candidate = with_kind(candidate, NO_RECOMPUTE)
        return self.effort.expected_fraction * self._simple(candidate)[1]

    def _simple(self, candidate: Candidate) -> tuple[Estimate, float]:
        """Return the best simple plan, and the least time of any, feasible or not."""
        if candidate not in self._simple_plans:
            plans = simple_plans(self.cost_model, candidate, self.effort)
            least_s = min(plan.iteration_time_s for plan in plans)
            self._simple_plans[candidate] = min(plans, key=leader_order), least_s
        return self._simple_plans[candidate]

    def refuse(self, candidate: Candidate) -> Reason | None:
        """Return the reason why a candidate has no strategy, or None."""
        model, traits = self.experiment.model, self.experiment.traits
        undivided = self.why_undivided(candidate.options)
        if undivided is not None:
            return undivided
        no_grid = traits.why_no_grid(candidate.options.tp, candidate.pp)
        if no_grid is not None:
            return Reason(kind="degree that the runtime does not have", detail=no_grid)
        no_zero = traits.why_no_zero(candidate.options.zero, candidate.pp)
        if no_zero is not None:
            return Reason(kind=_zero_refusal(candidate), detail=no_zero)
        if candidate.pp > model.num_layers:
            detail = f"pp {candidate.pp}, {model.num_layers} layers"
            return Reason(kind="more stages than layers", detail=detail)
        whole = self.cost_model.samples_of(candidate.options).are_whole
        unmeasured = self._unmeasured(candidate.options.tp) if whole else None
        return self._why_uncut(candidate.pp) or unmeasured

    def _why_uncut(self, pp: int) -> Reason | None:
        """Return the reason if the runtime's own rule has no cuts for so many stages."""
        blocks, rule = len(self.experiment.model.indices("block")), self.experiment.traits.partition
        if rule == "even-blocks" and blocks % pp:
            return Reason(kind="pp does not divide the blocks", detail=f"pp {pp}, {blocks} blocks")
        if rule != "exact" and ruled_bounds(self.experiment, pp) is None:
            return Reason(kind="stage without blocks and head", detail=f"pp {pp}")
        return None

    def _unmeasured(self, tp: int) -> Reason | None:
        gap = self.experiment.profile.gap(self.experiment.cluster.device_types, tp)
        return None if gap is None else Reason(kind="not in the profile", detail=gap)

    def why_undivided(self, options: StageOptions) -> Reason | None:
        """Return the reason if a degree does not divide the heads or experts, else None."""
        shape, tp = self.experiment.model.shape, options.tp
        if options.ep > 1 and not shape.num_experts:
            return Reason(kind="ep needs a model with experts", detail=f"ep {options.ep}")
        if shape.num_experts % options.ep:
            detail = f"ep {options.ep}, num_experts {shape.num_experts}"
            return Reason(kind="ep does not divide the experts", detail=detail)
        traits = self.experiment.traits
        if shape.expert_bias and options.expert_tp > 1 and not traits.divides_biased_experts:
            detail = f"tp {tp} of ep 1; ep above 1 keeps experts whole"
            return Reason(kind="tp divides experts with biases", detail=detail)
        if not traits.shards_heads:
            return None
        for heads, name in (("attention", "num_heads"), ("key/value", "num_key_value_heads")):
            if (count := getattr(shape, name)) % tp:
                detail = f"tp {tp}, {name} {count}"
                return Reason(kind=f"tp does not divide the {heads} heads", detail=detail)
        no_heads = self.experiment.why_no_heads(options)
        kind = "tp x cp does not divide the key/value heads"
        return None if no_heads is None else Reason(kind=kind, detail=no_heads)


class CandidatePlanner(Protocol):
    """Plans candidates."""

    def plan(self, candidate: AnyCandidate) -> Result:
        """Return the best plan."""
        ...


@dataclass(frozen=True, kw_only=True, eq=False)
class ChooseRecompute:
    """Chooses the recompute of every stage.

    On fixed devices, solve cuts and recompute exactly. Otherwise first choose devices with the same
    recompute in all stages, once per kind; then solve cuts and recompute on those devices.
    """

    space: SpacePlanner

    def plan(self, candidate: AnyCandidate) -> Result:
        """Return the best plan over all choices of recompute."""
        if candidate.options.recompute != AUTO:
            return self.space.plans(candidate)[0]
        if isinstance(candidate, Candidate) and self.space.is_listed(candidate):
            return self._plan_listed(candidate)
        plans, refusals = self._plans_of_each_kind(candidate)
        if not plans:
            return replace(refusals[0], candidate=candidate)
        cost_model = self.space.cost_model
        plans += [with_recompute(cost_model, plan.strategy) for plan in plans]
        return replace(min(plans, key=leader_order), lower_bound_s=None)

    def _plan_listed(self, candidate: Candidate) -> Result:
        """Solve exactly on devices in hostfile order; token slices use one kind for all stages."""
        refused = self.space.refuse(candidate)
        if refused is not None:
            return Infeasible(candidate=candidate, reason=refused)
        plain = with_kind(candidate, NO_RECOMPUTE)
        bounds = even_bounds(self.space.experiment.model.num_layers, candidate.pp)
        best = with_recompute(self.space.cost_model, Strategy.uniform(plain, bounds))
        if not self.space.cuts_sequences:
            return best
        plans, _ = self._plans_of_each_kind(candidate)
        return replace(min([best, *plans], key=leader_order), lower_bound_s=None)

    def _plans_of_each_kind(
        self, candidate: AnyCandidate
    ) -> tuple[list[Estimate], list[Infeasible]]:
        """Plan a candidate once per kind of recompute, the same in all stages."""
        settings = recompute_choices(self.space.experiment)
        kinds = dict.fromkeys(setting.whole for setting in settings)
        candidates = [with_kind(candidate, kind) for kind in kinds]
        results = [result for kept in candidates for result in self.space.plans(kept)]
        plans = [result for result in results if isinstance(result, Estimate)]
        return plans, [result for result in results if isinstance(result, Infeasible)]


@dataclass(frozen=True, kw_only=True, eq=False)
class ChooseZero:
    """Chooses the ZeRO setting of a candidate, and bounds its time before planning."""

    inner: CandidatePlanner  # plans a candidate whose setting is fixed
    space: SpacePlanner  # bounds the time of such a candidate
    _choices: dict[tuple[int, int, int], tuple[Zero, ...]] = field(init=False, default_factory=dict)

    def plan(self, candidate: AnyCandidate) -> Result:
        """Return the best plan over all ZeRO settings.

        Skip settings whose lower bound exceeds the best safe plan so far. If no setting fits, plan
        the one that enough memory would have.
        """
        if candidate.options.zero != AUTO_ZERO:
            return self.inner.plan(candidate)
        choices = self.choices(candidate)
        refused = self._refuse(candidate, choices)
        if refused is not None:
            return Infeasible(candidate=candidate, reason=refused)
        bounds: dict[AnyCandidate, float] = {
            choice: self.space.least_s(choice, math.inf) if isinstance(choice, Candidate) else 0.0
            for choice in choices
        }
        choices.sort(key=lambda choice: (bounds[choice], choice.options.zero))
        results: list[Result] = []
        limit_s = math.inf
        for choice in choices:
            if bounds[choice] > limit_s or bounds[choice] == math.inf:
                continue
            result = self.inner.plan(choice)
            results.append(result)
            if isinstance(result, Estimate) and result.feasible and not is_risky(result):
                limit_s = min(limit_s, result.iteration_time_s)
        plans = [result for result in results if isinstance(result, Estimate)]
        too_large = [
            choice
            for choice in choices
            if isinstance(choice, Candidate) and bounds[choice] == math.inf
        ]
        if too_large and not any(plan.feasible for plan in plans):
            result = self.inner.plan(min(too_large, key=self._expected))
            results.append(result)
            plans += [result] if isinstance(result, Estimate) else []
        if not plans:
            first = results[0]
            assert isinstance(first, Infeasible)
            return replace(first, candidate=candidate)
        return replace(min(plans, key=leader_order), lower_bound_s=None)

    def _expected(self, candidate: Candidate) -> tuple[bool, float]:
        """Return the order of settings that do not fit: that of plans with enough memory."""
        experiment = self.space.experiment
        plain = Strategy.uniform(with_kind(candidate, NO_RECOMPUTE), tuple(range(candidate.pp + 1)))
        unexplained = experiment.traits.is_unexplained(plain, len(experiment.cluster.nodes))
        return unexplained, self.space.expected_s(candidate)

    def choices(self, candidate: C) -> list[C]:
        """Return one candidate per ZeRO setting that the experiment allows."""
        if isinstance(candidate, Candidate):
            options = without_context(candidate.options)
            degrees = options.tp, options.dp, candidate.pp
            if degrees not in self._choices:
                self._choices[degrees] = zero_choices(self.space.experiment, *degrees)
            choices = self._choices[degrees]
        else:
            choices = group_zero_choices(self.space.experiment)
        return [with_zero(candidate, zero) for zero in choices]

    def _refuse(self, candidate: AnyCandidate, choices: Sequence[AnyCandidate]) -> Reason | None:
        """Return why a candidate has no strategy with any of its ZeRO settings, or None."""
        traits, shard_ranks = self.space.experiment.traits, self.space.experiment.shard_ranks
        if isinstance(candidate, Candidate):
            zero = choices[0].options.zero if choices else Zero(stage=traits.min_zero_stage)
            if (refused := self.space.refuse(with_zero(candidate, zero))) is not None:
                return refused
        if choices:
            return None
        detail = f"shard_ranks {shard_ranks}, dp {candidate.options.dp}"
        return Reason(kind="shard_ranks do not divide dp", detail=detail)

    def with_least_memory(self, candidate: Candidate) -> Candidate:
        """Return the candidate with the most sharding and recompute, where these are open."""
        if candidate.options.zero == AUTO_ZERO:
            choices = self.choices(candidate)
            shards = candidate.options.dp > 1
            candidate = max(choices, key=_num_sharded) if shards else min(choices, key=self._peak)
        return with_most_recompute(self.space.experiment, candidate)

    def _peak(self, candidate: Candidate) -> float:
        """Return the memory of a stage with all layers, without recompute."""
        plain, model = with_kind(candidate, NO_RECOMPUTE), self.space.cost_model
        memory = model.samples_of(plain.options).memory(plain)
        return memory.peak(0, 0, model.experiment.model.num_layers)

    def least_s(self, candidate: Candidate, limit_s: float) -> float:
        """Return the least lower bound over all ZeRO settings."""
        if candidate.options.zero != AUTO_ZERO:
            return self.space.least_s(candidate, limit_s)
        bounds_s = (self.space.least_s(choice, limit_s) for choice in self.choices(candidate))
        return min(bounds_s, default=math.inf)

    def expected_s(self, candidate: Candidate) -> float:
        """Return the least expected time over the ZeRO settings.

        Of a pipeline, only that of the first one counts, which shards least: with more stages,
        exchanges overlap with less computation.
        """
        if candidate.options.zero != AUTO_ZERO:
            return self.space.expected_s(candidate)
        choices = self.choices(candidate)[: None if candidate.pp == 1 else 1]
        return min(map(self.space.expected_s, choices))


def _zero_refusal(candidate: Candidate) -> str:
    stage = candidate.options.zero.stage
    if candidate.pp > 1:
        return f"this runtime cannot combine ZeRO-{stage} with a pipeline"
    return f"this runtime cannot use ZeRO-{stage}"


def _num_sharded(candidate: Candidate) -> tuple[int, bool, int]:
    zero = candidate.options.zero
    return zero.stage, not zero.keeps_weights, candidate.options.num_shards


@dataclass(frozen=True, kw_only=True, eq=False)
class AmpRayPlanner:
    """Our planner: optimal cuts by the closed form, with times from an event simulation."""

    experiment: Experiment
    traits: ClassVar = PlannerTraits(knows_prices=True, has_constants=True)
    effort: SearchEffort = EFFORT

    @cached_property
    def cost_model(self) -> CostModel:
        """Cost model of the experiment; it caches its tables."""
        return CostModel(experiment=self.experiment)

    @cached_property
    def _space(self) -> SpacePlanner:
        return SpacePlanner(cost_model=self.cost_model, effort=self.effort)

    @cached_property
    def chooser(self) -> ChooseZero:
        """Planner of a candidate that also chooses recompute and ZeRO where they are open."""
        return self.choosing(self._space)

    def choosing(self, space: SpacePlanner) -> ChooseZero:
        """Return a planner that chooses recompute and ZeRO, and leaves the rest to `space`."""
        return ChooseZero(inner=ChooseRecompute(space=space), space=space)

    @property
    def relative_error(self) -> float:
        """Relative error of the estimated times."""
        return self.experiment.constants.time_error

    def candidates(self, num_rows: int | None = None) -> Candidates:
        """List the candidates of the space.

        In a large uniform space, candidates are optional where bounds can exclude them.

        Raises:
            ValueError: If the limits exclude every candidate; the message names the limit.
        """
        required, optional = candidates_of(self.experiment), optional_candidates(self.experiment)
        may_idle = self._space.bounds_are_tight and self.experiment.may_idle
        within = self._within if may_idle else None
        if num_rows is None or optional or not self._may_leave_out(len(required)):
            return Candidates(required=required, optional=self._if_fast(optional), within=within)
        grids = tuple(grid for grid in required if isinstance(grid, Candidate))
        first = replace(self._if_fast(grids), num_rows=num_rows, is_lazy=True)
        return Candidates(optional=first, within=within)

    def _within(self, least: int, most: int, limit_s: float) -> OptionalCandidates:
        """Return the candidates on such numbers of devices that may beat a limit."""
        window = IdleWindow(
            least_devices=least, most_devices=most, limit_s=limit_s, pass_s=self._space.pass_s
        )
        candidates = idle_candidates(self.experiment, window)
        return replace(self._if_fast(candidates), limit_s=limit_s, is_lazy=True)

    def _may_leave_out(self, num_candidates: int) -> bool:
        """Return whether lower bounds can show that some required candidates need no planning."""
        return (
            self._space.bounds_are_tight
            and num_candidates > self.effort.max_uniform_candidates
            and not self.experiment.limits.batch_tolerance
            and not self.experiment.counts_money
        )

    def _if_fast(self, candidates: tuple[Candidate, ...]) -> OptionalCandidates:
        """Return candidates to plan only if their lower bound is low enough."""
        groups = has_groups(self.experiment)
        return OptionalCandidates(
            candidates=candidates,
            least_s=self.chooser.least_s,
            expected_s=self.chooser.expected_s,
            improve=self.improve,
            most_devices=self.effort.max_grid_devices if groups else None,
            extra_plans=self._extra_plans if groups else lambda _plans: [],
        )

    def _extra_plans(self, plans: Sequence[Estimate]) -> list[Estimate]:
        """Return the fastest plans made for similar clusters, and those that moves reach."""
        levelled = list(plans_for_other_clusters(self, plans, self.effort))
        tps = self._space.device_groups.tps
        moved = moved_plans(self.cost_model, tps, [*plans, *levelled], self.effort)
        scored = (self.within_limits(self.score(plan.strategy)) for plan in moved)
        return [*levelled, *(plan for plan in scored if isinstance(plan, Estimate))]

    def on_cluster(self, cluster: Cluster) -> Self:
        """Return a planner for another cluster."""
        return replace(self, experiment=replace(self.experiment, cluster=cluster))

    def why_none(self, results: Sequence[Result]) -> str:
        """Explain why no result is feasible; name the closest strategy, and one that would fit."""
        remedies = Remedies(experiment=self.experiment)
        return why_none(results, self.roomiest(), remedies.add) + self._fits_with_recompute()

    def _fits_with_recompute(self) -> str:
        """Name a strategy that fits with ``recompute: auto``; return "" if none does."""
        if self.experiment.recompute == AUTO:
            return ""
        choosing = replace(self, experiment=replace(self.experiment, recompute=AUTO))
        fitting = [estimate for estimate in choosing.roomiest() if estimate.feasible]
        if not fitting:
            return ""
        best = min(fitting, key=leader_order)
        kind = best.strategy.stages[0].options.recompute
        return (
            f"; with 'recompute: auto' some fit, such as {named(best.strategy)}, recompute {kind}"
        )

    def memory_parts(self, strategy: Strategy) -> list[dict[str, float]]:
        """Return the parts of each stage's peak memory, in bytes."""
        return self.cost_model.memory_parts(strategy)

    def timeline(self, strategy: Strategy) -> Timeline | None:
        """Return the predicted timeline of every stage."""
        return predicted_timeline(self.cost_model, strategy)

    def plan(self, candidate: AnyCandidate) -> Result:
        """Cut a candidate exactly, place it where the space allows, and estimate it.

        If no cut fits the memory, estimate the best cut without the limit: the result then shows
        how much memory is missing.
        """
        result = self.chooser.plan(candidate)
        if isinstance(result, Estimate):
            result = self.cost_model.with_columns(result)
        return self.within_limits(result)

    def within_limits(self, result: Result) -> Result:
        """Return the result, with an added reason if it exceeds the limit on cost or time."""
        if not isinstance(result, Estimate):
            return result
        reasons, limits = list(result.reasons), self.experiment.limits
        most, least = limits.max_cost_per_iteration, limits.min_tokens_per_s
        if most is not None and result.cost is not None and result.cost.per_iteration > most:
            detail = f"{result.cost.per_iteration:.6g} per iteration, at most {most:g}"
            reasons.append(Reason(kind="over max_cost_per_iteration", detail=detail))
        if least is not None and result.tokens_per_s is not None and result.tokens_per_s < least:
            detail = f"{result.tokens_per_s:.6g} tokens/s, at least {least:g}"
            reasons.append(Reason(kind="below min_tokens_per_s", detail=detail))
        if len(reasons) == len(result.reasons):
            return result
        return replace(result, reasons=tuple(reasons))

    def improve(self, estimate: Estimate) -> Result:
        """Reorder the stages of a strategy for as long as that makes it faster."""
        if self.experiment.space == "uniform" or estimate.strategy.is_sliced:
            return estimate
        better, bound_s = reorder(self.cost_model, estimate, self.effort), estimate.lower_bound_s
        if better is not estimate:
            better = self.cost_model.with_columns(better)
        if bound_s is not None:
            bound_s = min(bound_s, better.iteration_time_s)
        return self.within_limits(replace(better, lower_bound_s=bound_s))

    def score(self, strategy: Strategy) -> Result:
        """Estimate a complete strategy; it is launchable only if tp divides the model."""
        estimate = self.cost_model.with_columns(self.cost_model.estimate(strategy))
        options = dict.fromkeys(stage.options for stage in strategy.stages)
        undivided = next(filter(None, map(self._space.why_undivided, options)), None)
        if undivided is None:
            return estimate
        reasons = (undivided, *estimate.reasons)
        return replace(estimate, reasons=reasons, launchable=False, failure_probability=1.0)

    def roomiest(self) -> tuple[Estimate, ...]:
        """Return the strategies that come closest to fitting the memory.

        All stages have the same tp and dp, the devices keep their order, and the cuts need the
        least memory. Return the strategies that fit, and each one that comes closer than all before
        it.
        """
        estimates: list[Estimate] = []
        within = math.inf  # largest share of device memory that a strategy may need
        with suppress(ValueError):  # no candidate within the limits, or one that the profile lacks
            for uniform in uniform_candidates(self.experiment):
                if not self.cost_model.samples_of(uniform.options).are_whole:
                    continue  # the message names strategies whose ranks have whole sequences
                candidate = self.chooser.with_least_memory(uniform)
                if self._space.refuse(candidate) is None:
                    costs = self.cost_model.costs(candidate)
                    bounds = roomiest_bounds(self.experiment, costs, within=within)
                    if bounds is not None:
                        strategy = Strategy.uniform(candidate, bounds)
                        estimates.append(self.cost_model.estimate_from(costs, strategy))
                        within = min(within, max(1.0, estimates[-1].memory_share) * (1 + 1e-6))
        return tuple(estimates)
