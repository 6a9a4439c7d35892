"""The doctor's program on a host: answers questions about it before any trial.

It speaks the agent's protocol (``wire``). It ends with its stdin, or after ``limit_s``, together
with all its child processes: they are in its process group.

============  ==========================================================================
message       answer
============  ==========================================================================
``facts``     user, disk, GPUs, software of the trial's Python, address, a listening port
``reach``     peers that accept a TCP connection
============  ==========================================================================
"""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .resources import DEVICE_VARIABLE, base_folder, find_address, free_port, inherited, make_folder
from .wire import FROM_AGENT, FROM_CONTROLLER, Seal, read_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Message = dict[str, Any]

MAX_THREADS = 64
PORT_TRIES = 3
ERROR_LINES = 3
SMI_TIMEOUT_S = 20.0  # without persistence mode the driver takes seconds per GPU to wake up
# Names come last, since they may contain commas
GPU_QUERY = ("index", "uuid", "memory.total", "memory.used", "enforced.power.limit", "name")
PROCESS_QUERY = ("gpu_uuid", "pid", "used_memory", "process_name")
MIB = 2**20

stdout_lock = threading.Lock()
listeners: list[socket.socket] = []  # open until the end; the kernel accepts connections


def gather(request: Message) -> Message:
    """Gather all facts in parallel; a part that fails or is late has only a ``problem``."""
    pieces: dict[str, Callable[[], Message]] = {
        "identity": identity,
        "disk": lambda: disk(request["base"]),
        "shared_memory": lambda: {"free_bytes": free_bytes(Path("/dev/shm"))},  # noqa: S108
        "gpus": gpus,
        "address": lambda: listen(request),
        "software": lambda: software(request),
    }
    parts: Message = {}

    def work(name: str, look: Callable[[], Message]) -> None:
        try:
            parts[name] = look()
        except Exception as error:  # noqa: BLE001 - one failure must not hide the other parts
            parts[name] = {"problem": f"{type(error).__name__}: {error}"}

    threads = [
        threading.Thread(target=work, args=piece, name=piece[0], daemon=True)
        for piece in pieces.items()
    ]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + request["limit_s"]
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
        late = f"not found within {request['limit_s']:g} s"
        parts.setdefault(thread.name, {"problem": late})
    version = ".".join(str(part) for part in sys.version_info[:3])
    return {"version": version, "executable": sys.executable, **parts}


def identity() -> Message:
    """Return the user's name, or the user's number if there is no name."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = str(os.getuid())
    return {"uid": os.getuid(), "user": user}


def disk(base: str | None) -> Message:
    """Return the free space of the trials' base folder, and whether we may write there."""
    folder = base_folder(base)
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    problem = None if existing.is_dir() else f"{existing} is no folder"
    probe = existing / f"amp-ray-doctor-{secrets.token_hex(4)}"
    try:
        if problem is None:
            make_folder(probe)
            probe.rmdir()
    except OSError as error:
        problem = error.strerror or str(error)
    return {"path": str(folder), "free_bytes": free_bytes(existing), "problem": problem}


def free_bytes(folder: Path) -> int | None:
    """Return the bytes that a user may still write to a file system."""
    with contextlib.suppress(OSError):
        status = os.statvfs(folder)
        return status.f_bavail * status.f_frsize
    return None


def gpus() -> Message:
    """Ask ``nvidia-smi`` for GPUs and for the processes on them."""
    try:
        rows = list(_query("gpu", GPU_QUERY))
        processes = list(_query("compute-apps", PROCESS_QUERY))
    except FileNotFoundError:
        problem = "nvidia-smi is not there"
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        problem = f"nvidia-smi: {error}"
    else:
        return {
            "gpus": [
                {
                    "index": int(index),
                    "uuid": uuid,
                    "name": name,
                    "memory_bytes": _mib(total),
                    "used_bytes": _mib(used),
                    "power_limit_w": _watts(limit),
                }
                for index, uuid, total, used, limit, name in rows
            ],
            "processes": [
                {
                    "uuid": uuid,
                    "pid": int(pid) if pid.isdigit() else 0,
                    "name": name,
                    "memory_bytes": _mib(used),
                }
                for uuid, pid, used, name in processes
            ],
            "visible": os.environ.get(DEVICE_VARIABLE),
            "problem": None,
        }
    return {"gpus": [], "processes": [], "visible": None, "problem": problem}


def _query(table: str, keys: tuple[str, ...]) -> Iterator[list[str]]:
    argv = ["nvidia-smi", f"--query-{table}={','.join(keys)}", "--format=csv,noheader,nounits"]
    ended = subprocess.run(argv, capture_output=True, text=True, timeout=SMI_TIMEOUT_S, check=False)
    if ended.returncode != 0:
        words = (ended.stdout.strip() or ended.stderr.strip()).splitlines()
        raise ValueError(words[0] if words else f"exit code {ended.returncode}")
    for line in ended.stdout.splitlines():
        if line.strip():
            cells = [cell.strip() for cell in line.split(",", len(keys) - 1)]
            if len(cells) != len(keys):
                raise ValueError(f"cannot read {line!r}")
            yield cells


def _mib(text: str) -> int | None:
    """Read a number of MiB; None if the driver reports none."""
    return int(text) * MIB if text.isdigit() else None


def _watts(text: str) -> float | None:
    """Read a number of watts; None if the driver reports none."""
    return float(text) if text.replace(".", "", 1).isdigit() else None


def listen(request: Message) -> Message:
    """Find the address that peers use; listen there at a port of the trials' range."""
    reached_at = os.environ.get("SSH_CONNECTION", "").split()[2:3]
    try:
        address, interface = find_address([*request["addresses"], *reached_at])
    except OSError as error:
        return {"problem": error.strerror or str(error)}
    facts = {"address": address, "interface": interface, "port": None}
    problem = ""
    for _ in range(PORT_TRIES):
        try:
            port = free_port(address)
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            backlog = request["num_peers"]
            opened = socket.create_server((address, port), family=family, backlog=backlog)
        except OSError as error:
            problem = error.strerror or str(error)
        else:
            listeners.append(opened)
            return {**facts, "port": port, "problem": None}
    return {**facts, "problem": problem}


def software(request: Message) -> Message:
    """Run the software script with the trial's Python and a rank's environment variables."""
    try:
        ended = subprocess.run(
            [request["python"], "-c", request["script"]],
            cwd="/",
            env={**inherited(), **request["environment"]},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=request["limit_s"],
            check=False,
        )
    except OSError as error:
        return {"problem": error.strerror or str(error)}
    for line in reversed(ended.stdout.splitlines()):
        with contextlib.suppress(ValueError):
            facts = json.loads(line)
            if isinstance(facts, dict) and facts.get("kind") in {"software", "old"}:
                return {**facts, "problem": None}
    words = " / ".join(ended.stderr.strip().splitlines()[-ERROR_LINES:])
    return {"problem": words or f"exit code {ended.returncode}"}


def reach(request: Message) -> Message:
    """Connect to all peers in parallel; return the errors."""

    def connect(peer: Message) -> Message:
        place = (peer["address"], peer["port"])
        problem = None
        try:
            socket.create_connection(place, timeout=request["limit_s"]).close()
        except OSError as error:
            late = isinstance(error, TimeoutError)
            problem = "timed out" if late else error.strerror or str(error)
        return {"name": peer["name"], "problem": problem}

    peers = request["peers"]
    with ThreadPoolExecutor(max_workers=min(MAX_THREADS, max(1, len(peers)))) as pool:
        return {"peers": list(pool.map(connect, peers))}


def answer(message: Message, seal: Seal) -> None:
    """Answer one message."""
    ways = {"facts": gather, "reach": reach}
    reply = {"kind": message["kind"], **ways[message["kind"]](message)}
    with stdout_lock, contextlib.suppress(OSError):
        data = b"\n" + seal.seal(reply)
        while data:
            data = data[os.write(1, data) :]


def end(*_signal: object) -> None:
    """Kill this process and all its children."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def main() -> None:
    """Answer messages until stdin ends or ``limit_s`` is over."""
    with contextlib.suppress(OSError):  # already a session leader
        os.setsid()
    for number in (signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    for number in (signal.SIGALRM, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    try:
        signal.alarm(json.loads(read_line().decode())["limit_s"])
        key = bytes.fromhex(read_line().decode())
        ours, theirs = Seal(key, FROM_AGENT), Seal(key, FROM_CONTROLLER)
        while True:
            line = read_line()[:-1]
            message = theirs.open(line) if line else None  # empty lines show that it is there
            if message is not None:
                threading.Thread(target=answer, args=(message, ours), daemon=True).start()
    finally:
        end()
