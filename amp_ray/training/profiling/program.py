"""The entry: read the job, measure, turn every ending into an event and an exit code."""

import importlib
import os
from collections.abc import Sequence
from typing import Final

from amp_ray.training.events import EventChannel
from amp_ray.training.fields import read_object
from amp_ray.training.profiling.job import ProfileJob, read_profile_job
from amp_ray.training.program import preload, run_rank

RUNTIME_MODULE: Final = "amp_ray.training.profiling.run"
"""Importing it imports torch and DeepSpeed."""

USAGE: Final = "usage: python -m amp_ray.training.profiling JOB.json"


def main(arguments: Sequence[str]) -> int:
    """Run one rank of a profile run, and return its exit code; see `run_rank`."""

    def read(channel: EventChannel) -> ProfileJob:
        if len(arguments) != 1:
            raise ValueError(f"{USAGE}; found {list(arguments)}")
        job = read_profile_job(read_object(arguments[0]))
        channel.trial_id = job.trial.trial_id
        return job

    return run_rank(read, _run)


def _run(job: ProfileJob, channel: EventChannel) -> None:
    """Measure."""
    if job.trial.device != "auto":
        os.environ.setdefault("DS_ACCELERATOR", job.trial.device)
    preload(zero=False)
    importlib.import_module(RUNTIME_MODULE).run(job, channel)
