"""Entry point: reads the job, runs it, and turns each ending into an event and an exit code."""

import importlib
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn, TypeVar

from amp_ray.training.events import EXIT_CODES, EventChannel, cause_of
from amp_ray.training.fields import read_object
from amp_ray.training.job import Job, UnfitError, read_job
from amp_ray.training.profiling.job import ProfileJob, read_profile_job

RUNTIME_MODULE: Final = "amp_ray.training.loop"
"""Module that runs a trial; it imports torch."""

ENGINE_MODULE: Final = "amp_ray.training.pipeline"
"""Module of the DeepSpeed engines; it imports DeepSpeed."""

ZERO_MODULE: Final = "deepspeed.runtime.zero.muon.muon_optimizer"
"""DeepSpeed imports it for a ZeRO optimizer; it takes 1.5 s, as it imports torch's compiler."""

PROFILING_MODULE: Final = "amp_ray.training.profiling.run"
"""Module that runs a profile; it imports torch and DeepSpeed."""

_Job = TypeVar("_Job")


def main(job: Sequence[str] | Mapping[str, Any]) -> int:
    """Run one rank of a trial, and return its exit code.

    Args:
        job: Command-line arguments (``[JOB.json]``; the ``--local_rank`` of DeepSpeed's
            launcher is understood), or the job's JSON object, for a process forked from one
            that has called ``preload``.
    """
    return _run_rank(job, read_job, _train)


def profile(arguments: Sequence[str]) -> int:
    """Run one rank of a profile run for a job file; return its exit code."""
    return _run_rank(arguments, read_profile_job, _measure)


def _run_rank(
    job: Sequence[str] | Mapping[str, Any],
    read: Callable[[Mapping[str, Any]], _Job],
    run: Callable[[_Job, EventChannel], None],
) -> int:
    """Read and run a job; report every ending as an event, and raise nothing.

    Returns:
        0 after a complete run, else the code of the cause in ``events.EXIT_CODES``.
    """
    with EventChannel() as channel:
        try:
            record = job if isinstance(job, Mapping) else read_object(_job_path(job))
            trial = record.get("trial", record) if isinstance(record, Mapping) else None
            if isinstance(trial, Mapping):
                channel.trial_id = trial.get("trial_id")
            loaded = read(record)
        except (ValueError, OSError) as error:
            channel.failed(error, "bad_job")
            return EXIT_CODES["bad_job"]
        try:
            channel.send("started")
            run(loaded, channel)
        except BaseException as error:  # noqa: BLE001 - every ending is reported, SystemExit too
            cause = "bad_job" if isinstance(error, UnfitError) else cause_of(error)
            channel.failed(error, cause)
            return EXIT_CODES[cause]
        return 0


def leave(code: int) -> NoReturn:
    """End the process, even if a communication thread waits for a dead peer."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def preload(*, deepspeed: bool = True, zero: bool = True) -> None:
    """Import torch and the models without using a device, so that ranks can be forked later.

    ``deepspeed`` adds the modules of that runtime, ``zero`` those for its ZeRO stages.
    """
    # Counting GPUs through the CUDA driver would break CUDA in every forked child; NVML does not.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    if not any(Path("/dev").glob("nvidia[0-9]*")):
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    with EventChannel():  # DeepSpeed logs to stdout as it is imported
        importlib.import_module(RUNTIME_MODULE)
        if deepspeed:
            importlib.import_module(ENGINE_MODULE)
        if deepspeed and zero:
            importlib.import_module(ZERO_MODULE)


def _train(job: Job, channel: EventChannel) -> None:
    start = time.perf_counter()
    _import(job, zero=job.zero_stage > 0)
    imports_s = time.perf_counter() - start
    importlib.import_module(RUNTIME_MODULE).run(job, channel, imports_s)


def _measure(job: ProfileJob, channel: EventChannel) -> None:
    _import(job.trial, zero=False)
    importlib.import_module(PROFILING_MODULE).run(job, channel)


def _import(job: Job, *, zero: bool) -> None:
    if job.device != "auto":
        os.environ.setdefault("DS_ACCELERATOR", job.device)
    preload(deepspeed=job.runtime == "deepspeed", zero=zero)


def _job_path(arguments: Sequence[str]) -> str:
    """Return the one argument that is not ``--local_rank``."""
    paths = [argument for argument in arguments if not argument.startswith("--local_rank")]
    for argument in arguments:
        name, _, value = argument.partition("=")
        if name == "--local_rank" and value:
            os.environ["LOCAL_RANK"] = value
    if len(paths) != 1:
        program = "python -m amp_ray.training[.profiling] [--local_rank=N] JOB.json"
        raise ValueError(f"usage: {program}; found {list(arguments)}")
    return paths[0]
