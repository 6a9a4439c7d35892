"""The ranks of one trial on this host."""

from __future__ import annotations

import fnmatch
import itertools
import os
import re
import shutil
import stat
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .processes import TAG_VARIABLE, die_first, die_with_parent, num_oom_kills, state_of
from .rank import EVENTS_BYTES, RankProcess
from .wire import CHUNK_BYTES, is_plain_name, pack

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from .store import Store
    from .warm import Warm

    Message = dict[str, Any]

FOLDER_VARIABLE = "AMP_RAY_FOLDER"  # tells a rank where the trial's files are

INHERITED = (
    *("PATH", "HOME", "USER", "LOGNAME", "LANG", "LC_ALL", "TZ", "TMPDIR", "XDG_RUNTIME_DIR"),
    *("LD_LIBRARY_PATH", "CUDA_HOME", "CUDA_DEVICE_ORDER"),
)
"""What a rank takes from the login environment; proxies and PYTHON* stay out."""


PROBE_BYTES = 4096  # an empty file costs no block: only bytes show that a disk is full
RANK_LOG = re.compile(r"rank-\d+\.log")  # of ranks only; what a program writes so stays here
MAX_FILES = 4096  # that come back of one trial, the logs of ranks not counted
DEVICE_VARIABLE = "CUDA_VISIBLE_DEVICES"


def visible_devices(slots: list[int]) -> str:
    """Name the devices in some slots; where the login sees a few only, slots count among those."""
    names = [name for name in os.environ.get(DEVICE_VARIABLE, "").split(",") if name]
    return ",".join(names[slot] if slot < len(names) else str(slot) for slot in slots)


def inherited() -> dict[str, str]:
    """Take the variables that every rank gets."""
    return {name: os.environ[name] for name in INHERITED if name in os.environ}


def base_folder(name: str | None) -> Path:
    """Return the folder of all trials' folders: the one asked for, or for temporary files."""
    return Path(name or os.environ.get("TMPDIR") or "/tmp").expanduser()  # noqa: S108


def make_folder(folder: Path) -> None:
    """Make a trial's folder and make sure that it can be written to."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700)
    probe = folder / ".probe"
    try:
        with probe.open("xb") as file:
            file.write(bytes(PROBE_BYTES))
        probe.unlink()
    except OSError:
        shutil.rmtree(folder, ignore_errors=True)
        raise


class Job:
    """One trial's part on this host."""

    def __init__(self, message: Mapping[str, Any], folder: str, tag: str) -> None:
        self.folder = folder
        self.ranks: list[RankProcess] = []
        self.stop: str | None = None
        self._message = message
        self._environment = {TAG_VARIABLE: tag, FOLDER_VARIABLE: folder}
        self._event_tag = tag if message["events"] else None
        self._devices = {DEVICE_VARIABLE: visible_devices(message["slots"])}
        self._deadline = time.monotonic() + message["deadline_s"]
        self._failed_at: float | None = None
        self._oom_kills_before = num_oom_kills()

    @property
    def num_oom_kills(self) -> int:
        """How often this host's kernel ended a process for want of memory, since the start."""
        return num_oom_kills() - self._oom_kills_before

    def write_files(self, store: Store) -> None:
        """Put the trial's files into its folder."""
        for name, digest in self._message["files"].items():
            store.write(digest, Path(self.folder, name))

    def start(self, warm: Warm | None) -> Iterator[Message]:
        """Start every rank, forked by the warm process where it suits."""
        cwd = self._message["cwd"] or self.folder
        for entry in self._message["ranks"]:
            environment = {
                **inherited(),
                **self._devices,
                **entry["environment"],
                **self._environment,
            }
            read_end, write_end = os.pipe2(os.O_CLOEXEC)
            os.set_blocking(read_end, False)
            try:
                rank = RankProcess(
                    entry["rank"],
                    read_end,
                    self.folder,
                    tag=self._event_tag,
                    room=EVENTS_BYTES // len(self._message["ranks"]),
                    words=self._message["words"],
                )
                self.ranks.append(rank)
                if warm is not None and warm.suits(entry["argv"]):
                    warm.fork(rank.number, entry["argv"], environment, cwd, write_end)
                    continue
                rank.pid = _start(entry["argv"], environment, cwd, write_end)
                yield {"kind": "started", "rank": rank.number, "pid": rank.pid, "warm": False}
            finally:
                os.close(write_end)

    def exited(self, pid: int, status: int) -> None:
        """Note the end of a child, which may be a rank."""
        for rank in self.ranks:
            if rank.pid == pid and rank.status is None:
                rank.status = status
                if status != 0 and self._failed_at is None:
                    self._failed_at = time.monotonic()

    def note_states(self) -> None:
        """Note what every rank does that is still running."""
        for rank in self.ranks:
            if rank.status is None:
                rank.state = state_of(rank.pid)

    def why_over(self) -> str | None:
        """Say why the job is over, if it is."""
        now = time.monotonic()
        if self.stop is not None:
            return self.stop
        if all(rank.status is not None for rank in self.ranks):
            return "exited"
        if self._failed_at is not None:
            # A moment for the peers, so that more than the first victim tells its story.
            return "failed" if now > self._failed_at + self._message["settle_s"] else None
        return "deadline" if now > self._deadline else None

    def collect(self) -> Iterator[Message]:
        """Yield the files that the controller wants, in pieces; of a long one, not all."""
        limit = self._message["collect_bytes"]
        logs = {f"rank-{rank.number}.log": rank.log for rank in self.ranks}
        room = self._message["collect_bytes_in_all"] // max(1, len(logs))
        for name, log in logs.items():
            if self._is_wanted(name):
                content = log.content(min(limit, room))
                yield from _pieces(name, content, num_cut=log.num_dropped)
        with os.scandir(self.folder) as entries:
            names = (entry.name for entry in entries if self._is_wanted(entry.name))
            others = (name for name in names if not RANK_LOG.fullmatch(name))
            found = sorted(itertools.islice(others, MAX_FILES))
        room = self._message["collect_bytes_in_all"]
        for name in found:
            for message in self._send_file(name, min(limit, room)):
                room -= message.pop("num_bytes")
                yield message

    def _is_wanted(self, name: str) -> bool:
        shapes = self._message["collect"]
        return is_plain_name(name) and any(fnmatch.fnmatchcase(name, shape) for shape in shapes)

    def _send_file(self, name: str, limit: int) -> Iterator[Message]:
        """Yield the end of a file, unless it is a link, a pipe or the like."""
        path = Path(self.folder, name)
        try:
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            descriptor = os.open(str(path), flags)
        except OSError:
            if path.is_symlink():
                return
            raise
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if stat.S_ISREG(status.st_mode):
                num_cut = max(0, status.st_size - limit)
                file.seek(num_cut)
                yield from _pieces(name, file.read(limit), num_cut=num_cut)


def _pieces(name: str, content: bytes, *, num_cut: int) -> Iterator[Message]:
    """Yield a file in pieces, of which there is at least one."""
    for start in range(0, max(1, len(content)), CHUNK_BYTES):
        yield {
            "kind": "file",
            "name": name,
            "data": pack(content[start : start + CHUNK_BYTES]),
            "num_cut": num_cut,
            "num_bytes": len(content[start : start + CHUNK_BYTES]),
            "last": start + CHUNK_BYTES >= len(content),
        }


def _start(argv: list[str], environment: dict[str, str], cwd: str, output: int) -> int:
    process = subprocess.Popen(
        argv,
        env=environment,
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        preexec_fn=die_with_parent(os.getpid()),  # noqa: PLW1509 - the agent has no threads
    )
    die_first(process.pid)
    process.returncode = 0  # reaped by us, with every other child
    return process.pid
