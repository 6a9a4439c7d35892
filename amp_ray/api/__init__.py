"""The API of ``import amp_ray``: the commands as functions, and the types that they return."""

from amp_ray.api.functions import (
    CostModel,
    Options,
    StudyOptions,
    calibrate,
    doctor,
    explain,
    init,
    load,
    plan,
    score,
    show,
    sweep,
    tune,
    write_report,
)
from amp_ray.api.results import Checkup, Explanation, Plan, Scores, Study, StudyState, Sweep
from amp_ray.calibration import Calibration
from amp_ray.cost.estimate import Estimate
from amp_ray.inputs.experiment import Experiment
from amp_ray.strategies.strategy import Strategy

__all__ = [
    "Calibration",
    "Checkup",
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
    "StudyState",
    "Sweep",
    "calibrate",
    "doctor",
    "explain",
    "init",
    "load",
    "plan",
    "score",
    "show",
    "sweep",
    "tune",
    "write_report",
]
