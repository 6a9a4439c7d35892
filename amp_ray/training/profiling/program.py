"""The entry: read the job, measure, turn every ending into an event and an exit code."""

import importlib
import os
from collections.abc import Sequence
from typing import Final

from amp_ray.training.events import EXIT_CODES, EventChannel, cause_of
from amp_ray.training.job import UnfitError
from amp_ray.training.profiling.job import ProfileJob, load_profile_job
from amp_ray.training.program import preload

RUNTIME_MODULE: Final = "amp_ray.training.profiling.run"
"""Importing it imports torch and DeepSpeed."""

USAGE: Final = "usage: python -m amp_ray.training.profiling JOB.json"


def main(arguments: Sequence[str]) -> int:
    """Run one rank of a profile run.

    Args:
        arguments: ``[JOB.json]``.

    Returns:
        0 after a complete run, else the code of the cause in ``events.EXIT_CODES``. Nothing is
        raised: what went wrong has been sent as an event.
    """
    with EventChannel() as channel:
        try:
            job = load_profile_job(_job_path(arguments))
        except (ValueError, OSError) as error:
            channel.failed(error, "bad_job")
            return EXIT_CODES["bad_job"]
        channel.trial_id = job.trial.trial_id
        return _run(job, channel)


def _run(job: ProfileJob, channel: EventChannel) -> int:
    """Run a job that has been read."""
    try:
        channel.send("started")
        if job.trial.device != "auto":
            os.environ.setdefault("DS_ACCELERATOR", job.trial.device)
        preload(zero=False)
        importlib.import_module(RUNTIME_MODULE).run(job, channel)
    except BaseException as error:  # noqa: BLE001 - every ending is reported, SystemExit included
        cause = "bad_job" if isinstance(error, UnfitError) else cause_of(error)
        channel.failed(error, cause)
        return EXIT_CODES[cause]
    return 0


def _job_path(arguments: Sequence[str]) -> str:
    """Return the one argument."""
    if len(arguments) != 1:
        message = f"{USAGE}; found {list(arguments)}"
        raise ValueError(message)
    return arguments[0]
