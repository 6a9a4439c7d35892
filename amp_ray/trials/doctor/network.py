"""Checks of addresses: an interface has the hostfile's, peers reach it, no host is named twice."""

import re
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Final

from amp_ray.trials.doctor.findings import Finding, shell_command
from amp_ray.trials.doctor.host_facts import HostReport, HostSpec
from amp_ray.trials.doctor.software import Wanted

_DEBIAN_OWN: Final = "127.0.1.1"
"""What Debian writes into ``/etc/hosts`` for a host's own name."""


def check_network(report: HostReport, _wanted: Wanted) -> Iterator[Finding]:
    """Check a host's address, its own name, a port, and the way to its peers."""
    assert report.facts is not None
    facts = report.facts.part("address")
    if "address" not in facts:
        yield _no_address(report, facts["problem"])
        return
    yield _check_address(report)
    yield _check_port(report)
    if report.num_peers:
        yield _check_own_name(report)
        yield from _check_peers(report)


def check_same_machine(reports: Sequence[HostReport]) -> Iterator[Finding]:
    """Refuse two names for one machine: their slots would be the same devices."""
    first: dict[tuple[str, str], str] = {}
    for report in reports:
        machine = report.facts.machine if report.facts is not None else None
        if machine is None:
            continue
        other = first.setdefault(machine, report.spec.name)
        if other != report.spec.name:
            yield Finding(
                level="error",
                host=report.spec.name,
                check="machine",
                found=f"is the same machine as {other}",
                expected="a machine of its own",
                advice="name it once in the hostfile, with all of its slots",
            )


def is_loopback(address: str) -> bool:
    """Tell whether an address stays within its host."""
    return address.startswith("127.") or address == "::1"


def _no_address(report: HostReport, problem: str) -> Finding:
    """Report that no interface has an address by which peers know the host."""
    expected = "an interface with the address that the hostfile's name stands for"
    return _wrong_address(report, problem, expected)


def _wrong_address(report: HostReport, found: str, expected: str) -> Finding:
    """Report an address that does not serve, with the command that lists the others."""
    return Finding(
        level="error",
        host=report.spec.name,
        check="address",
        found=found,
        expected=expected,
        command=shell_command(report.spec.login, ["ip", "-brief", "address"]),
        advice="name the host in the hostfile by one of the addresses that this lists",
    )


def _check_address(report: HostReport) -> Finding:
    assert report.facts is not None
    facts = report.facts.part("address")
    found = f"{facts['address']} on {facts['interface']}"
    if not (report.num_peers and is_loopback(facts["address"])):
        return Finding(level="ok", host=report.spec.name, check="address", found=found)
    return _wrong_address(report, found, "an address that the other hosts can reach")


def _check_port(report: HostReport) -> Finding:
    assert report.facts is not None
    facts = report.facts.part("address")
    if facts["port"] is not None:
        found = f"{facts['port']} is free"
        return Finding(level="ok", host=report.spec.name, check="port", found=found)
    return Finding(
        level="error",
        host=report.spec.name,
        check="port",
        found=facts["problem"],
        expected="a free port between 20000 and 32000",
        command=shell_command(report.spec.login, ["ss", "-Htlnp"]),
        advice="end what listens there; this lists it",
    )


def _check_own_name(report: HostReport) -> Finding:
    assert report.facts is not None
    spec, facts = report.spec, report.facts
    names = facts.part("own_name").get("addresses", {})
    inward = [
        name
        for name, addresses in names.items()
        if name != "localhost" and any(is_loopback(address) for address in addresses)
    ]
    if not inward:
        found = ", ".join(f"{name} is {' '.join(found)}" for name, found in names.items() if found)
        found = found or "resolves to nothing there"
        return Finding(level="ok", host=spec.name, check="own name", found=found)
    name = inward[0]
    address = facts.part("address")["address"]
    command = None
    if _DEBIAN_OWN in names[name] and not is_loopback(address):
        edit = ["sed", "-i", rf"s/^{re.escape(_DEBIAN_OWN)}\b/{address}/", "/etc/hosts"]
        command = shell_command(spec.login, edit, as_root=facts.needs_sudo)
    return Finding(
        level="warning",
        host=spec.name,
        check="own name",
        found=f"{name} is {' '.join(names[name])} there",
        expected=address,
        command=command,
        advice="trials are told the address in digits; own programs that look themselves up find "
        "the loopback",
    )


def _check_peers(report: HostReport) -> Iterator[Finding]:
    assert report.facts is not None
    spec = report.spec
    if not report.unreached:
        found = f"reaches {report.num_peers} hosts"
        yield Finding(level="ok", host=spec.name, check="peers", found=found)
    for reason, entries in groupby(sorted(report.unreached, key=_reason), key=_reason):
        peers = [peer for peer, _ in entries]
        names = ", ".join(peer.name for peer in peers)
        address = report.facts.part("address")["address"]
        allow = ["iptables", "-I", "INPUT", "-s", address, "-j", "ACCEPT"]
        lines = [shell_command(peer.login, allow, as_root=True) for peer in peers]
        yield Finding(
            level="error",
            host=spec.name,
            check="peers",
            found=f"no connection to {names}: {reason}",
            expected="every host to reach every other, at ports 20000 to 32000 and above",
            command=" && ".join(lines),
            advice="if a firewall is the reason, this lets the host in until the next restart",
        )


def _reason(entry: tuple[HostSpec, str]) -> str:
    """Return what kept a peer from being reached."""
    return entry[1]
