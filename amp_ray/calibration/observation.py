"""Outcomes of trials in the form that a calibration uses."""

from dataclasses import dataclass
from typing import Literal

from amp_ray.errors import Where
from amp_ray.inputs.experiment import Experiment
from amp_ray.strategies.strategy import Strategy
from amp_ray.trials.outcome import Measured, OutOfMemory
from amp_ray.trials.outcome import Outcome as TrialOutcome
from amp_ray.trials.steps import standard_error, tells_time

Outcome = Literal["measured", "oom", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """One trial with its outcome."""

    experiment: Experiment  # trials of one calibration may have different ones
    strategy: Strategy
    outcome: Outcome  # ``oom``: out of memory; ``failed``: no result of unknown cause
    measured_s: float | None = None  # seconds per iteration: the mean over steps, if known
    spread_s: float | None = None  # interquartile range of its steps, if known
    # Lognormal sigma of an unsteady measurement; 0 for a steady one, whose error is part of the
    # model's error
    noise: float = 0.0
    peak_memory_bytes: tuple[float, ...] = ()  # of each stage, or of the largest; empty if unknown
    where: Where | None = None

    def __post_init__(self) -> None:
        if (self.outcome == "measured") != (self.measured_s is not None):
            message = f"outcome {self.outcome!r} does not go with measured_s {self.measured_s}"
            raise ValueError(message)
        if self.measured_s is not None and not self.measured_s > 0:
            raise ValueError(f"measured_s must be positive, found {self.measured_s}")
        if self.peak_memory_bytes and len(self.peak_memory_bytes) not in {1, self.strategy.pp}:
            raise ValueError(
                f"peak_memory_bytes needs one figure, or one per stage ({self.strategy.pp}), "
                f"found {len(self.peak_memory_bytes)}"
            )

    @property
    def plan(self) -> tuple[Experiment, Strategy]:
        """The plan to predict."""
        return self.experiment, self.strategy

    def excess_s(self, predicted_s: float) -> float:
        """Return by how much it took longer than predicted, in s per slot of the pipeline.

        There are as many slots as micro-batches pass the last stage while it works or waits.
        """
        num_slots = self.strategy.num_micro_batches + self.strategy.pp - 1
        return ((self.measured_s or 0.0) - predicted_s) / num_slots

    @property
    def tells_time(self) -> bool:
        """Whether it has a measured time, steady or not."""
        return self.measured_s is not None


def observe(
    experiment: Experiment, strategy: Strategy, outcome: TrialOutcome
) -> Observation | None:
    """Return the observation of a trial's outcome.

    None for outcomes without information about cost: a time-out of the trial, a crash, an
    unreachable host.
    """
    if isinstance(outcome, Measured):
        return Observation(
            experiment=experiment,
            strategy=strategy,
            outcome="measured",
            measured_s=outcome.mean_s,
            spread_s=outcome.spread_s,
            noise=0.0 if outcome.tells_time else outcome.error_fraction,
            peak_memory_bytes=tuple(map(float, outcome.peak_memory_bytes)),
        )
    if isinstance(outcome, OutOfMemory):
        return Observation(experiment=experiment, strategy=strategy, outcome="oom")
    return None


def noise_of(measured_s: float | None, spread_s: float | None) -> float:
    """Return the noise of a measurement from the few figures of a table."""
    if measured_s is None or spread_s is None or tells_time(measured_s, spread_s):
        return 0.0
    return standard_error((), measured_s, spread_s)
