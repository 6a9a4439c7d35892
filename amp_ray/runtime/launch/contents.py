"""The files of a trial as they travel: each content once, compressed once for all hosts."""

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

from amp_ray.runtime.hosts.agent.wire import CHUNK_BYTES, DIGEST_BYTES, pack


class Contents:
    """What the hosts of a launcher may have to be sent; kept from trial to trial."""

    def __init__(self) -> None:
        """Start with no files."""
        self.names: Mapping[str, str] = {}
        self._data: dict[str, bytes] = {}
        self._packed: dict[str, tuple[str, ...]] = {}

    @property
    def digests(self) -> tuple[str, ...]:
        """Names of all contents, each once."""
        return tuple(self._data)

    def take(self, files: Mapping[str, bytes]) -> None:
        """Take the files of the next trial, and forget what only earlier ones had."""
        digests = {
            name: hashlib.blake2b(data, digest_size=DIGEST_BYTES).hexdigest()
            for name, data in files.items()
        }
        self.names = digests
        self._data = {digests[name]: data for name, data in files.items()}
        self._packed = {key: self._packed[key] for key in self._packed.keys() & self._data.keys()}

    def messages(self, digest: str) -> Iterator[dict[str, Any]]:
        """Yield the messages that bring a content to an agent."""
        if digest not in self._packed:
            data = self._data[digest]
            starts = range(0, max(1, len(data)), CHUNK_BYTES)
            self._packed[digest] = tuple(pack(data[at : at + CHUNK_BYTES]) for at in starts)
        packed = self._packed[digest]
        for number, text in enumerate(packed, 1):
            yield {"kind": "put", "digest": digest, "data": text, "last": number == len(packed)}
