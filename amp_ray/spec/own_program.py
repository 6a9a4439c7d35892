"""A user's own training program: its command, and how its iteration times are found."""

from dataclasses import dataclass
from typing import Final, Literal

Per = Literal["rank", "node"]
BuiltIn = Literal["helper", "megatron", "deepspeed"]

SECONDS_PER_UNIT: Final = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
"""Units in which a log may give a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """Where a log says how long an iteration took.

    Args:
        pattern: Regular expression with one group, which holds a number.
        unit: Of that number, a key of ``SECONDS_PER_UNIT``.
    """

    pattern: str
    unit: str = "s"


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnProgram:
    """What is run instead of the package's own training program.

    Args:
        argv: Program and arguments, with placeholders such as ``{tp}``.
        per: Whether it is started once per rank or once per node.
        metric: A built-in way to find iteration times, or a pattern over the log.
        files: Files that are copied into the trial's folder on every host.
        cwd: Where it starts; None for the trial's folder.
        collect: Patterns of further files of the trial's folder that are brought back.
    """

    argv: tuple[str, ...]
    per: Per = "rank"
    metric: BuiltIn | Pattern = "helper"
    files: tuple[str, ...] = ()
    cwd: str | None = None
    collect: tuple[str, ...] = ()
