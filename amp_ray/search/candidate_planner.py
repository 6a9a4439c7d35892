"""Plan one candidate: its cuts and devices, its recompute and its ZeRO setting.

`SpacePlanner` chooses cuts and devices. The experiment's space decides between uniform stages on
devices in hostfile order, uniform stages on any devices, and stage groups. `ChooseRecompute` and
`ChooseZero` are wrappers that each choose one further dimension: if the candidate leaves it open,
the wrapper plans every value and keeps the best plan; a fixed value is passed on.
"""

import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Protocol

from amp_ray.cost.estimate import Estimate, Infeasible, Reason, Result
from amp_ray.cost.model import CostModel
from amp_ray.cost.stages import without_context
from amp_ray.cost.tables import Tables
from amp_ray.inputs.experiment import Experiment
from amp_ray.partition import even_bounds
from amp_ray.search.cuts import best_bounds
from amp_ray.search.effort import EFFORT, SearchEffort
from amp_ray.search.grid_bounds import GridBounds
from amp_ray.search.placement import plan_listed, plan_placement, simple_plans
from amp_ray.search.ranking import is_risky, leader_order
from amp_ray.search.recompute import with_recompute
from amp_ray.search.space import (
    group_zero_choices,
    has_groups,
    recompute_choices,
    with_most_recompute,
    zero_choices,
)
from amp_ray.search.stage_groups import DeviceGroups, plan_stage_groups
from amp_ray.search.token_slices import plan_slices
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
from amp_ray.strategies.strategy import Strategy
from amp_ray.strategies.zero import AUTO_ZERO, Zero


@dataclass(frozen=True, kw_only=True, eq=False)
class SpacePlanner:
    """Plans candidates in the experiment's space; caches tables that candidates share."""

    cost_model: CostModel
    effort: SearchEffort = EFFORT
    _bounds: dict[Tables, GridBounds] = field(init=False, default_factory=dict)
    _simple_plans: dict[Candidate, tuple[Estimate, float]] = field(init=False, default_factory=dict)

    @property
    def experiment(self) -> Experiment:
        """The experiment to plan."""
        return self.cost_model.experiment

    def plan(self, candidate: AnyCandidate, *, with_bounds: bool) -> Result:
        """Choose the cuts and devices of a candidate, and estimate the result.

        Args:
            candidate: With recompute and ZeRO fixed.
            with_bounds: Whether to prove a lower bound for stage groups.
        """
        if isinstance(candidate, GroupsCandidate):
            return plan_stage_groups(self.device_groups, candidate, with_bounds=with_bounds)
        refused = self.refuse(candidate)
        if refused is not None:
            return Infeasible(candidate=candidate, reason=refused)
        if self.experiment.space != "uniform":
            start = self._simple(candidate)[0] if has_groups(self.experiment) else None
            return plan_placement(self.cost_model, candidate, start, self.effort)
        if not self.cuts_sequences:
            return plan_listed(self.cost_model, candidate, self.effort)
        costs = self.cost_model.costs(candidate)
        bounds = best_bounds(self.experiment, costs, self.effort)
        whole = self.cost_model.estimate_from(costs, Strategy.uniform(candidate, bounds))
        sliced = plan_slices(self.cost_model, candidate, costs, bounds, self.effort)
        return whole if sliced is None else min(whole, sliced, key=leader_order)

    @cached_property
    def device_groups(self) -> DeviceGroups:
        """Device groups that stages can use, shared by all candidates."""
        return DeviceGroups(cost_model=self.cost_model, effort=self.effort)

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
        """Return whether a candidate uses all devices in hostfile order."""
        uses_all = candidate.num_devices == self.experiment.cluster.num_devices
        return uses_all and self.experiment.space == "uniform"

    def _grid_bounds(self, tables: Tables) -> GridBounds:
        """Return the lower bounds for candidates with the same tables."""
        if tables not in self._bounds:
            self._bounds[tables] = GridBounds(cost_model=self.cost_model, tables=tables)
        return self._bounds[tables]

    def least_s(self, candidate: Candidate, limit_s: float) -> float:
        """Return a lower bound on the time of a candidate; infinite if it has no strategy.

        Args:
            candidate: Its recompute may be open.
            limit_s: Above this limit any valid bound will do.
        """
        if self.refuse(candidate) is not None:
            return math.inf
        bounds = self._grid_bounds(self.cost_model.tables_of(candidate.options))
        candidate = replace(candidate, options=without_context(candidate.options))
        least_s = bounds.least_s(candidate, limit_s)
        if least_s > limit_s or math.isinf(least_s) or self.experiment.space == "uniform":
            return least_s
        return least_s if bounds.may_fit(candidate) else math.inf

    def expected_s(self, candidate: Candidate) -> float:
        """Return an unproven estimate of the least time of a candidate's strategies.

        Args:
            candidate: Its degrees divide the model. If its recompute is open, there is none, which
                is fastest.
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
            return Reason(kind="ZeRO stage that the runtime cannot run so", detail=no_zero)
        if candidate.pp > model.num_layers:
            detail = f"pp {candidate.pp}, {model.num_layers} layers"
            return Reason(kind="more stages than layers", detail=detail)
        if traits.partition == "even-blocks":
            blocks = len(model.indices("block"))
            if blocks % candidate.pp:
                detail = f"pp {candidate.pp}, {blocks} blocks"
                return Reason(kind="pp does not divide the blocks", detail=detail)
        whole = self.cost_model.tables_of(candidate.options).are_whole
        return self._unmeasured(candidate.options.tp) if whole else None

    def _unmeasured(self, tp: int) -> Reason | None:
        """Return the gap of the profile for a tensor parallel degree, or None."""
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
        heads = {"num_heads": shape.num_heads, "num_key_value_heads": shape.num_key_value_heads}
        undivided = [f"{name} {count}" for name, count in heads.items() if count % tp]
        if not undivided or not self.experiment.traits.shards_heads:
            return None
        detail = f"tp {tp}, {undivided[0]}"
        return Reason(kind="tp does not divide the attention heads", detail=detail)


class CandidatePlanner(Protocol):
    """Plans candidates."""

    def plan(self, candidate: AnyCandidate, *, with_bounds: bool) -> Result:
        """Return the best plan; ``with_bounds`` adds a lower bound where one can be proven."""
        ...


@dataclass(frozen=True, kw_only=True, eq=False)
class ChooseRecompute:
    """Chooses the recompute of every stage.

    On fixed devices, solve cuts and recompute exactly. Otherwise first choose devices with the same
    recompute in all stages, once per kind; then solve cuts and recompute on those devices.
    """

    space: SpacePlanner

    def plan(self, candidate: AnyCandidate, *, with_bounds: bool) -> Result:
        """Return the best plan over all choices of recompute."""
        if candidate.options.recompute != AUTO:
            return self.space.plan(candidate, with_bounds=with_bounds)
        if isinstance(candidate, Candidate) and self.space.is_listed(candidate):
            return self._plan_listed(candidate)
        plans, refusals = self._plans_of_each_kind(candidate)
        if not plans:
            return replace(refusals[0], candidate=candidate)
        cost_model = self.space.cost_model
        plans += [with_recompute(cost_model, plan.strategy) for plan in plans]
        best = min(plans, key=leader_order)
        if not isinstance(candidate, GroupsCandidate) or not (with_bounds and best.feasible):
            return replace(best, lower_bound_s=None)
        bound_s = self.space.device_groups.least_s(with_kind(candidate, NO_RECOMPUTE))
        return replace(best, lower_bound_s=min(bound_s, best.iteration_time_s))

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
        results = [self.space.plan(with_kind(candidate, kind), with_bounds=False) for kind in kinds]
        plans = [result for result in results if isinstance(result, Estimate)]
        return plans, [result for result in results if isinstance(result, Infeasible)]


@dataclass(frozen=True, kw_only=True, eq=False)
class ChooseZero:
    """Chooses the ZeRO setting of a candidate, and bounds its time before planning."""

    inner: CandidatePlanner  # plans a candidate whose setting is fixed
    space: SpacePlanner  # bounds the time of such a candidate
    relative_error: float  # two predictions closer than this share are a tie
    _choices: dict[tuple[int, int, int], tuple[Zero, ...]] = field(init=False, default_factory=dict)

    def plan(self, candidate: AnyCandidate, *, with_bounds: bool) -> Result:
        """Return the best plan over all ZeRO settings.

        Skip settings whose lower bound exceeds the best plan that fits so far. The first setting is
        always planned, to show how much memory an infeasible candidate lacks.
        """
        if candidate.options.zero != AUTO_ZERO:
            return self.inner.plan(candidate, with_bounds=with_bounds)
        choices = self.choices(candidate)
        bounds: dict[AnyCandidate, float] = {
            choice: self.space.least_s(choice, math.inf) if isinstance(choice, Candidate) else 0.0
            for choice in choices
        }
        choices.sort(key=lambda choice: (bounds[choice], choice.options.zero))
        results: list[Result] = []
        limit_s = math.inf
        for choice in choices:
            if results and (bounds[choice] > limit_s or bounds[choice] == math.inf):
                continue
            result = self.inner.plan(choice, with_bounds=False)
            results.append(result)
            if isinstance(result, Estimate) and result.feasible:
                slack = 1 + (self.relative_error if is_risky(result) else 0.0)
                limit_s = min(limit_s, slack * result.iteration_time_s)
        plans = [result for result in results if isinstance(result, Estimate)]
        if not plans:
            first = results[0]
            assert isinstance(first, Infeasible)
            return replace(first, candidate=candidate)
        return replace(min(plans, key=leader_order), lower_bound_s=None)

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

    def with_least_memory(self, candidate: Candidate) -> Candidate:
        """Return the candidate with the most sharding and recompute, where these are open."""
        if candidate.options.zero == AUTO_ZERO:
            candidate = max(self.choices(candidate), key=_share_order)
        return with_most_recompute(self.space.experiment, candidate)

    def least_s(self, candidate: Candidate, limit_s: float) -> float:
        """Return the least lower bound over all ZeRO settings."""
        if candidate.options.zero != AUTO_ZERO:
            return self.space.least_s(candidate, limit_s)
        bounds_s = (self.space.least_s(choice, limit_s) for choice in self.choices(candidate))
        return min(bounds_s, default=math.inf)

    def expected_s(self, candidate: Candidate) -> float:
        """Return the expected time of the first ZeRO setting, which shards least."""
        if candidate.options.zero == AUTO_ZERO:
            candidate = self.choices(candidate)[0]
        return self.space.expected_s(candidate)


def _share_order(candidate: Candidate) -> tuple[int, bool, int]:
    """Order candidates by how much state ZeRO shards."""
    zero = candidate.options.zero
    return zero.stage, not zero.keeps_weights, candidate.options.num_shards
