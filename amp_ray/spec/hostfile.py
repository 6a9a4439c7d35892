"""DeepSpeed's hostfile: ``host slots=4`` lines to and from values; ``host 4`` is read as well."""

import re
from dataclasses import dataclass

from amp_ray.errors import InputError, Mistakes, Where, placed
from amp_ray.spec.cells import content_lines, is_count
from amp_ray.spec.json_text import shown

_LINE = re.compile(r"(?P<host>\S+)\s+(?:slots\s*=\s*(?P<slots>\S+)|(?P<number>[\d.+-]+))")
_HOST = re.compile(r"(?![-.])[^\s#/\\\x00-\x1f\x7f-\x9f]{1,255}")


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSlots:
    """One line of a hostfile: a host and how many devices may be used on it."""

    # Name or address; no spaces, no ``#``, nothing that leads to another folder, and no ``-`` in
    # front, which programs would take for an option
    host: str
    num_slots: int  # at least one

    def __post_init__(self) -> None:
        """Refuse what a hostfile could not say."""
        if _HOST.fullmatch(self.host) is None:
            raise ValueError(_wrong_name(self.host))
        if self.num_slots < 1:
            raise ValueError(f"host {self.host!r} needs at least one slot, found {self.num_slots}")


def parse_hostfile(text: str, *, file: str = "hostfile") -> tuple[HostSlots, ...]:
    r"""Read a hostfile; comments (``#``) and blank lines are skipped, order is kept.

    Metis's README writes ``host 4``, which says the same. A host that stands there twice is
    refused, and so is a file without any.

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
    """Read a line without comment, of the groups ``host`` and ``slots`` or ``number``."""
    match = pattern.fullmatch(content)
    if match is None:
        raise InputError(f"found {shown(content)}{expected}", where=where)
    host, slots = match["host"], match["slots"] or match["number"]
    if not is_count(slots):
        message = f"slots must be a positive integer, found {shown(slots)} for host {shown(host)}"
        raise InputError(message, where=where)
    with placed(where, ValueError):
        return HostSlots(host=host, num_slots=int(slots))


def _wrong_name(host: str) -> str:
    """Say what a host's name has not."""
    return (
        f"found host {shown(host)}; a name has at most 255 characters, no spaces, no '#', '/' or "
        "'\\', no control characters, and no '-' (an option) or '.' (a folder) in front"
    )
