"""What a check of a host found, and what mends it."""

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from amp_ray.errors import printable

Level = Literal["ok", "warning", "error"]
"""An error keeps trials from running or from meaning anything; a warning is worth reading."""

LEVELS: Final[tuple[Level, ...]] = ("ok", "warning", "error")
"""From harmless to serious."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was looked at on one host."""

    level: Level
    host: str
    check: str  # what was looked at, in one or two words
    found: str
    expected: str = ""  # what should be; empty where all is well
    # Mends it, ready to paste into a shell on this machine; None where no command can
    command: str | None = None
    advice: str = ""  # what to do, or to know before the command is run

    def __post_init__(self) -> None:
        """Make what a host said fit for a terminal."""
        for name in ("found", "expected", "advice"):
            object.__setattr__(self, name, printable(getattr(self, name)))
        if self.command is not None:
            object.__setattr__(self, "command", printable(self.command))

    def to_json(self) -> dict[str, Any]:
        """Return the finding as it stands in ``doctor --json``."""
        return {
            "level": self.level,
            "host": self.host,
            "check": self.check,
            "found": self.found,
            "expected": self.expected,
            "command": self.command,
            "advice": self.advice,
        }

    def __str__(self) -> str:
        parts = [f"{self.host}: {self.check}: {self.found}"]
        parts += [f"expected {self.expected}"] if self.expected else []
        parts += [self.advice] if self.advice else []
        parts += [f"run: {self.command}"] if self.command is not None else []
        return "; ".join(parts)


def only(findings: Iterable[Finding], level: Level) -> list[Finding]:
    """Return the findings of one level."""
    return [finding for finding in findings if finding.level == level]


def shell_command(shell: Sequence[str], argv: Sequence[str], *, as_root: bool = False) -> str:
    """Return the line that runs a command on a host.

    Args:
        shell: What reaches the host, such as ``("ssh", "-p", "22", "ada@host")``; empty for
            this machine.
        argv: The command there.
        as_root: Whether it needs ``sudo``.

    Example:
        >>> print(shell_command(("ssh", "a"), ["rm", "--", "a file"]))
        ssh a 'rm -- '"'"'a file'"'"''
        >>> shell_command((), ["kill", "7"], as_root=True)
        'sudo kill 7'
    """
    words = ["sudo", *argv] if as_root else argv
    line = shlex.join(words)
    return shlex.join([*shell, line]) if shell else line
