"""Times of a trial's steps: what can be true, which were warm-up, median and spread."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Final

MAD_TO_SIGMA: Final = 1.4826
"""Median absolute deviation to standard deviation, for a normal distribution."""

NUM_SIGMAS: Final = 3.0
MIN_EXCESS_FRACTION: Final = 0.05
"""A first step that is less than this slower is no warm-up, however steady the others are."""

MIN_STEPS_FOR_QUARTILES: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSummary:
    """Times of a run's steps, summed up."""

    iteration_time_s: float  # median of the steps after warm-up
    spread_s: float  # interquartile range of the same steps
    num_warmup_steps: int


def summarise_steps(step_time_s: Sequence[float]) -> StepSummary:
    """Find the warm-up, then median and spread of what follows.

    Example:
        >>> summarise_steps([9.0, 2.0, 1.0, 1.0, 1.25, 1.0, 1.25, 1.0])
        StepSummary(iteration_time_s=1.0, spread_s=0.1875, num_warmup_steps=2)
    """
    if not step_time_s or min(step_time_s) <= 0:
        message = f"a measurement needs at least one step and positive times, found {step_time_s!r}"
        raise ValueError(message)
    num_warmup_steps = count_warmup_steps(step_time_s)
    steady = step_time_s[num_warmup_steps:]
    spread_s = 0.0
    if len(steady) >= MIN_STEPS_FOR_QUARTILES:
        low, _, high = quantiles(steady, n=4, method="inclusive")
        spread_s = high - low
    return StepSummary(
        iteration_time_s=median(steady), spread_s=spread_s, num_warmup_steps=num_warmup_steps
    )


def count_warmup_steps(step_time_s: Sequence[float]) -> int:
    """Count the slow steps at the start: those before the first that the second half would allow.

    At most half of the steps can be warm-up, so that something is left to measure.

    Example:
        >>> count_warmup_steps([5.0, 1.2, 1.0, 1.0, 1.0, 1.0])
        2
        >>> count_warmup_steps([1.0, 1.0, 9.0, 1.0])
        0
    """
    half = len(step_time_s) // 2
    reference = step_time_s[half:]
    middle = median(reference)
    deviation = median([abs(time_s - middle) for time_s in reference])
    limit = middle + max(NUM_SIGMAS * MAD_TO_SIGMA * deviation, MIN_EXCESS_FRACTION * middle)
    return next((index for index in range(half) if step_time_s[index] <= limit), half)


LEAST_STEP_S: Final = 1e-6
"""No optimizer step is faster than the launch of a single kernel, which takes microseconds."""

LONGEST_STEP_S: Final = 1e6
"""Eleven days: more than any trial lasts."""


def check_times(step_time_s: Sequence[float], *, source: str) -> None:
    """Refuse what no step can have taken."""
    for index, seconds in enumerate(step_time_s):
        if not LEAST_STEP_S <= seconds <= LONGEST_STEP_S:
            raise ValueError(
                f"entry {index} of {source} says that a step took {seconds:g} s; expected "
                f"{LEAST_STEP_S:g} to {LONGEST_STEP_S:g} s"
            )


def check_total(step_time_s: Sequence[float], *, timeout_s: float) -> None:
    """Refuse times that a trial cannot have had."""
    total_s = sum(step_time_s)
    if total_s > timeout_s:
        raise ValueError(
            f"the steps add up to {total_s:g} s, but the trial took at most {timeout_s:g} s: is "
            "the metric's unit right?"
        )


def same_length(times: Mapping[str, Sequence[float]]) -> int:
    """Return how many steps each of several ranks told."""
    counts = {source: len(values) for source, values in times.items()}
    if len(set(counts.values())) > 1:
        told = ", ".join(f"{source}: {number}" for source, number in counts.items())
        raise ValueError(
            f"ranks tell different numbers of steps ({told}); let one rank tell, or each equally "
            "often"
        )
    return next(iter(counts.values()))


def slowest_of(times: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """Return the time of the slowest rank at every step.

    Example:
        >>> slowest_of([[1.0, 2.0], [3.0, 1.0]])
        (3.0, 2.0)
    """
    return tuple(map(max, zip(*times, strict=True)))
