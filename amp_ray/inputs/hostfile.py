"""Read and write DeepSpeed's hostfile, with lines ``host slots=4``; ``host 4`` is also read."""

import re
from dataclasses import dataclass
from typing import Final

from amp_ray.errors import InputError, Mistakes, Where, placed, shown
from amp_ray.inputs.strict_text import content_lines, is_count

_LINE: Final = re.compile(r"(?P<host>\S+)\s+(?:slots\s*=\s*(?P<slots>\S+)|(?P<number>[\d.+-]+))")

# Every character is harmless in a shell, a folder name, a URL and a program's options
_NAME: Final = r"[A-Za-z0-9_][A-Za-z0-9._-]{0,254}"
_TARGET: Final = re.compile(
    rf"(?:(?P<user>{_NAME})@)?(?:(?P<name>{_NAME})|\[(?P<ipv6>[0-9A-Fa-f:.]+)\])"
    r"(?::(?P<port>[0-9]{1,5}))?"
)
_MAX_PORT: Final = 65535


@dataclass(frozen=True, slots=True, kw_only=True)
class SshTarget:
    """User, host and port of a connection, from the name of a host."""

    host: str
    user: str | None = None  # None leaves it to the SSH configuration
    port: int | None = None  # None leaves it to the SSH configuration


def parse_target(text: str) -> SshTarget:
    """Read ``[user@]host[:port]``; an IPv6 address is in brackets.

    All names of hosts, wherever they come from, are checked by this function.

    Raises:
        InputError: If the name has another form.

    Example:
        >>> parse_target("ada@[fe80::1]:2222")
        SshTarget(host='fe80::1', user='ada', port=2222)
    """
    match = _TARGET.fullmatch(text)
    port = int(match["port"]) if match is not None and match["port"] else None
    if match is None or (port is not None and not 0 < port <= _MAX_PORT):
        raise InputError(
            f"found host {shown(text)}: expected [user@]host[:port] of letters, digits, '.', '_' "
            f"and '-', with a port up to {_MAX_PORT}; an IPv6 address stands in brackets, as "
            "[fe80::1]"
        )
    return SshTarget(host=match["name"] or match["ipv6"], user=match["user"], port=port)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSlots:
    """One line of a hostfile: a host, and the number of its devices that may be used."""

    host: str  # in a form that `parse_target` reads
    num_slots: int  # at least one

    def __post_init__(self) -> None:
        parse_target(self.host)
        if self.num_slots < 1:
            raise ValueError(f"host {self.host!r} needs at least one slot, found {self.num_slots}")


def parse_hostfile(text: str, *, file: str = "hostfile") -> tuple[HostSlots, ...]:
    r"""Read a hostfile in order, skipping comments (``#``) and blank lines.

    Metis's README writes ``host 4``, with the same meaning. A repeated host is refused, and so is a
    file without hosts.

    Example:
        >>> parse_hostfile("a slots=4  # fast\n\nb slots=2\n")[1]
        HostSlots(host='b', num_slots=2)
    """
    places: dict[str, Where] = {}
    hosts = []
    mistakes = Mistakes()
    for where, content in content_lines(text, file):
        with mistakes.collect():
            entry = parse_line(content, where)
            first = places.setdefault(entry.host, where)
            if first is not where:
                message = f"host {entry.host!r} stands here and on line {first.line}: name it once"
                raise InputError(message, where=where)
            hosts.append(entry)
    mistakes.check()
    if not hosts:
        message = "no host found: expected lines like 'worker-1 slots=4'"
        raise InputError(message, where=Where(file=file))
    return tuple(hosts)


def format_hostfile(hosts: tuple[HostSlots, ...]) -> str:
    """Write hosts in DeepSpeed's format; ``parse_hostfile`` reads them back."""
    return "".join(f"{entry.host} slots={entry.num_slots}\n" for entry in hosts)


def parse_line(
    content: str,
    where: Where,
    pattern: re.Pattern[str] = _LINE,
    expected: str = ": expected 'host slots=N' or 'host N'",
) -> HostSlots:
    """Read a line without comment; ``pattern`` has groups ``host`` and ``slots`` or ``number``."""
    match = pattern.fullmatch(content)
    if match is None:
        raise InputError(f"found {shown(content)}{expected}", where=where)
    host, slots = match["host"], match["slots"] or match["number"]
    if not is_count(slots):
        message = f"slots must be a positive integer, found {shown(slots)} for host {shown(host)}"
        raise InputError(message, where=where)
    with placed(where, ValueError):
        return HostSlots(host=host, num_slots=int(slots))
