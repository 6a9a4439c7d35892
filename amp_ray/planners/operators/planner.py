"""Our planner where stages are cut between operators, or any short chain is looked at in full.

A profile of operators makes `search.space: operator` one of stages cut at any operator. Without one
its stages are those of the heterogeneous space, and where a chain and its devices are few, every
plan is looked at (`short_chains`). Strategies of layers are planned and scored as ever.
"""

from dataclasses import dataclass, field, replace

from amp_ray.cost.estimate import Estimate, Result
from amp_ray.cost.timeline import Timeline
from amp_ray.errors import InputError
from amp_ray.planners.operators.cost import OperatorCostModel
from amp_ray.planners.operators.search import OperatorSearch
from amp_ray.planners.operators.short_chains import plan_short
from amp_ray.search.amp_ray_planner import AmpRayPlanner
from amp_ray.search.choices import CandidatePlanner, ChooseZero
from amp_ray.search.objective import money_key, within_limits
from amp_ray.search.planner import Candidates
from amp_ray.search.ranking import leader_order
from amp_ray.search.space import group_candidates, group_zero_choices
from amp_ray.search.space_planner import SpacePlanner
from amp_ray.strategies.candidate import AnyCandidate, Candidate, GroupsCandidate
from amp_ray.strategies.strategy import Strategy
from amp_ray.strategies.zero import AUTO_ZERO

_MOST_ZERO_STAGE = 1  # stages of operators share out optimizer states or nothing


@dataclass(frozen=True, kw_only=True, eq=False)
class OperatorPlanner(AmpRayPlanner):
    """Plans and scores stages of operators; layers as its parent."""

    _searches: dict[int, OperatorSearch] = field(init=False, default_factory=dict)

    @property
    def _cuts_operators(self) -> bool:
        return self.experiment.space == "operator" and self.experiment.profile.operators is not None

    def candidates(self, num_rows: int | None = None) -> Candidates:
        """List the candidates of the space, which are all of it.

        Raises:
            ValueError: If the limits leave nothing, with the limit that did it.
        """
        if not self._cuts_operators:
            whole = self.experiment.space == "operator"
            return replace(super().candidates(num_rows), are_whole_space=whole)
        if self.experiment.counts_money:
            raise ValueError(
                f"{money_key(self.experiment)} is not for stages cut between operators, whose "
                "price is not known"
            )
        if self.experiment.limits.launchable:
            message = "no runtime launches stages cut between operators; they can be exported only"
            raise ValueError(message)
        return Candidates(required=group_candidates(self.experiment), are_whole_space=True)

    def plan(self, candidate: AnyCandidate) -> Result:
        """Cut a candidate between operators; one of layers as its parent does."""
        if not isinstance(candidate, GroupsCandidate) or not self._cuts_operators:
            return super().plan(candidate)
        return within_limits(self._plan_operators(candidate), self.experiment.limits)

    def _plan_operators(self, candidate: GroupsCandidate) -> Result:
        stages = [candidate.zero.stage]
        if candidate.zero == AUTO_ZERO:
            choices = [zero.stage for zero in group_zero_choices(self.experiment)]
            stages = [stage for stage in choices if stage <= _MOST_ZERO_STAGE]
        results = [self._search(stage).plan(candidate) for stage in stages]
        plans = [result for result in results if isinstance(result, Estimate)]
        if not plans:
            return results[0]
        bounds_s = [plan.lower_bound_s for plan in plans if plan.lower_bound_s is not None]
        return replace(min(plans, key=leader_order), lower_bound_s=min(bounds_s))

    def choosing(self, space: SpacePlanner) -> ChooseZero:
        """Return a planner in a space that looks at all plans of a short chain first."""
        chooser = super().choosing(space)
        if self.experiment.space != "operator":
            return chooser
        return replace(chooser, inner=TryAll(inner=chooser.inner, space=space))

    def score(self, strategy: Strategy) -> Result:
        """Estimate a complete strategy, of operators or layers.

        Raises:
            InputError: If it tells how single operators are used, and the profile has none.
        """
        if not strategy.has_operators:
            return super().score(strategy)
        if self.experiment.profile.operators is None:
            raise InputError(
                "a strategy that tells how single operators are used needs a profile of operators: "
                "profile.source aceso"
            )
        try:
            return self._search(strategy.zero.stage).cost_model.estimate(strategy)
        except ValueError as error:
            raise InputError(str(error)) from None

    def memory_parts(self, strategy: Strategy) -> list[dict[str, float]]:
        """Return what the peak of each stage is made of, in bytes."""
        if not strategy.has_operators:
            return super().memory_parts(strategy)
        return self._search(strategy.zero.stage).cost_model.memory_parts(strategy)

    def timeline(self, strategy: Strategy) -> Timeline | None:
        """Return when every stage does what; None for stages priced operator by operator."""
        return None if strategy.has_operators else super().timeline(strategy)

    def _search(self, zero_stage: int) -> OperatorSearch:
        if zero_stage not in self._searches:
            experiment = replace(self.experiment, zero_stage=zero_stage)
            try:
                cost_model = OperatorCostModel(experiment=experiment)
            except ValueError as error:
                raise InputError(str(error)) from None
            self._searches[zero_stage] = OperatorSearch(cost_model=cost_model)
        return self._searches[zero_stage]


@dataclass(frozen=True, kw_only=True, eq=False)
class TryAll:
    """Looks at every plan of a candidate where they are few, else as another planner does."""

    inner: CandidatePlanner
    space: SpacePlanner

    def plan(self, candidate: AnyCandidate, *, with_bounds: bool) -> Result:
        """Return the best of all plans, if they are few and one fits."""
        best = None
        if isinstance(candidate, GroupsCandidate):
            best = plan_short(self.space.device_groups(candidate.zero), candidate)
        return best or self.inner.plan(candidate, with_bounds=with_bounds)

    def least_s(self, candidate: Candidate, limit_s: float) -> float:
        """Return the other planner's lower bound."""
        return self.inner.least_s(candidate, limit_s)

    def expected_s(self, candidate: Candidate) -> float:
        """Return what the other planner expects."""
        return self.inner.expected_s(candidate)
