"""The warm process: it imports slow modules once and then forks ranks.

Agent and warm process use a socket that preserves message boundaries. A request for a rank passes
the descriptor of the pipe for its output.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import importlib
import json
import os
import re
import runpy
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .job import end_of
from .processes import child_alarm, die_first, die_with_parent, reap, set_dumpable
from .resources import inherited
from .wire import BOOTSTRAP

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import BinaryIO

    Message = dict[str, Any]

READ_BYTES = 1024 * 1024
SEND_BYTES = READ_BYTES // 2  # size of the send buffer, which limits messages; Linux doubles it
DESCRIPTOR = struct.Struct("i")
OWN_FOLDER = "@AMP_RAY_FOLDER@"  # placeholder for the warm process's folder in its variables
DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri")  # GPUs, whose contexts do not survive a fork

MAX_DEATHS = 2  # after so many deaths of warm processes on a host, ranks start without one
# Limits of the output of a dead warm process in messages
TAIL_BYTES, TAIL_LINES = 4096, 5
SEND_LIMIT_S = 5.0  # time limit for the warm process to accept a request
END_POLL_S = 0.02  # pause between the end of its socket and the end of the process
LOCK_FILE = ".lock"
WARM_FOLDER = re.compile(r"amp-ray-[0-9a-f]{16}-warm")


class Warm:
    """The agent's side of the warm process; restarts it after its first death."""

    def __init__(self, request: Mapping[str, Any], folder: Path, say: Callable[..., None]) -> None:
        """Start the process; a message tells the controller when it is ready, or why it is not.

        The request has ``python``, the ``modules`` to import (``module:function`` is also called),
        the variables of its ``environment``, and ``limit_s``.
        """
        self.ready = False
        self._request, self._folder, self._say = request, folder, say
        self._num_deaths = 0
        self._given_up = False
        self._socket: socket.socket | None = None
        self._start()

    @property
    def pids(self) -> tuple[int, ...]:
        """The process id, if the process lives."""
        return () if self._socket is None else (self._process.pid,)

    @property
    def descriptors(self) -> list[int]:
        """The descriptor of the socket to the process, if the process lives."""
        return [] if self._socket is None else [self._socket.fileno()]

    @property
    def is_starting(self) -> bool:
        """Whether the process is still importing."""
        return not self.ready and not self._given_up

    def keep(self) -> None:
        """Between trials: restart the process if it died; end it if its imports take too long."""
        if self._socket is None and not self._given_up:
            try:
                self._start()
            except OSError as error:
                self._give_up(f"{self._request['python']}: {error.strerror}")
        limit_s = self._request["limit_s"]
        if self.is_starting and time.monotonic() - self._started_at > limit_s:
            self._give_up(f"its imports took longer than {limit_s:g} s{self._last_lines()}")
            self._kill()

    def leave(self) -> None:
        """Stop reporting and restarting the process."""
        self._given_up = True

    def exited(self, pid: int, status: int) -> str:
        """Note the end of a child; if it was the warm process and ready, return why it died."""
        if self._socket is None or pid != self._process.pid:
            return ""
        was_ready, self.ready = self.ready, False
        self._process.returncode = status
        self._socket.close()
        self._socket = None
        if self._given_up:
            return ""
        self._num_deaths += 1
        while_ = "" if was_ready else f" while it imported {', '.join(self._request['modules'])}"
        text = f"the warm process {describe_end(status)}{while_}{self._last_lines()}"
        if self._num_deaths < MAX_DEATHS:
            self._say(kind="warm-died", text=text)
        else:
            self._give_up(f"{text}; it is not started a third time")
        return text if was_ready else ""

    def suits(self, argv: Sequence[str]) -> bool:
        """Return whether the warm process can run a command: its own Python, a module or script."""
        words = _without_unbuffered(argv)
        is_program = bool(words) and (words[0] == "-m" or not words[0].startswith("-"))
        return self.ready and is_program and argv[0] == self._request["python"]

    def fork(
        self, rank: int, argv: Sequence[str], environment: Mapping[str, str], cwd: str, pipe: int
    ) -> bool:
        """Request a rank that prints to ``pipe``; kill the process if it accepts no request.

        Returns whether the request was sent: a very large environment does not fit in a message.
        """
        words = _without_unbuffered(argv)
        request = {"rank": rank, "argv": words, "environment": dict(environment), "cwd": cwd}
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, DESCRIPTOR.pack(pipe))]
        try:
            assert self._socket is not None
            self._socket.sendmsg([json.dumps(request).encode()], rights)
        except OSError as error:
            if error.errno == errno.EMSGSIZE:
                return False
            self._kill()
        return True

    def read(self) -> Message | None:
        """Read a message; return it if it is about a rank: ``forked`` or ``exit``."""
        try:
            data = self._socket.recv(READ_BYTES) if self._socket is not None else b""
        except OSError:
            data = b""
        if not data:  # the process is ending; `exited` is called then, and knows the reason
            self._kill()
            time.sleep(END_POLL_S)
            return None
        message: Message = json.loads(data.decode())
        if message["kind"] != "warm":
            return message
        if not self._given_up:
            self.ready, self._given_up = not message["problem"], bool(message["problem"])
            self._say(**message)
        return None

    def _start(self) -> None:
        self._started_at = time.monotonic()
        ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BYTES)
        ours.settimeout(SEND_LIMIT_S)
        names = json.dumps(self._request["modules"])
        python, folder = self._request["python"], str(self._folder)
        variables = self._request["environment"].items()
        try:
            # A file as stdin: a pipe would block until the interpreter has started
            with theirs, self._new("bundle") as bundle, self._new("output") as output:
                bundle.write(sys.modules[__package__ or ""].data)
                bundle.seek(0)
                self._process = subprocess.Popen(
                    [python, "-u", "-c", BOOTSTRAP, "warm", str(theirs.fileno()), names],
                    env={
                        **inherited(),
                        **{name: text.replace(OWN_FOLDER, folder) for name, text in variables},
                    },
                    cwd=folder,
                    pass_fds=[theirs.fileno()],
                    stdin=bundle,
                    stdout=output,
                    stderr=output,
                    preexec_fn=die_with_parent(os.getpid()),  # noqa: PLW1509 - no threads here
                )
        except OSError:
            ours.close()
            raise
        die_first(self._process.pid)
        self._socket = ours

    def _new(self, name: str) -> BinaryIO:
        path = self._folder / name
        path.unlink(missing_ok=True)
        return path.open("x+b")

    def _give_up(self, problem: str) -> None:
        """Report why ranks start without a warm process from now on."""
        self._given_up = True
        self._say(kind="warm", problem=problem, import_s=0.0)

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, signal.SIGKILL)

    def _last_lines(self) -> str:
        """Return the last lines that the process printed, for the end of a sentence."""
        printed = b""
        with contextlib.suppress(OSError):
            printed = end_of(self._folder / "output", TAIL_BYTES) or b""
        lines = printed.decode("utf-8", "replace").strip().splitlines()[-TAIL_LINES:]
        return f"; it printed last: {' / '.join(lines)}" if lines else ""


def describe_end(status: int) -> str:
    """Describe a wait status."""
    if not os.WIFSIGNALED(status):
        return f"ended with exit code {os.WEXITSTATUS(status)}"
    number = os.WTERMSIG(status)
    with contextlib.suppress(ValueError):
        return f"was ended by signal {number} ({signal.Signals(number).name})"
    return f"was ended by signal {number}"


def hold_folder(folder: Path) -> None:
    """Mark a folder as in use until this process ends, even if SIGKILL ends it."""
    number = os.open(
        str(folder / LOCK_FILE), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
    )
    fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)


def remove_unheld_folders(base: Path) -> None:
    """Remove this user's warm-process folders whose agents have died."""
    for folder in base.glob("amp-ray-*-warm"):
        with contextlib.suppress(OSError):
            number = os.open(str(folder / LOCK_FILE), os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if WARM_FOLDER.fullmatch(folder.name) and folder.lstat().st_uid == os.getuid():
                    shutil.rmtree(str(folder), ignore_errors=True)
            finally:
                os.close(number)


def _without_unbuffered(argv: Sequence[str]) -> list[str]:
    """Return a command without the interpreter and its ``-u``."""
    return list(argv[2:] if argv[1:2] == ["-u"] else argv[1:])


# -------------------------------------------------------------------------- in the process itself


def why_not_fork() -> str:
    """Return why forking this process would be unsafe; empty if it is safe."""
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
    set_dumpable(dumpable=False)  # before the first rank starts: no rank may forge messages
    # Use a copy: the original stays open until the process ends, so the agent sees no earlier end
    channel = socket.socket(fileno=os.dup(int(sys.argv[2])))
    start = time.monotonic()
    problem = ""
    try:
        for entry in json.loads(sys.argv[3]):
            name, _, function = entry.partition(":")
            module = importlib.import_module(name)
            if function:
                getattr(module, function)()
    except Exception as error:  # noqa: BLE001 - any exception of an import is reported
        problem = f"{type(error).__name__}: {error}"[:TAIL_BYTES]
    problem = problem or why_not_fork()
    _tell(channel, kind="warm", problem=problem, import_s=time.monotonic() - start)
    if not problem:
        rank = _serve(channel)
        if rank is not None:
            _become_rank(*rank)


def _serve(channel: socket.socket) -> tuple[Message, int] | None:
    """Fork a child per request; return request and pipe in the child, None in the parent."""
    alarm = child_alarm()[0]
    while True:
        readable = select.select([channel.fileno(), alarm], [], [])[0]
        if alarm in readable:
            os.read(alarm, READ_BYTES)
            for pid, status in reap():
                _tell(channel, kind="exit", pid=pid, status=status)
        if channel.fileno() in readable:
            data, rights, _, _ = channel.recvmsg(READ_BYTES, socket.CMSG_SPACE(DESCRIPTOR.size))
            if not data:
                return None
            request = json.loads(data.decode())
            (pipe,) = DESCRIPTOR.unpack(rights[0][2][: DESCRIPTOR.size])
            if _fork(channel, request["rank"], pipe):
                return request, pipe


def _fork(channel: socket.socket, rank: int, pipe: int) -> bool:
    """Fork a rank; return whether this is the child."""
    problem = why_not_fork()
    parent = os.getpid()
    child = -1 if problem else os.fork()
    if child == 0:
        signal.set_wakeup_fd(-1)
        channel.detach()
        _close_all_but(pipe)
        die_with_parent(parent)()
        set_dumpable(dumpable=True)
        return True
    os.close(pipe)
    _tell(channel, kind="forked", rank=rank, pid=child, problem=problem)
    return False


def _close_all_but(pipe: int) -> None:
    """Close all descriptors above 2 except ``pipe``, such as the agent's socket."""
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
    # An interpreter does the same with PYTHONPATH when it starts
    added = [entry for entry in os.environ.get("PYTHONPATH", "").split(":") if entry]
    first = request["cwd"] if module else str(Path(words[0]).resolve().parent)
    sys.path[:0] = [first, *added]
    if module:
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(words[0], run_name="__main__")


def _tell(channel: socket.socket, **message: str | float) -> None:
    with contextlib.suppress(ConnectionError):
        channel.send(json.dumps(message).encode())
