"""A rank's reports to its launcher: one-line JSON events, the result file and exit codes."""

import contextlib
import json
import os
import socket
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from amp_ray.runtime.whole_file import write_whole
from amp_ray.trials.steps import summarise_steps

TAG_VARIABLE: Final = "AMP_RAY_TAG"
"""Variable with the tag of events, set by the agent that starts a rank. The agent ignores events
without the tag, since output of libraries may look like events."""

EXIT_CODES: Final = {
    "bad_job": 2,
    "error": 1,
    "out_of_memory": 42,
    "communication": 43,
    "port_taken": 44,
}
"""Exit code for each cause of failure; 0 only after a complete run."""

MAX_EVENT_BYTES: Final = 4096
"""Writes of up to PIPE_BUF bytes (4096 on Linux) to a pipe are atomic (POSIX)."""

MAX_MESSAGE_CHARACTERS: Final = 1000
NUM_TRACEBACK_LINES: Final = 12
MAX_LINE_CHARACTERS: Final = 160

OUT_OF_MEMORY_WORDS: Final = (
    "out of memory",
    "can't allocate memory",
    "cannot allocate memory",
    "not enough memory",
    "cuda_error_out_of_memory",
    "cudaerrormemoryallocation",
)
PORT_WORDS: Final = ("address already in use", "eaddrinuse")
COMMUNICATION_WORDS: Final = (
    "connection closed by peer",
    "connection reset",
    "connection refused",
    "connection was closed",
    "broken pipe",
    "timed out",
    "timeout",
    "gloo",
    "nccl",
    "socket",
)


class EventChannel:
    """Writes events to stdout and redirects all other output to stderr.

    Libraries may print to stdout. While the channel is open, file descriptor 1 is
    a copy of stderr, and only events reach the real stdout.
    """

    def __init__(self) -> None:
        """Read rank and tag from the environment; nothing is opened yet."""
        self.trial_id: str | None = None
        self._fd = -1

    def __enter__(self) -> Self:
        self._fd = os.dup(1)
        os.dup2(2, 1)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with contextlib.suppress(OSError, ValueError):  # the reader is gone
            sys.stdout.flush()
        os.dup2(self._fd, 1)
        os.close(self._fd)

    def send(self, event: str, **values: Any) -> None:  # noqa: ANN401 - JSON values
        """Write one event as a line of JSON, in a single write.

        If an event is too long for an atomic write, its longest values are replaced by their names.
        """
        head = {
            "event": event,
            "tag": os.environ.get(TAG_VARIABLE),
            "trial_id": self.trial_id,
            "rank": int(os.environ.get("RANK", "-1")),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "time_s": time.time(),
        }
        line = _line(head, values)
        dropped = []
        while len(line) > MAX_EVENT_BYTES and values:
            dropped.append(max(values, key=lambda key: len(json.dumps(values[key]))))
            del values[dropped[-1]]
            line = _line(head, {**values, "dropped": sorted(dropped)})
        os.write(self._fd, line)

    def failed(self, error: BaseException, cause: str) -> None:
        """Send the event ``failed`` with the error and its cause."""
        lines = [
            line[:MAX_LINE_CHARACTERS]
            for entry in traceback.format_exception(error)
            for line in entry.rstrip().splitlines()
        ]
        self.send(
            "failed",
            cause=cause,
            type=type(error).__name__,
            message=str(error)[:MAX_MESSAGE_CHARACTERS],
            traceback=lines[-NUM_TRACEBACK_LINES:],
        )


def _line(head: Mapping[str, Any], values: Mapping[str, Any]) -> bytes:
    return json.dumps({**head, **values}).encode() + b"\n"


def cause_of(error: BaseException) -> str:
    """Classify an error: out of memory, communication, port in use, or any other.

    When one rank dies, its peers see connections break and often report first. So
    a launcher trusts the cause ``communication`` only if no rank reports another one.

    Example:
        >>> cause_of(MemoryError())
        'out_of_memory'
        >>> cause_of(RuntimeError("Connection closed by peer [10.0.0.1]:4021"))
        'communication'
    """
    name = type(error).__name__
    text = f"{name}: {error}".lower()
    if isinstance(error, MemoryError) or any(word in text for word in OUT_OF_MEMORY_WORDS):
        return "out_of_memory"
    if any(word in text for word in PORT_WORDS):
        return "port_taken"
    network = isinstance(error, ConnectionError | TimeoutError) or name.startswith("Dist")
    if network or (isinstance(error, RuntimeError) and any(w in text for w in COMMUNICATION_WORDS)):
        return "communication"
    return "error"


def write_result(out_dir: str, result: Mapping[str, Any]) -> None:
    """Write ``result.json`` atomically, creating the folder if it does not exist."""
    Path(out_dir).mkdir(parents=True, exist_ok=True)
    write_whole(Path(out_dir) / "result.json", [json.dumps(result, indent=1).encode()])


SCHEMA: Final = 1
STAGE_SPANS: Final = (
    "forward",
    "backward",
    "tensor_parallel",
    "send",
    "receive",
    "load",
    "gradient_sync",
    "optimizer",
)


Chunk = tuple[int, int]
"""First layer of a chunk, and the layer after its last."""


def summarise(
    trial_id: str,
    warmup_steps: int,
    stages: Sequence[Sequence[Chunk]],
    ranks: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """Return the content of ``result.json``.

    ``ranks`` has one report per process; its keys include ``stage``, ``step_s``, ``losses``,
    ``spans_s`` (mean per measured step) and ``peak_memory_bytes``. ``stages`` has the chunks of
    each stage. In the result, the times of a step and of each part of a stage are maxima over
    ranks. ``iteration_time_s`` is the mean of the steps after the detected warm-up; the times of
    all steps are kept. In a stage, ``forward_s`` and ``backward_s`` include
    ``tensor_parallel_s``, and ``receive_s`` includes the wait for the neighbour.
    """
    step_s = [max(times) for times in zip(*(rank["step_s"] for rank in ranks), strict=True)]
    return {
        "schema": SCHEMA,
        "trial_id": trial_id,
        "iteration_time_s": summarise_steps(step_s[warmup_steps:]).mean_s,
        "warmup_steps": warmup_steps,
        "step_s": step_s,
        "losses": list(ranks[0]["losses"]),
        "peak_memory_bytes": max(rank["peak_memory_bytes"] for rank in ranks),
        "stages": [
            _stage(chunks, [rank for rank in ranks if rank["stage"] == stage])
            for stage, chunks in enumerate(stages)
        ],
        "ranks": [dict(rank) for rank in ranks],
    }


def _stage(chunks: Sequence[Chunk], ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    layers = [list(chunk) for chunk in chunks]
    return {
        **({"layers": layers[0]} if len(layers) == 1 else {"chunks": layers}),
        "peak_memory_bytes": max(rank["peak_memory_bytes"] for rank in ranks),
        **{
            f"{name}_s": max(rank["spans_s"].get(name, 0.0) for rank in ranks)
            for name in STAGE_SPANS
        },
    }
