"""Planners that choose recompute and ZeRO, each a wrapper around another planner.

If the candidate leaves the dimension open, the wrapper plans every value and keeps the best plan;
a fixed value is passed on.
"""

import math
from dataclasses import dataclass, field, replace
from typing import Protocol

from amp_ray.cost.estimate import Estimate, Infeasible, Result
from amp_ray.cost.stages import without_context
from amp_ray.inputs.experiment import Experiment
from amp_ray.partition import even_bounds
from amp_ray.search.ranking import is_risky, leader_order
from amp_ray.search.recompute import patterns, with_recompute
from amp_ray.search.space import group_zero_choices, zero_choices
from amp_ray.search.space_planner import SpacePlanner
from amp_ray.strategies.candidate import (
    AnyCandidate,
    C,
    Candidate,
    GroupsCandidate,
    with_kind,
    with_zero,
)
from amp_ray.strategies.recompute import AUTO, NO_RECOMPUTE
from amp_ray.strategies.strategy import Strategy
from amp_ray.strategies.zero import AUTO_ZERO, Zero


class CandidatePlanner(Protocol):
    """Plans candidates, and bounds their time before planning."""

    def plan(self, candidate: AnyCandidate, *, with_bounds: bool) -> Result:
        """Return the best plan; ``with_bounds`` adds a lower bound where one can be proven."""
        ...

    def least_s(self, candidate: Candidate, limit_s: float) -> float:
        """Return a lower bound on the time of a candidate; infinite if it has no strategy.

        Args:
            candidate: Degrees.
            limit_s: Above this limit any valid bound will do.
        """
        ...

    def expected_s(self, candidate: Candidate) -> float:
        """Return an unproven estimate of the least time of a candidate's strategies.

        Args:
            candidate: Its degrees divide the model.
        """
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
        kinds = dict.fromkeys(pattern.whole for pattern in patterns(self.space.cost_model))
        results = [self.space.plan(with_kind(candidate, kind), with_bounds=False) for kind in kinds]
        plans = [result for result in results if isinstance(result, Estimate)]
        return plans, [result for result in results if isinstance(result, Infeasible)]

    def least_s(self, candidate: Candidate, limit_s: float) -> float:
        """Return a lower bound that holds for any recompute."""
        return self.space.least_s(candidate, limit_s)

    def expected_s(self, candidate: Candidate) -> float:
        """Return the expected time; if recompute is open, without any, which is fastest."""
        if candidate.options.recompute == AUTO:
            candidate = with_kind(candidate, NO_RECOMPUTE)
        return self.space.expected_s(candidate)


@dataclass(frozen=True, kw_only=True, eq=False)
class ChooseZero:
    """Chooses the ZeRO setting of a candidate."""

    inner: CandidatePlanner
    experiment: Experiment
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
            choice: self.inner.least_s(choice, math.inf) if isinstance(choice, Candidate) else 0.0
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
                self._choices[degrees] = zero_choices(self.experiment, *degrees)
            choices = self._choices[degrees]
        else:
            choices = group_zero_choices(self.experiment)
        return [with_zero(candidate, zero) for zero in choices]

    def with_most_shared(self, candidate: Candidate) -> Candidate:
        """Return the candidate with the most sharding, if its ZeRO setting is open."""
        if candidate.options.zero != AUTO_ZERO:
            return candidate
        return max(self.choices(candidate), key=_share_order)

    def least_s(self, candidate: Candidate, limit_s: float) -> float:
        """Return the least lower bound over all ZeRO settings."""
        if candidate.options.zero != AUTO_ZERO:
            return self.inner.least_s(candidate, limit_s)
        bounds_s = (self.inner.least_s(choice, limit_s) for choice in self.choices(candidate))
        return min(bounds_s, default=math.inf)

    def expected_s(self, candidate: Candidate) -> float:
        """Return the expected time of the first ZeRO setting, which shards least."""
        if candidate.options.zero == AUTO_ZERO:
            candidate = self.choices(candidate)[0]
        return self.inner.expected_s(candidate)


def _share_order(candidate: Candidate) -> tuple[int, bool, int]:
    """Order candidates by how much state ZeRO shards."""
    zero = candidate.options.zero
    return zero.stage, not zero.keeps_weights, candidate.options.num_shards
