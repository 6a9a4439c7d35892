"""What a check of a host found, and what mends it."""

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

from amp_ray.errors import printable

Level = Literal["ok", "warning", "error"]  # an error keeps trials from running or meaning a thing
LEVELS: Final[tuple[Level, ...]] = ("ok", "warning", "error")  # from harmless to serious


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was looked at on one host."""

    level: Level
    host: str
    check: str  # what was looked at, in one or two words
    found: str
    expected: str = ""  # what should be; empty where all is well
    command: str | None = None  # mends it, ready for a shell on this machine; None if none can
    advice: str = ""  # what to do, or to know before the command is run

    def __post_init__(self) -> None:
        for name in ("found", "expected", "advice"):
            object.__setattr__(self, name, printable(getattr(self, name)))
        if self.command is not None:
            object.__setattr__(self, "command", printable(self.command))

    def to_json(self) -> dict[str, Any]:
        """Return the finding as it stands in ``doctor --json``."""
        return asdict(self)

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
    """Return the line that runs a command on a host, which the words of ``shell`` reach.

    Example:
        >>> print(shell_command(("ssh", "a"), ["rm", "--", "a file"]))
        ssh a 'rm -- '"'"'a file'"'"''
        >>> shell_command((), ["kill", "7"], as_root=True)
        'sudo kill 7'
    """
    words = ["sudo", *argv] if as_root else argv
    line = shlex.join(words)
    return shlex.join([*shell, line]) if shell else line
