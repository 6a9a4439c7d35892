"""A study as a value: what could be tried, what was tried, what came of it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal, get_args

from amp_ray.cost.estimate import Estimate, Result
from amp_ray.search.ranking import rank
from amp_ray.spec.experiment import Experiment
from amp_ray.spec.strategy import Strategy
from amp_ray.trials.outcome import Outcome
from amp_ray.tuner.log import Log
from amp_ray.units import counted

Policy = Literal["best", "predicted-order", "random", "amp-2022"]

POLICIES: Final[tuple[Policy, ...]] = get_args(Policy)
"""Only ``best`` learns from trials and stops early; the others are there to compare with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TunerSettings:
    """Settings of a study.

    Args:
        seed: Of the policy ``random``; no other one draws anything.
        tolerance_fraction: Strategies this close to the best are as good as the best.
        max_repeats: How often one strategy may be run again.

    Raises:
        ValueError: If a figure is out of its range, or there is no such policy.
    """

    budget: int
    policy: Policy = "best"
    seed: int = 0
    tolerance_fraction: float = 0.05
    confidence_fraction: float = 0.95
    max_repeats: int = 2

    def __post_init__(self) -> None:
        """Refuse what makes no study."""
        if self.policy not in POLICIES:
            message = f"policy is one of {', '.join(POLICIES)}, found {self.policy!r}"
            raise ValueError(message)
        for name in ("budget", "seed", "max_repeats"):
            if getattr(self, name) < 0:
                message = f"{name} starts at 0, found {getattr(self, name)}"
                raise ValueError(message)
        for name in ("tolerance_fraction", "confidence_fraction"):
            if not 0 < getattr(self, name) < 1:
                message = f"{name} lies between 0 and 1, found {getattr(self, name)}"
                raise ValueError(message)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One launch that was decided on.

    Args:
        number: Its number in the study, from 0.
        predicted_s: Seconds per iteration that were expected.
        sigma: Lognormal sigma of that expectation.
        repeats: Number of the trial that it repeats; None for a strategy's first one.
    """

    number: int
    strategy: Strategy
    predicted_s: float
    sigma: float
    repeats: int | None
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRecord:
    """A trial and what came of it.

    Args:
        candidate: Its strategy's index among the candidates.
        outcome: What came of it; None while it runs.
    """

    trial: Trial
    candidate: int
    outcome: Outcome | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TunerState:
    """All that a study knows. Every change makes a new one; the old one stays valid.

    Args:
        candidates: In the order of the uncalibrated ranking, feasible ones first.
        order: Indices of the candidates in the order in which policies other than ``best`` go.
        trials: Every trial, by number.
        index_of: The index of every candidate's strategy.
    """

    experiment: Experiment
    candidates: tuple[Estimate, ...]
    settings: TunerSettings
    order: tuple[int, ...]
    trials: Log[TrialRecord]
    index_of: Mapping[Strategy, int] = field(repr=False, compare=False)

    @property
    def budget_left(self) -> int:
        """How many trials may still be launched."""
        return max(0, self.settings.budget - len(self.trials))

    @property
    def running(self) -> tuple[Trial, ...]:
        """Trials that have no outcome yet."""
        return tuple(
            trial_record.trial for trial_record in self.trials if trial_record.outcome is None
        )


def begin(
    experiment: Experiment,
    results: Iterable[Result],
    settings: TunerSettings,
    order: Sequence[Strategy] | None = None,
) -> TunerState:
    """Start a study.

    Results without a strategy are left out. The policy ``amp-2022`` goes in ``order``, that of
    the published planner.

    Raises:
        ValueError: If the policy needs an order and none is given, or the order names what is no
            candidate.
    """
    ranked = rank(results).results
    candidates = {each.strategy: each for each in reversed(ranked) if isinstance(each, Estimate)}
    found = tuple(reversed(candidates.values()))
    indices = {estimate.strategy: index for index, estimate in enumerate(found)}
    return TunerState(
        experiment=experiment,
        candidates=found,
        settings=settings,
        order=_order(settings, indices, order),
        trials=Log(),
        index_of=indices,
    )


def start(state: TunerState, trial: Trial) -> TunerState:
    """Note that a trial was launched.

    Raises:
        ValueError: If its number is not the next one, or its strategy is no candidate.
    """
    if trial.number != len(state.trials):
        message = f"the next trial is number {len(state.trials)}, found number {trial.number}"
        raise ValueError(message)
    index = state.index_of.get(trial.strategy)
    if index is None:
        message = f"trial {trial.number} runs a strategy that is no candidate of this study"
        raise ValueError(message)
    trial_record = TrialRecord(trial=trial, candidate=index)
    return replace(state, trials=state.trials.appended(trial_record))


def record(state: TunerState, number: int, outcome: Outcome) -> TunerState:
    """Note what came of a trial. A trial ends once: a later outcome changes nothing.

    Raises:
        ValueError: If no such trial was launched.
    """
    if not 0 <= number < len(state.trials):
        message = f"trial {number} was never launched; the study has {len(state.trials)}"
        raise ValueError(message)
    trial_record = state.trials[number]
    if trial_record.outcome is not None:
        return state
    return replace(
        state, trials=state.trials.replaced(number, replace(trial_record, outcome=outcome))
    )


def reopen(state: TunerState, number: int) -> TunerState:
    """Forget what came of a trial: it is to run again, and costs nothing more."""
    trial_record = replace(state.trials[number], outcome=None)
    return replace(state, trials=state.trials.replaced(number, trial_record))


def _order(
    settings: TunerSettings, indices: Mapping[Strategy, int], order: Sequence[Strategy] | None
) -> tuple[int, ...]:
    """Turn another planner's order into indices; without one, take the ranking's."""
    if order is None:
        if settings.policy == "amp-2022":
            message = "the policy amp-2022 needs the order of the published planner"
            raise ValueError(message)
        return tuple(range(len(indices)))
    strange = sum(strategy not in indices for strategy in order)
    if strange:
        named = counted(strange, "strategy", "strategies")
        message = f"the order names {named} outside the candidates of this study"
        raise ValueError(message)
    return tuple(dict.fromkeys(indices[strategy] for strategy in order))
