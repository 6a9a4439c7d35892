"""The number of processes that a command starts, by the options of `launchers.yaml`."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from typing import Final

from pydantic import BaseModel

from amp_ray.exports.shell import Command
from amp_ray.shipped import Table, Words

_ROLES: Final = ("nodes", "slots", "total", "devices", "hosts")
_BATCH: Final = "sbatch"
_DIRECTIVE: Final = re.compile(r"^#SBATCH[ \t]+([^#\n]*)", re.MULTILINE)
_NUMBER: Final = re.compile(r"(?:[A-Za-z][\w.-]*:){0,2}([0-9]{1,6})")  # also gpu:8 and a100:8
_HOST: Final = re.compile(r"[\w.-]+(?::([0-9]{1,4}))?")
_JOINED: Final = re.compile(r"(-[A-Za-z])([0-9]{1,6})")  # as -N4


class _Launcher(BaseModel, extra="forbid", frozen=True):
    nodes: Words = ()
    slots: Words = ()
    total: Words = ()
    devices: Words = ()
    hosts: Words = ()
    unread: Words = ()
    inherits: bool = False


class _Table(Table):
    """The file `launchers.yaml`, which describes its fields."""

    file = "exports/launchers.yaml"
    launchers: dict[str, _Launcher]
    variables: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """How a command starts a program."""

    processes: int | None = None  # None if it does not say
    stated: str = ""  # how it says so, in its own words
    unread: Mapping[str, str] = field(default_factory=dict)  # what holds more of the run


_Stated = dict[str, tuple[str, int | None]]
"""Words of the file and number (None if the environment decides), by role."""


def is_launcher(word: str) -> bool:
    """Return whether a word, such as ``/usr/bin/srun``, is the name of a launcher."""
    return _name(word) in _Table.shipped().launchers


def _name(word: str) -> str:
    return word.rpartition("/")[2].replace("_", "-")


@cache
def launch_variables() -> frozenset[str]:
    """Return the variables of the environment by which launchers take numbers and files."""
    rows = _Table.shipped().launchers.values()
    kinds = (getattr(row, kind) for row in rows for kind in (*_ROLES, "unread"))
    return frozenset(word for words in kinds for word in words if word[0].isupper())


def batch_variables(text: str) -> dict[str, str]:
    """Return the variables that Slurm sets for the directives of a batch script.

    Example:
        >>> batch_variables("#SBATCH -N 4")
        {'SLURM_NNODES': '4', 'SLURM_JOB_NUM_NODES': '4'}
    """
    stated = _stated(_BATCH, _directives(text), {})
    numbers = {role: number for role, (_, number) in stated.items() if number is not None}
    roles = _Table.shipped().variables.items()
    return {name: str(numbers[role]) for name, role in roles if role in numbers}


def _directives(text: str) -> list[str]:
    return " ".join(_DIRECTIVE.findall(text)).split()


def launch_of(command: Command, start: int, text: str) -> Launch:
    """Return how a command starts its program.

    Of launchers within each other, as ``srun torchrun``, the innermost starts the processes; what
    it leaves out, the others and the directives of the batch script state.

    Args:
        command: The command, with the words around it.
        start: Index of its first word after the program; 0 if no word is the program.
        text: The script, with directives of Slurm.
    """
    words = (*command.around, *command.words[: start or None])
    assignments = (word.partition("=") for word in words)  # env NNODES=4, docker run -e NNODES=4
    variables = dict(command.variables)
    variables |= {
        name: value for name, _, value in assignments if value and name in launch_variables()
    }
    places = [index for index, word in enumerate(words) if is_launcher(word)]
    stated = _stated(_BATCH, _directives(text), {})
    name = _BATCH
    unread: dict[str, str] = {}
    for place, end in pairwise((*places, len(words))):
        name = _name(words[place])
        row, own = _Table.shipped().launchers[name], words[place + 1 : end]
        kept = stated.keys() & ({*_ROLES} if row.inherits else {"nodes", "devices"})
        inner = _stated(name, own, variables)
        kept -= {"total"} if "slots" in inner else set()
        stated = {role: stated[role] for role in kept} | _known(inner, stated)
        unread |= dict(_options(own, row.unread, variables))
    if not places:  # no task of Slurm starts the program
        stated = {role: stated[role] for role in stated.keys() & {"nodes", "devices"}}
    counts = _processes(name, stated)
    rest = _stated("program", command.words[start:], variables)
    counts = counts or _processes("program", rest)
    processes, words_of_it = counts or (None, "")
    return Launch(processes=processes, stated=words_of_it, unread=unread)


def _known(inner: _Stated, outer: _Stated) -> _Stated:
    """Return what is stated, with outer numbers for those that the environment decides."""
    return {
        role: outer[role] if number is None and role in outer else (words, number)
        for role, (words, number) in inner.items()
    }


def _stated(name: str, words: Sequence[str], variables: Mapping[str, str]) -> _Stated:
    row = _Table.shipped().launchers[name]
    stated: _Stated = {}
    for role in _ROLES:
        for option, value in _options(words, getattr(row, role), variables):
            number = _NUMBER.fullmatch(value)
            stated[role] = f"{option} {value}", int(number[1]) if number else None
            hosts = [_HOST.fullmatch(host) for host in value.split(",")]
            if role == "hosts" and all(hosts):
                slots = sum(int(host[1] or 1) for host in hosts if host)
                stated[role] = f"{option} {value}", slots
    return stated


def _options(
    words: Sequence[str], names: Sequence[str], variables: Mapping[str, str]
) -> Iterator[tuple[str, str]]:
    """Yield options and variables of some names, as the file writes them, with their values."""
    yield from ((name, variables[name]) for name in names if name in variables)
    for word, following in pairwise((*words, "")):
        joined = _JOINED.fullmatch(word)
        option, equals, value = joined.expand(r"\1 = \2").split() if joined else word.partition("=")
        if option.lstrip("+").replace("_", "-") in names:
            yield option, value if equals else following


def _processes(name: str, stated: _Stated) -> tuple[int, str] | None:
    """Return the number of processes and how it is stated; None if it is not."""
    if _Table.shipped().launchers[name].nodes:
        stated = {"nodes": ("", 1), **stated}
    for roles in (("total",), ("nodes", "slots"), ("hosts",), ("nodes", "devices")):
        counts = [stated.get(role, ("", None)) for role in roles]
        numbers = [number for _, number in counts if number]
        if len(numbers) == len(roles):
            world = numbers[0] * numbers[-1] if len(numbers) > 1 else numbers[0]
            words = " x ".join(words for words, _ in counts if words)
            return world, f"{words} = {world} processes"
    return None
