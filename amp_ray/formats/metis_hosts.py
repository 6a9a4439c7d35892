"""Metis's hostfile: ``IP slots=8`` as its code reads it, ``IP 8`` as its README writes it."""

import re
from dataclasses import dataclass

from amp_ray.errors import InputError, Mistakes, Where, placed
from amp_ray.spec.cells import content_lines, is_count
from amp_ray.spec.hostfile import HostSlots
from amp_ray.spec.json_text import shown

_LINE = re.compile(r"(?P<host>[^\s#-]\S*)\s+(?:slots\s*=\s*)?(?P<slots>\S+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class MetisHost:
    """One line of the file.

    Args:
        address: What the cluster file describes; several lines may name the same.
    """

    address: str
    num_slots: int
    line: int


def parse_metis_hostfile(text: str, *, file: str = "hostfile") -> tuple[MetisHost, ...]:
    r"""Read the lines of a hostfile of either form; comments (``#``) and blank lines are skipped.

    An address may stand there several times: for Metis it names a kind of node.

    Raises:
        InputError: With file and line, for a line of another form, a slot count that is no
            positive integer, or no host at all.

    Example:
        >>> [host.num_slots for host in parse_metis_hostfile("0.0.0.1 slots=16\n\n0.0.0.2  8\n")]
        [16, 8]
    """
    hosts = []
    mistakes = Mistakes()
    for where, content in content_lines(text, file):
        with mistakes.collect():
            hosts.append(_parse_line(content, where))
    mistakes.check()
    if not hosts:
        message = "no host found: expected lines like '0.0.0.1 slots=8' or '0.0.0.1 8'"
        raise InputError(message, where=Where(file=file))
    return tuple(hosts)


def node_names(hosts: tuple[MetisHost, ...]) -> tuple[str, ...]:
    r"""Give every node a name: its address, with a number where that stands there again.

    Example:
        >>> node_names(parse_metis_hostfile("a 4\na 4\nb 4"))
        ('a', 'a-2', 'b')
    """
    names: dict[str, None] = {}
    numbers: dict[str, int] = {}
    for host in hosts:
        name, number = host.address, numbers.get(host.address, 1)
        while name in names:
            number += 1
            name = f"{host.address}-{number}"
        numbers[host.address] = number
        names[name] = None
    return tuple(names)


def _parse_line(content: str, where: Where) -> MetisHost:
    """Read one line without its comment."""
    match = _LINE.fullmatch(content)
    if match is None:
        message = f"found {shown(content)}; expected 'IP slots=N' or 'IP N'"
        raise InputError(message, where=where)
    if not is_count(match["slots"]):
        message = (
            f"slots must be a positive integer, found {shown(match['slots'])} for host "
            f"{shown(match['host'])}"
        )
        raise InputError(message, where=where)
    with placed(where, ValueError):
        entry = HostSlots(host=match["host"], num_slots=int(match["slots"]))
    return MetisHost(address=entry.host, num_slots=entry.num_slots, line=where.line or 0)
