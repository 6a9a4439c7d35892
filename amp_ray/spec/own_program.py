"""A user's own training program: its command, and how its iteration times are found."""

from dataclasses import dataclass
from typing import Final, Literal

Per = Literal["rank", "node"]
BuiltIn = Literal["helper", "megatron", "deepspeed"]

SECONDS_PER_UNIT: Final = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
"""Units in which a log may give a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """Where a log says how long an iteration took."""

    pattern: str  # regular expression with one group, which holds a number
    unit: str = "s"  # of that number, a key of ``SECONDS_PER_UNIT``


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnProgram:
    """What is run instead of the package's own training program."""

    argv: tuple[str, ...]  # program and arguments, with placeholders such as ``{tp}``
    per: Per = "rank"  # whether it is started once per rank or once per node
    # A built-in way to find iteration times, or a pattern over the log
    metric: BuiltIn | Pattern = "helper"
    files: tuple[str, ...] = ()  # files that are copied into the trial's folder on every host
    cwd: str | None = None  # where it starts; None for the trial's folder
    # Patterns of further files of the trial's folder that are brought back
    collect: tuple[str, ...] = ()
