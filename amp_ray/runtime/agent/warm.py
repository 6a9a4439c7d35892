"""A process that imports much once and then forks one rank after the other."""

from __future__ import annotations

import collections
import contextlib
import importlib
import json
import os
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .bundle import BOOTSTRAP
from .processes import child_alarm, die_first, die_with_parent, reap, set_dumpable

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    Message = dict[str, Any]

READ_BYTES = 64 * 1024
DESCRIPTOR = struct.Struct("i")

OWN_FOLDER = "@AMP_RAY_FOLDER@"
"""In a variable of the warm process: its own folder, which goes with the agent."""

DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri")
"""An open one means a device context, which does not survive a fork."""


class Warm:
    """The agent's end."""

    def __init__(
        self, request: Mapping[str, Any], environment: Mapping[str, str], folder: Path
    ) -> None:
        """Start the process; it reports when it is ready.

        Args:
            request: ``python``, the ``modules`` to import, as ``module`` or ``module:function``
                to call a function of it too, and the ``environment`` in which.
            environment: Which that adds to.
            folder: For what the imports write.

        Raises:
            OSError: If that Python cannot be started.
        """
        self.python = request["python"]
        self.ready = False
        self.socket, theirs = socket.socketpair()
        names = json.dumps(request["modules"])
        given = {
            name: text.replace(OWN_FOLDER, str(folder))
            for name, text in request["environment"].items()
        }
        with theirs:
            self.process = subprocess.Popen(
                [self.python, "-u", "-c", BOOTSTRAP, "warm", str(theirs.fileno()), names],
                env={**environment, **given},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                preexec_fn=die_with_parent(os.getpid()),  # noqa: PLW1509 - the agent has no threads
            )
        die_first(self.process.pid)
        self._rest = b""
        pipe = self.process.stdin
        assert pipe is not None
        with contextlib.suppress(BrokenPipeError), pipe:
            pipe.write(sys.modules[__package__ or ""].data)

    def suits(self, argv: Sequence[str]) -> bool:
        """Tell whether it can run a command: the same Python, a module or a script."""
        words = _without_unbuffered(argv)
        known = bool(words) and (words[0] == "-m" or not words[0].startswith("-"))
        return self.ready and known and argv[0] == self.python

    def fork(
        self, rank: int, argv: Sequence[str], environment: Mapping[str, str], cwd: str, pipe: int
    ) -> None:
        """Ask for a rank, whose output goes to a pipe."""
        words = _without_unbuffered(argv)
        request = {"rank": rank, "argv": words, "environment": dict(environment), "cwd": cwd}
        data = json.dumps(request).encode() + b"\n"
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, DESCRIPTOR.pack(pipe))]
        sent = self.socket.sendmsg([data], rights)
        self.socket.sendall(data[sent:])

    def read(self) -> Iterator[Message]:
        """Take its messages; its end is one too."""
        data = self.socket.recv(READ_BYTES)
        if not data:
            yield {"kind": "gone"}
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            yield json.loads(line.decode())


def _without_unbuffered(argv: Sequence[str]) -> list[str]:
    """Leave out the interpreter and its ``-u``."""
    return list(argv[2:] if argv[1:2] == ["-u"] else argv[1:])


def why_not_fork() -> str:
    """Say why forking this process would be unsafe, or nothing."""
    num_threads = len(list(Path("/proc/self/task").iterdir()))
    if num_threads > 1:
        return f"the imports started {num_threads - 1} threads"
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            target = os.readlink(descriptor)  # noqa: PTH115 - Path.readlink is newer than 3.8
            if target.startswith(DEVICES):
                return f"the imports opened {target}"
    return ""


def main() -> None:
    """Run as the warm process: import, then fork a rank per request."""
    set_dumpable(dumpable=False)  # before the first rank: what it says of ranks must be its own
    channel = socket.socket(fileno=int(sys.argv[2]))
    start = time.monotonic()
    problem = ""
    try:
        for entry in json.loads(sys.argv[3]):
            name, _, function = entry.partition(":")
            module = importlib.import_module(name)
            if function:
                getattr(module, function)()
    except Exception as error:  # noqa: BLE001 - whatever an import raises is an answer
        problem = f"{type(error).__name__}: {error}"
    problem = problem or why_not_fork()
    _tell(channel, kind="warm", problem=problem, import_s=time.monotonic() - start)
    if not problem:
        task = _Forker(channel).serve()
        if task is not None:
            _become_rank(*task)


class _Forker:
    """The warm process at work."""

    def __init__(self, channel: socket.socket) -> None:
        """Listen for requests and for children's ends."""
        self._channel = channel
        self._alarm = child_alarm()
        self._rest = b""
        self._pipes: collections.deque[int] = collections.deque()

    def serve(self) -> tuple[Message, int] | None:
        """Fork a child per request; return the request in the child, None at the end."""
        while True:
            readable = select.select([self._channel.fileno(), self._alarm[0]], [], [])[0]
            if self._alarm[0] in readable:
                os.read(self._alarm[0], READ_BYTES)
                for pid, status in reap():
                    _tell(self._channel, kind="exit", pid=pid, status=status)
            if self._channel.fileno() in readable:
                requests = self._receive()
                if requests is None:
                    return None
                for request in requests:
                    pipe = self._pipes.popleft()
                    if self._fork(request, pipe):
                        return request, pipe

    def _receive(self) -> list[Message] | None:
        """Take requests and their pipes; None at the end."""
        space = socket.CMSG_SPACE(DESCRIPTOR.size)
        data, rights, _, _ = self._channel.recvmsg(READ_BYTES, space)
        self._pipes.extend(DESCRIPTOR.unpack(raw[: DESCRIPTOR.size])[0] for _, _, raw in rights)
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [json.loads(line.decode()) for line in lines] if data else None

    def _fork(self, request: Message, pipe: int) -> bool:
        """Fork a rank; tell whether this is the child."""
        problem = why_not_fork()
        parent = os.getpid()
        child = -1 if problem else os.fork()
        if child == 0:
            signal.set_wakeup_fd(-1)
            self._channel.detach()
            _close_all_but(pipe)
            die_with_parent(parent)()
            set_dumpable(dumpable=True)
            return True
        os.close(pipe)
        _tell(self._channel, kind="forked", rank=request["rank"], pid=child, problem=problem)
        return False


def _close_all_but(pipe: int) -> None:
    """Close every descriptor above 2 but one: the agent's socket and other ranks' pipes too."""
    for entry in os.listdir("/proc/self/fd"):  # noqa: PTH208 - a path of descriptors, not files
        if int(entry) > 2 and int(entry) != pipe:  # noqa: PLR2004 - stdin, stdout and stderr
            with contextlib.suppress(OSError):
                os.close(int(entry))


def _become_rank(request: Message, pipe: int) -> None:
    """Turn a forked child into the rank: environment, folder, output, program."""
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.dup2(pipe, 1)
    os.dup2(pipe, 2)
    os.close(pipe)
    os.chdir(request["cwd"])
    words = request["argv"]
    module = words[0] == "-m"
    sys.argv = words[1:] if module else words
    # What an interpreter does with PYTHONPATH when it starts.
    added = [entry for entry in os.environ.get("PYTHONPATH", "").split(":") if entry]
    first = request["cwd"] if module else str(Path(words[0]).resolve().parent)
    sys.path[:0] = [first, *added]
    if module:
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(words[0], run_name="__main__")


def _tell(channel: socket.socket, **message: str | float) -> None:
    """Send one message to the agent, which may be gone."""
    with contextlib.suppress(BrokenPipeError):
        channel.sendall(json.dumps(message).encode() + b"\n")
