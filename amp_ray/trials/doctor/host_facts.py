"""What a probe reports of a host."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from amp_ray.clusters.device import Device, is_cpu
from amp_ray.trials.doctor.findings import Finding, Level, shell_command

Facts = Mapping[str, Any]
"""One part of a probe's answer; one that could not be found has only a ``problem``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSpec:
    """What an experiment expects of one host."""

    name: str
    device: Device
    num_slots: int
    group: int = 0  # of the hosts that run a trial together
    login: tuple[str, ...] = ()  # words before a command that runs there; none for this machine

    @property
    def has_gpu(self) -> bool:
        """Whether its devices are GPUs."""
        return not is_cpu(self.device.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """How a host's clock compares with this machine's."""

    offset_s: float  # above zero where the host is ahead
    uncertainty_s: float  # half of the time that the question took


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """What a probe says of its host; see ``runtime/agent/probe.py``."""

    version: str
    executable: str
    is_old: bool = False  # whether it is too old to say more
    parts: Mapping[str, Facts] = field(default_factory=dict)  # the rest, by name of the part

    def part(self, name: str) -> Facts:
        """Return one part, or what kept it from being found."""
        return self.parts.get(name, {"problem": "the probe did not say"})

    @property
    def needs_sudo(self) -> bool:
        """Whether changing the system takes more rights than the user has."""
        return bool(self.part("identity").get("uid", 0) != 0)

    @property
    def machine(self) -> tuple[str, str] | None:
        """Kernel and network: hosts that share both are one machine. None where unknown."""
        identity = self.part("identity")
        known = "boot_id" in identity and "network" in identity
        return (identity["boot_id"], identity["network"]) if known else None


@dataclass(frozen=True, slots=True, kw_only=True)
class HostReport:
    """Everything that is known of one host."""

    spec: HostSpec
    failure: Finding | None = None  # why it could not be looked at; None if it could
    facts: HostFacts | None = None  # None if it could not
    clock: Clock | None = None  # None where unknown
    start_s: float | None = None  # of the login's shell and Python; None where unknown
    unreached: tuple[tuple[HostSpec, str], ...] = ()  # peers that it cannot connect to, and why
    num_peers: int = 0

    def part(self, name: str) -> Facts:
        """Return one part of the facts of a host that has answered."""
        assert self.facts is not None
        return self.facts.part(name)

    def command(self, argv: Sequence[str], *, as_root: bool = False) -> str:
        """Return the line that runs a command there; ``as_root`` where the user is not root."""
        as_root = as_root and self.facts is not None and self.facts.needs_sudo
        return shell_command(self.spec.login, argv, as_root=as_root)

    def finding(self, level: Level, check: str, found: str, **more: Any) -> Finding:  # noqa: ANN401
        """Return what was found on this host; more are the other fields of a finding."""
        return Finding(level=level, host=self.spec.name, check=check, found=found, **more)

    def error(self, check: str, found: str, **more: Any) -> Finding:  # noqa: ANN401
        """Return what keeps trials from running."""
        return self.finding("error", check, found, **more)

    def warning(self, check: str, found: str, **more: Any) -> Finding:  # noqa: ANN401
        """Return what may disturb trials."""
        return self.finding("warning", check, found, **more)

    def ok(self, check: str, found: str) -> Finding:
        """Return that all is well."""
        return self.finding("ok", check, found)


def read_facts(message: Mapping[str, Any]) -> HostFacts:
    """Read a probe's answer to ``facts``."""
    head = ("kind", "version", "executable")
    return HostFacts(
        version=message["version"],
        executable=message["executable"] or "",
        is_old=message["kind"] == "old",
        parts={name: part for name, part in message.items() if name not in head},
    )
