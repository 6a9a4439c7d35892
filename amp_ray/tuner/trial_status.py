"""The status of every candidate: measured, failed, running, or not yet run."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median, stdev
from typing import Final

from amp_ray.calibration import Observation, observe
from amp_ray.spec.experiment import Experiment
from amp_ray.spec.strategy import Strategy
from amp_ray.trials.outcome import Crashed, Measured, OutOfMemory, TimedOut, Unreachable
from amp_ray.tuner.state import TunerState

IQR_PER_SIGMA: Final = 1.349  # interquartile range of a normal distribution in units of its sigma
MOST_UNREACHABLE: Final = 2  # times; hosts fell silent so often: the strategy may be the cause


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """What a strategy takes, as measured."""

    measured_s: float  # median over its runs
    sigma: float  # lognormal sigma of that median: half of how far it may be off by chance
    runs: tuple[Measured, ...]
    numbers: tuple[int, ...]

    @property
    def typical(self) -> Measured:
        """The middle run, or the faster one of the two in the middle."""
        ordered = sorted(self.runs, key=lambda run: run.iteration_time_s)
        return ordered[(len(ordered) - 1) // 2]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialStatus:
    """The status of candidates, by index."""

    figures: Mapping[int, Figure]  # measured ones
    out_of_memory: Mapping[int, int]  # only ran out of memory, with the number of the last trial
    closed: frozenset[int]  # what is not to be run as something new again
    silent: frozenset[int]  # timed out, crashed, or hosts fell silent: they tell nothing
    running: tuple[int, ...]  # what runs now, in the order of the trials
    launched: Mapping[int, int]

    @property
    def best(self) -> int | None:
        """The fastest measured candidate; the earlier trial wins a tie."""
        figures = self.figures
        return min(figures, key=lambda index: figures[index].measured_s, default=None)

    @property
    def best_s(self) -> float | None:
        """What the fastest measured candidate takes."""
        return None if self.best is None else self.figures[self.best].measured_s

    def is_new(self, index: int) -> bool:
        """Whether a candidate may be run for the first time."""
        return index not in self.closed and index not in self.running


def status_of(state: TunerState) -> TrialStatus:
    """Sort all trials of a study by candidate."""
    runs: dict[int, list[tuple[int, Measured]]] = {}
    failed: dict[int, int] = {}
    silent: set[int] = set()
    unreachable: dict[int, int] = {}
    running: list[int] = []
    for number, trial_record in enumerate(state.trials):
        index, outcome = trial_record.candidate, trial_record.outcome
        if isinstance(outcome, Measured):
            runs.setdefault(index, []).append((number, outcome))
        elif isinstance(outcome, OutOfMemory):
            failed[index] = number
        elif isinstance(outcome, TimedOut | Crashed):
            silent.add(index)
        elif isinstance(outcome, Unreachable):
            unreachable[index] = unreachable.get(index, 0) + 1
        else:
            running.append(index)
    silent |= {index for index, times in unreachable.items() if times >= MOST_UNREACHABLE}
    return TrialStatus(
        figures={index: _figure(found) for index, found in runs.items()},
        out_of_memory={index: number for index, number in failed.items() if index not in runs},
        closed=frozenset(silent | runs.keys() | failed.keys()),
        silent=frozenset(silent - runs.keys() - failed.keys()),
        running=tuple(running),
        launched=Counter(trial_record.candidate for trial_record in state.trials),
    )


def observations(
    experiment: Experiment, strategies: Sequence[Strategy], status: TrialStatus, most: int
) -> dict[int, Observation]:
    """Return what a calibration learns from: one observation per strategy.

    Repeats count as their median. Of more than ``most`` strategies the fastest half and, for the
    rest, those that ended last are taken: the leaders decide what is recommended, and the latest
    trials are where the search is. They stand by index, in its order.
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


def _figure(found: Sequence[tuple[int, Measured]]) -> Figure:
    """Return the figure of a strategy's runs.

    One run tells by its own steps how steady it is; several tell by their difference too, and the
    larger of the two is believed.
    """
    runs = tuple(run for _, run in found)
    times = [run.iteration_time_s for run in runs]
    steps = median(run.spread_s / run.iteration_time_s for run in runs) / IQR_PER_SIGMA
    between = stdev(map(math.log, times)) if len(times) > 1 else 0.0
    return Figure(
        measured_s=median(times),
        sigma=max(steps, between) / math.sqrt(len(times)),
        runs=runs,
        numbers=tuple(number for number, _ in found),
    )


def _observation(experiment: Experiment, strategy: Strategy, figure: Figure | None) -> Observation:
    """Return what is known of one candidate; without a figure it ran out of memory."""
    if figure is None:
        return Observation(experiment=experiment, strategy=strategy, outcome="oom")
    typical = observe(experiment, strategy, figure.typical)
    assert typical is not None
    return replace(typical, measured_s=figure.measured_s)
