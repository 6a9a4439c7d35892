"""Calibration: fits constants to trials, with priors, robust losses and standard errors."""

from amp_ray.calibration.calibrate import Choice, calibrate
from amp_ray.calibration.calibration import (
    Calibration,
    TrialRecord,
    apply_calibration,
    calibration_to_json,
    parse_calibration,
    transferable,
)
from amp_ray.calibration.fingerprint import fingerprint
from amp_ray.calibration.observation import Observation, observe
from amp_ray.calibration.predictions import Predictor

__all__ = [
    "Calibration",
    "Choice",
    "Observation",
    "Predictor",
    "TrialRecord",
    "apply_calibration",
    "calibrate",
    "calibration_to_json",
    "fingerprint",
    "observe",
    "parse_calibration",
    "transferable",
]
