"""Answers questions about this host before any trial, and leaves nothing behind.

It lives as long as its stdin, and never longer than ``limit_s``. Whatever it started ends with it:
all of that is in its process group.

============  ==========================================================================
message       answer
============  ==========================================================================
``facts``     what ``machine`` and ``software`` find, the address, a port that listens
``time``      this host's clock
``reach``     which peers a TCP connection reaches
============  ==========================================================================
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import machine
from .job import inherited
from .network import find_address, free_port
from .stdio import read_line

if TYPE_CHECKING:
    from collections.abc import Callable

    Message = dict[str, Any]

MAX_THREADS = 64
PORT_TRIES = 3
ERROR_LINES = 3

stdout_lock = threading.Lock()
listeners: list[socket.socket] = []  # Kept open until the end; the kernel accepts on our behalf


def gather(request: Message) -> Message:
    """Find everything at once; what takes too long or fails has a ``problem`` instead."""
    base = request["base"]
    pieces: dict[str, Callable[[], Message]] = {
        "identity": machine.identity,
        "capacity": machine.capacity,
        "disk": lambda: machine.disk(base),
        "shared_memory": lambda: {"free_bytes": machine.free_bytes(Path("/dev/shm"))},  # noqa: S108
        "gpus": machine.gpus,
        "left": lambda: machine.leftovers(base),
        "address": lambda: listen(request),
        "own_name": lambda: own_name(request["name"]),
        "software": lambda: software(request),
        "program": lambda: program(request),
    }
    found: Message = {}

    def work(name: str, find: Callable[[], Message]) -> None:
        try:
            found[name] = find()
        except Exception as error:  # noqa: BLE001 - one fact that fails must not hide the others
            found[name] = {"problem": f"{type(error).__name__}: {error}"}

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
        found.setdefault(thread.name, {"problem": late})
    version = ".".join(str(part) for part in sys.version_info[:3])
    return {"version": version, "executable": sys.executable, **found}


def listen(request: Message) -> Message:
    """Find the address that peers use, and listen there at a port such as trials use."""
    reached_at = os.environ.get("SSH_CONNECTION", "").split()[2:3]
    try:
        address, interface = find_address([*request["addresses"], *reached_at])
    except OSError as error:
        return {"problem": error.strerror or str(error)}
    found = {"address": address, "interface": interface, "port": None}
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
            return {**found, "port": port, "problem": None}
    return {**found, "problem": problem}


def own_name(name: str) -> Message:
    """Say what this host takes its own names for."""
    names = dict.fromkeys([name, socket.gethostname()])
    return {"addresses": {own: machine.resolve(own) for own in names}}


def software(request: Message) -> Message:
    """Run the software script with the Python that trains, in the environment of a rank."""
    argv = [request["python"], "-c", request["script"], *(["deep"] if request["deep"] else [])]
    try:
        ended = subprocess.run(
            argv,
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


def program(request: Message) -> Message:
    """Look for the user's own program and its folder, where there are such."""
    name, cwd = request["program"], request["cwd"]
    path = {**inherited(), **request["environment"]}.get("PATH")
    return {
        "program": shutil.which(name, path=path) if name is not None else None,
        "has_cwd": Path(cwd).is_dir() if cwd is not None else True,
    }


def reach(request: Message) -> Message:
    """Connect to every peer, all at once; say what prevents it."""

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


def tell_time(_request: Message) -> Message:
    """Read the clock."""
    return {"time_s": time.time()}


def say(message: Message) -> None:
    """Write one line, whole."""
    data = b"\n" + json.dumps(message).encode() + b"\n"
    with stdout_lock, contextlib.suppress(OSError):
        while data:
            data = data[os.write(1, data) :]


def answer(message: Message) -> None:
    """Answer one message."""
    ways = {"facts": gather, "time": tell_time, "reach": reach}
    say({"kind": message["kind"], **ways[message["kind"]](message)})


def end(*_signal: object) -> None:
    """End this process and all that it has started."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def main() -> None:
    """Answer until stdin ends or the time is up."""
    with contextlib.suppress(OSError):  # already the leader of its session
        os.setsid()
    for number in (signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    for number in (signal.SIGALRM, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    signal.alarm(json.loads(read_line().decode())["limit_s"])
    while True:
        line = read_line_or_end()
        threading.Thread(target=answer, args=(json.loads(line.decode()),), daemon=True).start()


def read_line_or_end() -> bytes:
    """Read the next message; at the end of stdin everything ends."""
    try:
        return read_line()
    except SystemExit:
        end()
        raise
