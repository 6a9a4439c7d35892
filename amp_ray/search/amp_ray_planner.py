"""Our planner: costs to arrays, arrays to cuts, cuts to an estimate.

`AmpRayPlanner.plan` is the function that every worker maps; a search is that map and a ranking
(`runtime.ray.searching`).
"""

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, Self

from amp_ray.clusters.cluster import Cluster
from amp_ray.cost.estimate import Estimate, Result
from amp_ray.cost.model import CostModel
from amp_ray.cost.timeline import Timeline, predicted_timeline
from amp_ray.inputs.experiment import Experiment
from amp_ray.search.choices import ChooseRecompute, ChooseZero
from amp_ray.search.cuts import roomiest_bounds
from amp_ray.search.effort import EFFORT, SearchEffort
from amp_ray.search.placement import reorder
from amp_ray.search.planner import Candidates, OptionalCandidates, PlannerTraits
from amp_ray.search.ranking import excess, leader_order, named, why_none
from amp_ray.search.recompute import with_most_recompute
from amp_ray.search.space import (
    candidates_of,
    has_groups,
    optional_candidates,
    uniform_candidates,
)
from amp_ray.search.space_planner import SpacePlanner
from amp_ray.search.variants import plans_for_other_clusters, within_limits
from amp_ray.strategies.candidate import AnyCandidate
from amp_ray.strategies.recompute import AUTO
from amp_ray.strategies.strategy import Strategy


@dataclass(frozen=True, kw_only=True, eq=False)
class AmpRayPlanner:
    """Our planner: exact cuts for the closed form, judged by event simulation."""

    experiment: Experiment
    traits: ClassVar = PlannerTraits(knows_prices=True, has_constants=True)
    effort: SearchEffort = EFFORT
    with_bounds: bool = True  # whether lower bounds are proven where stages have their own devices

    @cached_property
    def cost_model(self) -> CostModel:
        """The cost model, with its tables."""
        return CostModel(experiment=self.experiment)

    @cached_property
    def _space(self) -> SpacePlanner:
        """Plans candidates; only their cuts and devices are still to choose."""
        return SpacePlanner(cost_model=self.cost_model, effort=self.effort)

    @cached_property
    def chooser(self) -> ChooseZero:
        """Plans any candidate of layers."""
        return self.choosing(self._space)

    def choosing(self, space: SpacePlanner) -> ChooseZero:
        """Return a planner in a space that chooses recompute and ZeRO."""
        return ChooseZero(
            inner=ChooseRecompute(space=space),
            experiment=self.experiment,
            relative_error=self.relative_error,
        )

    @property
    def relative_error(self) -> float:
        """The time estimate's own error."""
        return self.experiment.constants.time_error

    def candidates(self, num_rows: int | None = None) -> Candidates:
        """List the candidates of the space.

        Of a large uniform space those are optional that are proven not to be among the first rows.

        Raises:
            ValueError: If the limits leave nothing, with the limit that did it.
        """
        required, optional = candidates_of(self.experiment), self._optional()
        if num_rows is None or not self._may_leave_out(required):
            return Candidates(required=required, optional=optional)
        uniform = uniform_candidates(self.experiment)
        return Candidates(optional=replace(optional, candidates=uniform, num_rows=num_rows))

    def _may_leave_out(self, required: Sequence[AnyCandidate]) -> bool:
        """Tell whether bounds say enough of candidates that not each has to be planned."""
        limits = self.experiment.limits
        return (
            self.experiment.space == "uniform"
            and len(required) > self.effort.max_uniform_candidates
            and not optional_candidates(self.experiment)
            and not (limits.token_slices or limits.tp_across_nodes or limits.batch_tolerance)
            and not self.experiment.counts_money
        )

    def _optional(self) -> OptionalCandidates:
        """Return the candidates that are planned only if they may be fast."""
        groups = has_groups(self.experiment)
        return OptionalCandidates(
            candidates=optional_candidates(self.experiment),
            least_s=self.chooser.least_s,
            expected_s=self.chooser.expected_s,
            improve=self.improve,
            most_devices=self.effort.max_grid_devices if groups else None,
            extra_plans=self._on_other_clusters if groups else lambda _plans: [],
        )

    def _on_other_clusters(self, plans: Sequence[Estimate]) -> list[Estimate]:
        """Return the fastest plans for other clusters, as they are on the real one."""
        return list(plans_for_other_clusters(self, plans, self.effort))

    def on_cluster(self, cluster: Cluster) -> Self:
        """Return a planner for another cluster, whose bounds are not asked for."""
        return replace(
            self, experiment=replace(self.experiment, cluster=cluster), with_bounds=False
        )

    def why_none(self, results: Sequence[Result]) -> str:
        """Say why none of these results is feasible, what comes closest, and what would fit."""
        return why_none(results, self.roomiest()) + self._fits_with_recompute()

    def _fits_with_recompute(self) -> str:
        """Name a strategy that would fit with recompute chosen per stage; empty where none does."""
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
        """Return what the peak of each stage is made of, in bytes."""
        return self.cost_model.memory_parts(strategy)

    def timeline(self, strategy: Strategy) -> Timeline | None:
        """Return when every stage does what."""
        return predicted_timeline(self.cost_model, strategy)

    def plan(self, candidate: AnyCandidate) -> Result:
        """Cut a candidate exactly, place it where the space allows, and estimate it.

        Where no cut fits the memory, the best one without the limit is estimated, so that the
        result tells by how much it fails.
        """
        result = self.chooser.plan(candidate, with_bounds=self.with_bounds)
        if isinstance(result, Estimate):
            result = self.cost_model.with_columns(result)
        return within_limits(result, self.experiment.limits)

    def improve(self, estimate: Estimate) -> Result:
        """Reorder the stages of a strategy, where the space places them, while that is faster."""
        if self.experiment.space == "uniform" or estimate.strategy.is_sliced:
            return estimate
        better, bound_s = reorder(self.cost_model, estimate, self.effort), estimate.lower_bound_s
        if better is not estimate:
            better = self.cost_model.with_columns(better)
        if bound_s is not None:
            bound_s = min(bound_s, better.iteration_time_s)
        better = replace(better, lower_bound_s=bound_s)
        return within_limits(better, self.experiment.limits)

    def score(self, strategy: Strategy) -> Result:
        """Estimate a complete strategy, launchable only where tp divides the model."""
        estimate = self.cost_model.with_columns(self.cost_model.estimate(strategy))
        options = dict.fromkeys(stage.options for stage in strategy.stages)
        undivided = next(filter(None, map(self._space.why_undivided, options)), None)
        if undivided is None:
            return estimate
        reasons = (undivided, *estimate.reasons)
        return replace(estimate, reasons=reasons, launchable=False, failure_probability=1.0)

    def roomiest(self) -> tuple[Estimate, ...]:
        """Return the strategies that come closest to fitting, to tell what a cluster lacks.

        Only strategies with one tp and dp for all stages count, on the devices in their order, each
        with the cuts that need the least memory: those that fit, and those that come closer than
        all before them.
        """
        estimates: list[Estimate] = []
        within = math.inf  # largest share of device memory that a strategy may need
        with suppress(ValueError):  # limits may leave none, and a profile may lack some
            for uniform in uniform_candidates(self.experiment):
                if not self.cost_model.tables_of(uniform.options).are_whole:
                    continue  # the message names strategies whose ranks have whole sequences
                candidate = self.chooser.with_most_shared(uniform)
                candidate = with_most_recompute(self.cost_model, candidate)
                if self._space.refuse(candidate) is None:
                    costs = self.cost_model.costs(candidate)
                    bounds = roomiest_bounds(self.experiment, costs, within=within)
                    if bounds is not None:
                        strategy = Strategy.uniform(candidate, bounds)
                        estimates.append(self.cost_model.estimate_from(costs, strategy))
                        within = min(within, excess(estimates[-1]) * (1 + 1e-6))
        return tuple(estimates)
