"""Searches the logs of hosts in a separate process, which can be killed.

A user's regular expression may take years on some line, and blocks all threads of its process: in
the controller, leases would not be renewed, and Ctrl-C would have no effect.
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

LIMIT_S: Final = 20.0  # usual patterns read some 20 MiB/s
LIMIT_S_PER_MIB: Final = 2.0
_BYTES_PER_MIB: Final = 2**20
# With this process's import path, and without the current folder
_PROGRAM: Final = f"import sys; sys.path[:] = sys.argv[1:]; from {__name__} import main; main()"


def read_logs_aside(
    files: Mapping[str, bytes],
    formats: Sequence[LogFormat],
    *,
    num_warmup_steps: int,
    samples: int,
    limit_s: float | None = None,
) -> Measurement:
    """Call ``read_logs`` in a process that is killed after a limit, by default by log size."""
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
    """Search the logs on stdin; write the measurement, or an error message, to stdout."""
    logs, formats, options = pickle.load(sys.stdin.buffer)  # noqa: S301 - from the parent process
    try:
        answer: Measurement | str = read_logs(logs, formats, **options)
    except ValueError as error:
        answer = str(error)
    sys.stdout.buffer.write(pickle.dumps(answer))


def _talk(process: "subprocess.Popen[bytes]", question: Any) -> Measurement | str | None:  # noqa: ANN401 - see main
    """Send the question and wait for the answer; None if the process ends without one."""
    assert process.stdin is not None
    assert process.stdout is not None
    with contextlib.suppress(BrokenPipeError), process.stdin as pipe:
        pickle.dump(question, pipe)
    data = process.stdout.read()
    process.wait()
    return pickle.loads(data) if data else None  # noqa: S301 - from our child process
