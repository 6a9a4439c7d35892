"""Why a strategy cannot run, and how sure that is."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from amp_ray.clusters.constants import Constants
from amp_ray.clusters.device import Device
from amp_ray.cost.estimate import Estimate, Reason
from amp_ray.models.model import Model
from amp_ray.runtimes.traits import RuntimeTraits
from amp_ray.units import GIB

WITHOUT_PARAMETERS = "stage without parameters"
FEWER_BLOCKS = "fewer blocks than chunks"
OUT_OF_MEMORY = "out of memory"
NOT_SEARCHED = "out of memory, as far as was searched"  # a plan that was not searched may fit
OVER_TIME_LIMIT = "over the launcher's time limit"

RISKY_PROBABILITY: Final = 0.1
"""A strategy with at least this failure probability is risky: it comes after all safe ones."""

_SAFE_SIGMAS: Final = 1.28155157
"""A normal value exceeds its mean by more sigmas with just less than `RISKY_PROBABILITY`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether a strategy runs."""

    reasons: tuple[Reason, ...]  # why not; empty when it is expected to run
    failure_probability: float  # chance that it does not finish


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Judge:
    """Judges estimates of one experiment."""

    model: Model  # the chain of layers
    traits: RuntimeTraits  # limits of the runtime
    constants: Constants  # the model's own errors

    def judge(
        self,
        bounds: tuple[int, ...],
        iteration_time_s: float,
        peaks_bytes: Sequence[float],
        devices: Sequence[Device],
    ) -> Verdict:
        """Judge one estimate.

        ``bounds`` are those of all chunks. Peaks and devices (the smallest of each stage) have
        shape ``(pp,)``.
        """
        ratios = [
            peak / device.memory_bytes for peak, device in zip(peaks_bytes, devices, strict=True)
        ]
        worst = max(range(len(ratios)), key=ratios.__getitem__)
        without = self._without_parameters(bounds, len(peaks_bytes))
        finishes = 1.0 - exceeds_probability(ratios[worst], self.constants.memory_error)
        limit_s = self.launch_limit_s
        reasons = list(without)
        if ratios[worst] > 1:
            reasons.append(_out_of_memory(worst, peaks_bytes[worst], devices[worst]))
        if limit_s is not None:
            slow = iteration_time_s / limit_s
            finishes *= 1.0 - exceeds_probability(slow, self.constants.time_error)
            if slow > 1:
                detail = f"{iteration_time_s:.2f} s per iteration, at most {limit_s:.2f} s"
                reasons.append(Reason(kind=OVER_TIME_LIMIT, detail=detail))
        return Verdict(
            reasons=tuple(reasons), failure_probability=1.0 if without else 1.0 - finishes
        )

    @property
    def launch_limit_s(self) -> float | None:
        """The longest iteration that ends before the launcher gives up."""
        traits = self.traits
        if traits.launch_limit_s is None:
            return None
        return (traits.launch_limit_s - traits.launch_setup_s) / traits.launch_iterations

    def _without_parameters(self, bounds: tuple[int, ...], pp: int) -> list[Reason]:
        none = [
            str(chunk % pp) for chunk, (first, end) in enumerate(pairwise(bounds)) if first == end
        ]
        if none:
            detail = f"stage {', '.join(dict.fromkeys(none))} of {(len(bounds) - 1) // pp} chunks"
            return [Reason(kind=FEWER_BLOCKS, detail=detail)]
        if not self.traits.fails_without_parameters:
            return []
        layers = self.model.layers
        empty = [
            str(chunk % pp)
            for chunk, (first, end) in enumerate(pairwise(bounds))
            if not any(layer.num_parameters for layer in layers[first:end])
        ]
        return (
            [Reason(kind=WITHOUT_PARAMETERS, detail=f"stage {', '.join(empty)}")] if empty else []
        )


def would_fit(estimate: Estimate) -> bool:
    """Return whether a strategy lacks nothing but memory, if anything."""
    return all(reason.kind == OUT_OF_MEMORY for reason in estimate.reasons)


def safe_memory_fraction(constants: Constants) -> float:
    """Return the largest share of a device's memory that a safe strategy may be estimated to need.

    Example:
        >>> round(safe_memory_fraction(Constants(memory_error=0.08)), 3)
        0.903
    """
    return math.exp(-_SAFE_SIGMAS * constants.memory_error)


def exceeds_probability(ratio: float, error: float) -> float:
    """Return the probability to exceed a limit, given a lognormal error of the estimate.

    At a ``ratio`` of 0 the probability is 0; ``error`` is the sigma of the logarithm of true over
    estimated value.

    Example:
        >>> exceeds_probability(1.0, 0.1)
        0.5
    """
    if ratio <= 0:
        return 0.0
    return 0.5 * math.erfc(-math.log(ratio) / (error * math.sqrt(2)))


def _out_of_memory(stage: int, peak_bytes: float, device: Device) -> Reason:
    detail = (
        f"stage {stage} needs {peak_bytes / GIB:.2f} GiB of {device.memory_gib:.2f} ({device.name})"
    )
    return Reason(kind=OUT_OF_MEMORY, detail=detail)
