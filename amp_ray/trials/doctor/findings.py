"""Reports of hosts, and findings: results of checks, with commands that fix the problems."""

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any, Final, Literal

from amp_ray.clusters.device import Device, is_cpu
from amp_ray.errors import printable

Level = Literal["ok", "warning", "error"]  # an error prevents trials or makes them meaningless
LEVELS: Final[tuple[Level, ...]] = ("ok", "warning", "error")  # from harmless to serious

Facts = Mapping[str, Any]
"""One part of a probe's answer; it has only a ``problem`` if the probe failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The result of one check on one host."""

    level: Level
    host: str
    check: str  # name of the check, in one or two words
    found: str
    expected: str = ""  # expected state; empty if all is well
    command: str | None = None  # shell command to run on this machine that fixes the problem
    advice: str = ""  # instructions, or a caution before running the command

    def __post_init__(self) -> None:
        for name in ("found", "expected", "advice"):
            object.__setattr__(self, name, printable(getattr(self, name)))
        if self.command is not None:
            object.__setattr__(self, "command", printable(self.command))

    def to_json(self) -> dict[str, Any]:
        """Return the finding as in the output of ``doctor --json``."""
        return asdict(self)

    def __str__(self) -> str:
        parts = [f"{self.host}: {self.check}: {self.found}"]
        parts += [f"expected {self.expected}"] if self.expected else []
        parts += [self.advice] if self.advice else []
        parts += [f"run: {self.command}"] if self.command is not None else []
        return "; ".join(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSpec:
    """The devices that an experiment expects on one host."""

    name: str
    devices: tuple[Device, ...]  # of its slots
    group: int = 0  # index of the group of hosts that run a trial together
    login: tuple[str, ...] = ()  # prefix of commands, such as ssh; empty for this machine

    @property
    def num_slots(self) -> int:
        """Number of its slots."""
        return len(self.devices)

    @property
    def has_gpu(self) -> bool:
        """Whether its devices are GPUs."""
        return not is_cpu(self.devices[0].name)

    @property
    def boards(self) -> str:
        """Name its devices, as ``4 x A100-80 and 2 x T4``."""
        runs = groupby(device.name for device in self.devices)
        return " and ".join(f"{len([*run])} x {name}" for name, run in runs)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostReport:
    """The probe's answer about one host, or the reason why there is none."""

    spec: HostSpec
    failure: Finding | None = None
    answer: Facts | None = None  # see ``runtime/hosts/agent/probe.py``
    unreached: tuple[tuple[HostSpec, str], ...] = ()  # unreachable peers, with reasons
    num_peers: int = 0

    @property
    def is_old(self) -> bool:
        """Whether the host's Python is too old to answer more than its version."""
        return self.answer is not None and self.answer["kind"] == "old"

    def part(self, name: str) -> Facts:
        """Return one part of the answer, or a ``problem`` if it is missing."""
        assert self.answer is not None
        facts: Facts = self.answer.get(name, {"problem": "the probe did not say"})
        return facts

    def command(self, argv: Sequence[str], *, as_root: bool = False) -> str:
        """Return the shell line that runs a command on this host, with sudo if needed."""
        is_root = self.part("identity").get("uid", 0) == 0
        return shell_command(self.spec.login, argv, as_root=as_root and not is_root)

    def finding(self, level: Level, check: str, found: str, **more: Any) -> Finding:  # noqa: ANN401
        """Return a finding about this host; ``more`` holds further fields of `Finding`."""
        return Finding(level=level, host=self.spec.name, check=check, found=found, **more)

    def error(self, check: str, found: str, **more: Any) -> Finding:  # noqa: ANN401
        """Return a finding of a problem that prevents trials."""
        return self.finding("error", check, found, **more)

    def warning(self, check: str, found: str, **more: Any) -> Finding:  # noqa: ANN401
        """Return a finding of a problem that may disturb trials."""
        return self.finding("warning", check, found, **more)

    def ok(self, check: str, found: str) -> Finding:
        """Return a finding of a check that passed."""
        return self.finding("ok", check, found)


def only(findings: Iterable[Finding], level: Level) -> list[Finding]:
    """Return the findings with a level."""
    return [finding for finding in findings if finding.level == level]


def shell_command(shell: Sequence[str], argv: Sequence[str], *, as_root: bool = False) -> str:
    """Return the line that runs a command on a host; ``shell`` is its prefix, such as ssh.

    Example:
        >>> print(shell_command(("ssh", "a"), ["rm", "--", "a file"]))
        ssh a 'rm -- '"'"'a file'"'"''
        >>> shell_command((), ["kill", "7"], as_root=True)
        'sudo kill 7'
    """
    words = ["sudo", *argv] if as_root else argv
    line = shlex.join(words)
    return shlex.join([*shell, line]) if shell else line
