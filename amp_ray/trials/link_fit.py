"""From times by message size to a link's rate and latency."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log
from statistics import median
from typing import Final

_Link = tuple[float, float]
"""Seconds per step, seconds per byte."""

_LEAST_LATENCY_S: Final = 1e-9
"""No link has less; a fit that ends here found none."""

_MAX_ROUNDS: Final = 100
_DAMPING: Final = 1e-3
_DAMPING_FACTOR: Final = 4.0
_LONGEST_MOVE: Final = 2.0
"""In the logarithm, at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSample:
    """What one message or collective should take on a link, and what it took.

    Args:
        num_steps: Latencies in a row.
        num_bytes: What crosses the link in a row, overheads included.
        start_s: Seconds that do not depend on the link.
        seconds: Measured.
    """

    num_steps: float
    num_bytes: float
    start_s: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkFit:
    """A link as the cost model describes it.

    Args:
        bytes_per_s: Rate.
        latency_s: Of one step.
        error_fraction: Median distance of the fit from the samples.
    """

    bytes_per_s: float
    latency_s: float
    error_fraction: float


def fit_link(samples: Sequence[LinkSample]) -> LinkFit:
    """Fit rate and latency so that the logarithms of predicted over measured are least squares.

    Small messages tell the latency and large ones the rate, and half as long is as wrong as
    twice as long: relative errors would prefer what is too short.

    Args:
        samples: At least one.

    Raises:
        ValueError: If there is no sample, or a time that is not positive.

    Example:
        >>> samples = [
        ...     LinkSample(num_steps=1, num_bytes=n, start_s=0.5, seconds=0.5 + 2 + n / 10)
        ...     for n in (1, 10, 100)
        ... ]
        >>> fit = fit_link(samples)
        >>> round(fit.bytes_per_s, 6), round(fit.latency_s, 6)
        (10.0, 2.0)
    """
    if not samples or min(sample.seconds for sample in samples) <= 0:
        message = f"a link is fitted to positive times, found {list(samples)}"
        raise ValueError(message)
    link = _first_guess(samples)
    error, damping = _error(samples, link), _DAMPING
    for _ in range(_MAX_ROUNDS):
        trial = _step(samples, link, damping)
        trial_error = _error(samples, trial)
        if trial_error < error:
            link, error, damping = trial, trial_error, damping / _DAMPING_FACTOR
        else:
            damping *= _DAMPING_FACTOR
    ratios = [_predicted_s(sample, link) / sample.seconds for sample in samples]
    return LinkFit(
        bytes_per_s=1 / link[1],
        latency_s=link[0] if link[0] > _LEAST_LATENCY_S else 0.0,
        error_fraction=median(abs(ratio - 1) for ratio in ratios),
    )


def _first_guess(samples: Sequence[LinkSample]) -> _Link:
    """Take the latency from the sample with the fewest bytes and the rate from that with most."""
    small = min(samples, key=lambda sample: sample.num_bytes / sample.num_steps)
    large = max(samples, key=lambda sample: sample.num_bytes)
    latency_s = max((small.seconds - small.start_s) / small.num_steps, _LEAST_LATENCY_S)
    return latency_s, large.seconds / large.num_bytes


def _predicted_s(sample: LinkSample, link: _Link) -> float:
    """Return what a sample would take."""
    return sample.start_s + link[0] * sample.num_steps + link[1] * sample.num_bytes


def _error(samples: Sequence[LinkSample], link: _Link) -> float:
    """Return the sum of squared logarithms."""
    return sum(log(_predicted_s(sample, link) / sample.seconds) ** 2 for sample in samples)


def _step(samples: Sequence[LinkSample], link: _Link, damping: float) -> _Link:
    """Take a step of Levenberg and Marquardt in the logarithms, which keeps both positive."""
    aa = ab = bb = ag = bg = 0.0
    for sample in samples:
        predicted_s = _predicted_s(sample, link)
        a = link[0] * sample.num_steps / predicted_s
        b = link[1] * sample.num_bytes / predicted_s
        goal = log(sample.seconds / predicted_s)
        aa, ab, bb = aa + a * a, ab + a * b, bb + b * b
        ag, bg = ag + a * goal, bg + b * goal
    aa, bb = aa + damping, bb + damping
    determinant = aa * bb - ab * ab
    moves = (ag * bb - bg * ab) / determinant, (bg * aa - ag * ab) / determinant
    latency_s, s_per_byte = (
        value * exp(max(-_LONGEST_MOVE, min(_LONGEST_MOVE, move)))
        for value, move in zip(link, moves, strict=True)
    )
    return max(latency_s, _LEAST_LATENCY_S), s_per_byte
