"""A total order over results, with ties marked and infeasible ones last."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from amp_ray.cost.estimate import Estimate, Infeasible, Reason, Result
from amp_ray.inputs.experiment import Objective
from amp_ray.strategies.candidate import AnyCandidate, GroupsCandidate, StageOptions
from amp_ray.strategies.strategy import Strategy

SIGNIFICANT_DIGITS = 12
"""Times that agree to so many digits are equal: they differ by the order of additions only."""

RISKY_PROBABILITY: Final = 0.1
"""Chance of not finishing from which a strategy stands behind the others that it ties with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """All results of a search, best first."""

    # The ties with the fastest feasible estimate, safe ones before risky ones and each by time; the
    # other feasible estimates by time; infeasible ones by time; candidates from which nothing could
    # be made
    results: tuple[Result, ...]
    num_feasible: int  # how many of them can run
    num_tied: int  # how many leading estimates the model cannot tell apart from the fastest one
    # No feasible strategy of the space is faster by the model; None if unknown
    lower_bound_s: float | None
    relative_error: float  # two predictions closer than this share are a tie in any case
    # What is best. By ``cost`` results are ordered by money instead of time; by ``time-cost`` those
    # that no other beats in both come first, by time.
    objective: Objective = "time"
    # How many leading results no other beats in time and money at once; 0 unless that is the
    # objective
    num_front: int = 0
    # Candidates that come after these results, or cannot run, and were not planned
    num_left_out: int = 0

    @property
    def best(self) -> Estimate | None:
        """The feasible estimate that comes first."""
        first = self.results[0] if self.num_feasible else None
        return first if isinstance(first, Estimate) else None

    @property
    def infeasible(self) -> tuple[Result, ...]:
        """What cannot run."""
        return self.results[self.num_feasible :]


def rank(
    results: Iterable[Result],
    *,
    lower_bound_s: float | None = None,
    relative_error: float = 0.0,
    objective: Objective = "time",
    per_sample: bool = False,
) -> Ranking:
    """Order results; equal times are ordered by the strategy's values, never by arrival.

    Among ties with the best, those that are likely to finish come first: the model cannot tell
    which of them is faster, but it can tell which may run out of memory.

    Args:
        results: In any order; with a cost where the objective needs one.
        lower_bound_s: Proven bound of the search, if any.
        relative_error: The model's own error as a share.
        objective: What is best.
        per_sample: Whether strategies have different batches and go by the time of a sample.
    """
    ordered = sorted(results, key=_key)
    if per_sample:
        ordered.sort(key=lambda result: (_class(result), _sample_s(result)))
    if objective == "cost":
        ordered.sort(key=lambda result: (_class(result), _money(result)))
    feasible = [result for result in ordered if isinstance(result, Estimate) and result.feasible]
    front = _front(feasible) if objective == "time-cost" else []
    tied: list[Estimate] = []
    if feasible and not front:
        figure = _money if objective == "cost" else _sample_s if per_sample else _seconds
        limit = figure(feasible[0]) * (1 + relative_error)
        tied = [estimate for estimate in feasible if figure(estimate) <= limit]
    chosen = {id(estimate) for estimate in front}
    return Ranking(
        results=(
            *front,
            *sorted(tied, key=is_risky),
            *(result for result in ordered[len(tied) :] if id(result) not in chosen),
        ),
        num_feasible=len(feasible),
        num_tied=len(tied),
        lower_bound_s=lower_bound_s,
        relative_error=relative_error,
        objective=objective,
        num_front=len(front),
    )


def with_more_ties(ranking: Ranking, errors: Sequence[tuple[Estimate, float]]) -> Ranking:
    """Return a ranking by time whose ties are all that the model cannot tell from the fastest.

    They are the fastest and those that follow it by time, up to the first that lies further from it
    than their common error: one group with one leader, so that each strategy is a tie or none,
    whatever lies between.

    Args:
        ranking: By one error for all, which makes ties in any case.
        errors: The fastest estimates, each with the error of its logarithm against the first one.
    """
    fastest = errors[0][0].iteration_time_s
    able = [
        estimate
        for estimate in ranking.results[: ranking.num_feasible]
        if isinstance(estimate, Estimate)
    ]
    able.sort(key=_key)
    error_of = {id(estimate): error for estimate, error in errors}
    number = 0
    for estimate in able:
        error = error_of.get(id(estimate), 0.0)
        if number >= ranking.num_tied and estimate.iteration_time_s > fastest * math.exp(error):
            break
        number += 1
    results = (*sorted(able[:number], key=is_risky), *able[number:], *ranking.infeasible)
    return replace(ranking, results=results, num_tied=number)


def _front(feasible: Sequence[Estimate]) -> list[Estimate]:
    """Return those of some estimates, by time, that cost less than every faster one."""
    front: list[Estimate] = []
    for estimate in feasible:
        if not front or _money(estimate) < _money(front[-1]):
            front.append(estimate)
    return front


def _seconds(estimate: Estimate) -> float:
    return estimate.iteration_time_s


def _sample_s(result: Result) -> float:
    """Return seconds per sample, equal up to the order of additions; what has none comes last."""
    if isinstance(result, Infeasible):
        return float("inf")
    each_s = result.iteration_time_s / result.strategy.global_batch_size
    return float(f"{each_s:.{SIGNIFICANT_DIGITS}g}")


def _money(result: Result) -> float:
    """Return money per iteration, equal up to the order of additions; what has none comes last."""
    if isinstance(result, Infeasible) or result.cost is None:
        return float("inf")
    return float(f"{result.cost.per_iteration:.{SIGNIFICANT_DIGITS}g}")


def is_risky(estimate: Estimate) -> bool:
    """Return whether a strategy may well not finish."""
    return estimate.failure_probability >= RISKY_PROBABILITY


def first_reason(result: Result) -> Reason:
    """Return the reason under which an infeasible result is counted."""
    return result.reason if isinstance(result, Infeasible) else result.reasons[0]


def reasons_text(results: Iterable[Result]) -> str:
    """Count infeasible results, each once, by the kind of its first reason.

    Returns:
        Text such as ``12 out of memory, 5 more stages than layers``, the most frequent first.
    """
    counts = Counter(first_reason(result).kind for result in results)
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{count} {kind}" for kind, count in ordered)


def why_none(results: Sequence[Result], roomiest: Sequence[Estimate] = ()) -> str:
    """Say why nothing is feasible, and what comes closest: the least need beyond the memory.

    Args:
        results: All infeasible, at least one.
        roomiest: Strategies cut for little memory, which may come closer.

    Returns:
        Text such as ``9 out of memory; closest: tp 1, pp 4, dp 1, micro-batch size 1, bounds 0 2 4
        6 9: stage 0 needs 17.20 GiB of 15.64 (T4)``.
    """
    text = reasons_text(results)
    estimates = [result for result in (*results, *roomiest) if isinstance(result, Estimate)]
    missing = [estimate for estimate in estimates if not estimate.feasible]
    if not missing:
        return f"{text}, for example {first_reason(results[0]).detail}"
    nearest = min(missing, key=lambda estimate: (excess(estimate), *_key(estimate)))
    details = "; ".join(reason.detail for reason in nearest.reasons)
    return f"{text}; closest: {named(nearest.strategy)}: {details}"


def named(plan: Strategy) -> str:
    """Name a strategy in a message by its degrees and bounds."""
    figures = {
        "tp": plan.tp,
        "pp": plan.pp,
        "dp": plan.dp,
        "micro-batch size": plan.micro_batch_size,
        "chunks per stage": plan.virtual_stages if plan.virtual_stages > 1 else None,
        "bounds": " ".join(map(str, plan.given_bounds)),
    }
    return ", ".join(f"{name} {value}" for name, value in figures.items() if value is not None)


def excess(estimate: Estimate) -> float:
    """Return the largest need of a stage in parts of what it has; 1 where all fits."""
    pairs = zip(estimate.peak_memory_bytes, estimate.memory_limit_bytes, strict=True)
    return max([1.0, *(peak / limit for peak, limit in pairs)])


def speed(estimate: Estimate) -> tuple[bool, float]:
    """Order estimates by whether they run, then by time; equal up to the order of additions."""
    return not estimate.feasible, float(f"{estimate.iteration_time_s:.{SIGNIFICANT_DIGITS}g}")


def leader_order(estimate: Estimate) -> tuple[object, ...]:
    """Order the estimates of one candidate: by speed, then by value."""
    strategy = estimate.strategy
    return (*speed(estimate), *_cuts(strategy))


def _key(result: Result) -> tuple[object, ...]:
    """Sort feasible before infeasible before impossible; then time; then values."""
    if isinstance(result, Infeasible):
        return (_class(result), 0.0, *_degrees(result.candidate), ())
    return (*speed(result), *_values(result.strategy))


def _class(result: Result) -> int:
    """Return 0 for a plan that can run, 1 for one that cannot, 2 for a candidate without plans."""
    return 2 if isinstance(result, Infeasible) else int(not result.feasible)


def _degrees(candidate: AnyCandidate) -> tuple[object, ...]:
    """Return the values that distinguish candidates, in the form of those of a strategy."""
    if isinstance(candidate, GroupsCandidate):
        return (candidate.micro_batch_size, ())
    return (
        candidate.micro_batch_size,
        (_divided(candidate.options),) * candidate.pp,
        candidate.virtual_stages,
    )


def _divided(options: StageOptions) -> tuple[object, ...]:
    """Return the degrees that distinguish the options of stages."""
    return options.tp, options.dp, tuple(options.others.items())


def _values(strategy: Strategy) -> tuple[object, ...]:
    """Return the values that distinguish strategies of equal time."""
    degrees = tuple(_divided(stage.options) for stage in strategy.stages)
    return (strategy.micro_batch_size, degrees, *_cuts(strategy))


def _cuts(strategy: Strategy) -> tuple[object, ...]:
    """Return the values that distinguish strategies of equal degrees."""
    chunks = strategy.virtual_stages, strategy.chunk_bounds
    return (strategy.bounds, strategy.placement, strategy.token_slices, *chunks)
