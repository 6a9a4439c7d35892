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
from typing import TYPE_CHECKING, Any

from .isolation import isolate
from .job import Job, base_folder, inherited, make_folder
from .leftovers import sweep
from .network import find_address, free_port
from .processes import (
    become_subreaper,
    child_alarm,
    descendants,
    describe,
    end_all,
    reap,
    set_dumpable,
    set_name,
)
from .rank import trouble
from .slots import Slots
from .stdio import Stdio, read_line
from .store import Store
from .warm import Warm, hold_folder, remove_unheld_folders

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from types import FrameType

    from .rank import RankProcess

    Message = dict[str, Any]

READ_BYTES = 4096
"""Of the alarm pipe: what it says is only that there is something to reap."""

TURN_S = 0.25
"""How long the loop sleeps at most."""


class Agent:
    """Everything that an agent knows."""

    def __init__(self, start: Message, isolation: str, key: bytes) -> None:
        self._start = start
        self._stdio = Stdio(key, lease_s=start["lease_s"], heartbeat_s=start["heartbeat_s"])
        self._store: Store | None = None
        self._job: Job | None = None
        self._warm: Warm | None = None
        self._slots = Slots(start["pid"])
        self._folder: str | None = None
        self._warm_folder: Path | None = None
        self._alarm = child_alarm()[0]
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._told_to_end)
        # Address and port of the client, then ours: what the controller, or its jump host, used.
        self._reached_at = os.environ.get("SSH_CONNECTION", "").split()[2:3]
        self._stdio.say(
            kind="hello",
            pid=os.getpid(),
            python=".".join(str(part) for part in sys.version_info[:3]),
            isolation=isolation,
            hostname=socket.gethostname(),
        )

    def run(self) -> None:
        """Serve until the lease ends."""
        while self._stdio.over is None:
            self._turn(TURN_S)
            for message in self._stdio.take_messages():
                self._handle(message)
            self._watch()
        if self._warm is not None:
            self._warm.leave()
        self._finish("lease")
        self._remove_folder()
        end_all(descendants, self._start["grace_s"], self._reap)
        if self._warm_folder is not None:
            shutil.rmtree(self._warm_folder, ignore_errors=True)

    def _turn(self, timeout_s: float) -> None:
        ranks = self._job.ranks if self._job is not None and not self._stdio.is_full else ()
        pipes = {rank.pipe: rank for rank in ranks if rank.pipe is not None}
        warm = self._warm.descriptors if self._warm is not None else []
        waiting = [1] if self._stdio.has_output else []
        readable, writable, _ = select.select(
            [0, self._alarm, *pipes, *warm], waiting, [], timeout_s
        )
        self._stdio.listen(readable=0 in readable)
        if self._alarm in readable:
            os.read(self._alarm, READ_BYTES)
        if any(descriptor in readable for descriptor in warm):
            self._hear_warm(readable)
        for descriptor in readable:
            if descriptor in pipes:
                self._hear_rank(pipes[descriptor])
                self._stdio.beat()
                self._stdio.flush()
        self._stdio.beat()
        if writable:
            self._stdio.flush()

    def _told_to_end(self, number: int, _frame: FrameType | None) -> None:
        """End in order on a signal."""
        self._stdio.over = f"signal {number}"

    # ------------------------------------------------------------------ messages

    def _handle(self, message: Message) -> None:
        """Do what the controller asks; what no controller asks for is the end, in order."""
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
        except Exception as error:  # noqa: BLE001 - ranks and folders must not stay
            self._stdio.over = f"{message['kind'][:20]!r}: {type(error).__name__}: {error}"
            self._stdio.say(**trouble(OSError(0, self._stdio.over), what="start"))
            self._stdio.flush()

    def _prepare(self, message: Message) -> None:
        """Make the trial's folder; find address, interface and a free port."""
        folder = base_folder(message["base"]) / message["name"]
        try:
            make_folder(folder)
        except OSError as error:
            error.filename = str(folder)
            self._stdio.say(**trouble(error))
            return
        self._folder = str(folder)
        try:
            address, interface = find_address([*message["addresses"], *self._reached_at])
            port = free_port(address) if message["port"] else None
        except OSError as error:
            self._stdio.say(**trouble(error, what="network"))
            self._remove_folder()
            return
        try:
            self._store = self._store or Store(folder.parent)
        except OSError as error:
            self._stdio.say(**trouble(error))
            self._remove_folder()
            return
        self._stdio.say(
            kind="prepared",
            folder=str(folder),
            address=address,
            interface=interface,
            port=port,
            missing=self._store.missing(message["digests"]),
        )

    def _put(self, message: Message) -> None:
        assert self._store is not None, "prepare comes first"
        try:
            self._store.add(message["digest"], message["data"], last=message["last"])
        except OSError as error:
            self._stdio.say(**trouble(error))
            return
        if message["last"]:
            self._stdio.say(kind="stored", digest=message["digest"])

    def _begin(self, message: Message) -> None:
        assert self._folder is not None, "prepare comes first"
        self._job = Job(message, self._folder, self._start["tag"])
        if self._warm is not None and self._warm.is_starting:  # it died after the controller asked
            self._warm_problem("the warm process is being started again")
            return
        try:
            assert self._store is not None, "prepare comes first"
            self._job.write_files(self._store)
            self._stdio.beat()  # on a busy host a program takes seconds to start
            self._stdio.flush()
            for event in self._job.start(self._warm):
                self._stdio.say(**event)
                self._stdio.flush()  # each takes a moment, and there may be hundreds
        except OSError as error:
            self._stdio.say(**trouble(error, what="start"))
            self._job.stop = "failed"

    def _stop(self, message: Message) -> None:
        """End the job, or only its preparation; a job that has just ended by itself has said so."""
        if self._job is not None:
            self._job.stop = self._job.stop or message["reason"]
        elif self._folder is not None:
            self._remove_folder()
            end = {"clean": True, "left": [], "num_oom_kills": 0}
            self._stdio.say(kind="done", reason=message["reason"], **end)

    def _claim(self, message: Message) -> None:
        try:
            problem = self._slots.claim(message["slots"], message["owner"], message["study"])
        except OSError as error:
            problem = f"slots cannot be claimed: {error.strerror}"
        self._stdio.say(kind="claimed", problem=problem)

    def _warm_up(self, message: Message) -> None:
        """Start the warm process, in a folder for what its imports write."""
        folder = base_folder(message["base"]) / f"{self._start['tag']}-warm"
        try:
            remove_unheld_folders(folder.parent)
            make_folder(folder)
            self._warm_folder = folder
            hold_folder(folder)
            self._warm = Warm(message, inherited(), folder, self._stdio.say)
        except OSError as error:
            problem = f"{error.filename or message['python']}: {error.strerror}"
            self._stdio.say(kind="warm", problem=problem, import_s=0.0)

    def _sweep(self, message: Message) -> None:
        self._stdio.say(kind="swept", **sweep(message, self._reap))

    # ------------------------------------------------------------------ ranks

    def _hear_rank(self, rank: RankProcess, *, everything: bool = False) -> None:
        for message in rank.read(everything=everything):
            self._stdio.say(**message)

    def _hear_warm(self, readable: list[int]) -> None:
        assert self._warm is not None
        for message in self._warm.read(readable):
            if self._job is not None and message["kind"] == "forked":
                self._forked(self._job, message)
            elif self._job is not None:
                self._job.exited(message["pid"], message["status"])

    def _forked(self, job: Job, message: Message) -> None:
        rank = next(rank for rank in job.ranks if rank.number == message["rank"])
        if message["problem"]:
            text = f"no rank can be forked: {message['problem']}"
            self._stdio.say(kind="trouble", what="start", rank=rank.number, text=text)
            job.stop = "failed"
        else:
            rank.pid = message["pid"]
            self._stdio.say(kind="started", rank=rank.number, pid=rank.pid, warm=True)

    def _warm_problem(self, text: str) -> None:
        """End a job that needs the warm process; it has to run again."""
        if text and self._job is not None:
            self._stdio.say(kind="trouble", what="warm", rank=None, text=text)
            self._job.stop = "failed"

    def _reap(self) -> None:
        """Collect ended children; keep up the heartbeat meanwhile."""
        for pid, status in reap():
            if self._warm is not None:
                self._warm_problem(self._warm.exited(pid, status))
            if self._job is not None:
                self._job.exited(pid, status)
        self._stdio.beat()
        self._stdio.flush()

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
                self._stdio.say(**rank.exit_message(ended=False))
        why = self._job.why_over()
        if why is not None:
            self._finish(why)

    def _finish(self, why: str) -> None:
        """End all ranks, send what is left of them, remove the folder, say so."""
        job = self._job
        if job is None:
            return
        job.note_states()
        spared = self._warm.pids if self._warm is not None else ()
        left = end_all(lambda: descendants(spared), self._start["grace_s"], self._reap)
        for rank in job.ranks:
            self._hear_rank(rank, everything=True)
            if not rank.reported:
                self._stdio.say(**rank.exit_message(ended=True))
        self._job = None
        if why != "lease":
            self._stdio.say(kind="collecting", reason=why)
            self._send_files(job)
        for rank in job.ranks:
            rank.close()
        self._remove_folder()
        self._stdio.say(
            kind="done",
            reason=why,
            clean=not left,
            left=[describe(pid) for pid in left],
            num_oom_kills=job.num_oom_kills,
        )

    def _send_files(self, job: Job) -> None:
        """Send the collected files as fast as the controller reads."""
        try:
            for message in job.collect():
                self._stdio.say(**message)
                while self._stdio.is_full and self._stdio.over is None:
                    self._turn(TURN_S)
        except OSError as error:
            self._stdio.say(**trouble(error))

    def _remove_folder(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None


def read_first(parse: Callable[[str], Any]) -> Any:  # noqa: ANN401 - whatever it makes of a text
    """Read one of the lines before the first message; whoever sends another is no controller."""
    try:
        return parse(read_line().decode())
    except (ValueError, TypeError, RecursionError):
        sys.exit("these are not the settings and the key that amp-ray sends to its agents")


def main() -> None:
    """Run as the agent."""
    with contextlib.suppress(OSError):  # already the leader of its session
        os.setsid()
    for number in (signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    start = read_first(lambda text: {"pid": 0, **json.loads(text)})
    start["pid"] = os.getpid()  # outside of any namespace of its own
    isolation = isolate() if start["isolate"] else "off"
    set_dumpable(dumpable=False)  # from here on nobody else can read what this process reads
    key = read_first(bytes.fromhex)
    become_subreaper()
    set_name("amp-ray-agent")
    Agent(start, isolation, key).run()
