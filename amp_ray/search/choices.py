"""Dimensions that a planner may choose, each a wrapper around a planner of the others.

Where a candidate leaves its dimension open, a wrapper tries each value and keeps the best plan; a
value that the candidate fixes goes through.
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
    """Plans candidates, and says beforehand how fast they may be."""

    def plan(self, candidate: AnyCandidate, *, with_bounds: bool) -> Result:
        """Return the best plan, proven by a lower bound where that is asked for and possible."""
        ...

    def least_s(self, candidate: Candidate, limit_s: float) -> float:
        """Return a lower bound on the time of a candidate; infinite where it has no strategy.

        Args:
            candidate: Degrees.
            limit_s: A bound above it need not be the best that is known.
        """
        ...

    def expected_s(self, candidate: Candidate) -> float:
        """Return the time that strategies of a candidate are expected to take at least.

        Args:
            candidate: Degrees that the model can be divided by.
        """
        ...


@dataclass(frozen=True, kw_only=True, eq=False)
class ChooseRecompute:
    """Chooses the recompute of every stage.

    Stages whose devices are given are solved exactly. Where devices are to be chosen, too, that is
    done for stages that all compute the same again, of each kind; the plans are then cut anew.
    """

    space: SpacePlanner

    def plan(self, candidate: AnyCandidate, *, with_bounds: bool) -> Result:
        """Return the best plan with any recompute."""
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
        """Choose exactly, on the devices as they are listed; token slices with one kind for all."""
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
        """Plan a candidate whose stages all compute the same again, for each kind."""
        kinds = dict.fromkeys(pattern.whole for pattern in patterns(self.space.cost_model))
        results = [self.space.plan(with_kind(candidate, kind), with_bounds=False) for kind in kinds]
        plans = [result for result in results if isinstance(result, Estimate)]
        return plans, [result for result in results if isinstance(result, Infeasible)]

    def least_s(self, candidate: Candidate, limit_s: float) -> float:
        """Return a lower bound that holds for any recompute."""
        return self.space.least_s(candidate, limit_s)

    def expected_s(self, candidate: Candidate) -> float:
        """Return the expected time without recompute, which is fastest, where it is open."""
        if candidate.options.recompute == AUTO:
            candidate = with_kind(candidate, NO_RECOMPUTE)
        return self.space.expected_s(candidate)


@dataclass(frozen=True, kw_only=True, eq=False)
class ChooseZero:
    """Chooses the ZeRO setting."""

    inner: CandidatePlanner
    experiment: Experiment
    relative_error: float  # two predictions closer than this share are a tie
    _choices: dict[tuple[int, int, int], tuple[Zero, ...]] = field(init=False, default_factory=dict)

    def plan(self, candidate: AnyCandidate, *, with_bounds: bool) -> Result:
        """Return the best plan with any way of sharing that may come first.

        Choices that cannot be as fast as the best that fits so far are left out; the first is
        planned in any case, to tell by how much a candidate fails.
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
        """Return a candidate with each way of sharing between data-parallel ranks."""
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
        """Let a candidate share out as much as it can, where that is open."""
        if candidate.options.zero != AUTO_ZERO:
            return candidate
        return max(self.choices(candidate), key=_share_order)

    def least_s(self, candidate: Candidate, limit_s: float) -> float:
        """Return the least lower bound of all choices."""
        if candidate.options.zero != AUTO_ZERO:
            return self.inner.least_s(candidate, limit_s)
        bounds_s = (self.inner.least_s(choice, limit_s) for choice in self.choices(candidate))
        return min(bounds_s, default=math.inf)

    def expected_s(self, candidate: Candidate) -> float:
        """Return the expected time of the first choice, which shares out least."""
        if candidate.options.zero == AUTO_ZERO:
            candidate = self.choices(candidate)[0]
        return self.inner.expected_s(candidate)


def _share_order(candidate: Candidate) -> tuple[int, bool, int]:
    """Order candidates by how much their ranks share out."""
    zero = candidate.options.zero
    return zero.stage, not zero.keeps_weights, candidate.options.num_shards
