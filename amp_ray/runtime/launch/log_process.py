"""Searches the logs of hosts in a separate process, which can be killed.

A user's regular expression may take years on some line, and matching blocks all threads of its
process. In the controller, leases would not be renewed then, and Ctrl-C would have no effect.
"""

import pickle
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Final

from amp_ray.errors import AmpRayError
from amp_ray.trials.own_program.metrics import LogFormat, log_names, read_logs
from amp_ray.trials.result import Measurement, MissingRankError

LIMIT_S: Final = 20.0  # usual patterns read some 20 MiB/s
LIMIT_S_PER_MIB: Final = 2.0
_BYTES_PER_MIB: Final = 2**20
# Program with this process's import path, which the current folder is not part of
_PROGRAM: Final = f"import sys; sys.path[:] = sys.argv[1:]; from {__name__} import main; main()"


def read_logs_aside(
    files: Mapping[str, bytes],
    formats: Sequence[LogFormat],
    *,
    num_warmup_steps: int,
    samples: int,
    limit_s: float | None = None,
) -> Measurement:
    """Call ``read_logs`` in a process that is killed after ``limit_s``.

    The default limit grows with the size of the logs.
    """
    logs = {name: files[name] for name in log_names(files)}
    if limit_s is None:
        limit_s = LIMIT_S + LIMIT_S_PER_MIB * sum(map(len, logs.values())) / _BYTES_PER_MIB
    options = {"num_warmup_steps": num_warmup_steps, "samples": samples}
    argv = [sys.executable, "-I", "-c", _PROGRAM, *(entry for entry in sys.path if entry)]
    try:
        ended = subprocess.run(
            argv,
            input=pickle.dumps((logs, tuple(formats), options)),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        shown = " or ".join(repr(entry.shown) for entry in formats)
        message = (
            f"searching the logs for {shown} was ended after {limit_s:g} s: the pattern can match "
            "the same text in too many ways, as nested or neighbouring + and * do"
        )
        raise ValueError(message) from None
    if not ended.stdout:
        message = f"the process that searches logs ended by itself (status {ended.returncode})"
        raise AmpRayError(message)
    answer = pickle.loads(ended.stdout)  # noqa: S301 - from our child process
    if isinstance(answer, Measurement):
        return answer
    raise answer


def main() -> None:
    """Search the logs on stdin; write the measurement, or an error message, to stdout."""
    logs, formats, options = pickle.load(sys.stdin.buffer)  # noqa: S301 - from the parent process
    try:
        answer: Measurement | ValueError = read_logs(logs, formats, **options)
    except MissingRankError as error:
        answer = error
    except ValueError as error:
        answer = ValueError(str(error))
    sys.stdout.buffer.write(pickle.dumps(answer))
