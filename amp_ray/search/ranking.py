"""A total order over results, with ties marked and infeasible ones last."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from operator import attrgetter
from typing import Final, Literal

from amp_ray.cost.estimate import Estimate, Infeasible, Reason, Result
from amp_ray.cost.verdict import RISKY_PROBABILITY
from amp_ray.inputs.experiment import Objective
from amp_ray.strategies.candidate import AnyCandidate, GroupsCandidate, StageOptions
from amp_ray.strategies.recompute import NO_RECOMPUTE
from amp_ray.strategies.strategy import Strategy, named
from amp_ray.strategies.zero import MOST_ZERO_STAGE

SIGNIFICANT_DIGITS = 12
"""Times that agree to this many digits count as equal: the rest is rounding."""

_SCHEDULE: Final = attrgetter(*(part.name for part in fields(Strategy)[3:]))
"""Placement and schedule of a strategy: all its values but stages and micro-batches."""

SHOWN_DIGITS: Final = 4
"""Times that agree to this many digits are shown alike: then plainer strategies come first."""

SHOWN_SLACK: Final = 10.0 ** (1 - SHOWN_DIGITS)
"""Largest relative difference of two times that are shown alike."""

NEAR_FRACTION: Final = 0.02
"""Safe strategies within this share of the fastest one's time are ordered by plainness.

The same configuration differs as much from run to run: twice the standard deviation between the
runs of an MLPerf submission is .2 % in the median and 2.2 % at most (72 submissions, rounds 4.1 and
5.0); between releases of the program it drifts 3.9 % in the median (21 configurations, see
`experiments/published/megatron_bridge.csv`).
"""


_UNLIKELY: Final = 0.01
"""Failures with a lower probability count as none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """All results of a search, best first."""

    # In order: safe feasible estimates by time, except for `num_near`; then risky ones by time, see
    # `RISKY_PROBABILITY`; infeasible estimates by time; candidates without an estimate
    results: tuple[Result, ...]
    num_feasible: int  # number of results that can run
    num_tied: int  # number of first estimates whose difference is below the model's error
    # Lower bound on the time of every feasible strategy of the space; None if unknown
    lower_bound_s: float | None
    relative_error: float  # two predictions closer than this share are always a tie
    # ``cost`` orders results by money instead of time; ``time-cost`` puts the Pareto front of time
    # and money first, by time.
    objective: Objective = "time"
    # Number of first results that form the Pareto front of time and money; 0 with other
    # objectives
    num_front: int = 0
    # Number of first results that are safe and near the fastest, ordered by `plainest_first`; 0 if
    # results are only ordered by time
    num_near: int = 0
    # Candidates that were not planned: they would come after these results, or cannot run
    num_left_out: int = 0
    num_compared: int | None = None  # first rows that `with_more_ties` looked at; None for all

    @property
    def best(self) -> Estimate | None:
        """The first feasible estimate, or None."""
        first = self.results[0] if self.num_feasible else None
        return first if isinstance(first, Estimate) else None

    @property
    def fastest(self) -> Estimate | None:
        """The fastest of the safe estimates, or of all feasible ones if none is safe; or None."""
        return min(self.leading, key=_sample_s, default=None)

    @property
    def may_have_more_ties(self) -> bool:
        """Whether there may be ties beyond the first `num_tied` rows, which no one looked for."""
        num_compared = self.num_feasible if self.num_compared is None else self.num_compared
        has_more = num_compared < self.num_feasible or self.num_left_out > 0
        return has_more and self.num_tied >= num_compared

    @property
    def near_fraction(self) -> float:
        """Share of the fastest one's time within which the plainest estimate comes first."""
        return min(NEAR_FRACTION, self.relative_error)

    @property
    def leading(self) -> list[Estimate]:
        """The feasible estimates that are as safe as the first one."""
        feasible = (one for one in self.results[: self.num_feasible] if isinstance(one, Estimate))
        return [one for one in feasible if _class(one) == _class(self.results[0])]

    @property
    def infeasible(self) -> tuple[Result, ...]:
        """Results that cannot run."""
        return self.results[self.num_feasible :]


def rank(
    results: Iterable[Result],
    *,
    lower_bound_s: float | None = None,
    relative_error: float = 0.0,
    objective: Objective = "time",
    per_sample: bool = False,
) -> Ranking:
    """Order results; break equal times by the strategy's values, not by order of arrival.

    Safe strategies come before all that may run out of memory. If the model has an error, of
    strategies whose times are shown alike those with fewer dimensions come first. With
    ``per_sample``, times per sample are compared, as batches differ.
    """
    ordered = sorted(results, key=_key)
    if relative_error:  # formulas without an error are ranked by their exact times
        ordered.sort(key=_shown)
    if per_sample:
        ordered.sort(key=lambda result: (_class(result), _sample_s(result)))
    if objective == "cost":
        ordered.sort(key=lambda result: (_class(result), _money(result)))
    feasible = [result for result in ordered if isinstance(result, Estimate) and result.feasible]
    leading = [estimate for estimate in feasible if _class(estimate) == _class(feasible[0])]
    front = _front(leading) if objective == "time-cost" else []
    tied: list[Estimate] = []
    if feasible and not front:
        figure = _money if objective == "cost" else _sample_s if per_sample else _seconds
        limit = figure(feasible[0]) * (1 + relative_error)
        tied = [estimate for estimate in leading if figure(estimate) <= limit]
    chosen = {id(estimate) for estimate in front}
    return Ranking(
        results=(
            *front,
            *(result for result in ordered if id(result) not in chosen),
        ),
        num_feasible=len(feasible),
        num_tied=len(tied),
        lower_bound_s=lower_bound_s,
        relative_error=relative_error,
        objective=objective,
        num_front=len(front),
    )


def plainest_first(ranking: Ranking, *, has_experts: bool = False) -> Ranking:
    """Order the safe estimates near the fastest by the techniques that they use in addition.

    Techniques count that make a run harder to set up and to debug: each doubling of context
    parallelism, more expert parallelism than the fastest has, chunks of stages, and token slices.
    Of estimates with as many, those with the lowest ZeRO stage come first, then the fastest.
    Rankings by money keep their order.

    If the ranks of the fastest gather all experts of a layer for every micro-batch, and one that
    does not is a tie of it, then those near the latter come first: networks rarely reach their rate
    in such gathers. Only estimates within `NEAR_FRACTION` and the model's error change places, so
    the first one is a tie of the fastest.
    """
    fastest = ranking.fastest
    is_by_time = ranking.objective == "time" and ranking.near_fraction
    if fastest is None or is_risky(fastest) or not is_by_time:
        return ranking
    leading = ranking.leading
    if has_experts and _gathers_experts(fastest.strategy):
        limit_s = _sample_s(fastest) * (1 + ranking.relative_error)
        spread = [one for one in leading if not _gathers_experts(one.strategy)]
        if spread and _sample_s(least := min(spread, key=_sample_s)) <= limit_s:
            fastest, leading = least, spread
    limit_s = _sample_s(fastest) * (1 + ranking.near_fraction)
    near = [one for one in leading if _sample_s(one) <= limit_s]
    needed_ep = _most(fastest.strategy, "ep")
    chosen = {id(one) for one in near}
    near.sort(key=lambda one: (_num_extras(one.strategy, needed_ep), _sharding(one)))
    rest = (result for result in ranking.results if id(result) not in chosen)
    return replace(ranking, results=(*near, *rest), num_near=len(near))


def _gathers_experts(strategy: Strategy) -> bool:
    return strategy.zero.stage == MOST_ZERO_STAGE and _most(strategy, "ep") == 1


def _sharding(estimate: Estimate) -> int:
    """Return the ZeRO stage; at least 1 where more sharding would lower the risk."""
    needs_room = estimate.failure_probability >= _UNLIKELY
    return max(estimate.strategy.zero.stage, int(needs_room))


def _num_extras(strategy: Strategy, needed_ep: int) -> int:
    flags = (
        _most(strategy, "ep") > needed_ep,
        strategy.is_interleaved,
        strategy.is_sliced,
    )
    return sum(flags) + (_most(strategy, "cp") - 1).bit_length()


def _most(strategy: Strategy, degree: Literal["cp", "ep"]) -> int:
    return max(int(getattr(stage.options, degree)) for stage in strategy.stages)


def with_more_ties(ranking: Ranking, errors: Sequence[tuple[Estimate, float]]) -> Ranking:
    """Return a ranking by time whose ties are all estimates within their error of the fastest.

    Ties end at the first estimate that differs from the fastest by more than the error of that
    difference. So they form one group with one leader.

    Args:
        ranking: Its ties use one error for all estimates; they remain ties.
        errors: The fastest estimates, each with the error of its log time relative to the first.
    """
    fastest = errors[0][0].iteration_time_s
    able = [
        estimate
        for estimate in ranking.results[: ranking.num_feasible]
        if isinstance(estimate, Estimate)
    ]
    error_of = {id(estimate): error for estimate, error in errors}
    number = 0
    for estimate in able:
        limit_s = fastest * math.exp(error_of.get(id(estimate), 0.0))
        is_apart = estimate.iteration_time_s > limit_s or is_risky(estimate) != is_risky(able[0])
        if number >= ranking.num_tied and is_apart:
            break
        number += 1
    return replace(ranking, num_tied=number, num_compared=min(len(errors), len(able)))


def _front(feasible: Sequence[Estimate]) -> list[Estimate]:
    """Return the estimates, by time, that cost less than every faster one."""
    front: list[Estimate] = []
    for estimate in sorted(feasible, key=leader_order):
        if not front or _money(estimate) < _money(front[-1]):
            front.append(estimate)
    return front


def _seconds(estimate: Estimate) -> float:
    return estimate.iteration_time_s


def _sample_s(result: Result) -> float:
    """Return rounded seconds per sample; infinite without an estimate."""
    if isinstance(result, Infeasible):
        return float("inf")
    each_s = result.iteration_time_s / result.strategy.global_batch_size
    return float(f"{each_s:.{SIGNIFICANT_DIGITS}g}")


def _money(result: Result) -> float:
    """Return rounded money per iteration; infinite without a cost."""
    if isinstance(result, Infeasible) or result.cost is None:
        return float("inf")
    return float(f"{result.cost.per_iteration:.{SIGNIFICANT_DIGITS}g}")


def is_risky(estimate: Estimate) -> bool:
    """Return whether it comes after all others.

    Its failure probability reaches `RISKY_PROBABILITY`, or its time lacks what such strategies were
    measured to take.
    """
    return estimate.unexplained or estimate.failure_probability >= RISKY_PROBABILITY


def first_reason(result: Result) -> Reason:
    """Return the first reason of an infeasible result; counts group by it."""
    return result.reason if isinstance(result, Infeasible) else result.reasons[0]


def reasons_text(results: Iterable[Result]) -> str:
    """Count infeasible results by reason, as ``12 out of memory, 5 more stages than layers``."""
    counts = Counter(first_reason(result).kind for result in results)
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{count} {kind}" for kind, count in ordered)


def plainest_text(ranking: Ranking) -> str:
    """Describe why the first estimate is not the fastest; return "" if it is."""
    if not ranking.num_near or ranking.best is ranking.fastest:
        return ""
    if not any(one is ranking.fastest for one in ranking.results[: ranking.num_near]):
        return "a tie of the fastest, whose ranks gather all experts for every micro-batch"
    percent = 100 * ranking.near_fraction
    return f"the plainest of {ranking.num_near} within {percent:.2g} % of the fastest"


def why_none(
    results: Sequence[Result],
    roomiest: Sequence[Estimate] = (),
    with_remedies: Callable[[Estimate], Estimate] = lambda estimate: estimate,
) -> str:
    """Explain why nothing is feasible, and name the strategy with the least memory excess.

    ``roomiest`` are strategies cut for the least memory, which may come closer; ``with_remedies``
    adds the changes by which one would fit.

    Returns:
        Text such as ``9 out of memory; closest: tp 1, pp 4, dp 1, micro-batch size 1, bounds 0 2 4
        6 9: stage 0 needs 17.20 GiB of 15.64 (T4)``.
    """
    text = reasons_text(results)
    estimates = [result for result in (*results, *roomiest) if isinstance(result, Estimate)]
    missing = [estimate for estimate in estimates if not estimate.feasible]
    if not missing:
        return f"{text}, for example {first_reason(results[0]).detail}"
    nearest = min(missing, key=lambda one: (max(1.0, one.memory_share), *_key(one)))
    parts = [reason.detail for reason in nearest.reasons]
    if remedies := with_remedies(nearest).remedies_text:
        parts.append(remedies)
    details = "; ".join(parts)
    return f"{text}; closest: {named(nearest.strategy)}: {details}"


def speed(estimate: Estimate) -> tuple[int, float]:
    """Return the sort key of estimates: safe ones, risky ones, infeasible ones, by rounded time."""
    return _class(estimate), float(f"{estimate.iteration_time_s:.{SIGNIFICANT_DIGITS}g}")


def leader_order(estimate: Estimate) -> tuple[object, ...]:
    """Return the sort key of one candidate's estimates: speed, then the strategy's values."""
    strategy = estimate.strategy
    return (*speed(estimate), *_cuts(strategy))


def _key(result: Result) -> tuple[object, ...]:
    """Return the sort key of results: by class, then time, then the strategy's values."""
    if isinstance(result, Infeasible):
        return (_class(result), 0.0, *_degrees(result.candidate), ())
    return (*speed(result), *_values(result.strategy))


def _shown(result: Result) -> tuple[int, float, int]:
    """Return the sort key of results as they are shown: by class, time, and dimensions."""
    if isinstance(result, Infeasible):
        return _class(result), 0.0, 0
    shown_s = float(f"{result.iteration_time_s:.{SHOWN_DIGITS}g}")
    return _class(result), shown_s, _num_dimensions(result.strategy)


def _class(result: Result) -> int:
    """Return 0 for a safe plan, 1 for a risky one, 2 or 3 for an infeasible one, 4 for no plan.

    An infeasible one is 3 if it would be risky with enough memory, too.
    """
    if isinstance(result, Infeasible):
        return 4
    return int(is_risky(result)) if result.feasible else 2 + result.unexplained


def _num_dimensions(strategy: Strategy) -> int:
    options = [stage.options for stage in strategy.stages]
    used = {name for stage in options for name in stage.others}
    used |= {name for stage in options for name in ("tp", "dp") if getattr(stage, name) > 1}
    flags = (
        strategy.pp > 1,
        strategy.zero.stage > 0,
        strategy.is_interleaved,
        strategy.is_sliced,
        len(set(options)) > 1,
        any(stage.recompute != NO_RECOMPUTE for stage in options),
    )
    return len(used) + sum(flags)


def _degrees(candidate: AnyCandidate) -> tuple[object, ...]:
    """Return the values that distinguish candidates, in the form of `_values`."""
    if isinstance(candidate, GroupsCandidate):
        return (candidate.micro_batch_size, ())
    degrees = (_divided(candidate.options),) * candidate.pp
    return (candidate.micro_batch_size, degrees, candidate.num_chunks)


def _divided(options: StageOptions) -> tuple[object, ...]:
    """Return the degrees that distinguish the options of stages."""
    return options.tp, options.dp, tuple(options.others.items())


def _values(strategy: Strategy) -> tuple[object, ...]:
    """Return the values that distinguish strategies of equal time."""
    degrees = tuple(_divided(stage.options) for stage in strategy.stages)
    return (strategy.micro_batch_size, degrees, *_cuts(strategy))


def _cuts(strategy: Strategy) -> tuple[object, ...]:
    """Return the values that distinguish strategies of equal degrees."""
    return (strategy.bounds, *_SCHEDULE(strategy))
