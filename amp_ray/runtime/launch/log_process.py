"""Logs of hosts are searched in a process of its own, which can be ended.

A regular expression of the user may take years on a line that a host wrote, and as long as it
takes no other thread of its process runs: leases would not be renewed, Ctrl-C would do nothing.
"""

import contextlib
import pickle
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Final

from amp_ray.errors import AmpRayError
from amp_ray.trials.own_program.metrics import LogFormat, log_names, read_logs
from amp_ray.trials.result import Measurement

LIMIT_S: Final = 20.0
LIMIT_S_PER_MIB: Final = 2.0
"""Far more than the patterns take that people write; logs are searched at some 20 MiB/s."""

_BYTES_PER_MIB: Final = 2**20

_PROGRAM: Final = f"import sys; sys.path[:] = sys.argv[1:]; from {__name__} import main; main()"
"""With the folders that this process imports from, and nothing from where the user is."""


def read_logs_aside(
    files: Mapping[str, bytes],
    formats: Sequence[LogFormat],
    *,
    num_warmup_steps: int,
    samples: int,
    limit_s: float | None = None,
) -> Measurement:
    """Find the times of all steps, as ``read_logs`` does, within a time limit.

    Args:
        files: What came back from all hosts, by name.
        formats: In order; the first of which a line is found counts.
        num_warmup_steps: Steps that do not count, from the first.
        samples: Per step, to turn a rate into a time.
        limit_s: For the search; None for one that grows with the logs.
    """
    logs = {name: files[name] for name in log_names(files)}
    if limit_s is None:
        limit_s = LIMIT_S + LIMIT_S_PER_MIB * sum(map(len, logs.values())) / _BYTES_PER_MIB
    options = {"num_warmup_steps": num_warmup_steps, "samples": samples}
    argv = [sys.executable, "-I", "-c", _PROGRAM, *(entry for entry in sys.path if entry)]
    late = threading.Event()
    pipe, null = subprocess.PIPE, subprocess.DEVNULL
    with subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=null) as process:

        def end() -> None:
            late.set()
            process.kill()

        timer = threading.Timer(limit_s, end)
        timer.start()
        try:
            answer = _talk(process, (logs, tuple(formats), options))
        finally:
            timer.cancel()
            process.kill()
    if answer is None and late.is_set():
        shown = " or ".join(repr(entry.shown) for entry in formats)
        raise ValueError(
            f"searching the logs for {shown} was ended after {limit_s:g} s: the pattern can match "
            "the same text in too many ways, as nested or neighbouring + and * do"
        )
    if answer is None:
        message = f"the process that searches logs ended by itself (status {process.returncode})"
        raise AmpRayError(message)
    if isinstance(answer, Measurement):
        return answer
    raise ValueError(answer)


def main() -> None:
    """Search the logs that arrive on stdin; write the measurement, or why there is none."""
    logs, formats, options = pickle.load(sys.stdin.buffer)  # noqa: S301 - from our own parent
    try:
        answer: Measurement | str = read_logs(logs, formats, **options)
    except ValueError as error:
        answer = str(error)
    sys.stdout.buffer.write(pickle.dumps(answer))


def _talk(process: "subprocess.Popen[bytes]", question: Any) -> Measurement | str | None:  # noqa: ANN401 - what main unpacks
    """Ask the process, and wait for its answer; None if it ends without one."""
    assert process.stdin is not None
    assert process.stdout is not None
    with contextlib.suppress(BrokenPipeError), process.stdin as pipe:
        pickle.dump(question, pipe)
    data = process.stdout.read()
    process.wait()
    return pickle.loads(data) if data else None  # noqa: S301 - from our own child
