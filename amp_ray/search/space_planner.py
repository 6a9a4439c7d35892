"""Choose cuts and devices of a candidate.

The experiment's space decides between uniform stages on devices in hostfile order, uniform stages
on any devices, and stage groups.
"""

import math
from dataclasses import dataclass, field, replace
from functools import cached_property

from amp_ray.cost.estimate import Estimate, Infeasible, Reason, Result
from amp_ray.cost.model import CostModel, SampleCosts
from amp_ray.cost.stages import without_context
from amp_ray.inputs.experiment import Experiment
from amp_ray.search.cuts import best_bounds
from amp_ray.search.effort import EFFORT, SearchEffort
from amp_ray.search.grid_bounds import GridBounds
from amp_ray.search.placement import plan_listed, plan_placement, simple_plans
from amp_ray.search.ranking import leader_order
from amp_ray.search.space import has_groups
from amp_ray.search.stage_groups import DeviceGroups, plan_stage_groups
from amp_ray.search.token_slices import plan_slices
from amp_ray.strategies.candidate import AnyCandidate, Candidate, GroupsCandidate, StageOptions
from amp_ray.strategies.strategy import Strategy


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

    def is_listed(self, candidate: Candidate) -> bool:
        """Return whether a candidate uses all devices in hostfile order."""
        uses_all = candidate.num_devices == self.experiment.cluster.num_devices
        return uses_all and self.experiment.space == "uniform"

    def _grid_bounds(self, tables: SampleCosts) -> GridBounds:
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
        bounds = self._grid_bounds(self.cost_model.samples_of(candidate.options))
        candidate = replace(candidate, options=without_context(candidate.options))
        least_s = bounds.least_s(candidate, limit_s)
        if least_s > limit_s or math.isinf(least_s) or self.experiment.space == "uniform":
            return least_s
        return least_s if bounds.may_fit(candidate) else math.inf

    def expected_s(self, candidate: Candidate) -> float:
        """Return an unproven estimate of the least time of a candidate's strategies.

        Args:
            candidate: Its degrees divide the model.
        """
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
        whole = self.cost_model.samples_of(candidate.options).are_whole
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
