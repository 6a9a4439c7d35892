"""The strategy that a study recommends."""

import math
from dataclasses import dataclass
from typing import Final

from amp_ray.spec.strategy import Strategy
from amp_ray.tuner.knowledge import Knowledge
from amp_ray.tuner.state import TunerState

REPEAT_FRACTION: Final = 0.03
"""Two runs of one strategy on a quiet cluster differ by 3 % and more (BigScience chronicles)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tie:
    """A strategy as fast as the recommended one, within the error."""

    strategy: Strategy
    time_s: float
    measured: bool  # whether that was measured; else it is predicted


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """The strategy to use."""

    strategy: Strategy
    measured_s: float | None  # what it took; None if nobody has run it
    predicted_s: float
    number: int | None  # its first measured trial; None if there is none
    ties: tuple[Tie, ...]  # others that are as good as far as anybody can tell, fastest first
    reason: str


def recommend(state: TunerState, knowledge: Knowledge) -> Recommendation | None:
    """Recommend the best measured strategy, or a better one if it must be much better.

    One that nobody has run is recommended only if it is predicted to be faster than the best
    measured one by more than the prediction's error. Returns None where nothing was measured and
    nothing is expected to run.
    """
    status = knowledge.status
    first = next(iter(knowledge.proposable()), None)
    if status.best is None:
        return (
            None if first is None else _predicted(state, knowledge, first, "nothing was measured")
        )
    if first is not None:
        gain = math.log(_best_s(knowledge) / knowledge.estimates[first].iteration_time_s)
        error = knowledge.widening * knowledge.sigma(first)
        if gain > error:
            why = (
                f"predicted {100 * math.expm1(gain):.0f} % faster than the best measured, which "
                f"is more than the prediction's error of {100 * error:.0f} %"
            )
            return _predicted(state, knowledge, first, why)
    return _measured(state, knowledge, status.best)


def _measured(state: TunerState, knowledge: Knowledge, best: int) -> Recommendation:
    figure = knowledge.status.figures[best]
    ties = _ties(state, knowledge, best, figure.measured_s)
    as_good = f"; {len(ties)} more cannot be told from it" if ties else ""
    return Recommendation(
        strategy=state.candidates[best].strategy,
        measured_s=figure.measured_s,
        predicted_s=knowledge.estimates[best].iteration_time_s,
        number=figure.numbers[0],
        ties=ties,
        reason=f"the fastest of {len(knowledge.status.figures)} measured strategies{as_good}",
    )


def _predicted(state: TunerState, knowledge: Knowledge, index: int, why: str) -> Recommendation:
    predicted_s = knowledge.estimates[index].iteration_time_s
    return Recommendation(
        strategy=state.candidates[index].strategy,
        measured_s=None,
        predicted_s=predicted_s,
        number=None,
        ties=_ties(state, knowledge, index, predicted_s),
        reason=f"the best predicted one: {why}",
    )


def _ties(state: TunerState, knowledge: Knowledge, chosen: int, chosen_s: float) -> tuple[Tie, ...]:
    """Return the strategies whose times differ from the chosen one by less than the error.

    A prediction has the model's own error; two measured times that of a repeat, or of their
    spread where that is larger.
    """
    figures = knowledge.status.figures
    chosen_sigma = figures[chosen].sigma if chosen in figures else knowledge.time_error
    ties = []
    for index, figure in figures.items():
        error = max(REPEAT_FRACTION, math.hypot(figure.sigma, chosen_sigma))
        if index != chosen and math.log(figure.measured_s / chosen_s) <= error:
            ties.append((figure.measured_s, index, True))
    for index in knowledge.proposable():
        predicted_s = knowledge.estimates[index].iteration_time_s
        if index != chosen and math.log(predicted_s / chosen_s) <= knowledge.time_error:
            ties.append((predicted_s, index, False))
    return tuple(
        Tie(strategy=state.candidates[index].strategy, time_s=time_s, measured=measured)
        for time_s, index, measured in sorted(ties)
    )


def _best_s(knowledge: Knowledge) -> float:
    best_s = knowledge.status.best_s
    assert best_s is not None
    return best_s
