"""The known_hosts files of OpenSSH, as sshd(8) describes them: which host key is trusted."""

import base64
import binascii
import hashlib
import hmac
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from amp_ray.errors import HostError

AUTHORITY: Final = "@cert-authority"
REVOKED: Final = "@revoked"

_NUM_FIELDS: Final = 3
"""Names, type of the key, the key."""

_HASHED: Final = "|1|"


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownKey:
    """One line of a known_hosts file."""

    file: str
    line: int  # counted from 1
    marker: str  # ``@cert-authority``, ``@revoked`` or nothing
    names: tuple[str, ...]
    kind: str  # of the key, such as ``ssh-ed25519``
    data: bytes  # the public key in the form of RFC 4253

    @property
    def where(self) -> str:
        """File and line."""
        return f"{self.file}:{self.line}"

    @property
    def fingerprint(self) -> str:
        """What ``ssh-keygen -l`` shows."""
        digest = base64.b64encode(hashlib.sha256(self.data).digest()).decode()
        return f"SHA256:{digest.rstrip('=')}"

    def is_of(self, name: str) -> bool:
        """Tell whether the line speaks of a host, whose name is as ``known_hosts_name`` gives it.

        Example:
            >>> key = KnownKey(
            ...     file="f", line=1, marker="", names=("*.a", "!b.a"), kind="k", data=b""
            ... )
            >>> key.is_of("c.a"), key.is_of("b.a"), key.is_of("C.A")
            (True, False, True)
        """
        found = False
        for pattern in self.names:
            if _matches(pattern.removeprefix("!"), name.lower()):
                if pattern.startswith("!"):
                    return False
                found = True
        return found


def read_known_hosts(files: Iterable[str]) -> tuple[KnownKey, ...]:
    """Read all lines of several files; as in OpenSSH, one that cannot be read is passed over."""
    found: list[KnownKey] = []
    for name in files:
        try:
            data = Path(name).expanduser().read_bytes()
        except FileNotFoundError:
            continue
        except OSError as error:
            raise HostError(f"known_hosts file {name} cannot be read: {error.strerror}") from None
        found += _keys(name, data.decode("utf-8", "replace"))
    return tuple(found)


def _keys(file: str, text: str) -> Iterator[KnownKey]:
    for number, line in enumerate(text.split("\n"), start=1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        marker = words.pop(0) if words[0].startswith("@") else ""
        if marker not in {"", AUTHORITY, REVOKED} or len(words) < _NUM_FIELDS:
            continue
        try:
            data = base64.b64decode(words[2], validate=True)
        except (binascii.Error, ValueError):
            continue
        names = tuple(words[0].split(","))
        yield KnownKey(file=file, line=number, marker=marker, names=names, kind=words[1], data=data)


def _matches(pattern: str, name: str) -> bool:
    """Compare a host's name in lower case with a pattern, or with a name that is hashed."""
    if pattern.startswith(_HASHED):
        salt, _, digest = pattern.removeprefix(_HASHED).partition("|")
        try:
            expected = hmac.digest(base64.b64decode(salt), name.encode(), "sha1")
            return hmac.compare_digest(expected, base64.b64decode(digest))
        except (binascii.Error, ValueError):
            return False
    shape = re.escape(pattern.lower()).replace(r"\*", ".*").replace(r"\?", ".")
    return re.fullmatch(shape, name) is not None
