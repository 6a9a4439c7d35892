"""The known_hosts files of OpenSSH, as sshd(8) describes them: which host key is trusted.

And the commands that make a key known, or forget it.
"""

import base64
import binascii
import hashlib
import hmac
import re
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from amp_ray.errors import HostError
from amp_ray.inputs.ssh_settings import SshSettings

AUTHORITY: Final = "@cert-authority"
REVOKED: Final = "@revoked"
_NUM_FIELDS: Final = 3  # names, type of the key, the key
_HASHED: Final = "|1|"
DEFAULT_PORT: Final = 22  # of SSH, RFC 4251


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
        matching = [
            pattern for pattern in self.names if _matches(pattern.removeprefix("!"), name.lower())
        ]
        return bool(matching) and not any(pattern.startswith("!") for pattern in matching)


def read_known_hosts(files: Iterable[str]) -> tuple[KnownKey, ...]:
    """Read all lines of several files; as in OpenSSH, one that cannot be read is passed over."""
    keys: list[KnownKey] = []
    for name in files:
        try:
            data = Path(name).expanduser().read_bytes()
        except FileNotFoundError:
            continue
        except OSError as error:
            raise HostError(f"known_hosts file {name} cannot be read: {error.strerror}") from None
        keys += _keys(name, data.decode("utf-8", "replace"))
    return tuple(keys)


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


# ------------------------------------------------------------------------------------- commands


def known_hosts_name(host: str, port: int) -> str:
    """Return how a known_hosts file names a host.

    Example:
        >>> known_hosts_name("a", 22), known_hosts_name("a", 2222)
        ('a', '[a]:2222')
    """
    return host if port == DEFAULT_PORT else f"[{host}]:{port}"


def add_key_command(host: str, port: int, settings: SshSettings) -> str:
    """Return the command that makes a host's key known.

    Example:
        >>> add_key_command("a", 22, SshSettings(known_hosts="keys"))
        'ssh-keyscan -p 22 a >> keys'
    """
    scan = shlex.join(["ssh-keyscan", "-p", str(port), host])
    return f"{scan} >> {_shell_path(settings.known_hosts)}"


def forget_key_command(host: str, port: int, settings: SshSettings) -> str:
    """Return the command that forgets a host's key.

    Example:
        >>> forget_key_command("a", 2222, SshSettings(known_hosts="~/my keys"))
        "ssh-keygen -R '[a]:2222' -f ~/'my keys'"
    """
    forget = shlex.join(["ssh-keygen", "-R", known_hosts_name(host, port)])
    return f"{forget} -f {_shell_path(settings.known_hosts)}"


def _shell_path(path: str) -> str:
    """Quote a path for a person's shell, which has to see the tilde."""
    return f"~/{shlex.quote(path[2:])}" if path.startswith("~/") else shlex.quote(path)
