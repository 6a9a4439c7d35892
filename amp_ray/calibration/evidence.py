"""Published measurements that back an interval: by program, release, board and kind of strategy."""

import csv
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import Final, Self

from amp_ray.inputs.experiment import Experiment
from amp_ray.strategies.strategy import Strategy

COMMON: Final = 0.05
"""Sigma of the common factor of all times of a site without trials, if published measurements back
them: the root mean square of the mean errors of eight published tables (`make accuracy`, column
bias)."""

FIRST_MET: Final = 0.25
"""Sigma of the logarithm of a time that no published measurement backs.

When the model first met them, it missed seven programs' times by 14.4 (AMP's DeepSpeed), 10.7 and
15.3 (Megatron-DeepSpeed at vTrain and BLOOM), 3.6 (Megatron-LM), 24.7 and 36.1 (nanotron without
and with pipelines) and 15.2 % (LLM Foundry) on average: a root mean square of 20 %. The sigma of a
normal distribution is 1.25 times its mean deviation. Known programs on boards that were new were
missed by as much (docs/cost-model.md, section 10)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Where a time is measured, as far as errors of predictions differ."""

    program: str  # name of the runtime
    release: str  # of the program; empty: any
    board: str  # name of the device
    kind: str  # of model and strategy: words of `_kind`


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What published measurements tell of the error of a predicted time."""

    factor: float  # of the sigma that follows from the constants
    first_met: float  # sigma of a common factor beside it; 0 where measurements back the time
    unbacked: str = ""  # the first setting without measurements, in words

    @classmethod
    def of(cls, experiment: Experiment, strategy: Strategy) -> Self:
        """Return the evidence for a strategy's time before any trial.

        After trials there is nothing to correct: they replace priors. Of several boards the one
        that is known least counts.
        """
        if experiment.uncertainty:
            return cls(factor=1.0, first_met=0.0)
        factors = {setting: factor_of(setting) for setting in settings(experiment, strategy)}
        unknown = [setting for setting, factor in factors.items() if factor is None]
        if unknown:
            return cls(factor=1.0, first_met=FIRST_MET, unbacked=_unbacked(unknown[0]))
        return cls(factor=max(factor for factor in factors.values() if factor), first_met=0.0)

    def sigma(self, sigma: float) -> float:
        """Return the sigma of a log time whose constants leave so much."""
        return math.hypot(self.factor * sigma, self.first_met)

    @property
    def common_sigma(self) -> float:
        """Sigma of the common factor that a calibration may find: wider where tables are.

        It is not wider without measurements: a trial that is off by little moves others little.
        """
        return max(1.0, self.factor) * COMMON

    @property
    def warnings(self) -> tuple[str, ...]:
        """What to say of an interval that nothing backs."""
        return (f"wide interval: no published time of {self.unbacked}",) if self.unbacked else ()


def settings(experiment: Experiment, strategy: Strategy) -> Iterator[Setting]:
    """Yield the setting of a strategy on every board of an experiment."""
    for device in experiment.cluster.device_types:
        yield Setting(
            program=experiment.traits.name,
            release="",
            board=device.name,
            kind=_kind(experiment, strategy),
        )


def _kind(experiment: Experiment, strategy: Strategy) -> str:
    """Return what the model's parts depend on, in words.

    These are experts, gathers of sequence parallelism over networks, which programs may repeat for
    the backward pass, and launches that wait.
    """
    words = ["experts" if any(layer.experts for layer in experiment.model.layers) else "dense"]
    least_slots = min(node.num_slots for node in experiment.cluster.nodes)
    options = [stage.options for stage in strategy.stages]
    if any(each.sequence_parallel and each.tp > least_slots for each in options):
        words.append("gathers over nodes")
    if experiment.traits.blocking_launches:
        words.append("blocking launches")
    return ", ".join(words)


def factor_of(setting: Setting) -> float | None:
    """Return the factor of sigmas that measurements in a setting ask for; None without any.

    A row for any release counts if there is none for this one.
    """
    factors = _factors()
    return factors.get(setting, factors.get(replace(setting, release="")))


@cache
def _factors() -> Mapping[Setting, float]:
    """Return the rows of ``data/interval-widths.csv`` (``experiments/interval_widths.py``)."""
    text = resources.files("amp_ray").joinpath("data/interval-widths.csv").read_text("utf-8")
    return {
        Setting(
            program=row["program"], release=row["release"], board=board, kind=row["kind"]
        ): float(row["factor"])
        for row in csv.DictReader(text.splitlines())
        for board in row["boards"].split()
    }


def _unbacked(setting: Setting) -> str:
    """Return the first part of a setting that no measurement has, in words."""
    known = _factors()
    words = f"runtime {setting.program!r}"
    if not any(each.program == setting.program for each in known):
        return words
    words += f" on {setting.board}"
    if not any((each.program, each.board) == (setting.program, setting.board) for each in known):
        return words
    return f"{words}: {setting.kind}"
