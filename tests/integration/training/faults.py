"""Makes one rank of a trial fail on purpose; called in the rank before it starts."""

import ctypes
import importlib
import math
import os
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HANG_S = 3600.0
ADDRESS_SPACE_BYTES = 64 << 30
SPARE_BYTES = 1100 << 20
M_ARENA_MAX = -8
"""mallopt(3) option that limits the number of arenas, from glibc's malloc.h."""


def raise_error() -> None:
    """Fail as a program with a bug does."""
    message = "injected failure"
    raise RuntimeError(message)


def run_out_of_memory() -> None:
    """Ask torch for more memory than the process may have."""
    hard_limit = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE_BYTES, hard_limit))
    importlib.import_module("torch").ones(ADDRESS_SPACE_BYTES)


def limit_memory() -> None:
    """Limit the process to little more memory than it has so far.

    Threads that start later share one arena: a separate arena would reserve 128 MiB of addresses,
    which count towards the limit even if they are not used.
    """
    ctypes.CDLL(None).mallopt(M_ARENA_MAX, 1)
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    taken = pages * resource.getpagesize()
    hard_limit = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (taken + SPARE_BYTES, hard_limit))


def be_killed() -> None:
    """End as if the kernel's out-of-memory killer had killed this process."""
    os.kill(os.getpid(), signal.SIGKILL)


def hang() -> None:
    """Wait for ever."""
    time.sleep(HANG_S)


DECAY = "decay"
"""Fault: step times of the rank's clock fall by a third every four steps, down to `LONG_STEP_S`."""

LONG_STEP_S = 1000.0
"""A step time that is longer than any other rank's, even on a busy machine."""

HOW: dict[str, Callable[[], None]] = {
    "raise": raise_error,
    "out_of_memory": run_out_of_memory,
    "limit_memory": limit_memory,
    "kill": be_killed,
    "hang": hang,
}


def inject(rank: int, step: int, how: str) -> None:
    """Arrange that ``rank`` fails before its step ``step``; ``how`` names the fault."""
    if int(os.environ["RANK"]) != rank:
        return
    if how == "never_start":
        hang()
    # Imported here, because only ranks import torch and DeepSpeed.
    loop: Any = importlib.import_module("amp_ray.training.loop")
    train_step = loop.timed_step  # the place where a rank works

    def failing_step(job: Any, engine: Any, record: Any, *others: Any) -> None:  # noqa: ANN401
        if len(record.step_s) == step and how != DECAY:
            HOW[how]()
        train_step(job, engine, record, *others)
        if how == DECAY:
            record.step_s[-1] = LONG_STEP_S * (1.0 + math.exp(-len(record.step_s) / 10))

    loop.timed_step = failing_step
