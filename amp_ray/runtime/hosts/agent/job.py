"""One trial on this host: its files, its ranks, their output and logs."""

from __future__ import annotations

import errno
import fnmatch
import itertools
import json
import os
import re
import stat
import subprocess
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .processes import TAG_VARIABLE, die_first, die_with_parent, num_oom_kills, state_of
from .resources import DEVICE_VARIABLE, FOLDER_VARIABLE, inherited, visible_devices
from .wire import CHUNK_BYTES, is_plain_name, pieces, printable, unpack

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from io import FileIO

    from .warm import Warm

    Message = dict[str, Any]

RANK_LOG = re.compile(r"rank-\d+\.log")  # a rank's log; a program's file of such a name is not sent
MAX_FILES = 4096  # maximum number of files collected per trial, not counting the logs of ranks

EVENT_START = b'{"event"'  # prefix of a line that may be a JSON event for the controller
TAG_KEY = "tag"  # key of this agent's tag in an event; a line without it is text
EVENT_BYTES = 16 * 1024  # limit per event; a longer line counts as text
EVENTS_BYTES = 8 * 1024 * 1024  # limit for a host's events; later ones count as text
TAIL_LINES = 40
TAIL_CHARACTERS = 500  # limit per last line in a message
TAIL_BYTES = 64 * 1024  # size of the end of the output from which the last lines are taken
READ_BYTES = 64 * 1024

HEAD_BYTES = 4 * 1024 * 1024  # size of the kept beginning of a log
HALF_BYTES = 4 * 1024 * 1024  # size of each of two files for the end; a full one replaces the older
KEPT_BYTES = 4 * 1024 * 1024  # limit for lines with ``words`` between beginning and end
LINE_BYTES = 64 * 1024  # limit per such line


class Job:
    """The ranks of one trial on this host."""

    def __init__(self, message: Mapping[str, Any], folder: str, tag: str) -> None:
        self.folder = folder
        self.ranks: list[RankProcess] = []
        self.stop: str | None = None
        self._message = message
        self._environment = {TAG_VARIABLE: tag, FOLDER_VARIABLE: folder}
        self._event_tag = tag if message["events"] else None
        # In a host with several kinds of boards CUDA would put the fastest first
        order = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
        self._devices = {**order, DEVICE_VARIABLE: visible_devices(message["slots"])}
        self._deadline = time.monotonic() + message["deadline_s"]
        self._failed_at: float | None = None
        self._oom_kills_before = num_oom_kills()

    @property
    def num_oom_kills(self) -> int:
        """Number of out-of-memory kills by this host's kernel since the job began."""
        return num_oom_kills() - self._oom_kills_before

    def write_files(self, store: Store) -> None:
        """Write the trial's files into its folder."""
        for name, digest in self._message["files"].items():
            store.write(digest, Path(self.folder, name))

    def start(self, warm: Warm | None) -> Iterator[Message]:
        """Start every rank; the warm process forks it if it can."""
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
                words = rank.number, entry["argv"], environment, cwd, write_end
                if warm is not None and warm.suits(entry["argv"]) and warm.fork(*words):
                    continue
                rank.pid = _start(entry["argv"], environment, cwd, write_end)
                yield {"kind": "started", "rank": rank.number, "pid": rank.pid, "warm": False}
            finally:
                os.close(write_end)

    def exited(self, pid: int, status: int) -> None:
        """Note the end of a child process, if it is a rank."""
        for rank in self.ranks:
            if rank.pid == pid and rank.status is None:
                rank.status = status
                if status != 0 and self._failed_at is None:
                    self._failed_at = time.monotonic()

    def note_states(self) -> None:
        """Note the process state of every running rank."""
        for rank in self.ranks:
            if rank.status is None:
                rank.state = state_of(rank.pid)

    def why_over(self) -> str | None:
        """Return the reason why the job is over; None while it runs."""
        now = time.monotonic()
        if self.stop is not None:
            return self.stop
        if all(rank.status is not None for rank in self.ranks):
            return "exited"
        if self._failed_at is not None:
            # Wait for the peers' errors: the first rank to fail may not be the cause
            return "failed" if now > self._failed_at + self._message["settle_s"] else None
        return "deadline" if now > self._deadline else None

    def collect(self) -> Iterator[Message]:
        """Yield the requested files in pieces; cut long ones."""
        room_in_all = self._message["collect_bytes_in_all"]
        limit = min(self._message["collect_bytes"], room_in_all // max(1, len(self.ranks)))
        for rank in self.ranks:
            name = f"rank-{rank.number}.log"
            if self._is_wanted(name):
                yield from _file_messages(name, rank.log.content(limit))
        with os.scandir(self.folder) as entries:
            names = (entry.name for entry in entries if self._is_wanted(entry.name))
            written = (name for name in names if not RANK_LOG.fullmatch(name))
            chosen = sorted(itertools.islice(written, MAX_FILES))
        for name in chosen:
            limit = min(self._message["collect_bytes"], room_in_all)
            content = end_of(Path(self.folder, name), limit)
            if content is not None:
                room_in_all -= len(content)
                yield from _file_messages(name, content)

    def _is_wanted(self, name: str) -> bool:
        shapes = self._message["collect"]
        return is_plain_name(name) and any(fnmatch.fnmatchcase(name, shape) for shape in shapes)


def _file_messages(name: str, content: bytes) -> Iterator[Message]:
    return ({"kind": "file", "name": name, **piece} for piece in pieces(content))


def end_of(path: Path, limit: int) -> bytes | None:
    """Read the last ``limit`` bytes of a file; None for a link, a pipe or the like."""
    try:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(str(path), flags)
    except OSError:
        if path.is_symlink():
            return None
        raise
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            return None
        file.seek(max(0, status.st_size - limit))
        return file.read(limit)


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
    process.returncode = 0  # the agent reaps all children itself
    return process.pid


class RankProcess:
    """One rank's process: its output, log, last lines and exit status."""

    def __init__(
        self,
        number: int,
        pipe: int,
        folder: str,
        *,
        tag: str | None,
        room: int = EVENTS_BYTES,
        words: Sequence[str] = (),
    ) -> None:
        """Read from a non-blocking pipe; the log keeps all lines with ``words``."""
        self.number, self.pid = number, 0
        self._tag = tag
        self.pipe: int | None = pipe
        self.status: int | None = None
        self.state = ""
        self.reported = False
        self._last = bytearray()
        self._rest = b""
        self._room = room
        self._is_log_whole = True
        self.log = Log(folder, words)

    def read(self, *, everything: bool) -> Iterator[Message]:
        """Read new output; yield the rank's events, and ``trouble`` if its log fails."""
        while self.pipe is not None:
            try:
                data = os.read(self.pipe, READ_BYTES)
            except BlockingIOError:
                return
            if not data:
                self._close_pipe()
            yield from self._store(data)
            yield from self._hear(data)
            if not everything:
                return

    def close(self) -> None:
        """Close log and pipe."""
        self.log.close()
        self._close_pipe()

    def exit_message(self, *, ended: bool) -> Message:
        """Return the ``exit`` message; ``ended`` says whether the agent ended the rank."""
        status = self.status
        code = os.WEXITSTATUS(status) if status is not None and os.WIFEXITED(status) else None
        number = os.WTERMSIG(status) if status is not None and os.WIFSIGNALED(status) else None
        lines = (bytes(self._last) + self._rest).split(b"\n")
        tail = [_text(line) for line in (lines if lines[-1] else lines[:-1])[-TAIL_LINES:]]
        end = {"code": code, "signal": number, "ended": ended}
        return {"kind": "exit", "rank": self.number, **end, "state": self.state, "tail": tail}

    def _hear(self, data: bytes) -> Iterator[Message]:
        """Yield the events in new output; keep the end of the other text."""
        whole = self._rest + data
        end = whole.rfind(b"\n") + 1
        if not data or (not end and len(whole) > READ_BYTES):
            end = len(whole)
        lines, self._rest = whole[:end], whole[end:]
        if self._tag is not None and EVENT_START in lines:
            texts = []
            for line in lines.splitlines(keepends=True):
                event = self._event(line)
                if event is None:
                    texts.append(line)
                else:
                    yield {"kind": "said", "rank": self.number, "data": event}
            lines = b"".join(texts)
        self._last += lines
        if len(self._last) > 2 * TAIL_BYTES:
            del self._last[:-TAIL_BYTES]

    def _event(self, line: bytes) -> Message | None:
        """Parse an event with our tag; return None for any other line."""
        if not line.startswith(EVENT_START) or len(line) > min(EVENT_BYTES, self._room):
            return None
        try:
            event: Message = json.loads(line.decode())
        except (ValueError, RecursionError):
            return None
        if event.pop(TAG_KEY, None) != self._tag:
            return None
        self._room -= len(line)
        return event

    def _store(self, data: bytes) -> Iterator[Message]:
        """Write to the log; after the first error, yield ``trouble`` and write no more."""
        try:
            if self._is_log_whole:
                self.log.write(data)
        except OSError as error:
            self._is_log_whole = False
            error.filename = f"rank-{self.number}.log"
            yield trouble(error, rank=self.number)

    def _close_pipe(self) -> None:
        if self.pipe is not None:
            os.close(self.pipe)
            self.pipe = None


def _text(line: bytes) -> str:
    """Decode a line, with replacements for invalid bytes, and cut it."""
    text = line[: 4 * TAIL_CHARACTERS].decode("utf-8", "backslashreplace").rstrip("\r")
    return printable(text, TAIL_CHARACTERS)


def trouble(error: OSError, *, rank: int | None = None, what: str = "folder") -> Message:
    """Return the ``trouble`` message about a system error; ``what`` is its kind."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    place = f"{error.filename}: " if error.filename else ""
    text = f"{place}{error.strerror or error}"
    return {"kind": "trouble", "what": "disk-full" if full else what, "rank": rank, "text": text}


# --------------------------------------------------------------------------- files without a name


def unnamed_file(folder: str) -> FileIO:
    """Open a file without a name: no other process can open it; it disappears with this process."""
    return tempfile.TemporaryFile(dir=folder, buffering=0)


def write_all(file: FileIO, data: bytes) -> None:
    """Write all data at the file's position; continue after partial writes."""
    while data:
        data = data[file.write(data) :]


class Log:
    """A rank's output: its beginning, its end and, from the middle, the lines with certain words.

    Lines with these words may report the times of steps.
    """

    def __init__(self, folder: str, words: Sequence[str] = ()) -> None:
        self._folder = folder
        self._words = [word.encode() for word in words]
        self._files = [unnamed_file(folder)]  # first: beginning and kept lines; then two: the end
        self._num_head = self._num_kept = self._num_newest = 0
        self.num_dropped = 0  # bytes dropped from the middle
        self._line = b""  # start of the first line of the end, which was in a dropped file

    def write(self, data: bytes) -> None:
        """Append output."""
        if len(self._files) == 1:
            room = HEAD_BYTES - self._num_head
            end = len(data) if len(data) <= room else data.rfind(b"\n", 0, room) + 1
            write_all(self._files[0], data[:end])
            self._num_head += end
            if len(data) <= room:
                return
            self._files.append(unnamed_file(self._folder))
            data = data[end:]
        while data:
            if self._num_newest == HALF_BYTES:
                self._rotate()
            piece = data[: HALF_BYTES - self._num_newest]
            write_all(self._files[-1], piece)
            self._num_newest += len(piece)
            data = data[len(piece) :]

    def content(self, limit: int) -> bytes:
        """Return the log in order; leave out more of its middle if it exceeds ``limit`` bytes."""
        begin = _read(self._files[0])
        first, kept = begin[: self._num_head], begin[self._num_head :]
        last = self._line + b"".join(map(_read, self._files[1:]))
        num_missing = self.num_dropped
        if len(begin) + len(last) > limit:
            room = limit // 4
            end = first.rfind(b"\n", 0, room) + 1
            start = last.find(b"\n", max(0, len(last) - room)) + 1
            kept = self._select(first[end:]) + kept + self._select(last[:start])
            kept = kept[: limit // 2]
            num_missing += len(first) - end + start
            first, last = first[:end], last[start:]
        return first + self._note(num_missing) + kept + last

    def close(self) -> None:
        """Close the files, which frees their disk space."""
        for file in self._files:
            file.close()

    def _note(self, num_missing: int) -> bytes:
        words = " or ".join(repr(word.decode()) for word in self._words)
        but = f", but for the lines with {words} that follow" if words else ""
        text = f"[... {num_missing} bytes of this log were not kept{but} ...]\n"
        return text.encode() if num_missing else b""

    def _rotate(self) -> None:
        """Begin a new file for the end; keep only the lines with ``words`` of the oldest one."""
        if len(self._files) > 2:  # noqa: PLR2004 - beginning, older, newer
            if self._words:
                half = self._line + _read(self._files[1])
                end = half.rfind(b"\n") + 1
                self._line = half[end:][-LINE_BYTES:]
                kept = self._select(half[:end])[: KEPT_BYTES - self._num_kept]
                write_all(self._files[0], kept)
                self._num_kept += len(kept)
            self.num_dropped += HALF_BYTES
            self._files.pop(1).close()
        self._files.append(unnamed_file(self._folder))
        self._num_newest = 0

    def _select(self, data: bytes) -> bytes:
        lines = data.split(b"\n") if any(word in data for word in self._words) else []
        return b"".join(
            line[:LINE_BYTES] + b"\n" for line in lines if any(word in line for word in self._words)
        )


def _read(file: FileIO) -> bytes:
    """Read a whole file; its position is at the end afterwards, for the next write."""
    return os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0)


class Store:
    """Stores contents of files by digest between trials; ranks cannot change them."""

    def __init__(self, folder: str) -> None:
        self._file = unnamed_file(folder)
        self._places: dict[str, tuple[int, int]] = {}
        self._start = self._num_bytes = 0  # position and size of the content that is arriving

    def add(self, digest: str, text: str, *, last: bool) -> None:
        """Store the next piece of a content; the pieces of two contents are never mixed."""
        data = unpack(text)
        self._num_bytes += len(data)
        start, num_bytes = self._start, self._num_bytes
        try:
            write_all(self._file, data)
        finally:
            end = self._file.tell()
            if last:
                self._start, self._num_bytes = end, 0
        if last and end - start != num_bytes:  # an earlier piece could not be written
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if last:
            self._places[digest] = start, end

    def write(self, digest: str, path: Path) -> None:
        """Copy a content to a new file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        offset, end = self._places[digest]
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        with os.fdopen(os.open(str(path), flags, 0o600), "wb") as file:
            while offset < end:
                data = os.pread(self._file.fileno(), min(CHUNK_BYTES, end - offset), offset)
                file.write(data)
                offset += len(data)
