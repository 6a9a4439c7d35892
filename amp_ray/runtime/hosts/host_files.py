"""The files that came back from one host, in a folder of their own that nothing else can reach."""

import fnmatch
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from amp_ray.runtime.hosts.agent.job import MAX_FILES, RANK_LOG
from amp_ray.runtime.hosts.agent.wire import is_plain_name, printable, unpack

COLLECT_BYTES: Final = 16 * 1024 * 1024
"""Of one file that is brought back; of a longer one, the end, and of a log both ends."""

COLLECT_BYTES_IN_ALL: Final = 512 * 1024 * 1024
"""Of all logs of one host together, and of all other files: with many, each may be shorter."""

_SPARE_BYTES: Final = 64 * 1024
_FLAGS: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class HostFiles(Mapping[str, bytes]):
    """Content by name; read from the disk whenever it is asked for."""

    def __init__(self, folder: Path, patterns: Sequence[str], ranks: Sequence[int]) -> None:
        """Make the folder.

        Args:
            folder: Below one that nobody else can write to; not there yet.
            patterns: Of the names that the host was asked for.
            ranks: Of the host: it may send no other rank's log.
        """
        folder.mkdir(mode=0o700, parents=True)
        self._path = folder
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        self._folder = os.open(folder, flags)
        self._patterns = tuple(patterns)
        self._logs = {f"rank-{rank}.log" for rank in ranks}
        self._max_files = MAX_FILES + len(ranks)
        self._room = 2 * COLLECT_BYTES_IN_ALL + _SPARE_BYTES * len(ranks)
        self._sizes: dict[str, int] = {}
        self._open: tuple[str, int] | None = None

    def __getitem__(self, name: str) -> bytes:
        if name not in self:
            raise KeyError(name)
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(self._path / name, flags), "rb") as file:
            return file.read()

    def __contains__(self, name: object) -> bool:
        return name in self._sizes and (self._open is None or self._open[0] != name)

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._sizes if name in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def add(self, message: Mapping[str, Any]) -> None:
        """Write the next piece of a file."""
        name = message["name"]
        if self._open is None:
            self._check(name)
            self._sizes[name] = 0
            self._open = name, os.open(name, _FLAGS, 0o600, dir_fd=self._folder)
        if self._open[0] != name:
            text = f"a piece of {printable(name, 100)!r} in the middle of {self._open[0]!r}"
            raise ValueError(text)
        data = unpack(message["data"])
        self._sizes[name] += len(data)
        self._room -= len(data)
        if self._sizes[name] > COLLECT_BYTES + _SPARE_BYTES or self._room < 0:
            text = f"more than {COLLECT_BYTES} bytes of {name!r}, or too much of all files"
            raise ValueError(text)
        while data:
            data = data[os.write(self._open[1], data) :]
        if message["last"]:
            os.close(self._open[1])
            self._open = None

    def close(self) -> None:
        """Close the folder, after the last piece."""
        for descriptor in [self._folder] if self._open is None else [self._folder, self._open[1]]:
            os.close(descriptor)

    def _check(self, name: str) -> None:
        """Refuse a name that was not asked for, or that might mean a place outside the folder."""
        asked = any(fnmatch.fnmatchcase(name, pattern) for pattern in self._patterns)
        foreign = RANK_LOG.fullmatch(name) and name not in self._logs
        if not is_plain_name(name) or not asked or foreign:
            text = f"a file {printable(name, 100)!r}, where {', '.join(self._patterns)} is wanted"
            raise ValueError(text)
        if name in self._sizes or len(self._sizes) >= self._max_files:
            raise ValueError(f"{name!r} twice, or more than {self._max_files} files")
