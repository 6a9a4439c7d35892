"""A total order over results, with ties told and infeasible ones last."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from amp_ray.cost.estimate import Estimate, Infeasible, Result
from amp_ray.spec.candidate import AnyCandidate, GroupsCandidate
from amp_ray.spec.strategy import Strategy

SIGNIFICANT_DIGITS = 12
"""Times that agree to so many digits are equal: they differ by the order of additions only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """All results of a search, best first.

    Args:
        results: Feasible estimates by time, then infeasible ones by time, then candidates
            from which nothing could be made.
        num_feasible: How many of them can run.
        lower_bound_s: No feasible strategy of the space is faster by the model; None if unknown.
        relative_error: Two predictions closer than this share are a tie.
    """

    results: tuple[Result, ...]
    num_feasible: int
    lower_bound_s: float | None
    relative_error: float

    @property
    def best(self) -> Estimate | None:
        """The fastest feasible estimate."""
        first = self.results[0] if self.num_feasible else None
        return first if isinstance(first, Estimate) else None

    @property
    def num_tied(self) -> int:
        """How many leading feasible estimates the model cannot tell apart from the first."""
        if self.best is None:
            return 0
        limit_s = self.best.iteration_time_s * (1 + self.relative_error)
        return sum(
            isinstance(result, Estimate) and result.iteration_time_s <= limit_s
            for result in self.results[: self.num_feasible]
        )

    def reason_counts(self) -> list[tuple[str, int]]:
        """Count the kinds of reasons of the infeasible results, most frequent first."""
        counts = Counter(
            reason for result in self.results[self.num_feasible :] for reason in _kinds(result)
        )
        return sorted(counts.items(), key=lambda item: (-item[1], item[0]))


def rank(
    results: Iterable[Result], *, lower_bound_s: float | None = None, relative_error: float = 0.0
) -> Ranking:
    """Order results; equal times are ordered by the strategy's values, never by arrival.

    Args:
        results: In any order.
        lower_bound_s: Proven bound of the search, if any.
        relative_error: The model's own error as a share.
    """
    ordered = sorted(results, key=_key)
    return Ranking(
        results=tuple(ordered),
        num_feasible=sum(isinstance(result, Estimate) and result.feasible for result in ordered),
        lower_bound_s=lower_bound_s,
        relative_error=relative_error,
    )


def speed(estimate: Estimate) -> tuple[bool, float]:
    """Order estimates by whether they run, then by time; equal up to the order of additions."""
    return not estimate.feasible, float(f"{estimate.iteration_time_s:.{SIGNIFICANT_DIGITS}g}")


def leader_order(estimate: Estimate) -> tuple[object, ...]:
    """Order what a search within one candidate has found: by speed, then by value."""
    return (*speed(estimate), estimate.strategy.bounds, estimate.strategy.placement)


def _key(result: Result) -> tuple[object, ...]:
    """Sort feasible before infeasible before impossible; then time; then values."""
    if isinstance(result, Infeasible):
        return (2, 0.0, *_degrees(result.candidate), ())
    return (*speed(result), *_values(result.strategy))


def _degrees(candidate: AnyCandidate) -> tuple[object, ...]:
    """Return what tells candidates apart, in the form of a strategy's values."""
    if isinstance(candidate, GroupsCandidate):
        return (candidate.micro_batch_size, ())
    return (candidate.micro_batch_size, ((candidate.tp, candidate.dp),) * candidate.pp)


def _values(strategy: Strategy) -> tuple[object, ...]:
    """Return what tells strategies of equal time apart."""
    degrees = tuple((stage.tp, stage.dp) for stage in strategy.stages)
    return (strategy.micro_batch_size, degrees, strategy.bounds, strategy.placement)


def _kinds(result: Result) -> tuple[str, ...]:
    """Return the kinds of reasons of a result."""
    if isinstance(result, Infeasible):
        return (result.reason.kind,)
    return tuple(dict.fromkeys(reason.kind for reason in result.reasons))
