"""The guests: planners, spaces and files that lie in `planners/`, by name.

Nothing outside `planners/` imports a guest. These tables load a guest on request, so that a removed
folder breaks only requests for that guest.
"""

from importlib import import_module
from typing import Any, Final

from amp_ray.errors import InputError, Where

_FOLDER: Final = "amp_ray.planners"

PLANNERS: Final = {
    "amp-2022": f"{_FOLDER}.amp2022.planner:Amp2022Planner",
    "metis-2024": f"{_FOLDER}.metis2024.planner:Metis2024Planner",
    "aceso-2024": f"{_FOLDER}.aceso2024.planner:Aceso2024Planner",
}
"""Planners by the name of ``--cost-model`` and ``search.planner``."""

SPACES: Final = {"operator": f"{_FOLDER}.operators.planner:OperatorPlanner"}
"""Planners of the spaces that our own planner class does not cover, by ``search.space``."""

STRATEGY_EXPORTS: Final = {"aceso": f"{_FOLDER}.aceso2024.plan_file:export_plan"}
"""Programs that receive one strategy: functions of a `exports.chosen.Chosen`."""

EXPERIMENT_EXPORTS: Final = {"metis": f"{_FOLDER}.metis2024.profile_export:export_inputs"}
"""Programs that receive an experiment: functions of an `inputs.experiment.Experiment`."""

IMPORTS: Final = {"metis": f"{_FOLDER}.metis2024.inputs:import_inputs"}
"""Programs whose inputs become an experiment file."""

PROFILES: Final = {
    "aceso": f"{_FOLDER}.aceso2024.profile:read_aceso_profile",
    "metis": f"{_FOLDER}.metis2024.profile:read_metis_profile",
}
"""Readers of foreign profiles, by ``profile.source``."""

PROFILE_SUFFIXES: Final = {"aceso": ".csv", "metis": ".json"}
"""Suffix of the files of these profiles."""

STRATEGY_FILES: Final = {"num_ops_in_each_stage": f"{_FOLDER}.aceso2024.plan_file:read_aceso_plan"}
"""Readers of foreign JSON files with one strategy, by a top-level key of only these files."""


def load(place: str, setting: str, where: Where | None = None) -> Any:  # noqa: ANN401 - whatever lies there
    """Return the object at a place, ``module:name``.

    The message names ``setting``, which needs the guest, and its place ``where``.

    Raises:
        InputError: If the folder of the guest, or of another guest that it uses, is missing.
    """
    module, _, name = place.partition(":")
    try:
        return getattr(import_module(module), name)
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith(_FOLDER):
            raise
        message = f"{setting} needs {error.name}, which is not part of this installation"
        raise InputError(message, where=where) from None
