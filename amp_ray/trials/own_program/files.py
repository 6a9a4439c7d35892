"""Files that a trial of a user's own program gets: the user's, and generated ones."""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Final

from amp_ray.errors import InputError
from amp_ray.inputs.experiment import Experiment
from amp_ray.inputs.strategy_json import strategy_to_json
from amp_ray.strategies.strategy import Strategy
from amp_ray.trials.job_file import ds_config, to_json
from amp_ray.trials.launch import RESULT_FILE, Place, hostfile_text
from amp_ray.trials.own_program.metric_files import HELPER_FILE, METRIC_FILES

STRATEGY_FILE: Final = "strategy.json"
HOSTFILE: Final = "hostfile"
DS_CONFIG_FILE: Final = "ds_config.json"
LOG_FILES: Final = "rank-*.log"

RESERVED: Final = (
    *(STRATEGY_FILE, HOSTFILE, DS_CONFIG_FILE, HELPER_FILE),
    *(RESULT_FILE, METRIC_FILES, LOG_FILES),
)
"""Patterns of the names of files that are made or collected by us."""


def file_names(experiment: Experiment) -> dict[str, str]:
    """Return which of the user's files goes where.

    A file that is named relative to the experiment file keeps its path, so that packages stay
    packages; any other one goes by its last name. Returns the path that the user wrote, by the name
    in the trial's folder.
    """
    program = experiment.trials.program
    assert program is not None
    names: dict[str, str] = {}
    for index, path in enumerate(program.files):
        where = experiment.where("trials", "program", "files", index)
        name = _file_name(path)
        if not name or "\0" in name:
            raise InputError(f"found {path!r}, which names no file", where=where)
        if any(fnmatchcase(name, pattern) for pattern in RESERVED):
            message = f"found {path!r}; every trial has a {name} of its own: rename yours"
            raise InputError(message, where=where)
        if name in names:
            message = (
                f"found {path!r}, which would be {name!r} in the trial's folder, as {names[name]!r}"
            )
            raise InputError(message, where=where)
        names[name] = path
    return names


def generated_files(
    experiment: Experiment, strategy: Strategy, places: Sequence[Place]
) -> tuple[dict[str, bytes], str | None]:
    """Write what ``{strategy}``, ``{hostfile}`` and ``{ds_config}`` name, or why not the last."""
    record = strategy_to_json(strategy, experiment.cluster)
    record["placement"] = [list(place) for place in places]
    files = {STRATEGY_FILE: to_json(record), HOSTFILE: hostfile_text(places).encode()}
    if not strategy.is_uniform:
        return files, "its stages differ in tp, dp or shares, which DeepSpeed has no words for"
    if strategy.token_slices:
        return files, "it cuts sequences into token slices, which DeepSpeed has no words for"
    config = ds_config(experiment, strategy)
    program = experiment.trials.program
    if program is not None and program.metric == "deepspeed":
        # All engines but the pipeline's log their speed as information, which is silent by default.
        config["log_level"] = "info"
    return {**files, DS_CONFIG_FILE: to_json(config)}, None


def _file_name(path: str) -> str:
    """Return a file's name in the trial's folder; empty if there is none."""
    parts = [part for part in path.split("/") if part not in {"", "."}]
    if path.startswith(("/", "~")) or ".." in parts:
        parts = [part for part in parts[-1:] if part != ".."]
    return "/".join(parts)
