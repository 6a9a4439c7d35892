"""What trials told, in the form that a calibration learns from."""

from dataclasses import dataclass
from typing import Final, Literal

from amp_ray.errors import Where
from amp_ray.spec.experiment import Experiment
from amp_ray.spec.strategy import Strategy
from amp_ray.trials.outcome import Measured, OutOfMemory
from amp_ray.trials.outcome import Outcome as TrialOutcome

Outcome = Literal["measured", "oom", "failed"]

UNSTEADY_FRACTION: Final = 0.25
"""A trial whose steps spread (interquartile range) over more than this share of their median was
disturbed. Ten normal steps that spread so far know their median to 7 %, which is what repeats of
one run on a quiet cluster differ by (3-9 %, BigScience chronicles)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """One trial and what came of it."""

    # What was given; trials of one calibration may come from several experiments
    experiment: Experiment
    strategy: Strategy
    # ``measured``; ``oom`` for out of memory; ``failed`` for no result of unknown cause
    outcome: Outcome
    measured_s: float | None = None  # seconds per iteration of a trial that was measured
    spread_s: float | None = None  # interquartile range of its steps, if known
    # Measured peak of each stage, or one figure for the largest of all; empty if nobody looked
    peak_memory_bytes: tuple[float, ...] = ()
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
        """What a cost model needs to predict it."""
        return self.experiment, self.strategy

    @property
    def tells_time(self) -> bool:
        """Whether its time may be learnt from: measured, and steady as far as known."""
        if self.measured_s is None:
            return False
        return self.spread_s is None or self.spread_s <= UNSTEADY_FRACTION * self.measured_s


def observe(
    experiment: Experiment, strategy: Strategy, outcome: TrialOutcome
) -> Observation | None:
    """Return what a trial's outcome tells about its strategy.

    None for outcomes that tell nothing about its cost: a time-out of the trial, a crash, an
    unreachable host.
    """
    if isinstance(outcome, Measured):
        return Observation(
            experiment=experiment,
            strategy=strategy,
            outcome="measured",
            measured_s=outcome.iteration_time_s,
            spread_s=outcome.spread_s,
            peak_memory_bytes=tuple(map(float, outcome.peak_memory_bytes)),
        )
    if isinstance(outcome, OutOfMemory):
        return Observation(experiment=experiment, strategy=strategy, outcome="oom")
    return None
