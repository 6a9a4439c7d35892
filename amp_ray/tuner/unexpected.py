"""Outcomes to report: unlike their forecasts, or the same crash of two strategies."""

import math
import re
from dataclasses import dataclass, replace
from typing import Final

from amp_ray.cost.model import CostModel
from amp_ray.trials.outcome import Crashed, Measured, OutOfMemory
from amp_ray.tuner.state import Trial, TrialRecord, TunerState
from amp_ray.units import figure_text


@dataclass(frozen=True, slots=True, kw_only=True)
class Surprise:
    """A trial outside the band that was predicted when it was launched."""

    trial: Trial
    measured_s: float | None  # None if it ran out of memory
    low_s: float
    high_s: float
    text: str


def surprise_of(state: TunerState, trial_record: TrialRecord) -> Surprise | None:
    """Return a surprise if a trial's time is outside its predicted band, or it ran out of memory.

    A trial with unsteady steps is never a surprise, since its time cannot be compared.
    """
    width = state.settings.interval_sigmas
    trial, outcome = trial_record.trial, trial_record.outcome
    low_s, high_s = (trial.predicted_s * math.exp(way * trial.sigma) for way in (-width, width))
    if isinstance(outcome, Measured) and outcome.tells_time:
        measured_s = outcome.mean_s
        if low_s <= measured_s <= high_s:
            return None
        where = "faster" if measured_s < low_s else "slower"
        text = (
            f"trial {trial.number} was {where} than expected: measured {figure_text(measured_s)} "
            f"s, predicted {figure_text(trial.predicted_s)} s, at most {figure_text(high_s)} s and "
            f"at least {figure_text(low_s)} s with "
            f"{100 * state.settings.confidence_fraction:.3g} % confidence"
            f"{_other_setting(state, trial, measured_s)}"
        )
        return Surprise(trial=trial, measured_s=measured_s, low_s=low_s, high_s=high_s, text=text)
    chance = state.candidates[trial_record.candidate].failure_probability
    if isinstance(outcome, OutOfMemory) and chance < 1.0 - state.settings.confidence_fraction:
        text = (
            f"trial {trial.number} ran out of memory, with a chance of {100 * chance:.2g} % to "
            "fail by the uncalibrated model"
        )
        return Surprise(trial=trial, measured_s=None, low_s=low_s, high_s=high_s, text=text)
    return None


def _other_setting(state: TunerState, trial: Trial, measured_s: float) -> str:
    """Name another setting of the program by which a trial's time would have been expected."""
    width = state.settings.interval_sigmas * trial.sigma
    usual_s = CostModel(experiment=state.experiment).estimate(trial.strategy).iteration_time_s
    for change, traits in state.experiment.traits.other_settings():
        model = CostModel(experiment=replace(state.experiment, traits=traits))
        other_s = model.estimate(trial.strategy).iteration_time_s
        expected_s = trial.predicted_s * other_s / usual_s
        if abs(math.log(measured_s / expected_s)) <= width:
            seconds = figure_text(expected_s)
            return (
                f"; {seconds} s are predicted with {change}: plan with it if your program does so"
            )
    return ""


_PLACES: Final = re.compile(
    r"\branks? \d+( to \d+)?( on \S+)?|\bpid\W{0,2}\d+|\bport \d+|0x[0-9a-fA-F]+"
    r"|\b\d+\.\d+\.\d+\.\d+(:\d+)?|\S*amp-ray-\S+"
)
"""Parts of a message that differ between two runs with the same error: ranks, hosts, addresses,
folders of trials. Other numbers stay: an error that names a degree depends on the strategy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommonFailure:
    """Two trials of different strategies that crashed in the same way."""

    numbers: tuple[int, int]
    sign: str  # kind and reason of the crashes, without ranks, hosts and addresses
    reason: str


def common_failure(state: TunerState, number: int) -> CommonFailure | None:
    """Return a trial and an earlier one that crashed alike while nothing has been measured.

    Some failures are not crashes: a program that exits with 0 but reports no time, lost hosts, full
    disks, and a strategy that ran out of memory or time.
    """
    failed = state.trials[number]
    sign = _sign(failed.outcome)
    if sign is None or any(
        isinstance(trial_record.outcome, Measured) for trial_record in state.trials
    ):
        return None
    for trial_record in state.trials:
        if trial_record.candidate != failed.candidate and _sign(trial_record.outcome) == sign:
            assert failed.outcome is not None
            numbers = (
                min(trial_record.trial.number, number),
                max(trial_record.trial.number, number),
            )
            return CommonFailure(numbers=numbers, sign=sign, reason=str(failed.outcome.reason))
    return None


def _sign(outcome: object) -> str | None:
    """Return the kind and the reason of a crash without `_PLACES`; None if it is no crash."""
    if not isinstance(outcome, Crashed) or outcome.kind in {"no-result", "disk"}:
        return None
    host = rf"(?<!\w){re.escape(outcome.host)}(?!\w)" if outcome.host else "$"
    text = re.sub(host, "", _PLACES.sub("", outcome.reason))
    return f"{outcome.kind}: {' '.join(text.split())}"
