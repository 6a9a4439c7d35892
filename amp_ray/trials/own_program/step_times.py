"""Times that several ranks told of the same steps."""

from collections.abc import Mapping, Sequence
from typing import Final

LEAST_STEP_S: Final = 1e-6
"""No optimizer step is faster than the launch of a single kernel, which takes microseconds."""

LONGEST_STEP_S: Final = 1e6
"""Eleven days: more than any trial lasts."""


def check_times(step_time_s: Sequence[float], *, source: str) -> None:
    """Refuse what no step can have taken.

    Raises:
        ValueError: If a time is no number, or nothing, or less or more than any step takes.
    """
    for index, seconds in enumerate(step_time_s):
        if not LEAST_STEP_S <= seconds <= LONGEST_STEP_S:
            message = (
                f"entry {index} of {source} says that a step took {seconds:g} s; expected "
                f"{LEAST_STEP_S:g} to {LONGEST_STEP_S:g} s"
            )
            raise ValueError(message)


def check_total(step_time_s: Sequence[float], *, timeout_s: float) -> None:
    """Refuse times that a trial cannot have had.

    Raises:
        ValueError: If they add up to more.
    """
    total_s = sum(step_time_s)
    if total_s > timeout_s:
        message = (
            f"the steps add up to {total_s:g} s, but the trial took at most {timeout_s:g} s: is "
            "the metric's unit right?"
        )
        raise ValueError(message)


def same_length(times: Mapping[str, Sequence[float]]) -> int:
    """Return how many steps each of several ranks told.

    Raises:
        ValueError: If they differ.
    """
    counts = {source: len(values) for source, values in times.items()}
    if len(set(counts.values())) > 1:
        told = ", ".join(f"{source}: {number}" for source, number in counts.items())
        message = (
            f"ranks tell different numbers of steps ({told}); let one rank tell, or each equally "
            "often"
        )
        raise ValueError(message)
    return next(iter(counts.values()))


def slowest_of(times: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """Return the time of the slowest rank at every step.

    Example:
        >>> slowest_of([[1.0, 2.0], [3.0, 1.0]])
        (3.0, 2.0)
    """
    return tuple(map(max, zip(*times, strict=True)))
