"""Who is reached how: ``user@host:port``, and what the settings add."""

import re
from dataclasses import dataclass
from typing import Final

from amp_ray.errors import InputError

_NAME: Final = r"[A-Za-z0-9_][A-Za-z0-9._-]*"
_TARGET: Final = re.compile(
    rf"(?:(?P<user>{_NAME})@)?(?:(?P<name>{_NAME})|\[(?P<ipv6>[0-9A-Fa-f:.]+)\])(?::(?P<port>\d+))?"
)
_MAX_PORT: Final = 65535


@dataclass(frozen=True, slots=True, kw_only=True)
class SshTarget:
    """Where a connection goes.

    Args:
        host: Name or address.
        user: None where nobody said.
        port: None where nobody said.
    """

    host: str
    user: str | None = None
    port: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SshSettings:
    """How hosts are reached; whatever stands in a target goes first, then this, then the config.

    Args:
        known_hosts: File of the keys that are trusted; no other is.
        identities: Private key files to try, in order.
        config: OpenSSH client configuration to follow; None for none.
        user: For targets that name none.
        use_agent: Whether keys of a running ssh-agent are tried too.
        connect_timeout_s: For each step of setting up a connection.
        python: Interpreter on the hosts that runs the agent; an absolute path is safest.
    """

    known_hosts: str = "~/.ssh/known_hosts"
    identities: tuple[str, ...] = ()
    config: str | None = "~/.ssh/config"
    user: str | None = None
    use_agent: bool = False
    connect_timeout_s: float = 10.0
    python: str = "python3"


def parse_target(text: str) -> SshTarget:
    """Read ``[user@]host[:port]``; an IPv6 address stands in brackets.

    Raises:
        InputError: If it has another form; a host never starts with ``-``.

    Example:
        >>> parse_target("ada@[fe80::1]:2222")
        SshTarget(host='fe80::1', user='ada', port=2222)
    """
    match = _TARGET.fullmatch(text)
    port = int(match["port"]) if match is not None and match["port"] else None
    if match is None or (port is not None and not 0 < port <= _MAX_PORT):
        message = (
            f"found host {text!r}: expected [user@]host[:port] of letters, digits, '.', '_' and "
            f"'-', with a port up to {_MAX_PORT}; an IPv6 address stands in brackets, as [fe80::1]"
        )
        raise InputError(message)
    return SshTarget(host=match["name"] or match["ipv6"], user=match["user"], port=port)


def known_hosts_name(host: str, port: int) -> str:
    """Return how a known_hosts file names a host.

    Example:
        >>> known_hosts_name("a", 22), known_hosts_name("a", 2222)
        ('a', '[a]:2222')
    """
    return host if port == DEFAULT_PORT else f"[{host}]:{port}"


DEFAULT_PORT: Final = 22
"""Of SSH, RFC 4251."""
