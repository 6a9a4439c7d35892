"""A study as a value: candidates, trials, outcomes."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import NormalDist
from typing import Final, Literal, get_args

from amp_ray.cost.estimate import Estimate, Result
from amp_ray.inputs.experiment import Experiment
from amp_ray.search.ranking import rank
from amp_ray.strategies.strategy import Strategy
from amp_ray.trials.outcome import Outcome
from amp_ray.units import counted

Policy = Literal["best", "predicted-order", "random", "amp-2022"]
# Only ``best`` learns from trials and stops early; the others are baselines
POLICIES: Final[tuple[Policy, ...]] = get_args(Policy)


@dataclass(frozen=True, slots=True, kw_only=True)
class TunerSettings:
    """Settings of a study."""

    budget: int
    policy: Policy = "best"
    seed: int = 0  # of the policy ``random``; other policies draw no random numbers
    tolerance_fraction: float = 0.05  # strategies this close to the best are as good as the best
    confidence_fraction: float = 0.95
    max_repeats: int = 2  # how often one strategy may be run again

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise ValueError(f"policy is one of {', '.join(POLICIES)}, found {self.policy!r}")
        for name in ("budget", "seed", "max_repeats"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} starts at 0, found {getattr(self, name)}")
        for name in ("tolerance_fraction", "confidence_fraction"):
            if not 0 < getattr(self, name) < 1:
                raise ValueError(f"{name} lies between 0 and 1, found {getattr(self, name)}")

    @property
    def interval_sigmas(self) -> float:
        """Sigmas to either side of a normal mean that hold the confidence."""
        return NormalDist().inv_cdf((1.0 + self.confidence_fraction) / 2.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One planned launch."""

    number: int  # in the study, from 0
    strategy: Strategy
    predicted_s: float  # seconds per iteration, predicted before the launch
    sigma: float  # lognormal sigma of that prediction
    repeats: int | None  # number of the trial that it repeats; None for a strategy's first one
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRecord:
    """A trial with its outcome."""

    trial: Trial
    candidate: int  # its strategy's index among the candidates
    outcome: Outcome | None = None  # None while it runs


@dataclass(frozen=True, slots=True, kw_only=True)
class TunerState:
    """The state of a study. Every change makes a new state; the old one stays valid."""

    experiment: Experiment
    candidates: tuple[Estimate, ...]  # as in the uncalibrated ranking, feasible ones first
    settings: TunerSettings
    order: tuple[int, ...]  # indices in the order of policies other than ``best``
    trials: tuple[TrialRecord, ...]  # every trial, by number
    # The index of every candidate's strategy
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

    Results without a strategy are left out. The policy ``amp-2022`` needs ``order``, the order of
    the published planner.
    """
    ranked = rank(results).results
    candidates = {
        result.strategy: result for result in reversed(ranked) if isinstance(result, Estimate)
    }
    first_of_each = tuple(reversed(candidates.values()))
    indices = {estimate.strategy: index for index, estimate in enumerate(first_of_each)}
    return TunerState(
        experiment=experiment,
        candidates=first_of_each,
        settings=settings,
        order=_order(settings, indices, order),
        trials=(),
        index_of=indices,
    )


def start(state: TunerState, trial: Trial) -> TunerState:
    """Note that a trial was launched."""
    if trial.number != len(state.trials):
        message = f"the next trial is number {len(state.trials)}, found number {trial.number}"
        raise ValueError(message)
    index = state.index_of.get(trial.strategy)
    if index is None:
        raise ValueError(f"trial {trial.number} runs a strategy that is no candidate of this study")
    trial_record = TrialRecord(trial=trial, candidate=index)
    return replace(state, trials=(*state.trials, trial_record))


def record(state: TunerState, number: int, outcome: Outcome) -> TunerState:
    """Record the outcome of a trial; later outcomes of the same trial are ignored."""
    if not 0 <= number < len(state.trials):
        raise ValueError(f"trial {number} was never launched; the study has {len(state.trials)}")
    trial_record = state.trials[number]
    if trial_record.outcome is not None:
        return state
    ended = replace(trial_record, outcome=outcome)
    return replace(state, trials=(*state.trials[:number], ended, *state.trials[number + 1 :]))


def _order(
    settings: TunerSettings, indices: Mapping[Strategy, int], order: Sequence[Strategy] | None
) -> tuple[int, ...]:
    """Return another planner's order as indices; by default that of the ranking."""
    if order is None:
        if settings.policy == "amp-2022":
            raise ValueError("the policy amp-2022 needs the order of the published planner")
        return tuple(range(len(indices)))
    strange = sum(strategy not in indices for strategy in order)
    if strange:
        named = counted(strange, "strategy", "strategies")
        raise ValueError(f"the order names {named} outside the candidates of this study")
    return tuple(dict.fromkeys(indices[strategy] for strategy in order))
