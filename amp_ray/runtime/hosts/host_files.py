"""Files that are sent to the hosts of a trial, and files that are collected from them."""

import fnmatch
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from amp_ray.redaction import redact_data
from amp_ray.runtime.hosts.agent.job import MAX_FILES, RANK_LOG
from amp_ray.runtime.hosts.agent.wire import is_plain_name, new_hash, pieces, printable, unpack
from amp_ray.runtime.whole_file import write_whole

COLLECT_BYTES: Final = 16 * 1024 * 1024  # per file; longer ones keep their end, logs both ends
COLLECT_BYTES_IN_ALL: Final = 512 * 1024 * 1024  # per host, for logs and for other files each
_SPARE_BYTES: Final = 64 * 1024
_FLAGS: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class Contents:
    """Contents of the files that hosts may request, by digest; cached between trials."""

    def __init__(self) -> None:
        self.digests: Mapping[str, str] = {}  # by file name
        self._data: dict[str, bytes] = {}
        self._pieces: dict[str, tuple[Mapping[str, Any], ...]] = {}

    def take(self, files: Mapping[str, bytes]) -> None:
        """Take the files of the next trial; drop contents that it does not need."""
        digests = {}
        for name, data in files.items():
            state = new_hash()
            state.update(data)
            digests[name] = state.hexdigest()
        self.digests = digests
        self._data = {digests[name]: data for name, data in files.items()}
        self._pieces = {key: self._pieces[key] for key in self._pieces.keys() & self._data.keys()}

    def messages(self, digest: str) -> Iterator[dict[str, Any]]:
        """Return the ``put`` messages that send a content to an agent."""
        if digest not in self._pieces:
            self._pieces[digest] = tuple(pieces(self._data[digest]))
        return ({"kind": "put", "digest": digest, **piece} for piece in self._pieces[digest])


class HostFiles(Mapping[str, bytes]):
    """Collected files of one host as a mapping from name to content, read from disk on access."""

    def __init__(self, folder: Path, patterns: Sequence[str], ranks: Sequence[int]) -> None:
        """Make the folder; no other user may be able to write to its parent.

        Only names that match one of ``patterns`` are accepted, and only the logs of ``ranks``.
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
        return self._read(name)

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
            self._open = name, os.open(name, _FLAGS, 0o600, dir_fd=self._folder)
            self._sizes[name] = 0
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
        """Close all descriptors."""
        for descriptor in [self._folder] if self._open is None else [self._folder, self._open[1]]:
            os.close(descriptor)

    def redact(self, secrets: Collection[str]) -> None:
        """Replace secrets in all files; call it after the last piece."""
        for name in self._sizes:
            data = self._read(name)
            kept = redact_data(data, secrets, is_log=name in self._logs)
            if kept != data:
                write_whole(self._path / name, [kept], mode=0o600)

    def _read(self, name: str) -> bytes:
        """Read a file; refuse to follow a symbolic link."""
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(self._path / name, flags), "rb") as file:
            return file.read()

    def _check(self, name: str) -> None:
        """Refuse a name that was not requested, or that could be outside the folder."""
        asked = any(fnmatch.fnmatchcase(name, pattern) for pattern in self._patterns)
        foreign = RANK_LOG.fullmatch(name) and name not in self._logs
        if not is_plain_name(name) or not asked or foreign:
            text = f"a file {printable(name, 100)!r}, where {', '.join(self._patterns)} is wanted"
            raise ValueError(text)
        if name in self._sizes or len(self._sizes) >= self._max_files:
            raise ValueError(f"{name!r} twice, or more than {self._max_files} files")
