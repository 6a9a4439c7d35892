"""Read and write DeepSpeed's hostfile, with lines ``host slots=4``; other programs' are also read.

Those are lists of Slurm (``node[01-04]``), Intel MPI and mpirun (``a:8,b:8``), Open MPI
(``max_slots``), Metis (``host 4``), and files that name a host once for each of its slots.
"""

import ipaddress
import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from amp_ray.errors import InputError, Mistakes, Where, placed, shown
from amp_ray.inputs.strict_text import content_lines, is_count

_EXPECTED: Final = "expected 'host', 'host slots=N', 'host N' or 'host:N', or node[01-04] for host"
_OPTION: Final = re.compile(r"(?P<key>slots|max[_-]slots)=(?P<count>\S*)")
_LISTED: Final = re.compile(r"(?:[^,\[\]]|\[[^\[\]]*\])+")  # an item of a list with commas
_RANGES: Final = re.compile(r"\[([0-9][0-9,-]*)\]")  # of node numbers, as Slurm writes them
_RANGE: Final = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")
_MOST_HOSTS: Final = 100_000
_MOST_SLOTS_AFTER_COLON: Final = 512  # larger numbers after a colon may be meant as ports
_THIS_MACHINE: Final = ("localhost", "localhost.localdomain", "ip6-localhost", "127.0.0.1", "::1")

# Every character is harmless in a shell, a folder name, a URL and a program's options
_NAME: Final = r"[A-Za-z0-9_][A-Za-z0-9._-]{0,254}"
_TARGET: Final = re.compile(
    rf"(?:(?P<user>{_NAME})@)?(?:(?P<name>{_NAME})|\[(?P<ipv6>[0-9A-Fa-f.]*:[0-9A-Fa-f:.]*)\])"
    r"(?::(?P<port>[0-9]{1,5}))?"
)
_MAX_PORT: Final = 65535


@dataclass(frozen=True, slots=True, kw_only=True)
class SshTarget:
    """User, host and port of a connection, from the name of a host."""

    host: str
    user: str | None = None  # None leaves it to the SSH configuration
    port: int | None = None  # None leaves it to the SSH configuration

    @property
    def machine(self) -> tuple[str, int | None]:
        """A value that is equal for two names of one machine, as far as names tell."""
        host = self.host.lower().rstrip(".")
        if host in _THIS_MACHINE:
            return "localhost", self.port
        try:
            return str(ipaddress.ip_address(host)), self.port
        except ValueError:
            return host, self.port

    def __str__(self) -> str:
        """Render as `parse_target` reads it."""
        user = "" if self.user is None else f"{self.user}@"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{user}{host}" + ("" if self.port is None else f":{self.port}")


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
    """A host of a hostfile, and the number of its devices that may be used."""

    host: str  # in a form that `parse_target` reads
    num_slots: int | None  # at least one; None if the file does not say

    def __post_init__(self) -> None:
        parse_target(self.host)
        if self.num_slots is not None and self.num_slots < 1:
            raise ValueError(f"host {self.host!r} needs at least one slot, found {self.num_slots}")


def parse_hostfile(text: str, *, file: str = "hostfile") -> tuple[HostSlots, ...]:
    r"""Read a hostfile in order, skipping comments (``#``) and blank lines.

    A repeated host without a number of slots has as many slots as lines. Other repeated hosts are
    refused, and so are two names of one machine, and a file without hosts.

    Example:
        >>> parse_hostfile("a slots=4  # fast\n\nb[08-09]:2\n")[2]
        HostSlots(host='b09', num_slots=2)
        >>> parse_hostfile("a\na\nb\n")
        (HostSlots(host='a', num_slots=2), HostSlots(host='b', num_slots=1))
    """
    first: dict[tuple[str, int | None], tuple[HostSlots, Where]] = {}
    repeats: dict[str, int] = {}
    mistakes = Mistakes()
    for where, content in content_lines(text, file):
        with mistakes.collect(), placed(where, ValueError):
            for entry in host_entries(content):
                machine = parse_target(entry.host).machine
                before, line = first.setdefault(machine, (entry, where))
                repeats[entry.host] = repeats.get(entry.host, 0) + 1
                if before is not entry:
                    _check_repeated(before, entry, line)
                if len(first) > _MOST_HOSTS:
                    raise ValueError(f"found more than {_MOST_HOSTS:,} hosts")
    mistakes.check()
    if not first:
        message = "no host found: expected lines like 'worker-1 slots=4'"
        raise InputError(message, where=Where(file=file))
    hosts = [entry for entry, _ in first.values()]
    if max(repeats.values()) == 1:
        return tuple(hosts)
    return tuple(
        entry
        if entry.num_slots is not None
        else HostSlots(host=entry.host, num_slots=repeats[entry.host])
        for entry in hosts
    )


def _check_repeated(before: HostSlots, entry: HostSlots, where: Where) -> None:
    """Refuse a second entry of a machine, unless both stand for one slot."""
    if before.host != entry.host:
        raise ValueError(
            f"host {entry.host!r} is the same machine as {before.host!r} on line {where.line}: "
            "name it once"
        )
    if before.num_slots is not None or entry.num_slots is not None:
        raise ValueError(
            f"host {entry.host!r} stands here and on line {where.line}: name it once, with all its "
            "slots"
        )


def host_entries(content: str) -> Iterator[HostSlots]:
    """Yield the hosts of a line without comment."""
    names, *words = re.sub(r"(?<!\s)\s*=\s*", "=", content).split()
    slots = _slots(words, names, content)
    if names != ",".join(_LISTED.findall(names)):
        raise ValueError(f"found {shown(content)}: {_EXPECTED}")
    for listed in _LISTED.findall(names):
        for name in _expanded(listed):
            target = parse_target(name)
            if slots is not None or target.port is None:
                yield HostSlots(host=name, num_slots=slots)
            elif target.port > _MOST_SLOTS_AFTER_COLON:
                raise ValueError(
                    f"found {shown(name)}: a number of slots up to {_MOST_SLOTS_AFTER_COLON} may "
                    f"follow a colon; a port is read with slots beside it, as '{name} slots=8'"
                )
            else:
                host = str(SshTarget(host=target.host, user=target.user))
                yield HostSlots(host=host, num_slots=target.port)


def _slots(words: list[str], names: str, content: str) -> int | None:
    """Return the slots that the words after a host state; None without any."""
    stated: dict[str, int] = {}
    for word in words:
        match = _OPTION.fullmatch(word)
        key, count = ("slots", word) if match is None else (match["key"], match["count"])
        key = key.replace("-", "_")
        if (match is None and not re.fullmatch(r"[\d.+-]+", word)) or key in stated:
            raise ValueError(f"found {shown(content)}: {_EXPECTED}")
        if not is_count(count):
            raise ValueError(
                f"{key} must be a positive integer, found {shown(count)} for host {shown(names)}"
            )
        stated[key] = int(count)
    slots, most = stated.get("slots"), stated.get("max_slots")
    if most is not None and (slots is None or slots > most):
        raise ValueError(
            f"found {shown(content)}: max_slots needs slots beside it, at most as many"
        )
    return slots


def _expanded(name: str) -> Iterator[str]:
    """Yield the names that Slurm's notation stands for.

    Example:
        >>> list(_expanded("r[1-2]n[08-09,11]"))
        ['r1n08', 'r1n09', 'r1n11', 'r2n08', 'r2n09', 'r2n11']
    """
    texts = _RANGES.split(name)  # fixed text and ranges in turn
    numbers = [_numbers(text) for text in texts[1::2]]
    if math.prod(map(len, numbers)) > _MOST_HOSTS:
        raise ValueError(f"found {shown(name)}: more than {_MOST_HOSTS:,} hosts")
    shape = "{}".join(part.replace("{", "{{").replace("}", "}}") for part in texts[::2])
    yield from itertools.starmap(shape.format, itertools.product(*numbers))


def _numbers(ranges: str) -> list[str]:
    numbers: list[str] = []
    for part in ranges.split(","):
        match = _RANGE.fullmatch(part)
        low, high = (match[1], match[2] or match[1]) if match else ("1", "0")
        if int(high) < int(low):
            raise ValueError(f"found [{shown(ranges)[1:-1]}]: expected numbers such as 01-04,7")
        if len(numbers) + int(high) - int(low) >= _MOST_HOSTS:
            raise ValueError(f"found [{shown(ranges)[1:-1]}]: more than {_MOST_HOSTS:,} hosts")
        numbers += [f"{number:0{len(low)}}" for number in range(int(low), int(high) + 1)]
    return numbers


def format_hostfile(hosts: tuple[HostSlots, ...]) -> str:
    """Write hosts in DeepSpeed's format; ``parse_hostfile`` reads them back."""
    return "".join(
        entry.host + ("" if entry.num_slots is None else f" slots={entry.num_slots}") + "\n"
        for entry in hosts
    )
