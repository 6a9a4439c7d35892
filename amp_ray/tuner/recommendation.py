"""The answer of a study: one strategy, the same in every output."""

import math
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Final, Literal

from amp_ray.cost.estimate import Estimate, Reason
from amp_ray.search.ranking import rank
from amp_ray.strategies.strategy import Strategy
from amp_ray.tuner.knowledge import Knowledge, forecast_s, program_scale
from amp_ray.tuner.state import TunerState
from amp_ray.tuner.trial_status import PRIOR_REPEATS, Figure

Basis = Literal["measured", "posterior", "predicted"]
"""Basis of a time: steady runs; unsteady runs and the prediction, weighted by their errors; or the
prediction alone."""

LEAST_CONFIRMING: Final = 2  # least number of strategies with trials that confirm predictions

_FAILED: Final = Reason(kind="its trial failed", detail="")
_NORMAL: Final = NormalDist()


@dataclass(frozen=True, slots=True, kw_only=True)
class Tie:
    """A strategy as fast as the recommended one, within the error."""

    strategy: Strategy
    time_s: float  # measured, the mean of its runs, or predicted
    measured: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """The strategy to use."""

    strategy: Strategy
    rests_on: Basis
    time_s: float  # expected
    interval_s: tuple[float, float]  # holds the true time with the study's confidence
    measured_s: float | None  # None if it was not run
    predicted_s: float
    number: int | None  # its first measured trial; None if there is none
    ties: tuple[Tie, ...]  # strategies that cannot be told apart from it, best first
    reason: str


def recommend(state: TunerState, knowledge: Knowledge) -> Recommendation | None:
    """Recommend the best measured strategy, or an unmeasured one if it must be much faster.

    Unsteady measurements are compared by their combination with the predictions. A strategy without
    a trial is recommended only if trials have confirmed the predictions, and if it is predicted to
    be faster than the best measured one by more than the prediction's error. Returns None if
    nothing was measured: then no trial says that any prediction is right.
    """
    best = knowledge.status.best
    first = next(iter(knowledge.proposable()), None)
    if best is None:
        return None
    if first is None:
        return _measured(state, knowledge, best)
    error = knowledge.widening * knowledge.sigma(first)
    gain = math.log(knowledge.expected_s(best) / knowledge.expected_s(first))
    if gain <= error:
        return _measured(state, knowledge, best)
    faster = f"predicted {100 * math.expm1(gain):.0f} % faster"
    if not is_confirmed(state, knowledge):
        named = f"one that nobody has run is {faster}, by constants that no trials have confirmed"
        return _measured(state, knowledge, best, named)
    why = (
        f"{faster} than the best measured, which is more than the prediction's error of "
        f"{100 * error:.0f} %, by constants that trials have confirmed"
    )
    return _predicted(state, knowledge, first, why)


def is_confirmed(state: TunerState, knowledge: Knowledge) -> bool:
    """Return whether trials confirm the predictions of two strategies, and of most of them.

    A trial confirms its prediction if its time, without the common factor of all trials, lies in
    the interval of the prediction, and if the measurement has a smaller error than the prediction.
    """
    width = state.settings.interval_sigmas
    scale = program_scale(state, knowledge.experiment)
    verdicts = []
    for figure in knowledge.status.figures.values():
        first = state.trials[figure.numbers[0]]
        missed = abs(math.log(figure.measured_s / forecast_s(state, first, scale)))
        verdicts.append(figure.sigma <= first.trial.sigma and missed <= width * first.trial.sigma)
    num_confirming = sum(verdicts)
    return num_confirming >= LEAST_CONFIRMING and 2 * num_confirming > len(verdicts)


def ranked(knowledge: Knowledge, recommended: Recommendation | None) -> tuple[Estimate, ...]:
    """Return all candidates with their expected times, the recommended one first.

    The others follow by time. Measured strategies count as feasible even if the model predicts a
    failure; strategies with a failed trial count as infeasible.
    """
    estimates = [_updated_estimate(knowledge, index) for index in range(len(knowledge.estimates))]
    results = rank(estimates, relative_error=knowledge.time_error).results
    first = recommended and recommended.strategy
    able = [estimate for estimate in results if isinstance(estimate, Estimate)]
    return tuple(sorted(able, key=lambda estimate: estimate.strategy != first))


def _updated_estimate(knowledge: Knowledge, index: int) -> Estimate:
    estimate, status = knowledge.estimates[index], knowledge.status
    if index in status.figures:
        able = replace(estimate, reasons=(), failure_probability=0.0)
        return able.taking(status.figures[index].expected_s)
    if index in status.closed and estimate.feasible:
        return replace(estimate, reasons=(_FAILED,), failure_probability=1.0)
    return estimate


def _measured(
    state: TunerState, knowledge: Knowledge, best: int, more: str | None = None
) -> Recommendation:
    """Recommend the best measured strategy; ``more`` is added to the reason."""
    figure, number = knowledge.status.figures[best], len(knowledge.status.figures)
    alone = number == 1
    reason = (
        "the only strategy that was measured"
        if alone
        else f"the fastest of {number} measured strategies"
    )
    if not figure.is_steady:
        reason += " (unsteady times are averaged with the prediction)"
    return _recommendation(state, knowledge, best, "; ".join(filter(None, (reason, more))))


def _predicted(state: TunerState, knowledge: Knowledge, index: int, why: str) -> Recommendation:
    return _recommendation(state, knowledge, index, f"the best predicted one: {why}")


def _recommendation(
    state: TunerState, knowledge: Knowledge, index: int, reason: str
) -> Recommendation:
    figure, ties = knowledge.status.figures.get(index), _ties(state, knowledge, index)
    if ties:
        tied = "1 other is" if len(ties) == 1 else f"{len(ties)} others are"
        reason += f"; {tied} as good"
    freedom = PRIOR_REPEATS + knowledge.status.num_repeats
    is_normal = figure is None or freedom == PRIOR_REPEATS
    confidence = state.settings.confidence_fraction
    width = state.settings.interval_sigmas if is_normal else student_quantile(confidence, freedom)
    time_s, sigma = knowledge.expected_s(index), knowledge.expected_sigma(index)
    return Recommendation(
        strategy=state.candidates[index].strategy,
        rests_on="predicted" if figure is None else "measured" if figure.is_steady else "posterior",
        time_s=time_s,
        interval_s=(time_s * math.exp(-width * sigma), time_s * math.exp(width * sigma)),
        measured_s=None if figure is None else figure.measured_s,
        predicted_s=knowledge.estimates[index].iteration_time_s,
        number=None if figure is None else figure.numbers[0],
        ties=ties,
        reason=reason,
    )


def _ties(state: TunerState, knowledge: Knowledge, chosen: int) -> tuple[Tie, ...]:
    """Return the strategies that cannot be told from the chosen one.

    Two measured strategies tie if their times differ by less than the standard errors of both, with
    the study's confidence; both the measured and the expected times count. A strategy without a
    trial ties within the error of its prediction.
    """
    figures = knowledge.status.figures
    figure, chosen_s = figures.get(chosen), knowledge.expected_s(chosen)
    error = math.hypot(knowledge.time_error, figure.expected_sigma if figure else 0.0)
    width = _NORMAL.inv_cdf(state.settings.confidence_fraction)
    alike = [
        index for index, rival in figures.items() if figure and _is_alike(rival, figure, width)
    ]
    alike += [
        index
        for index in knowledge.proposable()
        if abs(math.log(knowledge.expected_s(index) / chosen_s)) <= error
    ]
    ties = sorted((knowledge.expected_s(index), index) for index in alike if index != chosen)
    return tuple(
        Tie(
            strategy=state.candidates[index].strategy,
            time_s=figures[index].measured_s if index in figures else time_s,
            measured=index in figures,
        )
        for time_s, index in ties
    )


def _is_alike(one: Figure, other: Figure, width: float) -> bool:
    """Return whether two measured times differ by less than ``width`` standard errors."""
    measured = abs(math.log(one.measured_s / other.measured_s))
    expected = abs(math.log(one.expected_s / other.expected_s))
    return measured <= width * math.hypot(
        one.sigma, other.sigma
    ) and expected <= width * math.hypot(one.expected_sigma, other.expected_sigma)


_NUM_HALVINGS: Final = 50


def student_quantile(confidence: float, freedom: int) -> float:
    """Return the half width that holds a share of Student's t distribution.

    Times with few repeated runs have it: their scale of error is as uncertain.

    References:
        Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.3 and 26.7.4.

    Example:
        >>> [round(student_quantile(0.95, freedom), 3) for freedom in (1, 2, 3, 10)]
        [12.706, 4.303, 3.182, 2.228]
    """
    low, high = 0.0, math.pi / 2
    for _ in range(_NUM_HALVINGS):
        middle = (low + high) / 2
        if _share_within(middle, freedom) < confidence:
            low = middle
        else:
            high = middle
    return math.sqrt(freedom) * math.tan(low)


def _share_within(angle: float, freedom: int) -> float:
    """Return the share of Student's t distribution within ``sqrt(freedom) tan(angle)`` of 0."""
    is_odd = freedom % 2
    term = math.cos(angle) if is_odd else 1.0
    total = term if freedom > 1 else 0.0
    for factor in range(2 + is_odd, freedom - 1, 2):
        term *= (factor - 1) / factor * math.cos(angle) ** 2
        total += term
    total *= math.sin(angle)
    return 2.0 / math.pi * (angle + total) if is_odd else total
