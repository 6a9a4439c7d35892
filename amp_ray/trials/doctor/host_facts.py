"""What a probe reports of a host."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from amp_ray.spec.device import Device, is_cpu
from amp_ray.trials.doctor.findings import Finding

Facts = Mapping[str, Any]
"""One part of a probe's answer; one that could not be found has only a ``problem``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSpec:
    """What an experiment expects of one host.

    Args:
        group: Of the hosts that run a trial together.
        login: Words in front of a command that shall run there; none for this machine.
    """

    name: str
    device: Device
    num_slots: int
    group: int = 0
    login: tuple[str, ...] = ()

    @property
    def has_gpu(self) -> bool:
        """Whether its devices are GPUs."""
        return not is_cpu(self.device.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """How a host's clock compares with this machine's.

    Args:
        offset_s: Above zero where the host is ahead.
        uncertainty_s: Half of the time that the question took.
    """

    offset_s: float
    uncertainty_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """What a probe says of its host; see ``runtime/agent/probe.py``.

    Args:
        is_old: Whether it is too old to say more.
        parts: The rest, by name of the part.
    """

    version: str
    executable: str
    is_old: bool = False
    parts: Mapping[str, Facts] = field(default_factory=dict)

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
    """Everything that is known of one host.

    Args:
        failure: Why it could not be looked at; None if it could.
        facts: None if it could not.
        clock: None where unknown.
        start_s: What the login's shell and Python took to start; None where unknown.
        unreached: Peers that it cannot connect to, with the reason.
    """

    spec: HostSpec
    failure: Finding | None = None
    facts: HostFacts | None = None
    clock: Clock | None = None
    start_s: float | None = None
    unreached: tuple[tuple[HostSpec, str], ...] = ()
    num_peers: int = 0


def read_facts(message: Mapping[str, Any]) -> HostFacts:
    """Read a probe's answer to ``facts``."""
    head = ("kind", "version", "executable")
    return HostFacts(
        version=message["version"],
        executable=message["executable"] or "",
        is_old=message["kind"] == "old",
        parts={name: part for name, part in message.items() if name not in head},
    )
