"""From times by message size to a link's rate and latency."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median


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
    """Fit rate and latency so that relative errors are least squares; neither is negative.

    Small messages tell the latency and large ones the rate, so each counts by its own size.

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
    latency_s, s_per_byte = _solve(samples)
    errors = [
        abs(
            (sample.start_s + latency_s * sample.num_steps + s_per_byte * sample.num_bytes)
            / sample.seconds
            - 1
        )
        for sample in samples
    ]
    return LinkFit(bytes_per_s=1 / s_per_byte, latency_s=latency_s, error_fraction=median(errors))


def _solve(samples: Sequence[LinkSample]) -> tuple[float, float]:
    """Solve the normal equations of two unknowns, with a latency of zero where it came out less."""
    steps = [sample.num_steps / sample.seconds for sample in samples]
    sizes = [sample.num_bytes / sample.seconds for sample in samples]
    goals = [1 - sample.start_s / sample.seconds for sample in samples]
    aa, ab, bb = _dot(steps, steps), _dot(steps, sizes), _dot(sizes, sizes)
    ag, bg = _dot(steps, goals), _dot(sizes, goals)
    determinant = aa * bb - ab * ab
    latency_s = (ag * bb - bg * ab) / determinant if determinant > 0 else 0.0
    s_per_byte = (bg - max(latency_s, 0.0) * ab) / bb
    if s_per_byte <= 0:
        # All time is latency and noise; the largest message still bounds the rate from below.
        largest = max(samples, key=lambda sample: sample.num_bytes)
        s_per_byte = largest.seconds / largest.num_bytes
    return max(latency_s, 0.0), s_per_byte


def _dot(left: Sequence[float], right: Sequence[float]) -> float:
    """Return the sum of products."""
    return sum(a * b for a, b in zip(left, right, strict=True))
