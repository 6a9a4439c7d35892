"""A calibration: constants fitted to trials, with their uncertainty."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Any, Final, Literal

from pydantic import TypeAdapter, ValidationError

from amp_ray.calibration.fingerprint import (
    PARTS,
    Fingerprint,
    describe_differences,
    differing_parts,
    fingerprint,
)
from amp_ray.calibration.intervals import partly_known
from amp_ray.calibration.observation import Outcome
from amp_ray.clusters.constants import PRIOR_SIGMA, PROGRAM_SCALE, Uncertainty
from amp_ray.errors import InputError, Where, shown
from amp_ray.inputs.experiment import Experiment
from amp_ray.inputs.strict_text import parse_json
from amp_ray.units import counted

Scope = Literal["device", "library", "site"]

_CONSTANTS: Final[Mapping[Scope, tuple[str, ...]]] = {
    "device": ("gemm_scale", "memory_efficiency", "profile_scale", "backward_scale"),
    "library": (
        *("host_scale", "host_backward_ratio", "host_s_per_micro_batch", "host_s_per_iteration"),
        *("message_scale", "loss_bytes_per_logit", "context_scale", "allocator_scale"),
    ),
    "site": (
        *("expert_imbalance", "intra_efficiency", "nic_efficiency", "latency_scale"),
        PROGRAM_SCALE,
    ),
}
SCOPES: Final[Mapping[str, Scope]] = MappingProxyType(
    {name: scope for scope, names in _CONSTANTS.items() for name in names}
)
"""The scope of each constant: it may be transferred to clusters of the same devices, anywhere, or
nowhere."""

SCHEMA: Final = 1

_LARGEST: Final = 1e15


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedConstant:
    """A constant that was fitted to trials."""

    name: str
    prior: float  # its physical value
    value: float
    prior_sigma: float  # lognormal sigma of the prior
    sigma: float  # lognormal sigma that the trials leave

    @property
    def ratio(self) -> float:
        """Value over prior."""
        return self.value / self.prior


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedConstant:
    """A constant that stays at its prior."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRecord:
    """A trial of a calibration."""

    strategy: Mapping[str, Any]  # a STRATEGY; ranks in device order if without placement
    outcome: Outcome
    # Whether times were fitted to it. Not so for a measured trial of a second population, slower
    # than any constant explains.
    tells_time: bool
    measured_s: float | None
    spread_s: float | None  # interquartile range of its steps
    before_s: float  # predicted with every constant at its prior
    after_s: float  # predicted by this calibration
    left_out_s: float | None  # by a calibration without this trial; None without a time
    peak_memory_bytes: tuple[float, ...]
    peak_before_bytes: tuple[float, ...]  # of each stage with every constant at its prior
    peak_after_bytes: tuple[float, ...]  # the same by this calibration
    noise: float = 0.0  # of the measured time, as in `Observation`


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Constants fitted to trials."""

    experiment: str  # name of the experiment
    fingerprint: Fingerprint
    constants: tuple[FittedConstant, ...]
    refused: tuple[RefusedConstant, ...]
    time_error: float  # remaining lognormal sigma of a predicted time, measurement included
    memory_error: float  # the same for a predicted peak
    time_constants: tuple[str, ...]  # names of all constants that times depend on
    covariance: tuple[tuple[float, ...], ...]  # posterior, of the logarithms of `time_constants`
    trials: tuple[TrialRecord, ...]

    @property
    def num_constants(self) -> int:
        """Number of fitted constants."""
        return len(self.constants)

    def mean_error(self, which: Literal["before_s", "after_s", "left_out_s"]) -> float | None:
        """Return the mean absolute relative error over trials that tell times; None without any."""
        errors = [
            abs(predicted / trial.measured_s - 1.0)
            for trial in self.trials
            if trial.tells_time and trial.measured_s is not None
            for predicted in [getattr(trial, which)]
            if predicted is not None
        ]
        return math.fsum(errors) / len(errors) if errors else None

    @property
    def second_population(self) -> tuple[TrialRecord, ...]:
        """Measured trials that times were not fitted to."""
        return tuple(
            trial for trial in self.trials if trial.measured_s is not None and not trial.tells_time
        )

    @property
    def second_population_text(self) -> str:
        """What to say of these trials; empty without any."""
        slow = self.second_population
        ratios = [(trial.measured_s or 0.0) / trial.after_s for trial in slow]
        if not slow:
            return ""
        return (
            f"no constant was fitted to {counted(len(slow), 'trial')} of a second population, "
            f"slower than any constant explains: {min(ratios):.2g} to {max(ratios):.2g} times the "
            "prediction"
        )

    def values(self) -> dict[str, float]:
        """Return the fitted values by name."""
        return {constant.name: constant.value for constant in self.constants}


def apply_calibration(
    calibration: Calibration, experiment: Experiment, *, transfer: bool = False
) -> Experiment:
    """Return an experiment with calibrated constants; refuse one of another experiment.

    With ``transfer``, the calibration may come from another model, cluster, runtime or profile;
    then only the constants of `transferable` are used, and the experiment keeps its errors.
    """
    ours = fingerprint(experiment)
    different = differing_parts(calibration.fingerprint, ours)
    constants = experiment.constants
    if different and not transfer:
        raise ValueError(
            f"the calibration was made for another {' and '.join(different)}: "
            f"{describe_differences(calibration.fingerprint, ours)}. "
            "Calibrate anew, or take over what does not depend on them: --transfer-calibration"
        )
    if not different:
        constants = replace(
            constants,
            time_error=calibration.time_error,
            memory_error=calibration.memory_error,
        )
    kept = transferable(calibration, experiment)
    values = {name: value for name, value in calibration.values().items() if name in kept}
    scale = values.pop(PROGRAM_SCALE, constants.program_scale) / constants.program_scale
    constants = replace(constants, **values).moved({PROGRAM_SCALE: scale})
    uncertainty = Uncertainty(names=calibration.time_constants, covariance=calibration.covariance)
    if different:
        uncertainty = partly_known(uncertainty, kept, experiment)
    return replace(experiment, constants=constants, uncertainty=uncertainty)


def transferable(calibration: Calibration, experiment: Experiment) -> tuple[str, ...]:
    """Return the fitted constants that hold for an experiment too.

    Constants of a site hold on the same cluster only. Constants of a device hold if every device of
    the experiment was calibrated. Constants of a library hold everywhere.
    """
    ours = fingerprint(experiment)
    same_site = calibration.fingerprint["cluster"] == ours["cluster"]
    device_names = [node["device"] for node in calibration.fingerprint["cluster"]["nodes"]]
    same_devices = all(node["device"] in device_names for node in ours["cluster"]["nodes"])
    holds = {"site": same_site, "device": same_devices, "library": True}
    return tuple(
        constant.name for constant in calibration.constants if holds[SCOPES[constant.name]]
    )


_ADAPTER: Final = TypeAdapter(Calibration)


def calibration_to_json(calibration: Calibration) -> dict[str, Any]:
    """Return the object that a calibration file holds."""
    record: dict[str, Any] = asdict(calibration)
    for constant, fitted in zip(record["constants"], calibration.constants, strict=True):
        constant["ratio"] = fitted.ratio
    return {"schema": SCHEMA, "kind": "calibration", **record}


def parse_calibration(text: str, *, file: str) -> Calibration:
    """Read an object of `calibration_to_json`; refuse another version and damaged objects."""
    where = Where(file=file)
    try:
        record = parse_json(text, file=file)
    except InputError as error:
        raise InputError(f"{error}; a calibration is made by amp-ray calibrate") from None
    if record.get("kind") != "calibration":
        raise InputError("not a calibration; one is made by amp-ray calibrate", where=where)
    if record.get("schema") != SCHEMA:
        message = (
            f"found a calibration of schema {shown(record.get('schema'))}; this version reads "
            f"{SCHEMA}. Calibrate anew from the same measurements"
        )
        raise InputError(message, where=where.at("schema"))
    try:
        calibration = _ADAPTER.validate_python(record)
    except ValidationError as error:
        finding = error.errors(include_url=False)[0]
        key = ".".join(map(str, finding["loc"]))
        raise InputError(finding["msg"], where=where.at(key)) from None
    _check(calibration, where)
    return calibration


def _check(calibration: Calibration, where: Where) -> None:
    unknown = [fitted.name for fitted in calibration.constants if fitted.name not in SCOPES]
    if unknown:
        message = f"unknown constant {unknown[0]!r}; known: {', '.join(PRIOR_SIGMA)}"
        raise InputError(message, where=where.at("constants"))
    numbers = [calibration.time_error, calibration.memory_error]
    for fitted in calibration.constants:
        numbers += [fitted.prior, fitted.value, fitted.prior_sigma, fitted.sigma]
    if not all(1 / _LARGEST <= number <= _LARGEST for number in numbers):
        message = (
            "expected positive numbers for every constant, sigma and error, from "
            f"{1 / _LARGEST:g} to {_LARGEST:g}"
        )
        raise InputError(message, where=where.at("constants"))
    names = [fitted.name for fitted in calibration.constants]
    if len(set(names)) < len(names):
        raise InputError("the same constant stands there twice", where=where.at("constants"))
    size = len(set(calibration.time_constants))
    exist = set(calibration.time_constants) <= set(SCOPES)
    square = [len(row) for row in calibration.covariance] == [size] * size
    fits = square and all(
        abs(number) <= _LARGEST and (row != column or number >= 0)
        for row, numbers in enumerate(calibration.covariance)
        for column, number in enumerate(numbers)
    )
    if not (exist and fits):
        message = f"expected {size} rows of {size} numbers, one for each of time_constants"
        raise InputError(message, where=where.at("covariance"))
    missing = [part for part in PARTS if part not in calibration.fingerprint]
    if missing:
        raise InputError(f"key {missing[0]!r} is missing", where=where.at("fingerprint"))
