"""Plan model-parallel training: search strategies, predict their cost, test them by real trials.

Every command is also a function here that returns a value; see docs/python.md. Names are loaded
when they are first used, so that importing the package takes no time.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

__all__ = [
    "Calibration",
    "Estimate",
    "Experiment",
    "Explanation",
    "Plan",
    "Scores",
    "Strategy",
    "Study",
    "Sweep",
    "__version__",
    "calibrate",
    "explain",
    "load",
    "plan",
    "score",
    "sweep",
    "tune",
    "write_report",
]

if TYPE_CHECKING:
    from amp_ray.api import (
        Calibration,
        Estimate,
        Experiment,
        Explanation,
        Plan,
        Scores,
        Strategy,
        Study,
        Sweep,
        calibrate,
        explain,
        load,
        plan,
        score,
        sweep,
        tune,
        write_report,
    )

else:

    def __getattr__(name: str) -> Any:  # noqa: ANN401 - the imports above tell the types
        """Load a public name when it is first used."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module("amp_ray.api"), name)
        return value


def __dir__() -> list[str]:
    """List the public names, loaded or not."""
    return sorted({*globals(), *__all__})
