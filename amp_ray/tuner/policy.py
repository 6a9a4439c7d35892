"""Which strategies are run next, and when nothing more is."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from statistics import NormalDist
from typing import Final

import numpy as np

from amp_ray.calibration import Predictor
from amp_ray.calibration.observation import UNSTEADY_FRACTION
from amp_ray.tuner.belief import time_covariance
from amp_ray.tuner.certificate import certify
from amp_ray.tuner.explore import explore
from amp_ray.tuner.knowledge import Knowledge, learn
from amp_ray.tuner.state import Trial, TunerSettings, TunerState
from amp_ray.tuner.trial_status import IQR_PER_SIGMA, Figure, TrialStatus, status_of
from amp_ray.units import counted

_REPEAT_SIGMA: Final = UNSTEADY_FRACTION / IQR_PER_SIGMA
"""How far a run may lie from another one of the same strategy before one counts as disturbed."""

_MOST_RESERVED: Final = 2
"""So many of a budget's last trials go to uncertain leaders rather than to something new."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Choice:
    """A trial without its number."""

    index: int
    predicted_s: float
    sigma: float
    reason: str
    repeats: int | None = None


def next_trials(
    state: TunerState, free: int, predictor: Predictor, knowledge: Knowledge | None = None
) -> tuple[Trial, ...]:
    """Decide what to launch now.

    ``knowledge`` is what `learn` made of this state, if the caller has it already. Returns up to
    ``free`` trials, to be given to `start` in this order. None where the budget is spent, the
    certificate says that nothing expected to run has much to gain, nothing is left, or running
    trials should be waited for.
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


def why_stop(state: TunerState, knowledge: Knowledge) -> str:
    """Say why a study ends when nothing runs and `next_trials` proposes nothing."""
    certificate = certify(state, knowledge)
    if state.settings.policy == "best" and certificate is not None and certificate.settled:
        return certificate.text
    if not state.budget_left:
        return f"the budget of {counted(state.settings.budget, 'trial')} is spent"
    doubtful = len(knowledge.doubtful())
    if doubtful:
        return f"every strategy expected to run was tried; {doubtful} more might run"
    return "every strategy that can run was tried"


def _in_order(state: TunerState, predictor: Predictor) -> Iterator[_Choice]:
    """Propose candidates in a fixed order; only the published planner's ignores memory."""
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
        for promise in explore(knowledge, state.settings):
            yield _Choice(
                index=promise.index,
                predicted_s=knowledge.estimates[promise.index].iteration_time_s,
                sigma=knowledge.sigma(promise.index),
                reason=promise.reason,
            )
    for index in again:
        figure = status.figures[index]
        first = figure.numbers[0]
        yield _Choice(
            index=index,
            predicted_s=figure.measured_s,
            sigma=math.hypot(figure.sigma, _REPEAT_SIGMA),
            reason=f"repeats trial {first}: its spread leaves open which leader is the fastest",
            repeats=first,
        )


_NORMAL: Final = NormalDist()


def to_repeat(status: TrialStatus, settings: TunerSettings) -> tuple[int, ...]:
    """Return the leaders to run again, first the one with the fewest runs, then the fastest.

    The winner is uncertain while another measured strategy has a chance to be in truth more than
    the tolerance faster: then both are run again. How far a figure may be off is told by the
    spread of its steps, and by its runs where there are several.
    """
    leader = status.best  # looked for once: it takes a look at every figure
    if leader is None:
        return ()
    best = status.figures[leader]
    margin = math.log1p(settings.tolerance_fraction)
    doubt = 1.0 - settings.confidence_fraction
    rivals = {
        index
        for index, figure in status.figures.items()
        if index != leader and _chance_of_gain(best, figure, margin) > doubt
    }
    if not rivals:
        return ()
    open_again = (
        index
        for index in rivals | {leader}
        if status.launched[index] <= settings.max_repeats and index not in status.running
    )

    def urgency(index: int) -> tuple[float, ...]:
        """Order by number of runs, then by time."""
        figure = status.figures[index]
        return (len(figure.runs), figure.measured_s, index)

    return tuple(sorted(open_again, key=urgency))


def _chance_of_gain(best: Figure, rival: Figure, margin: float) -> float:
    """Return the chance that a rival's true time lies below the best's by a margin of logarithm."""
    sigma = math.hypot(best.sigma, rival.sigma)
    if sigma <= 0.0:
        return 0.0
    apart = math.log(rival.measured_s / best.measured_s) + margin
    return _NORMAL.cdf(-apart / sigma)
