"""Fit of a link's bandwidth and latencies to times by message size."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from amp_ray.arrays import FloatArray

_Link = FloatArray  # seconds per step of a message, per step of a collective, and per byte
_LEAST_LATENCY_S: Final = 1e-9  # below any link's latency; a fit at this limit has none

_MAX_ROUNDS: Final = 100
_DAMPING: Final = 1e-3
_DAMPING_FACTOR: Final = 4.0
_LONGEST_MOVE: Final = 2.0  # maximum change of a logarithm in one step


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSample:
    """Work and measured time of one message or collective on a link."""

    num_steps: float
    num_bytes: float  # bytes that cross the link one after another, with overheads
    start_s: float  # seconds independent of the link
    seconds: float
    collective: bool = False  # whether its steps are those of a collective


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkFit:
    """Parameters of a link in the cost model."""

    bytes_per_s: float
    latency_s: float  # per message; per collective step if no message was measured
    collective_latency_s: float | None  # per step of a collective; None if none was measured
    error_fraction: float  # median relative error of the fit over the samples


def fit_link(samples: Sequence[LinkSample]) -> LinkFit:
    """Fit bandwidth and latencies by least squares of the logarithm of predicted over measured.

    Small messages determine the latencies, large ones the bandwidth. Logarithms weight half and
    double the time equally; relative errors would favour predictions that are too short. Collective
    steps have a separate latency, as gloo's ranks wait for each other at every step.

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
        raise ValueError(f"a link is fitted to positive times, found {list(samples)}")
    table = _Table.of(samples)
    link = _first_guess(samples)
    errors, damping = table.errors(link), _DAMPING
    for _ in range(_MAX_ROUNDS):
        trial = table.step(link, damping)
        trial_errors = table.errors(trial)
        if trial_errors @ trial_errors < errors @ errors:
            link, errors, damping = trial, trial_errors, damping / _DAMPING_FACTOR
        else:
            damping *= _DAMPING_FACTOR
    *latencies_s, s_per_byte = link.tolist()
    message_s, collective_s = (
        latency_s if latency_s > _LEAST_LATENCY_S else 0.0 for latency_s in latencies_s
    )
    has_collectives = any(sample.collective for sample in samples)
    has_messages = not all(sample.collective for sample in samples)
    return LinkFit(
        bytes_per_s=1 / s_per_byte,
        latency_s=message_s if has_messages else collective_s,
        collective_latency_s=collective_s if has_collectives else None,
        error_fraction=float(np.median(np.abs(np.expm1(errors)))),
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Table:
    """Samples as arrays, for the fit."""

    # Coefficients of the three parameters of ``_Link``, shape ``(num_samples, 3)``
    counts: FloatArray
    start_s: FloatArray  # shape ``(num_samples,)``
    seconds: FloatArray  # shape ``(num_samples,)``

    @classmethod
    def of(cls, samples: Sequence[LinkSample]) -> "_Table":
        """Convert samples to arrays."""
        rows = [
            (0.0, sample.num_steps, sample.num_bytes)
            if sample.collective
            else (sample.num_steps, 0.0, sample.num_bytes)
            for sample in samples
        ]
        return cls(
            counts=np.array(rows, dtype=np.float64),
            start_s=np.array([sample.start_s for sample in samples]),
            seconds=np.array([sample.seconds for sample in samples]),
        )

    def errors(self, link: _Link) -> FloatArray:
        """Return the logarithm of predicted over measured time for each sample."""
        ratios: FloatArray = (self.start_s + self.counts @ link) / self.seconds
        return np.log(ratios)

    def step(self, link: _Link, damping: float) -> _Link:
        """Take a Levenberg-Marquardt step in the parameters' logarithms, which stay positive."""
        slopes = self.counts * link / (self.start_s + self.counts @ link)[:, None]
        matrix = slopes.T @ slopes + damping * np.eye(len(link))
        moves = np.linalg.solve(matrix, -slopes.T @ self.errors(link))
        moved: FloatArray = link * np.exp(np.clip(moves, -_LONGEST_MOVE, _LONGEST_MOVE))
        moved[:2] = np.maximum(moved[:2], _LEAST_LATENCY_S)
        return moved


def _first_guess(samples: Sequence[LinkSample]) -> _Link:
    """Return latencies from the smallest samples and the bandwidth from the largest one."""
    large = max(samples, key=lambda sample: sample.num_bytes)
    latencies = []
    for collective in (False, True):
        kind = [sample for sample in samples if sample.collective is collective] or samples
        small = min(kind, key=lambda sample: sample.num_bytes / sample.num_steps)
        latencies.append((small.seconds - small.start_s) / small.num_steps)
    guess = np.maximum([*latencies, large.seconds / large.num_bytes], 0.0)
    guess[:2] = np.maximum(guess[:2], _LEAST_LATENCY_S)
    return guess
