"""The agent's main loop over stdin, stdout, child processes and pipes; it never blocks."""

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

from .job import Job, Store, trouble
from .processes import (
    become_subreaper,
    child_alarm,
    descendants,
    describe,
    end_all,
    isolate,
    reap,
    set_dumpable,
    set_name,
)
from .resources import Slots, base_folder, find_address, free_port, make_folder, sweep
from .warm import Warm, hold_folder, remove_unheld_folders
from .wire import COMMAND_BYTES, FROM_AGENT, FROM_CONTROLLER, Lines, Seal, WireError, read_line

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from .job import RankProcess

    Message = dict[str, Any]

ALARM_BYTES = 4096  # limit per read of the alarm pipe, which gets a byte when a child ends
TURN_S = 0.25  # longest sleep of the loop
READ_BYTES = 256 * 1024
FULL_BYTES = 1024 * 1024  # while more is unsent, the output of ranks is not read
LATE_S = 1.0  # a host that takes longer between two turns of the loop is too busy


class Stdio:
    """Non-blocking messages on stdin and stdout, and the lease on stdin."""

    def __init__(self, key: bytes, *, lease_s: float, heartbeat_s: float) -> None:
        """Take over descriptors 0 and 1; the lease ends after ``lease_s`` without a byte."""
        self.over: str | None = None
        self._lease_s, self._heartbeat_s = lease_s, heartbeat_s
        self._ours, self._theirs = Seal(key, FROM_AGENT), Seal(key, FROM_CONTROLLER)
        self._lines = Lines(COMMAND_BYTES)
        self._inbox: list[Message] = []
        self._outbox = bytearray(b"\n")  # ends the login shell's last line if it is incomplete
        self._last_heard = self._last_beat = self._last_listened = time.monotonic()
        os.set_blocking(0, False)
        os.set_blocking(1, False)

    @property
    def has_output(self) -> bool:
        """Whether any output is waiting to be written."""
        return bool(self._outbox)

    @property
    def is_full(self) -> bool:
        """Whether more than `FULL_BYTES` are waiting to be written."""
        return len(self._outbox) > FULL_BYTES

    def say(self, **message: Any) -> None:  # noqa: ANN401 - JSON
        """Queue a message."""
        self._outbox += self._ours.seal(message)

    def beat(self) -> None:
        """Queue an ``alive`` message when it is due, unless output is still waiting."""
        now = time.monotonic()
        if now - self._last_beat > self._heartbeat_s and not self._outbox:
            self._last_beat = now
            self.say(kind="alive")

    def flush(self) -> None:
        """Write as much as stdout accepts."""
        try:
            num_bytes = os.write(1, self._outbox) if self._outbox else 0
        except BlockingIOError:
            return
        except OSError:
            num_bytes = len(self._outbox)  # the reader is gone; stdin ends too
        del self._outbox[:num_bytes]

    def listen(self, *, readable: bool) -> None:
        """Read stdin, or end the lease if the controller has been silent for too long.

        The lease stands still while this loop does not run: a host that is too busy to run this
        process may have delayed the controller's bytes, too.
        """
        now = time.monotonic()
        if now > self._last_listened + LATE_S:
            self._last_heard += now - self._last_listened
        self._last_listened = now
        if not readable:
            if now - self._last_heard > self._lease_s:
                self.over = f"no sign of the controller for {self._lease_s} s"
            return
        try:
            data = os.read(0, READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self._last_heard = time.monotonic()
        if not data:
            self.over = "stdin has ended"
        try:
            for line in filter(None, self._lines.feed(data)):  # empty lines only renew the lease
                message = self._theirs.open(line)
                if message is None:
                    self.over = "a message is not the controller's"
                    return
                self._inbox.append(message)
        except WireError as error:
            self.over = str(error)

    def take_messages(self) -> list[Message]:
        """Return the complete messages, and remove them from the queue."""
        messages, self._inbox = self._inbox, []
        return messages


class Agent:
    """The agent's state: its job, warm process and slots."""

    def __init__(self, start: Message, isolation: str, key: bytes) -> None:
        self._start, self._base = start, base_folder(start["base"])
        self._stdio = Stdio(key, lease_s=start["lease_s"], heartbeat_s=start["heartbeat_s"])
        self._say = self._stdio.say
        self._store: Store | None = None
        self._job: Job | None = None
        self._warm: Warm | None = None
        self._slots = Slots(start["pid"])
        self._folder: str | None = None
        self._remaining: list[str] = []  # folders of trials that could not be removed whole
        self._warm_folder: Path | None = None
        self._alarm = child_alarm()[0]
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._end_by_signal)
        # Address and port of the client (controller or jump host), then of this host
        self._reached_at = os.environ.get("SSH_CONNECTION", "").split()[2:3]
        self._say(
            kind="hello",
            pid=os.getpid(),
            python=".".join(str(part) for part in sys.version_info[:3]),
            isolation=isolation,
            hostname=socket.gethostname(),
        )

    def run(self) -> None:
        """Handle messages and child processes until the lease ends."""
        while self._stdio.over is None:
            self._turn()
            for message in self._stdio.take_messages():
                self._handle(message)
            self._watch()
        if self._warm is not None:
            self._warm.leave()
        self._finish("lease")
        self._remove_folder()
        end_all(descendants, self._start["grace_s"], self._reap)
        for folder in self._remaining:
            shutil.rmtree(folder, ignore_errors=True)
        if self._warm_folder is not None:
            shutil.rmtree(self._warm_folder, ignore_errors=True)

    def _turn(self) -> None:
        ranks = self._job.ranks if self._job is not None and not self._stdio.is_full else ()
        pipes = {rank.pipe: rank for rank in ranks if rank.pipe is not None}
        warm = self._warm.descriptors if self._warm is not None else []
        waiting = [1] if self._stdio.has_output else []
        readable, writable, _ = select.select([0, self._alarm, *pipes, *warm], waiting, [], TURN_S)
        self._stdio.listen(readable=0 in readable)
        if self._alarm in readable:
            os.read(self._alarm, ALARM_BYTES)
        if any(descriptor in readable for descriptor in warm):
            self._hear_warm()
        for descriptor in readable:
            if descriptor in pipes:
                self._hear_rank(pipes[descriptor])
                self._show_life()
        self._stdio.beat()
        if writable:
            self._stdio.flush()

    def _show_life(self) -> None:
        """Send ``alive`` during work that may take long on a busy host."""
        self._stdio.beat()
        self._stdio.flush()

    def _end_by_signal(self, number: int, _frame: FrameType | None) -> None:
        self._stdio.over = f"signal {number}"

    # ------------------------------------------------------------------ messages

    def _handle(self, message: Message) -> None:
        """Handle a message of the controller; after an invalid one, clean up and exit."""
        ways = {
            "prepare": self._prepare,
            "put": self._put,
            "job": self._begin,
            "stop": self._stop,
            "claim": self._claim,
            "warm": self._warm_up,
            "sweep": self._sweep,
        }
        try:
            ways[message["kind"]](message)
        except Exception as error:  # noqa: BLE001 - ranks and folders must be removed
            self._stdio.over = f"{message['kind'][:20]!r}: {type(error).__name__}: {error}"
            self._say(**trouble(OSError(0, self._stdio.over), what="start"))
            self._stdio.flush()

    def _prepare(self, message: Message) -> None:
        """Make the trial's folder; find address, interface and a free port."""
        folder = self._base / message["name"]
        what = "folder"
        try:
            make_folder(folder)
            self._folder = str(folder)
            self._store = self._store or Store(str(self._base))
            what = "network"
            address, interface = find_address([*message["addresses"], *self._reached_at])
            port = free_port(address) if message["port"] else None
        except OSError as error:
            if what == "folder":
                error.filename = str(folder)
            self._say(**trouble(error, what=what))
            self._remove_folder()
            return
        self._say(
            kind="prepared",
            folder=self._folder,
            address=address,
            interface=interface,
            port=port,
        )

    def _put(self, message: Message) -> None:
        assert self._store is not None, "prepare comes first"
        try:
            self._store.add(message["digest"], message["data"], last=message["last"])
        except OSError as error:
            self._say(**trouble(error))
            return
        if message["last"]:
            self._say(kind="stored", digest=message["digest"])

    def _begin(self, message: Message) -> None:
        assert self._folder is not None, "prepare comes first"
        assert self._store is not None, "prepare comes first"
        self._job = Job(message, self._folder, self._start["tag"])
        if self._warm is not None and self._warm.is_starting:  # it died after the request
            self._end_for_want_of_warm("the warm process is being started again")
            return
        try:
            self._job.write_files(self._store)
            self._show_life()
            for event in self._job.start(self._warm):
                self._say(**event)
                self._stdio.flush()  # now: hundreds of ranks take a while to start
        except OSError as error:
            self._say(**trouble(error, what="start"))
            self._job.stop = "failed"

    def _stop(self, message: Message) -> None:
        """End the job, or its preparation; do nothing if the job has just ended by itself."""
        if self._job is not None:
            self._job.stop = self._job.stop or message["reason"]
        elif self._folder is not None:
            self._remove_folder()
            end = {"clean": True, "left": [], "num_oom_kills": 0}
            self._say(kind="done", reason=message["reason"], **end)

    def _claim(self, message: Message) -> None:
        try:
            problem = self._slots.claim(message["slots"], message["owner"], message["study"])
        except OSError as error:
            problem = f"slots cannot be claimed: {error.strerror}"
        self._say(kind="claimed", problem=problem)

    def _warm_up(self, message: Message) -> None:
        """Start the warm process, in a folder for files that its imports write."""
        folder = self._base / f"{self._start['tag']}-warm"
        try:
            remove_unheld_folders(self._base)
            make_folder(folder)
            self._warm_folder = folder
            hold_folder(folder)
            self._warm = Warm(message, folder, self._say)
        except OSError as error:
            problem = f"{error.filename or message['python']}: {error.strerror}"
            self._say(kind="warm", problem=problem, import_s=0.0)

    def _sweep(self, message: Message) -> None:
        self._say(kind="swept", left=sweep(message, self._base, self._reap))

    # ------------------------------------------------------------------ ranks

    def _hear_rank(self, rank: RankProcess, *, everything: bool = False) -> None:
        for message in rank.read(everything=everything):
            self._say(**message)

    def _hear_warm(self) -> None:
        message = self._warm.read() if self._warm is not None else None
        if self._job is None or message is None:
            return
        if message["kind"] == "forked":
            self._take_fork(self._job, message)
        else:
            self._job.exited(message["pid"], message["status"])

    def _take_fork(self, job: Job, message: Message) -> None:
        rank = next(rank for rank in job.ranks if rank.number == message["rank"])
        if message["problem"]:
            text = f"no rank can be forked: {message['problem']}"
            self._say(kind="trouble", what="start", rank=rank.number, text=text)
            job.stop = "failed"
        else:
            rank.pid = message["pid"]
            self._say(kind="started", rank=rank.number, pid=rank.pid, warm=True)

    def _end_for_want_of_warm(self, text: str) -> None:
        """End a job whose warm process has died; the controller runs the job again."""
        if text and self._job is not None:
            self._say(kind="trouble", what="warm", rank=None, text=text)
            self._job.stop = "failed"

    def _reap(self) -> None:
        """Collect ended children, and send ``alive`` if it is due."""
        for pid, status in reap():
            if self._warm is not None:
                self._end_for_want_of_warm(self._warm.exited(pid, status))
            if self._job is not None:
                self._job.exited(pid, status)
        self._show_life()

    def _watch(self) -> None:
        self._reap()
        if self._job is None:
            if self._warm is not None:
                self._warm.keep()
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
        """End all ranks, send logs and results, remove the folder, send ``done``."""
        job = self._job
        if job is None:
            return
        job.note_states()
        spared = self._warm.pids if self._warm is not None else ()
        stubborn = end_all(lambda: descendants(spared), self._start["grace_s"], self._reap)
        for rank in job.ranks:
            self._hear_rank(rank, everything=True)
            if not rank.reported:
                self._say(**rank.exit_message(ended=True))
        self._job = None
        if why != "lease":
            self._say(kind="collecting", reason=why)
            self._send_files(job)
        for rank in job.ranks:
            rank.close()
        self._remove_folder()
        self._say(
            kind="done",
            reason=why,
            clean=not stubborn,
            left=[describe(pid) for pid in stubborn],
            num_oom_kills=job.num_oom_kills,
        )

    def _send_files(self, job: Job) -> None:
        try:
            for message in job.collect():
                self._say(**message)
                while self._stdio.is_full and self._stdio.over is None:
                    self._turn()
        except OSError as error:
            self._say(**trouble(error))

    def _remove_folder(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            if Path(self._folder).exists():  # a process that is about to end has written into it
                self._remaining.append(self._folder)
            self._folder = None


def read_first(parse: Callable[[str], Any]) -> Any:  # noqa: ANN401 - the parser's result
    """Read one of the first lines (settings or key); exit if it cannot be parsed."""
    try:
        return parse(read_line().decode())
    except (ValueError, TypeError, RecursionError):
        sys.exit("these are not the settings and the key that amp-ray sends to its agents")


def main() -> None:
    """Run as the agent."""
    with contextlib.suppress(OSError):  # already a session leader
        os.setsid()
    for number in (signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    start = read_first(lambda text: {"pid": 0, **json.loads(text)})
    start["pid"] = os.getpid()  # taken before `isolate`: the number outside the PID namespace
    isolation = isolate() if start["isolate"] else "off"
    set_dumpable(dumpable=False)  # before the key is read
    key = read_first(bytes.fromhex)
    become_subreaper()
    set_name("amp-ray-agent")
    Agent(start, isolation, key).run()
