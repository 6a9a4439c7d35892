"""The choice of the next trials, and when to launch no more."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from statistics import NormalDist
from typing import Final

import numpy as np

from amp_ray.calibration.predictions import Predictor
from amp_ray.trials.steps import IQR_PER_SIGMA, UNSTEADY_FRACTION
from amp_ray.tuner.belief import Belief, ErrorModel, time_covariance
from amp_ray.tuner.calibrated_predictions import BoundedPredictor
from amp_ray.tuner.certificate import certify
from amp_ray.tuner.knowledge import Knowledge, learn
from amp_ray.tuner.state import Trial, TunerSettings, TunerState
from amp_ray.tuner.trial_status import Figure, TrialStatus, status_of
from amp_ray.units import figure_text

# How far a run may lie from another one of the same strategy before one counts as disturbed
_REPEAT_SIGMA: Final = UNSTEADY_FRACTION / IQR_PER_SIGMA
_MOST_RESERVED: Final = 2  # last trials of a budget, kept for uncertain leaders


_NORMAL: Final = NormalDist()


@dataclass(frozen=True, slots=True, kw_only=True)
class _View:
    """Knowledge as if every running trial had taken its predicted time."""

    knowledge: Knowledge
    belief: Belief
    best_s: float  # infinite before the first trial
    within_reach: bool  # whether the budget suffices to rule surprises out
    supposed: frozenset[int] = frozenset()

    @classmethod
    def of(cls, knowledge: Knowledge, *, within_reach: bool) -> "_View":
        """Return the view in which all running trials have ended as predicted."""
        view = cls(
            knowledge=knowledge,
            belief=knowledge.belief,
            best_s=knowledge.status.best_s or math.inf,
            within_reach=within_reach,
        )
        for index in knowledge.status.running:
            if index not in knowledge.status.closed:
                view = view.suppose(index)
        return view

    def suppose(self, index: int) -> "_View":
        """Return the view after a trial of one more strategy that took its predicted time."""
        row = self.belief.indices.index(index)
        predicted_s = self.knowledge.estimates[index].iteration_time_s
        return replace(
            self,
            belief=self.belief.as_if_measured(row),
            best_s=min(self.best_s, predicted_s),
            supposed=self.supposed | {index},
        )

    def is_settled(self, settings: TunerSettings) -> bool:
        """Return whether the study could stop if running trials end as predicted, so it waits."""
        indices = [index for index in self.knowledge.expected() if index not in self.supposed]
        limit_s = self.best_s / (1.0 + settings.tolerance_fraction)
        chances = self.knowledge.chances(indices, self.belief)
        if not self.within_reach:
            chances = chances.worth_trials()
        return chances.any_below(limit_s) <= 1.0 - settings.confidence_fraction

    def most_promising(self, indices: Sequence[int]) -> int:
        """Return the candidate with the largest expected gain; of equal ones the fastest."""
        rows = [self.belief.indices.index(index) for index in indices]
        gains = expected_gain(self.belief, rows, self.best_s, self.knowledge.errors)
        means = [float(self.belief.log_mean[row]) for row in rows]
        return min(zip(indices, gains, means, strict=True), key=lambda it: (-it[1], it[2], it[0]))[
            0
        ]

    def reason(self, index: int, num_left: int) -> str:
        if math.isinf(self.best_s):
            return f"best predicted of {num_left} feasible strategies"
        chance = self.knowledge.chances([index], self.belief).any_below(self.best_s)
        return (
            f"most to gain of {num_left} feasible strategies: {100 * chance:.0f} % chance to be "
            f"faster than {figure_text(self.best_s)} s"
        )


def explore(
    knowledge: Knowledge, settings: TunerSettings, *, within_reach: bool = False
) -> Iterator[tuple[int, str]]:
    """Yield strategies without a trial, by index and with the reason, most promising first.

    The first trial of a study is the strategy with the fastest prediction. Later ones are chosen by
    their expected gain over the best. Running and yielded trials count as if they had taken their
    predicted times, so that parallel trials test different things. If their results would end the
    study, no more are yielded; with ``within_reach``, that is when the certificate holds.
    """
    view = _View.of(knowledge, within_reach=within_reach)
    proposable = knowledge.proposable()
    near = [index for index in proposable if index in knowledge.belief.indices]
    for num_yielded in range(len(near)):
        if view.supposed and view.is_settled(settings):
            return
        index = view.most_promising(near)
        yield index, view.reason(index, len(proposable) - num_yielded)
        near.remove(index)
        view = view.suppose(index)
    for index in proposable:
        if index not in knowledge.belief.indices:
            yield index, "the next prediction, far behind the leaders"


def expected_gain(
    belief: Belief, rows: Sequence[int], best_s: float, errors: ErrorModel
) -> list[float]:
    """Return the expected gain of each strategy over a time; slower ones count as 0.

    If ``best_s`` is infinite, all gains are equal. Gains are in logarithms, multiplied by the
    chance to finish.
    """
    if math.isinf(best_s):
        return [0.0] * len(rows)
    share, gains = errors.surprise_fraction, []
    for row in rows:
        apart = math.log(best_s) - float(belief.log_mean[row])
        plain = errors.scale * float(belief.sigma[row])
        wide = math.hypot(plain, errors.surprise_sigma)
        gain = (1.0 - share) * _normal_gain(apart, plain) + share * _normal_gain(apart, wide)
        gains.append(gain * float(belief.finishes[row]))
    return gains


def _normal_gain(apart: float, sigma: float) -> float:
    """Return the expected gain over a time that lies ``apart`` above the expectation."""
    distance = apart / sigma
    return max(0.0, sigma * (_NORMAL.pdf(distance) + distance * _NORMAL.cdf(distance)))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Choice:
    """A trial without its number."""

    index: int
    predicted_s: float
    sigma: float
    reason: str
    repeats: int | None = None


def next_trials(
    state: TunerState, free: int, predictor: BoundedPredictor, knowledge: Knowledge | None = None
) -> tuple[Trial, ...]:
    """Choose the trials to launch now.

    ``knowledge`` is the result of `learn` for this state, if the caller has it. Returns up to
    ``free`` trials, to be passed to `start` in this order. Returns no trial if the budget is spent,
    the certificate leaves no large gain, no strategy is left, or running trials have to end first.
    """
    room = min(free, state.budget_left)
    if room <= 0:
        return ()
    if state.settings.policy == "best":
        choices = _best(state, knowledge or learn(state, predictor))
    else:
        choices = _in_order(state, predictor)
    return tuple(
        Trial(
            number=number,
            strategy=state.candidates[choice.index].strategy,
            predicted_s=choice.predicted_s,
            sigma=choice.sigma,
            repeats=choice.repeats,
            reason=choice.reason,
        )
        for number, choice in enumerate(islice(choices, room), start=len(state.trials))
    )


def _in_order(state: TunerState, predictor: Predictor) -> Iterator[_Choice]:
    """Propose candidates in a fixed order; only the published planner's order ignores memory."""
    status, order, policy = status_of(state), state.order, state.settings.policy
    if policy == "random":
        drawn = np.random.default_rng(state.settings.seed).permutation(len(order))
        order = tuple(order[int(index)] for index in drawn)
    for index in order:
        estimate = state.candidates[index]
        expected = estimate.feasible or policy == "amp-2022"
        if not (expected and estimate.launchable and status.is_new(index)):
            continue
        variance = time_covariance(state.experiment, [estimate.strategy], None, predictor)
        yield _Choice(
            index=index,
            predicted_s=estimate.iteration_time_s,
            sigma=math.sqrt(variance[0, 0]),
            reason=f"next in the order of the policy {policy}",
        )


def _best(state: TunerState, knowledge: Knowledge) -> Iterator[_Choice]:
    """Propose the largest expected gains; once little is left to gain, repeat the leaders."""
    status = knowledge.status
    certificate = certify(state, knowledge)
    again = to_repeat(status, state.settings)
    settled = certificate is not None and certificate.settled
    if not settled and state.budget_left > min(len(again), _MOST_RESERVED):
        within_reach = certificate is not None and certificate.within_reach
        for index, reason in explore(knowledge, state.settings, within_reach=within_reach):
            yield _Choice(
                index=index,
                predicted_s=knowledge.estimates[index].iteration_time_s,
                sigma=knowledge.sigma(index),
                reason=reason,
            )
    for index in again:
        figure = status.figures[index]
        first = figure.numbers[0]
        yield _Choice(
            index=index,
            predicted_s=figure.expected_s,
            sigma=math.hypot(figure.expected_sigma, _REPEAT_SIGMA),
            reason=f"repeats trial {first}: to be sure which strategy is the fastest",
            repeats=first,
        )


def to_repeat(status: TrialStatus, settings: TunerSettings) -> tuple[int, ...]:
    """Return the leaders to run again, first the one with the fewest runs, then the fastest.

    The winner is uncertain while another measured strategy may in truth be faster by more than the
    tolerance; then both are run again. A winner whose measurement is unsteady is also run again.
    The error of a time comes from the spread of its steps, and from repeated runs if there are any.
    The fastest of several single runs was chosen for its luck, too, so it always runs twice.
    """
    open_again = (
        index
        for index in _uncertain(status, settings)
        if status.launched[index] <= settings.max_repeats and index not in status.running
    )

    def urgency(index: int) -> tuple[float, ...]:
        """Order by number of runs, then by time."""
        figure = status.figures[index]
        return (len(figure.runs), figure.expected_s, index)

    return tuple(sorted(open_again, key=urgency))


def _uncertain(status: TrialStatus, settings: TunerSettings) -> set[int]:
    """Return the strategies among which the fastest measured one is not certain."""
    leader = status.best  # computed once: it compares all figures
    if leader is None:
        return set()
    best = status.figures[leader]
    margin = math.log1p(settings.tolerance_fraction)
    doubt = 1.0 - settings.confidence_fraction
    rivals = {
        index
        for index, figure in status.figures.items()
        if index != leader and _chance_of_gain(best, figure, margin) > doubt
    }
    is_lucky = len(status.figures) > 1 and len(best.counted) == 1
    return rivals | {leader} if rivals or is_lucky or not best.is_steady else set()


def _chance_of_gain(best: Figure, rival: Figure, margin: float) -> float:
    """Return the chance that a rival's true log time is below the best's by ``margin``."""
    sigma = math.hypot(best.expected_sigma, rival.expected_sigma)
    if sigma <= 0.0:
        return 0.0
    apart = math.log(rival.expected_s / best.expected_s) + margin
    return _NORMAL.cdf(-apart / sigma)
