"""Published measurements that back an interval: by program, release, board and kind of strategy."""

import csv
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import Final, Self

from amp_ray.inputs.experiment import Experiment
from amp_ray.runtimes.releases import oldest_alike
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

NEW_RELEASE: Final = 0.20
"""The same where other releases of the program were measured on the board, not this one: 1.25 times
16 %. Rows of Megatron-core 26.06 and later that the model met with the traits of their recipes were
missed by 15.6 % on average, the five of them in a published table by 17 %."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Where a time is measured, as far as errors of predictions differ."""

    program: str  # name of the runtime
    release: str  # of the program (`oldest_alike`); empty if it has none
    board: str  # name of the device
    kind: str  # of model and strategy: words of `_kind`


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What published measurements tell of the error of a predicted time."""

    factor: float  # of the sigma that follows from the constants
    first_met: float  # sigma of a common factor beside it; 0 where measurements back the time
    unbacked: str = ""  # what was not measured, in words

    @classmethod
    def of(cls, experiment: Experiment, strategy: Strategy) -> Self:
        """Return the evidence for a strategy's time before any trial.

        After trials there is nothing to correct: they replace priors. Of several boards the one
        that is known least counts.
        """
        if experiment.uncertainty:
            return cls(factor=1.0, first_met=0.0)
        of_boards = {each: backing(each, _factors()) for each in settings(experiment, strategy)}
        least, (_, first_met) = max(of_boards.items(), key=lambda known: known[1][1])
        return cls(
            factor=max(factor for factor, _ in of_boards.values()),
            first_met=first_met,
            unbacked=_unbacked(least, experiment.traits.release) if first_met else "",
        )

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
    traits, has_experts = experiment.traits, any(each.experts for each in experiment.model.layers)
    for device in experiment.cluster.device_types:
        yield Setting(
            program=traits.name,
            release=oldest_alike(
                traits.name,
                traits.release,
                has_experts=has_experts,
                in_fp8=experiment.precision == "fp8",
            ),
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


def backing(setting: Setting, factors: Mapping[Setting, float]) -> tuple[float, float]:
    """Return the factor of sigmas in a setting, and the sigma of a common factor beside it.

    ``factors`` are those that measurements ask for. Other releases count if there are none of this
    one: their largest factor, and `NEW_RELEASE` beside it.
    """
    if setting in factors:
        return factors[setting], 0.0
    alike = [
        factor
        for each, factor in factors.items()
        if replace(each, release=setting.release) == setting
    ]
    return (max(alike), NEW_RELEASE) if alike else (1.0, FIRST_MET)


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


def _unbacked(setting: Setting, release: str) -> str:
    """Return the first part of a setting that no measurement has, in words."""
    backed = [each for each in _factors() if each.program == setting.program]
    words = f"runtime {setting.program!r}"
    if not backed:
        return words
    words += f" on {setting.board}"
    there = [each for each in backed if each.board == setting.board]
    if not there:
        return words
    kinds = [each for each in there if each.kind == setting.kind]
    return f"{words}: {setting.kind}" + (f", release {release}" if kinds else "")
