"""The agent itself: one loop over stdin, stdout, children and pipes; none of them blocks it."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .isolation import isolate
from .job import Job, inherited
from .network import find_address, free_port
from .processes import become_subreaper, child_alarm, descendants, describe, end_all, reap, tagged
from .rank import trouble
from .warm import Warm

if TYPE_CHECKING:
    from types import FrameType

    from .rank import Rank

    Message = dict[str, Any]

READ_BYTES = 64 * 1024
OUTBOX_BYTES = 4 * 1024 * 1024
"""More that the controller has not read, and ranks wait too."""

PROBE_BYTES = 4096
"""An empty file costs no block: only bytes show that a disk is full."""

TURN_S = 0.25
"""How long the loop sleeps at most."""


class Agent:
    """Everything that an agent knows."""

    def __init__(self, start: Message, isolation: str) -> None:
        """Say hello.

        Args:
            start: The first message: ``tag``, ``grace_s``, ``lease_s``, ``heartbeat_s``.
            isolation: What came of it.
        """
        self._start = start
        self._outbox, self._inbox = bytearray(), bytearray()
        self._last_heard = self._last_beat = time.monotonic()
        self._over: str | None = None
        self._job: Job | None = None
        self._warm: Warm | None = None
        self._folder: str | None = None
        self._alarm = child_alarm()[0]
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._told_to_end)
        os.set_blocking(0, False)
        os.set_blocking(1, False)
        # Address and port of the client, then ours: what the controller, or its jump host, used.
        self._reached_at = os.environ.get("SSH_CONNECTION", "").split()[2:3]
        self._say(
            kind="hello",
            pid=os.getpid(),
            python=".".join(str(part) for part in sys.version_info[:3]),
            isolation=isolation,
            host=socket.gethostname(),
        )

    def run(self) -> None:
        """Serve until the lease ends."""
        while self._over is None:
            self._turn(TURN_S)
            for line in self._lines():
                if line:
                    self._handle(json.loads(line.decode()))
            self._watch()
        self._finish("lease")
        self._remove_folder()
        end_all(descendants, self._start["grace_s"], self._reap)

    # ------------------------------------------------------------------ bytes

    def _say(self, **message: Any) -> None:  # noqa: ANN401 - JSON
        """Queue a message."""
        self._outbox += json.dumps(message).encode() + b"\n"

    def _lines(self) -> list[bytes]:
        """Take the complete lines of the inbox."""
        *lines, rest = bytes(self._inbox).split(b"\n")
        self._inbox = bytearray(rest)
        return lines

    def _turn(self, timeout_s: float) -> None:
        """Wait for something, and move bytes."""
        ranks = self._job.ranks if self._job is not None else ()
        pipes = {rank.pipe: rank for rank in ranks if rank.pipe is not None}
        wanted = [0, self._alarm, *(pipes if len(self._outbox) < OUTBOX_BYTES else ())]
        warm = self._warm.socket.fileno() if self._warm is not None else -1
        wanted += [warm] if self._warm is not None else []
        readable, writable, _ = select.select(wanted, [1] if self._outbox else [], [], timeout_s)
        if 0 in readable:
            self._listen()
        elif time.monotonic() - self._last_heard > self._start["lease_s"]:
            self._over = f"no sign of the controller for {self._start['lease_s']} s"
        if self._alarm in readable:
            os.read(self._alarm, READ_BYTES)
        if warm in readable:
            self._hear_warm()
        for descriptor in readable:
            if descriptor in pipes:
                self._hear_rank(pipes[descriptor])
        self._beat()
        if writable:
            self._flush()

    def _listen(self) -> None:
        """Read stdin; its end is the end of the lease."""
        try:
            data = os.read(0, READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self._inbox += data
        self._last_heard = time.monotonic()
        if not data:
            self._over = "stdin has ended"

    def _beat(self) -> None:
        """Give a sign of life, unless the last one still waits."""
        now = time.monotonic()
        if now - self._last_beat > self._start["heartbeat_s"] and not self._outbox:
            self._last_beat = now
            self._say(kind="alive")

    def _flush(self) -> None:
        """Write what stdout takes."""
        try:
            num_bytes = os.write(1, self._outbox) if self._outbox else 0
        except BlockingIOError:
            return
        except OSError:
            num_bytes = len(self._outbox)  # nobody listens; stdin will say so too
        del self._outbox[:num_bytes]

    def _told_to_end(self, number: int, _frame: FrameType | None) -> None:
        """End in order on a signal."""
        self._over = f"signal {number}"

    # ------------------------------------------------------------------ messages

    def _handle(self, message: Message) -> None:
        """Do what the controller asks."""
        {
            "prepare": self._prepare,
            "job": self._begin,
            "stop": self._stop,
            "warm": self._warm_up,
            "sweep": self._sweep,
        }[message["kind"]](message)

    def _prepare(self, message: Message) -> None:
        """Make the trial's folder; find address, interface and a free port."""
        folder = _base(message) / message["name"]
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            folder.mkdir(mode=0o700)
            self._folder = str(folder)
            probe = folder / ".probe"
            probe.write_bytes(bytes(PROBE_BYTES))
            probe.unlink()
        except OSError as error:
            error.filename = str(folder)
            self._say(**trouble(error))
            self._remove_folder()
            return
        try:
            address, interface = find_address([*message["addresses"], *self._reached_at])
            port = free_port(address) if message["port"] else None
        except OSError as error:
            self._say(**trouble(error, what="network"))
            self._remove_folder()
            return
        self._say(
            kind="prepared", folder=str(folder), address=address, interface=interface, port=port
        )

    def _begin(self, message: Message) -> None:
        """Start the ranks of a trial."""
        assert self._folder is not None, "prepare comes first"
        self._job = Job(message, self._folder, self._start["tag"])
        try:
            self._job.write_files()
            for event in self._job.start(self._warm):
                self._say(**event)
        except OSError as error:
            self._say(**trouble(error, what="start"))
            self._job.stop = "failed"

    def _stop(self, message: Message) -> None:
        """End the job, or only its preparation."""
        if self._job is not None:
            self._job.stop = self._job.stop or message["reason"]
            return
        self._remove_folder()
        self._say(kind="done", reason=message["reason"], clean=True, left=[], num_oom_kills=0)

    def _warm_up(self, message: Message) -> None:
        """Start the warm process."""
        try:
            self._warm = Warm(message, {**inherited(), **message["environment"]})
        except OSError as error:
            self._say(kind="warm", problem=f"{message['python']}: {error.strerror}", import_s=0.0)

    def _sweep(self, message: Message) -> None:
        """End what another agent's tag marks, and remove its folders by name."""
        found = [describe(pid) for pid in tagged(message["tag"])]
        left = end_all(lambda: tagged(message["tag"]), 0.0, self._reap)
        for name in message["names"]:
            shutil.rmtree(_base(message) / name, ignore_errors=True)
        self._say(kind="swept", found=found, left=[describe(pid) for pid in left])

    # ------------------------------------------------------------------ ranks

    def _hear_rank(self, rank: Rank, *, everything: bool = False) -> None:
        """Pass on what a rank said."""
        for message in rank.read(everything=everything):
            self._say(**message)

    def _hear_warm(self) -> None:
        """Follow the warm process."""
        assert self._warm is not None
        for message in self._warm.read():
            kind = message["kind"]
            if kind == "warm":
                self._warm.ready = not message["problem"]
                self._say(**message)
            elif kind == "gone":
                self._warm_is_gone(self._warm)
            elif self._job is not None and kind == "forked":
                self._forked(self._job, message)
            elif self._job is not None:
                self._job.exited(message["pid"], message["status"])

    def _forked(self, job: Job, message: Message) -> None:
        """Note a rank's process id, or that it could not be forked."""
        rank = next(rank for rank in job.ranks if rank.number == message["rank"])
        if message["problem"]:
            text = f"no rank can be forked: {message['problem']}"
            self._say(kind="trouble", what="start", rank=rank.number, text=text)
            job.stop = "failed"
        else:
            rank.pid = message["pid"]
            self._say(kind="started", rank=rank.number, pid=rank.pid, warm=True)

    def _warm_is_gone(self, warm: Warm) -> None:
        """Go on without the warm process; ranks that it forked have died with it."""
        warm.socket.close()
        self._warm = None
        if self._job is not None:
            self._say(kind="trouble", what="start", rank=None, text="the warm process ended")
            self._job.stop = "failed"

    def _reap(self) -> None:
        """Collect ended children; keep up the heartbeat meanwhile."""
        for pid, status in reap():
            if self._job is not None:
                self._job.exited(pid, status)
        self._beat()
        self._flush()

    def _watch(self) -> None:
        """Follow the job to its end."""
        self._reap()
        if self._job is None:
            return
        for rank in self._job.ranks:
            if rank.status is not None and not rank.reported:
                rank.reported = True
                self._hear_rank(rank, everything=True)
                self._say(**rank.exit_message(ended=False))
        why = self._job.why_over()
        if why is not None:
            self._finish(why)

    def _finish(self, why: str) -> None:
        """End all ranks, send what is left of them, remove the folder, say so."""
        job = self._job
        if job is None:
            return
        spared = (self._warm.process.pid,) if self._warm is not None else ()
        left = end_all(lambda: descendants(spared), self._start["grace_s"], self._reap)
        for rank in job.ranks:
            self._hear_rank(rank, everything=True)
            rank.close()
            if not rank.reported:
                self._say(**rank.exit_message(ended=True))
        self._job = None
        if why != "lease":
            self._send_files(job)
        self._remove_folder()
        self._say(
            kind="done",
            reason=why,
            clean=not left,
            left=[describe(pid) for pid in left],
            num_oom_kills=job.num_oom_kills,
        )

    def _send_files(self, job: Job) -> None:
        """Send the collected files, one at a time and as fast as the controller reads."""
        try:
            for message in job.collect():
                self._say(**message)
                while self._outbox and self._over is None:
                    self._turn(TURN_S)
        except OSError as error:
            self._say(**trouble(error))

    def _remove_folder(self) -> None:
        """Remove the trial's folder, by name."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None


def _base(message: Message) -> Path:
    """Return the folder of all trials' folders."""
    return Path(message["base"] or os.environ.get("TMPDIR") or "/tmp").expanduser()  # noqa: S108


def _read_line() -> bytes:
    """Read the first line of stdin and not a byte more."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            sys.exit(0)
        line += byte
    return line


def main() -> None:
    """Run as the agent."""
    with contextlib.suppress(OSError):  # already the leader of its session
        os.setsid()
    for number in (signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    start = json.loads(_read_line().decode())
    isolation = isolate() if start["isolate"] else "off"
    become_subreaper()
    Agent(start, isolation).run()
