"""Our planner: it cuts each candidate into stages by its costs, and estimates the result.

Workers map `AmpRayPlanner.plan` over all candidates; the search then ranks the results
(`runtime.ray.searching`).
"""

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, Self

from amp_ray.clusters.cluster import Cluster
from amp_ray.cost.estimate import Estimate, Reason, Result
from amp_ray.cost.model import CostModel
from amp_ray.cost.timeline import Timeline, predicted_timeline
from amp_ray.inputs.experiment import Experiment
from amp_ray.search.candidate_planner import ChooseRecompute, ChooseZero, SpacePlanner
from amp_ray.search.cuts import roomiest_bounds
from amp_ray.search.effort import EFFORT, SearchEffort
from amp_ray.search.placement import reorder
from amp_ray.search.planner import Candidates, OptionalCandidates, PlannerTraits
from amp_ray.search.ranking import excess, leader_order, why_none
from amp_ray.search.space import (
    candidates_of,
    has_groups,
    optional_candidates,
    uniform_candidates,
)
from amp_ray.search.variants import plans_for_other_clusters
from amp_ray.strategies.candidate import AnyCandidate, Candidate
from amp_ray.strategies.recompute import AUTO
from amp_ray.strategies.strategy import Strategy, named


@dataclass(frozen=True, kw_only=True, eq=False)
class AmpRayPlanner:
    """Our planner: optimal cuts by the closed form, with times from an event simulation."""

    experiment: Experiment
    traits: ClassVar = PlannerTraits(knows_prices=True, has_constants=True)
    effort: SearchEffort = EFFORT
    with_bounds: bool = True  # whether to prove a lower bound for stages with device groups

    @cached_property
    def cost_model(self) -> CostModel:
        """Cost model of the experiment; it caches its tables."""
        return CostModel(experiment=self.experiment)

    @cached_property
    def _space(self) -> SpacePlanner:
        """Chooses cuts and devices of candidates whose other options are fixed."""
        return SpacePlanner(cost_model=self.cost_model, effort=self.effort)

    @cached_property
    def chooser(self) -> ChooseZero:
        """Planner of a candidate that also chooses recompute and ZeRO where they are open."""
        return self.choosing(self._space)

    def choosing(self, space: SpacePlanner) -> ChooseZero:
        """Return a planner that chooses recompute and ZeRO, and leaves the rest to `space`."""
        return ChooseZero(
            inner=ChooseRecompute(space=space),
            space=space,
            relative_error=self.relative_error,
        )

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
        if num_rows is None or optional or not self._may_leave_out(len(required)):
            return Candidates(required=required, optional=self._if_fast(optional))
        grids = tuple(grid for grid in required if isinstance(grid, Candidate))
        return Candidates(optional=replace(self._if_fast(grids), num_rows=num_rows))

    def _may_leave_out(self, num_candidates: int) -> bool:
        """Return whether lower bounds can spare the planning of some required candidates."""
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
            extra_plans=self._on_other_clusters if groups else lambda _plans: [],
        )

    def _on_other_clusters(self, plans: Sequence[Estimate]) -> list[Estimate]:
        """Return the fastest plans made for similar clusters, scored on the real one."""
        return list(plans_for_other_clusters(self, plans, self.effort))

    def on_cluster(self, cluster: Cluster) -> Self:
        """Return a planner for another cluster, without lower bounds."""
        return replace(
            self, experiment=replace(self.experiment, cluster=cluster), with_bounds=False
        )

    def why_none(self, results: Sequence[Result]) -> str:
        """Explain why no result is feasible; name the closest strategy, and one that would fit."""
        return why_none(results, self.roomiest()) + self._fits_with_recompute()

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
        result = self.chooser.plan(candidate, with_bounds=self.with_bounds)
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
        least memory. Keep the strategies that fit, and those that come closer than all before.
        """
        estimates: list[Estimate] = []
        within = math.inf  # largest share of device memory that a strategy may need
        with suppress(ValueError):  # limits may leave none, and a profile may lack some
            for uniform in uniform_candidates(self.experiment):
                if not self.cost_model.tables_of(uniform.options).are_whole:
                    continue  # the message names strategies whose ranks have whole sequences
                candidate = self.chooser.with_least_memory(uniform)
                if self._space.refuse(candidate) is None:
                    costs = self.cost_model.costs(candidate)
                    bounds = roomiest_bounds(self.experiment, costs, within=within)
                    if bounds is not None:
                        strategy = Strategy.uniform(candidate, bounds)
                        estimates.append(self.cost_model.estimate_from(costs, strategy))
                        within = min(within, excess(estimates[-1]) * (1 + 1e-6))
        return tuple(estimates)
