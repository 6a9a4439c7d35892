"""Calibrations as JSON text, with a schema number."""

from dataclasses import asdict
from typing import Annotated, Any, Final

from pydantic import Field, TypeAdapter, ValidationError

from amp_ray.calibration.calibration import SCOPES, Calibration
from amp_ray.calibration.fingerprint import PARTS
from amp_ray.errors import InputError, Where
from amp_ray.spec.constants import PRIOR_SIGMA
from amp_ray.spec.json_text import parse_json, shown

SCHEMA: Final = 1

_LARGEST: Final = 1e15

_ADAPTER: Final = TypeAdapter(Annotated[Calibration, Field()])


def calibration_to_json(calibration: Calibration) -> dict[str, Any]:
    """Return the object that a calibration file holds."""
    record: dict[str, Any] = asdict(calibration)
    for constant, fitted in zip(record["constants"], calibration.constants, strict=True):
        constant["ratio"] = fitted.ratio
    return {"schema": SCHEMA, "kind": "calibration", **record}


def parse_calibration(text: str, *, file: str) -> Calibration:
    """Read what `calibration_to_json` wrote; refuse another version, and what is damaged."""
    where = Where(file=file)
    try:
        record = parse_json(text, file=file)
    except InputError as error:
        message = f"{error}; a calibration is made by amp-ray calibrate"
        raise InputError(message) from None
    if record.get("kind") != "calibration":
        message = "not a calibration; one is made by amp-ray calibrate"
        raise InputError(message, where=where)
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
    """Refuse contents that no calibration of this version has."""
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
        message = "the same constant stands there twice"
        raise InputError(message, where=where.at("constants"))
    size = len(set(calibration.time_constants))
    known = set(calibration.time_constants) <= set(SCOPES)
    square = [len(row) for row in calibration.covariance] == [size] * size
    fits = square and all(
        abs(number) <= _LARGEST and (row != column or number >= 0)
        for row, numbers in enumerate(calibration.covariance)
        for column, number in enumerate(numbers)
    )
    if not (known and fits):
        message = f"expected {size} rows of {size} numbers, one for each of time_constants"
        raise InputError(message, where=where.at("covariance"))
    missing = [part for part in PARTS if part not in calibration.fingerprint]
    if missing:
        message = f"key {missing[0]!r} is missing"
        raise InputError(message, where=where.at("fingerprint"))
