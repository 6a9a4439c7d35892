"""Starts ranks by forking from a process that has imported torch and DeepSpeed once.

Run as a program. Each line on stdin is a JSON object ``{"job", "num_ranks", "port",
"folder", "deadline_s", "grace_s", ["fault"]}``; the answer is a line on stdout with the exit
code of every rank. Ranks write to ``<folder>/<rank>.out`` and ``.err``. The end of
stdin ends the program.
"""

import importlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from amp_ray.training import main, preload

POLL_S = 0.02


def start_rank(request: dict[str, Any], rank: int) -> int:
    """Fork one rank and return its process id."""
    pid = os.fork()
    if pid:
        return pid
    code = 99
    try:
        size = str(request["num_ranks"])
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=size,
            LOCAL_SIZE=size,
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(request["port"]),
            GLOO_SOCKET_IFNAME="lo",
        )
        folder = Path(request["folder"])
        for descriptor, suffix in ((1, "out"), (2, "err")):
            target = os.open(folder / f"{rank}.{suffix}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(target, descriptor)
        if request.get("fault"):
            # A module beside this program; imported here, so that tests can import this program.
            importlib.import_module("faults").inject(**request["fault"])
        (folder / f"{rank}.job").write_text(json.dumps(request["job"]), encoding="utf-8")
        code = main([str(folder / f"{rank}.job")])
    finally:
        os._exit(code)


def run(request: dict[str, Any]) -> list[int]:
    """Run all ranks to their end; kill the rest at the deadline, or some time after a failure."""
    codes: dict[int, int] = {}
    pids = [start_rank(request, rank) for rank in range(request["num_ranks"])]
    limit = time.monotonic() + request["deadline_s"]
    while len(codes) < len(pids):
        for pid in pids:
            if pid not in codes:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    codes[pid] = os.waitstatus_to_exitcode(status)
                    if codes[pid]:
                        limit = min(limit, time.monotonic() + request["grace_s"])
        if time.monotonic() > limit:
            for pid in pids:
                if pid not in codes:
                    os.kill(pid, signal.SIGKILL)
        time.sleep(POLL_S)
    return [codes[pid] for pid in pids]


def answer(value: Any) -> None:  # noqa: ANN401 - JSON
    """Write one line to stdout."""
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    preload()
    answer({"threads": len(list(Path("/proc/self/task").iterdir()))})
    for line in sys.stdin:
        answer(run(json.loads(line)))
