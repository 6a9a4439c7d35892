"""Entry point: reads the job, runs it, and reports its end by an event and an exit code."""

import importlib
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

from amp_ray.training.events import EXIT_CODES, EventChannel, cause_of
from amp_ray.training.job import Job, ProfileJob, UnfitError, read_job, read_profile_job

RUNTIME_MODULE: Final = "amp_ray.training.loop"
"""Module that runs a trial; it imports torch."""

ENGINE_MODULE: Final = "amp_ray.training.pipeline"
"""Module of the DeepSpeed engines; it imports DeepSpeed."""

ZERO_MODULE: Final = "deepspeed.runtime.zero.muon.muon_optimizer"
"""DeepSpeed imports this module for a ZeRO optimizer, in 1.5 s, since it needs torch's compiler."""

PROFILING_MODULE: Final = "amp_ray.training.profiling.run"
"""Module that runs a profile; it imports torch and DeepSpeed."""


def main(arguments: Sequence[str]) -> int:
    """Run one rank of a trial or of a profile run; report every ending as an event.

    The argument is the path of the job file. Returns 0 after a complete run, else the code of the
    cause in ``events.EXIT_CODES``.
    """
    with EventChannel() as channel:
        try:
            record = _read_file(arguments)
            channel.trial_id = record.get("trial", record).get("trial_id")
            loaded = read_profile_job(record) if "trial" in record else read_job(record)
        except (AttributeError, ValueError, OSError) as error:
            channel.failed(error, "bad_job")
            return EXIT_CODES["bad_job"]
        try:
            channel.send("started")
            _run(loaded, channel)
        except BaseException as error:  # noqa: BLE001 - every ending is reported, SystemExit too
            cause = "bad_job" if isinstance(error, UnfitError) else cause_of(error)
            channel.failed(error, cause)
            return EXIT_CODES[cause]
        return 0


def leave(code: int) -> NoReturn:
    """End the process, even if a communication thread is waiting for a dead peer."""
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


def _run(job: Job | ProfileJob, channel: EventChannel) -> None:
    trial = job.trial if isinstance(job, ProfileJob) else job
    if trial.device != "auto":
        os.environ.setdefault("DS_ACCELERATOR", trial.device)
    start = time.perf_counter()
    preload(deepspeed=trial.runtime == "deepspeed", zero=trial is job and trial.zero_stage > 0)
    if isinstance(job, ProfileJob):
        importlib.import_module(PROFILING_MODULE).run(job, channel)
    else:
        imports_s = time.perf_counter() - start
        importlib.import_module(RUNTIME_MODULE).run(job, channel, imports_s)


def _read_file(arguments: Sequence[str]) -> Mapping[str, Any]:
    if len(arguments) != 1:
        raise ValueError(f"usage: python -m amp_ray.training JOB.json; found {list(arguments)}")
    record: Mapping[str, Any] = json.loads(Path(arguments[0]).read_text(encoding="utf-8"))
    return record
