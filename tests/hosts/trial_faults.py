"""Makes a rank of our training program fail; it is sent to the hosts and imported in every rank."""

import importlib
import json
import os
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

MARK = "rank-injected.log"
"""File with the time of the failure by the machine's clock; it is collected like a log."""


def mark() -> None:
    """Mark the moment of the failure."""
    Path(MARK).write_text(str(time.monotonic()), encoding="ascii")


def raise_error() -> None:
    """Fail as a program with a bug does."""
    message = "no such layer"
    raise ValueError(message)


def fill_disk() -> None:
    """Let another program fill the disk; training goes on, but cannot write its result."""
    with Path("~/filler").expanduser().open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(1 << 16))


IN_STEP: dict[str, Callable[[], None]] = {
    "raise": raise_error,
    "disk": fill_disk,
}


def shift_clock(seconds: float) -> None:
    """Shift this rank's clock by ``seconds``."""
    real = time.time
    time.time = lambda: real() + seconds


def fail_in_step(number: int, how: str) -> None:
    """Fail in the middle of a step: at this rank's backward pass ``number``."""
    clock: Any = importlib.import_module("amp_ray.training.clock")
    span = clock.Spans.span
    num_passes = 0

    def failing_span(self: Any, name: str, *others: Any) -> Any:  # noqa: ANN401 - as Spans.span
        nonlocal num_passes
        num_passes += name == "backward"
        if name == "backward" and num_passes == number:
            mark()
            IN_STEP[how]()
        return span(self, name, *others)

    clock.Spans.span = failing_span


def inject() -> None:
    """Arrange the fault that the file beside this one names; called before a rank starts."""
    # A child process in a new session, which has to end with the rank.
    subprocess.Popen(["/bin/sleep", "3600"], start_new_session=True)
    fault = json.loads(Path("fault.json").read_text(encoding="utf-8"))
    if fault.get("rank") != int(os.environ["RANK"]):
        return
    if fault["how"] == "clock":
        shift_clock(fault["seconds"])
    else:
        fail_in_step(fault["backward_pass"], fault["how"])
