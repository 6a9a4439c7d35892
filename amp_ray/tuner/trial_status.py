"""The status of every candidate: measured, failed, running, or not yet run."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from amp_ray.calibration.observation import Observation, observe
from amp_ray.inputs.experiment import Experiment
from amp_ray.strategies.strategy import Strategy
from amp_ray.trials.outcome import Crashed, Measured, OutOfMemory, TimedOut, blames_host
from amp_ray.trials.steps import IQR_PER_SIGMA, SUPPOSED_STEPS, UNSTEADY_FRACTION
from amp_ray.tuner.state import TunerState

# Lognormal sigma of a run in addition to the standard error of its steps: two runs of one strategy
# on a quiet cluster differ by 3 % and more (BigScience chronicles)
REPEAT_SIGMA: Final = 0.02
PRIOR_REPEATS: Final = 1  # number of repeats that this prior counts for
# Warnings of times that are not used alone
_DISTURBED: Final = frozenset(("trend", "unsteady", "warm_up"))
# Standard error of a short trial whose steps are just about unsteady. A mean with a larger error is
# not used without its prediction, however steady its steps are
_STEADY_SIGMA: Final = UNSTEADY_FRACTION / IQR_PER_SIGMA / math.sqrt(SUPPOSED_STEPS)
MOST_HOSTLESS: Final = 2  # trials that failed because of a host, before the strategy is suspected


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """Measured time of a strategy."""

    measured_s: float  # mean time of a step, over runs that count, weighted by their errors
    sigma: float  # lognormal sigma of that mean: its standard error
    runs: tuple[Measured, ...]
    numbers: tuple[int, ...]
    predicted_s: float | None = None  # by calibrated constants; None if it is not computed
    predicted_sigma: float = math.inf  # lognormal sigma of that prediction

    @property
    def is_steady(self) -> bool:
        """Whether the measurement is used without its prediction."""
        return self.sigma <= _STEADY_SIGMA and all(map(_is_undisturbed, self.counted))

    @property
    def counted(self) -> tuple[Measured, ...]:
        """The runs that count: those without a disturbance, or all if each has one."""
        return _counted(self.runs)

    @property
    def expected_s(self) -> float:
        """Expected time of the strategy.

        An unsteady measurement and the prediction are weighted by their errors. After the constants
        are fitted to all trials, the remaining error of the prediction is independent of the
        measurement's, so this is the posterior mean.
        """
        if self.is_steady or self.predicted_s is None:
            return self.measured_s
        weight = self._weight
        return float(self.measured_s**weight * self.predicted_s ** (1.0 - weight))

    @property
    def expected_sigma(self) -> float:
        """Lognormal sigma of the expected time, without errors that all strategies share."""
        if self.is_steady or self.predicted_s is None:
            return self.sigma
        return self.sigma * math.sqrt(self._weight)

    @property
    def _weight(self) -> float:
        """Weight of the measurement when combined with the prediction, up to 1."""
        return 1.0 / (1.0 + (self.sigma / self.predicted_sigma) ** 2)

    @property
    def typical(self) -> Measured:
        """The middle run that counts, or the faster one of the two in the middle."""
        ordered = sorted(self.counted, key=lambda run: run.mean_s)
        return ordered[(len(ordered) - 1) // 2]

    @property
    def typical_number(self) -> int:
        """The number of that run."""
        return self.numbers[self.runs.index(self.typical)]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialStatus:
    """The status of candidates, by index."""

    figures: Mapping[int, Figure]  # measured ones
    out_of_memory: Mapping[int, int]  # only ran out of memory; number of their last trial
    closed: frozenset[int]  # have an outcome, so that only repeats may run them again
    silent: frozenset[int]  # timed out, crashed, or lost their hosts: no information about cost
    running: tuple[int, ...]  # in the order of the trials
    launched: Mapping[int, int]

    @property
    def best(self) -> int | None:
        """The measured candidate that is expected to be the fastest; the earlier wins a tie."""
        figures = self.figures
        return min(figures, key=lambda index: figures[index].expected_s, default=None)

    @property
    def num_repeats(self) -> int:
        """How many runs that count repeat another one."""
        return sum(len(figure.counted) - 1 for figure in self.figures.values())

    @property
    def best_s(self) -> float | None:
        """Expected time of the fastest measured candidate."""
        return None if self.best is None else self.figures[self.best].expected_s

    def with_predictions(self, times_s: Mapping[int, float], sigma: float) -> "TrialStatus":
        """Return the status with predictions of measured candidates, in s, by index."""
        figures = {
            index: replace(figure, predicted_s=times_s.get(index), predicted_sigma=sigma)
            for index, figure in self.figures.items()
        }
        return replace(self, figures=figures)

    def is_new(self, index: int) -> bool:
        """Whether a candidate may be run for the first time."""
        return index not in self.closed and index not in self.running


def status_of(state: TunerState) -> TrialStatus:
    """Sort all trials of a study by candidate."""
    runs: dict[int, list[tuple[int, Measured]]] = {}
    failed: dict[int, int] = {}
    silent: set[int] = set()
    hostless: dict[int, int] = {}
    running: list[int] = []
    for number, trial_record in enumerate(state.trials):
        index, outcome = trial_record.candidate, trial_record.outcome
        if isinstance(outcome, Measured):
            runs.setdefault(index, []).append((number, outcome))
        elif isinstance(outcome, OutOfMemory):
            failed[index] = number
        elif blames_host(outcome):
            hostless[index] = hostless.get(index, 0) + 1
        elif isinstance(outcome, TimedOut | Crashed):
            silent.add(index)
        else:
            running.append(index)
    silent |= {index for index, times in hostless.items() if times >= MOST_HOSTLESS}
    return TrialStatus(
        figures=_figures(runs),
        out_of_memory={index: number for index, number in failed.items() if index not in runs},
        closed=frozenset(silent | runs.keys() | failed.keys()),
        silent=frozenset(silent - runs.keys() - failed.keys()),
        running=tuple(running),
        launched=Counter(trial_record.candidate for trial_record in state.trials),
    )


def observations(
    experiment: Experiment, strategies: Sequence[Strategy], status: TrialStatus, most: int
) -> dict[int, Observation]:
    """Return the observations for a calibration: one per strategy.

    Repeats count as their mean. If there are more than ``most`` strategies, take the fastest for
    one half, because they decide the recommendation, and those that ended last for the other half,
    because they are where the search is. The result is ordered by index.
    """
    observed = {*status.figures, *status.out_of_memory}
    kept = observed
    if len(observed) > most:
        fastest = sorted(status.figures, key=lambda index: status.figures[index].measured_s)
        kept = set(fastest[: most // 2])
        last = {index: figure.numbers[-1] for index, figure in status.figures.items()}
        last = {**status.out_of_memory, **last}
        latest = sorted(observed - kept, key=lambda index: -last[index])
        kept |= set(latest[: most - len(kept)])
    return {
        index: _observation(experiment, strategies[index], status.figures.get(index))
        for index in sorted(kept)
    }


def _figures(runs: Mapping[int, Sequence[tuple[int, Measured]]]) -> dict[int, Figure]:
    """Return the figure of every strategy that was measured.

    The error of a run combines the error of its steps and the usual difference between two runs of
    a strategy. If runs differ by more, the machine is unsteady, and all errors of the study are
    increased by the same factor (the Birge ratio, for measurements that disagree).
    """
    figures = {index: _figure(numbered_runs) for index, numbered_runs in runs.items()}
    squares = [_disagreement(figure) for figure in figures.values()]
    num_repeats = sum(len(figure.counted) - 1 for figure in figures.values())
    ratio = (PRIOR_REPEATS + math.fsum(squares)) / (PRIOR_REPEATS + num_repeats)
    factor = max(1.0, math.sqrt(ratio))
    return {
        index: replace(figure, sigma=factor * figure.sigma) for index, figure in figures.items()
    }


def _is_undisturbed(run: Measured) -> bool:
    return run.tells_time and not _DISTURBED & {*run.warnings}


def _counted(runs: tuple[Measured, ...]) -> tuple[Measured, ...]:
    return tuple(filter(_is_undisturbed, runs)) or runs


def _figure(numbered_runs: Sequence[tuple[int, Measured]]) -> Figure:
    runs = _counted(tuple(run for _, run in numbered_runs))
    weights = [_run_sigma(run) ** -2.0 for run in runs]
    logs = [weight * math.log(run.mean_s) for run, weight in zip(runs, weights, strict=True)]
    return Figure(
        measured_s=runs[0].mean_s if len(runs) == 1 else math.exp(math.fsum(logs) / sum(weights)),
        sigma=sum(weights) ** -0.5,
        runs=tuple(run for _, run in numbered_runs),
        numbers=tuple(number for number, _ in numbered_runs),
    )


def _disagreement(figure: Figure) -> float:
    """Return the squared distances of the runs from their mean, in units of their errors."""
    return math.fsum(
        (math.log(run.mean_s / figure.measured_s) / _run_sigma(run)) ** 2 for run in figure.counted
    )


def _run_sigma(run: Measured) -> float:
    return math.hypot(REPEAT_SIGMA, run.error_fraction)


def _observation(experiment: Experiment, strategy: Strategy, figure: Figure | None) -> Observation:
    """Return the observation of one candidate; without a figure it ran out of memory."""
    if figure is None:
        return Observation(experiment=experiment, strategy=strategy, outcome="oom")
    typical = observe(experiment, strategy, figure.typical)
    assert typical is not None
    noise = 0.0 if figure.is_steady else figure.sigma
    return replace(typical, measured_s=figure.measured_s, noise=noise)
