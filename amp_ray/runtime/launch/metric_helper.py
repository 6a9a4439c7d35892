"""Functions by which a user's program reports its iteration times.

The trial's folder has this file as ``amp_ray_metric.py``, for ``import amp_ray_metric``. It needs
only Python 3.8. Outside a trial it does nothing, so the same program runs without one.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import sys
import tempfile
import time
import traceback
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

FOLDER_VARIABLE = "AMP_RAY_FOLDER"
TRIAL_VARIABLE = "AMP_RAY_TRIAL_ID"
RANKS_PER_STAGE_VARIABLE = "AMP_RAY_RANKS_PER_STAGE"
# Variables in which launchers set a process's rank; the first one that is set is used
RANK_VARIABLES = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID", "NODE_RANK")
_times: list[float] = []
_state: dict[str, Any] = {"pid": None, "stage": None}


@contextlib.contextmanager
def step() -> Iterator[None]:
    """Measure one optimizer step on this rank; a step that raises does not count."""
    _synchronise()
    start = time.perf_counter()
    yield
    _synchronise()
    report_step(time.perf_counter() - start)


def report_step(seconds: float) -> None:
    """Report the time of one step, also of warm-up steps; the program's end writes the file.

    The first call writes a file without times: it shows that this rank reports, even if it dies.
    """
    _times.append(float(seconds))
    if _state["pid"] != os.getpid():
        _state["pid"] = os.getpid()
        _write(None)
        atexit.register(_save_at_exit, os.getpid())


def report_iteration_times(seconds: Iterable[float]) -> None:
    """Report the times of all steps in order, including warm-up; replaces earlier reports."""
    _times[:] = [float(value) for value in seconds]
    save()


def set_stage(stage: int) -> None:
    """Set this rank's pipeline stage; needed unless rank numbers count tp, then dp, then stage."""
    _state["stage"] = int(stage)


def save() -> None:
    """Write all reports so far; for a program that ends by ``os._exit``."""
    _write(_times)


def _write(times: list[float] | None) -> None:
    """Write this rank's file; None means that the times will follow."""
    folder, trial_id = os.environ.get(FOLDER_VARIABLE), os.environ.get(TRIAL_VARIABLE)
    if not folder or not trial_id:
        return
    rank = _rank()
    record = {
        "trial_id": trial_id,
        "rank": rank,
        "num_ranks": int(os.environ.get("WORLD_SIZE", "1")),
        "num_files": _num_files(),
        "stage": _stage(rank),
        "step_s": times,
        "peak_memory_bytes": _peak_memory_bytes(),
    }
    path = os.path.join(folder, f"metric-rank-{rank}.json")  # noqa: PTH118 - fewer imports
    descriptor, partial = tempfile.mkstemp(prefix=".amp-ray-", dir=folder)
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        json.dump(record, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)  # noqa: PTH105


def _save_at_exit(pid: int) -> None:
    """Write the file at the end of process ``pid``, but not of its forked children.

    If that fails, exit with an error: Python ignores exceptions at exit.
    """
    if os.getpid() != pid:
        return
    try:
        save()
    except BaseException:  # noqa: BLE001 - any error must set the exit code
        traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def _rank() -> int:
    ranks = [os.environ[name] for name in RANK_VARIABLES if name in os.environ]
    return int(ranks[0]) if ranks else 0


def _num_files() -> int:
    """Return the number of files to expect: one per rank, or per node if ranks have no number."""
    by_rank = any(name in os.environ for name in RANK_VARIABLES[:-1])
    by_node = not by_rank and "NODE_RANK" in os.environ
    return int(os.environ.get("NUM_NODES" if by_node else "WORLD_SIZE", "1"))


def _stage(rank: int) -> int | None:
    ranks = os.environ.get(RANKS_PER_STAGE_VARIABLE)
    if _state["stage"] is not None or not ranks:
        stage: int | None = _state["stage"]
        return stage
    return rank // int(ranks)


def _cuda() -> Any:  # noqa: ANN401 - torch.cuda, which this file does not import
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    return cuda if cuda is not None and cuda.is_initialized() else None


def _synchronise() -> None:
    """Wait for the device, so that its work counts for the current step."""
    cuda = _cuda()
    if cuda is not None:
        cuda.synchronize()


def _peak_memory_bytes() -> int | None:
    """Return the peak memory of this rank's tensors on its device; None on a CPU."""
    cuda = _cuda()
    return None if cuda is None else int(cuda.max_memory_allocated())
