"""Calibrations as JSON text, with a schema number."""

import json
import math
from dataclasses import asdict
from typing import Annotated, Any, Final

from pydantic import Field, TypeAdapter, ValidationError

from amp_ray.calibration.calibration import SCOPES, Calibration
from amp_ray.calibration.fingerprint import PARTS
from amp_ray.errors import InputError, Where
from amp_ray.spec.constants import PRIOR_SIGMA

SCHEMA: Final = 1

_ADAPTER: Final = TypeAdapter(Annotated[Calibration, Field()])


def calibration_to_json(calibration: Calibration) -> dict[str, Any]:
    """Return the object that a calibration file holds."""
    record: dict[str, Any] = asdict(calibration)
    for constant, fitted in zip(record["constants"], calibration.constants, strict=True):
        constant["ratio"] = fitted.ratio
    return {"schema": SCHEMA, "kind": "calibration", **record}


def parse_calibration(text: str, *, file: str) -> Calibration:
    """Read what `calibration_to_json` wrote.

    Args:
        text: The file's text.
        file: Its name, for messages.

    Raises:
        InputError: If the text is no calibration, one of another version, or damaged.
    """
    where = Where(file=file)
    try:
        record = json.loads(text)
    except json.JSONDecodeError as error:
        message = f"not valid JSON: {error.msg}; a calibration is made by amp-ray calibrate"
        raise InputError(message, where=Where(file=file, line=error.lineno)) from None
    if not isinstance(record, dict) or record.get("kind") != "calibration":
        message = "not a calibration; one is made by amp-ray calibrate"
        raise InputError(message, where=where)
    if record.get("schema") != SCHEMA:
        message = (
            f"found a calibration of schema {record.get('schema')!r}; this version reads "
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
    if not all(math.isfinite(number) and number > 0 for number in numbers):
        message = "expected positive numbers for every constant, sigma and error"
        raise InputError(message, where=where.at("constants"))
    size = len(calibration.time_constants)
    known = set(calibration.time_constants) <= set(SCOPES)
    square = [len(row) for row in calibration.covariance] == [size] * size
    if not (known and square):
        message = f"expected {size} rows of {size} numbers, one for each of time_constants"
        raise InputError(message, where=where.at("covariance"))
    missing = [part for part in PARTS if part not in calibration.fingerprint]
    if missing:
        message = f"key {missing[0]!r} is missing"
        raise InputError(message, where=where.at("fingerprint"))
