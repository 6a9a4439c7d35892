"""Plan model-parallel training: search strategies, predict their cost, test them by real trials.

Every command is also a function here that returns a value; see docs/python.md. Names are loaded
when they are first used, so that importing the package takes no time.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from amp_ray import compiled

__version__ = "0.1.0"

__all__ = [
    "Calibration",
    "Checkup",
    "Differences",
    "Estimate",
    "Experiment",
    "Explanation",
    "Exported",
    "Plan",
    "Scores",
    "Strategy",
    "Study",
    "StudyState",
    "Sweep",
    "__version__",
    "calibrate",
    "diff",
    "doctor",
    "explain",
    "export",
    "init",
    "load",
    "plan",
    "score",
    "show",
    "sweep",
    "tune",
    "write_report",
]

_APART = {"Differences": "differences", "diff": "differences"}
_APART |= {"Exported": "exports", "export": "exports"}
"""Modules of names that few programs use, and that take long to import; others: functions."""

if TYPE_CHECKING:
    from amp_ray.api.differences import Differences, diff
    from amp_ray.api.exports import Exported, export
    from amp_ray.api.functions import (
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
    from amp_ray.calibration.calibration import Calibration
    from amp_ray.cost.estimate import Estimate
    from amp_ray.inputs.experiment import Experiment
    from amp_ray.strategies.strategy import Strategy

else:

    def __getattr__(name: str) -> Any:  # noqa: ANN401 - the imports above tell the types
        """Load a public name when it is first used."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module = import_module(f"amp_ray.api.{_APART.get(name, 'functions')}")
        value = globals()[name] = getattr(module, name)
        return value


compiled.install()


def __dir__() -> list[str]:
    """List the public names, loaded or not."""
    return sorted({*globals(), *__all__})
