"""Plan one candidate: costs to arrays, arrays to cuts, cuts to an estimate.

This is the function that every worker maps; a search is that map and a ranking
(`runtime.ray.searching`).
"""

import math
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final, Protocol

from amp_ray.cost.context import with_context, without_context
from amp_ray.cost.estimate import Estimate, Infeasible, Reason, Result
from amp_ray.cost.model import CostModel
from amp_ray.cost.operators import OperatorCostModel
from amp_ray.errors import InputError
from amp_ray.partition import even_bounds
from amp_ray.search.cuts import best_bounds, roomiest_bounds
from amp_ray.search.grid_bounds import GridBounds
from amp_ray.search.objective import within_limits
from amp_ray.search.operators import OperatorSearch
from amp_ray.search.placement import plan_listed, plan_placement, reorder, simple_plans
from amp_ray.search.ranking import excess, is_risky, leader_order
from amp_ray.search.recompute import patterns, with_recompute
from amp_ray.search.short_chains import plan_short
from amp_ray.search.space import (
    group_zero_choices,
    has_groups,
    uniform_candidates,
    zero_choices,
)
from amp_ray.search.stage_groups import DeviceGroups, plan_stage_groups
from amp_ray.search.token_slices.plan import plan_slices
from amp_ray.spec.candidate import (
    AnyCandidate,
    C,
    Candidate,
    GroupsCandidate,
    StageOptions,
    recompute_of,
    with_kind,
    with_zero,
    zero_of_candidate,
)
from amp_ray.spec.experiment import Experiment
from amp_ray.spec.recompute import AUTO, NO_RECOMPUTE
from amp_ray.spec.strategy import Strategy
from amp_ray.spec.strategy_file import Given
from amp_ray.spec.zero import AUTO_ZERO, Zero

LEAST_SHARE: Final = 0.75
"""Of the time of the best of a few simple placements, what the best of all takes at least on most
clusters: of 145 candidates on six clusters of 8 to 32 devices, those within 1.3 of the fastest take
0.77 and more, all 0.53 and more. Tiny and very uneven clusters go below."""


class Planner(Protocol):
    """Plans and scores the strategies of one experiment."""

    @property
    def relative_error(self) -> float:
        """Share by which two predictions must differ to be no tie."""
        ...

    def plan(self, candidate: AnyCandidate) -> Result:
        """Give a candidate its cuts and devices, and estimate it."""
        ...

    def score(self, strategy: Strategy) -> Result:
        """Estimate a complete strategy."""
        ...


def evaluate(planner: Planner, given: Given) -> Result:
    """Estimate a strategy that a user named; cuts that are left out are the planner's."""
    if given.strategy is not None:
        return planner.score(given.strategy)
    assert given.candidate is not None
    return planner.plan(given.candidate)


@dataclass(frozen=True, kw_only=True, eq=False)
class AmpRayPlanner:
    """Our planner: exact cuts for the closed form, judged by event simulation."""

    experiment: Experiment  # what is given
    cp: int = 1  # ranks that divide every sequence, of which the experiment's samples are parts
    bounded: bool = True  # whether stages with devices of their own are told what none undercuts
    _device_groups: dict[Zero, DeviceGroups] = field(init=False, default_factory=dict)
    _operator_searches: dict[int, OperatorSearch] = field(init=False, default_factory=dict)
    _simple_plans: dict[Candidate, tuple[Estimate, float]] = field(init=False, default_factory=dict)
    _zeros: dict[tuple[int, int, int], tuple[Zero, ...]] = field(init=False, default_factory=dict)

    @cached_property
    def cost_model(self) -> CostModel:
        """The cost model, with its tables."""
        return CostModel(experiment=self.experiment, cp=self.cp)

    def _groups(self, zero: Zero) -> DeviceGroups:
        """Return what is known of groups of devices, for all candidates of one ZeRO stage."""
        if zero not in self._device_groups:
            self._device_groups[zero] = DeviceGroups(cost_model=self.cost_model, zero=zero)
        return self._device_groups[zero]

    @cached_property
    def _grid_bounds(self) -> GridBounds:
        """What candidates take at least."""
        return GridBounds(cost_model=self.cost_model)

    def _operator_search(self, zero_stage: int) -> OperatorSearch:
        """Return the search over plans of operators with a ZeRO stage."""
        if zero_stage not in self._operator_searches:
            given = replace(self.experiment, zero_stage=zero_stage)
            try:
                model = OperatorCostModel(experiment=given)
            except ValueError as error:
                raise InputError(str(error)) from None
            self._operator_searches[zero_stage] = OperatorSearch(cost_model=model)
        return self._operator_searches[zero_stage]

    @property
    def relative_error(self) -> float:
        """The time estimate's own error."""
        return self.experiment.constants.time_error

    def plan(self, candidate: AnyCandidate) -> Result:
        """Cut a candidate exactly, place it where the space allows, and estimate it.

        Where no cut fits the memory, the best one without the limit is estimated, so that the
        result tells by how much it fails.
        """
        if isinstance(candidate, Candidate) and candidate.options.cp > 1:
            cp = candidate.options.cp
            found = self._with_context(cp).plan(without_context(candidate))
            return with_context(found, cp, self.experiment.traits)
        if isinstance(candidate, GroupsCandidate) and self.experiment.cuts_operators:
            result = self._plan_operators(candidate)
        elif zero_of_candidate(candidate) == AUTO_ZERO:
            result = self._plan_zero(candidate)
        else:
            result = self._plan(candidate, bounded=self.bounded)
        return within_limits(result, self.experiment.limits)

    def _plan_operators(self, candidate: GroupsCandidate) -> Result:
        """Cut a candidate between operators."""
        stages = [candidate.zero.stage]
        if candidate.zero == AUTO_ZERO:
            stages = [own.stage for own in group_zero_choices(self.experiment) if own.stage <= 1]
        results = [self._operator_search(stage).plan(candidate) for stage in stages]
        found = [result for result in results if isinstance(result, Estimate)]
        if not found:
            return results[0]
        bounds_s = [result.lower_bound_s for result in found if result.lower_bound_s is not None]
        return replace(min(found, key=leader_order), lower_bound_s=min(bounds_s))

    def _short(self, candidate: AnyCandidate) -> Estimate | None:
        """Return the best of all plans of a candidate of the operator space, if they are few."""
        if self.experiment.space != "operator" or not isinstance(candidate, GroupsCandidate):
            return None
        return plan_short(self._groups(candidate.zero), candidate)

    def _with_context(self, cp: int) -> "AmpRayPlanner":
        """Return the planner of parts of sequences that ``cp`` ranks divide."""
        if cp not in self._context_planners:
            own = self.cost_model.with_context(cp).experiment
            self._context_planners[cp] = AmpRayPlanner(experiment=own, cp=cp)
        return self._context_planners[cp]

    @cached_property
    def _context_planners(self) -> "dict[int, AmpRayPlanner]":
        """By context parallel degree."""
        return {}

    def _plan(self, candidate: AnyCandidate, *, bounded: bool = False) -> Result:
        """Plan a candidate, whatever it costs."""
        if recompute_of(candidate) == AUTO:
            return self._short(candidate) or self._plan_recompute(candidate, bounded=bounded)
        if isinstance(candidate, GroupsCandidate):
            groups = self._groups(candidate.zero)
            return self._short(candidate) or plan_stage_groups(groups, candidate, bounded=bounded)
        refused = self._refuse(candidate)
        if refused is not None:
            return Infeasible(candidate=candidate, reason=refused)
        if self.experiment.space != "uniform":
            start = self._simple(candidate)[0] if has_groups(self.experiment) else None
            return plan_placement(self.cost_model, candidate, start)
        if not self._cuts_sequences:
            return plan_listed(self.cost_model, candidate)
        costs = self.cost_model.costs(candidate)
        bounds = best_bounds(self.experiment, costs)
        whole = self.cost_model.estimate_from(costs, Strategy.uniform(candidate, bounds))
        sliced = plan_slices(self.cost_model, candidate, costs, bounds)
        return whole if sliced is None else min(whole, sliced, key=leader_order)

    def improve(self, found: Estimate) -> Result:
        """Reorder the stages of a strategy, where the space places them, while that is faster."""
        own = found.strategy
        if self.experiment.space == "uniform" or own.token_slices or own.has_operators:
            return found
        better, bound_s = reorder(self.cost_model, found), found.lower_bound_s
        if bound_s is not None:
            bound_s = min(bound_s, better.iteration_time_s)
        better = replace(better, lower_bound_s=bound_s)
        return within_limits(better, self.experiment.limits)

    def least_s(self, candidate: Candidate, limit_s: float) -> float:
        """Return what no strategy of a candidate undercuts; infinite where there is none.

        Args:
            candidate: Degrees.
            limit_s: A bound above it need not be the best that is known.
        """
        if candidate.options.cp > 1:
            own = self._with_context(candidate.options.cp)
            return own.least_s(without_context(candidate), limit_s)
        if candidate.options.zero == AUTO_ZERO:
            choices = self._zero_choices(candidate)
            return min((self.least_s(own, limit_s) for own in choices), default=math.inf)
        if self._refuse(candidate) is not None:
            return math.inf
        least_s = self._grid_bounds.least_s(candidate, limit_s)
        if least_s > limit_s or math.isinf(least_s) or self.experiment.space == "uniform":
            return least_s
        return least_s if self._grid_bounds.may_fit(self._roomy(candidate)) else math.inf

    def expected_s(self, candidate: Candidate) -> float:
        """Return what strategies of a candidate are expected to take at least.

        Args:
            candidate: Degrees that the model can be divided by.
        """
        if candidate.options.cp > 1:
            return self._with_context(candidate.options.cp).expected_s(without_context(candidate))
        if candidate.options.zero == AUTO_ZERO:
            candidate = self._zero_choices(candidate)[0]
        return LEAST_SHARE * self._simple(_plain(candidate))[1]

    def _simple(self, candidate: Candidate) -> tuple[Estimate, float]:
        """Return the best simple plan, and the least that one takes, whether it fits or not."""
        if candidate not in self._simple_plans:
            found = simple_plans(self.cost_model, candidate)
            least_s = min(each.iteration_time_s for each in found)
            self._simple_plans[candidate] = min(found, key=leader_order), least_s
        return self._simple_plans[candidate]

    def _zero_choices(self, candidate: C) -> list[C]:
        """Return a candidate with each way of sharing between data-parallel ranks."""
        if isinstance(candidate, Candidate):
            degrees = candidate.options.tp, candidate.options.dp, candidate.pp
            if degrees not in self._zeros:
                self._zeros[degrees] = zero_choices(self.experiment, *degrees)
            choices = self._zeros[degrees]
        else:
            choices = group_zero_choices(self.experiment)
        return [with_zero(candidate, zero) for zero in choices]

    def _plan_zero(self, candidate: AnyCandidate) -> Result:
        """Choose what data-parallel ranks share out: the best of all that may come first.

        Choices that cannot be as fast as the best that fits so far are left out; the first is
        planned in any case, to tell by how much a candidate fails.
        """
        choices = self._zero_choices(candidate)
        bounds: dict[AnyCandidate, float] = {
            own: self.least_s(own, math.inf) if isinstance(own, Candidate) else 0.0
            for own in choices
        }
        choices.sort(key=lambda own: (bounds[own], zero_of_candidate(own)))
        results: list[Result] = []
        limit_s = math.inf
        for own in choices:
            if results and (bounds[own] > limit_s or bounds[own] == math.inf):
                continue
            result = self._plan(own)
            results.append(result)
            if isinstance(result, Estimate) and result.feasible:
                slack = 1 + (self.relative_error if is_risky(result) else 0.0)
                limit_s = min(limit_s, slack * result.iteration_time_s)
        found = [result for result in results if isinstance(result, Estimate)]
        if not found:
            without = results[0]
            assert isinstance(without, Infeasible)
            return replace(without, candidate=candidate)
        return replace(min(found, key=leader_order), lower_bound_s=None)

    def _plan_recompute(self, candidate: AnyCandidate, *, bounded: bool) -> Result:
        """Choose what every stage computes again.

        Stages whose devices are given are solved exactly. Where devices are to be chosen, too, that
        is done for stages that all compute the same again, of each kind; what is found is cut anew.
        """
        if isinstance(candidate, Candidate) and self._is_listed(candidate):
            refused = self._refuse(candidate)
            if refused is not None:
                return Infeasible(candidate=candidate, reason=refused)
            plain = with_kind(candidate, NO_RECOMPUTE)
            bounds = even_bounds(self.experiment.model.num_layers, candidate.pp)
            best = with_recompute(self.cost_model, Strategy.uniform(plain, bounds))
            return self._or_sliced(candidate, best) if self._cuts_sequences else best
        kinds = dict.fromkeys(own.whole for own in patterns(self.cost_model))
        results = [self._plan(with_kind(candidate, own)) for own in kinds]
        found = [result for result in results if isinstance(result, Estimate)]
        without = [result for result in results if isinstance(result, Infeasible)]
        if not found:
            return replace(without[0], candidate=candidate)
        found += [with_recompute(self.cost_model, each.strategy) for each in found]
        best = min(found, key=leader_order)
        if not isinstance(candidate, GroupsCandidate) or not (bounded and best.feasible):
            return replace(best, lower_bound_s=None)
        bound_s = self._groups(candidate.zero).time_bound(NO_RECOMPUTE).least_s(candidate)
        return replace(best, lower_bound_s=min(bound_s, best.iteration_time_s))

    def _is_listed(self, candidate: Candidate) -> bool:
        """Tell whether a candidate runs on all devices, as they are listed."""
        uses_all = candidate.num_devices == self.experiment.cluster.num_devices
        return uses_all and self.experiment.space == "uniform"

    @property
    def _cuts_sequences(self) -> bool:
        """Whether plans may have token slices."""
        limits = self.experiment.limits
        able = self.experiment.traits.token_slices or not limits.launchable
        return limits.token_slices and able

    def _or_sliced(self, candidate: Candidate, best: Result) -> Result:
        """Return the better of a plan and those with token slices and one recompute for all."""
        kinds = dict.fromkeys(own.whole for own in patterns(self.cost_model))
        results = [best, *(self._plan(with_kind(candidate, own)) for own in kinds)]
        found = [result for result in results if isinstance(result, Estimate)]
        return replace(min(found, key=leader_order), lower_bound_s=None) if found else best

    def score(self, strategy: Strategy) -> Result:
        """Estimate a complete strategy; one that tensor parallelism cannot divide is told so.

        Raises:
            InputError: If it tells how single operators are used, and the profile has none.
        """
        if strategy.has_operators:
            return self._score_operators(strategy)
        estimate = self.cost_model.estimate(strategy)
        found = map(self._undivided, dict.fromkeys(stage.options for stage in strategy.stages))
        undivided = next(filter(None, found), None)
        if undivided is None:
            return estimate
        reasons = (undivided, *estimate.reasons)
        return replace(estimate, reasons=reasons, launchable=False, failure_probability=1.0)

    def _score_operators(self, strategy: Strategy) -> Result:
        """Estimate a plan of operators."""
        if self.experiment.profile.operators is None:
            raise InputError(
                "a strategy that tells how single operators are used needs a profile of operators: "
                "profile.source aceso"
            )
        try:
            return self._operator_search(strategy.zero.stage).cost_model.estimate(strategy)
        except ValueError as error:
            raise InputError(str(error)) from None

    def roomiest(self) -> tuple[Estimate, ...]:
        """Return the strategies that come closest to fitting, to tell what a cluster lacks.

        Every space has those with one tp and dp for all stages, on the devices in their order; here
        are those that fit, and those that come closer than all before them, each with the cuts that
        need the least memory.
        """
        found: list[Estimate] = []
        within = math.inf  # what they may need, as a share of what their devices have
        with suppress(ValueError):  # limits may leave none, and a profile may lack some
            for given in uniform_candidates(self.experiment):
                if given.options.cp > 1:
                    continue  # what comes closest without is told
                candidate = self._roomy(given)
                if self._refuse(candidate) is None:
                    costs = self.cost_model.costs(candidate)
                    bounds = roomiest_bounds(self.experiment, costs, within=within)
                    if bounds is not None:
                        strategy = Strategy.uniform(candidate, bounds)
                        found.append(self.cost_model.estimate_from(costs, strategy))
                        within = min(within, excess(found[-1]) * (1 + 1e-6))
        return tuple(found)

    def _roomy(self, candidate: Candidate) -> Candidate:
        """Let a candidate share out, and compute again, as much as it can of what is open."""
        if candidate.options.zero == AUTO_ZERO:
            candidate = max(self._zero_choices(candidate), key=_share_order)
        if candidate.options.recompute != AUTO:
            return candidate
        return with_kind(candidate, max(patterns(self.cost_model)).whole)

    def _refuse(self, candidate: Candidate) -> Reason | None:
        """Tell why no strategy can be made of a candidate."""
        model, traits = self.experiment.model, self.experiment.traits
        undivided = self._undivided(candidate.options)
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
        return self._unmeasured(candidate.options.tp)

    def _unmeasured(self, tp: int) -> Reason | None:
        """Tell what a published profile lacks for a degree; our own can be measured anew."""
        gap = self.experiment.profile.gap(self.experiment.cluster.device_types, tp)
        return None if gap is None else Reason(kind="not in the profile", detail=gap)

    def _undivided(self, options: StageOptions) -> Reason | None:
        """Tell which heads or experts degrees would have to divide and cannot."""
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


def _share_order(candidate: Candidate) -> tuple[int, bool, int]:
    """Order candidates by how much their ranks share out."""
    zero = candidate.options.zero
    return zero.stage, not zero.keeps_weights, zero.shards(candidate.options.dp)


def _plain(candidate: Candidate) -> Candidate:
    """Let a candidate whose recompute is to be chosen compute nothing again, which is fastest."""
    if candidate.options.recompute != AUTO:
        return candidate
    return with_kind(candidate, NO_RECOMPUTE)
