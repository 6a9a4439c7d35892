"""DeepSpeed's hostfile: ``host slots=4`` lines to and from values (text only, opens nothing)."""

import re
from dataclasses import dataclass

from amp_ray.errors import InputError, Where

_LINE = re.compile(r"(?P<host>\S+)\s+slots\s*=\s*(?P<slots>\S+)")
_METIS_LINE = re.compile(r"\S+\s+\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSlots:
    """One line of a hostfile: a host and how many devices may be used on it."""

    host: str
    num_slots: int


def parse_hostfile(text: str, *, file: str = "hostfile") -> tuple[HostSlots, ...]:
    r"""Read a hostfile; comments (``#``) and blank lines are skipped, order is kept.

    Raises:
        InputError: With file and line, for a line of another form, a host that
            stands there twice, a slot count that is not a positive integer, or no host at all.

    Example:
        >>> parse_hostfile("a slots=4  # fast\\n\\nb slots=2\\n")[1]
        HostSlots(host='b', num_slots=2)
    """
    hosts: dict[str, HostSlots] = {}
    lines: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        content = line.partition("#")[0].strip()
        if not content:
            continue
        entry = _parse_line(content, Where(file=file, line=number))
        if entry.host in hosts:
            message = (
                f"host {entry.host!r} stands here and on line {lines[entry.host]}: name it once"
            )
            raise InputError(message, where=Where(file=file, line=number))
        hosts[entry.host], lines[entry.host] = entry, number
    if not hosts:
        message = "no host found: expected lines like 'worker-1 slots=4'"
        raise InputError(message, where=Where(file=file))
    return tuple(hosts.values())


def format_hostfile(hosts: tuple[HostSlots, ...]) -> str:
    """Write hosts in DeepSpeed's format; ``parse_hostfile`` reads them back."""
    return "".join(f"{entry.host} slots={entry.num_slots}\n" for entry in hosts)


def _parse_line(content: str, where: Where) -> HostSlots:
    """Read ``host slots=N`` without comment."""
    match = _LINE.fullmatch(content)
    if match is None:
        hint = (
            f"this is Metis's form; write {' slots='.join(content.split())!r}"
            if _METIS_LINE.fullmatch(content)
            else "expected 'host slots=N'"
        )
        message = f"found {content!r}: {hint}"
        raise InputError(message, where=where)
    slots = match["slots"]
    if not slots.isdecimal() or int(slots) < 1:
        message = f"slots must be a positive integer, found {slots!r} for host {match['host']!r}"
        raise InputError(message, where=where)
    return HostSlots(host=match["host"], num_slots=int(slots))
