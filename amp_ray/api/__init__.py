"""The API of ``import amp_ray``: the commands as functions, and the types that they return."""

from amp_ray.api.functions import (
    CostModel,
    Options,
    StudyOptions,
    calibrate,
    explain,
    load,
    plan,
    score,
    sweep,
    tune,
    write_report,
)
from amp_ray.api.results import Explanation, Plan, Scores, Study, Sweep
from amp_ray.calibration import Calibration
from amp_ray.cost.estimate import Estimate
from amp_ray.inputs.experiment import Experiment
from amp_ray.strategies.strategy import Strategy

__all__ = [
    "Calibration",
    "CostModel",
    "Estimate",
    "Experiment",
    "Explanation",
    "Options",
    "Plan",
    "Scores",
    "Strategy",
    "Study",
    "StudyOptions",
    "Sweep",
    "calibrate",
    "explain",
    "load",
    "plan",
    "score",
    "sweep",
    "tune",
    "write_report",
]
