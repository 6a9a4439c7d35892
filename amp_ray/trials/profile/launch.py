"""Launch of a profile run: job file, commands, and the check that it finished."""

import json
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

from amp_ray.models.model import Model
from amp_ray.trials.job_file import ENVIRONMENT, JOB_FILE, PROGRAM, shape_to_json, torch_device
from amp_ray.trials.launch import RESULT_FILE, Launch, rank_commands
from amp_ray.trials.profile.points import LayerPoint, LinkPoint
from amp_ray.trials.result import Measurement, check_trial, parse_object

GRACE_S: Final = 300.0  # for the start, and for the last measurement to finish


def profile_job(
    *,
    trial_id: str,
    model: Model,
    precision: str,
    device: str,
    num_ranks: int,
    optimizer: str = "adam",
) -> dict[str, Any]:
    """Return the part of a profile job that has the form of a trial's job.

    Its strategy only sets the number of ranks.
    """
    return {
        "trial_id": trial_id,
        "out_dir": ".",
        "model": shape_to_json(model.shape),
        "strategy": {
            "tp": 1,
            "pp": 1,
            "dp": num_ranks,
            "micro_batch_size": 1,
            "num_micro_batches": 1,
            "bounds": [0, model.num_layers],
        },
        "global_batch_size": num_ranks,
        "steps": 1,
        "precision": precision,
        "optimizer": optimizer,
        "device": torch_device([device]),
    }


def profile_launch(
    trial: Mapping[str, Any],
    places: Sequence[tuple[str, int]],
    *,
    work: tuple[Sequence[LinkPoint], Sequence[LayerPoint]],
    seconds: float,
    program: tuple[str, Mapping[str, bytes]],
    step: bool = False,
) -> Launch:
    """Return a profile run, ready to start.

    ``trial`` is the result of ``profile_job``. No new measurement begins after ``seconds``. The
    hosts get an interpreter and the files of the ``program``, and need nothing but torch and
    DeepSpeed. With ``step``, the overhead of a step outside its layers is measured, too.
    """
    python, files = program
    links, layers = work
    job = {
        "trial": dict(trial),
        "links": [asdict(point) for point in links],
        "points": [asdict(point) for point in layers],
        "seconds": seconds,
        "step": step,
    }
    argv = [python, "-u", "-m", PROGRAM, JOB_FILE]
    return Launch(
        trial_id=str(trial["trial_id"]),
        commands=rank_commands(argv, places),
        files={**files, JOB_FILE: json.dumps(job, indent=1).encode()},
        environment=ENVIRONMENT,
        timeout_s=seconds + GRACE_S,
    )


def read_end(files: Mapping[str, bytes], trial_id: str) -> Measurement:
    """Check that a profile run finished; the run has sent its measurements as events.

    Raises:
        ValueError: If the run's result is missing or does not confirm the end.
    """
    if RESULT_FILE not in files:
        raise ValueError(f"the profile run ended without saying so in {RESULT_FILE}")
    expected = "trial_id (text), elapsed_s (seconds)"
    record = parse_object(RESULT_FILE, files[RESULT_FILE], expected)
    check_trial(RESULT_FILE, record, trial_id)
    elapsed_s = record.get("elapsed_s")
    if not isinstance(elapsed_s, float):
        message = f"{RESULT_FILE} needs {expected}, found elapsed_s {reprlib.repr(elapsed_s)}"
        raise ValueError(message)  # noqa: TRY004 - bad input is always a ValueError
    return Measurement(step_time_s=(elapsed_s,))
