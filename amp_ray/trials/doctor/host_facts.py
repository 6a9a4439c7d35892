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
    """What an experiment expects of one host."""

    name: str
    device: Device
    num_slots: int
    group: int = 0  # of the hosts that run a trial together
    # Words in front of a command that shall run there; none for this machine
    login: tuple[str, ...] = ()

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
    # What the login's shell and Python took to start; None where unknown
    start_s: float | None = None
    # Peers that it cannot connect to, with the reason
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
