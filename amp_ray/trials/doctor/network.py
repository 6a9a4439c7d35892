"""Checks of addresses: an interface has the hostfile's, peers reach it, no host is named twice."""

import re
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Final

from amp_ray.trials.doctor.findings import Finding, shell_command
from amp_ray.trials.doctor.host_facts import Look, Site
from amp_ray.trials.doctor.software import Wanted

_DEBIAN_OWN: Final = "127.0.1.1"
"""What Debian writes into ``/etc/hosts`` for a host's own name."""


def check_network(look: Look, _wanted: Wanted) -> Iterator[Finding]:
    """Check a host's address, its own name, a port, and the way to its peers."""
    assert look.facts is not None
    facts = look.facts.part("address")
    if "address" not in facts:
        yield _no_address(look, facts["problem"])
        return
    yield _check_address(look)
    yield _check_port(look)
    if look.num_peers:
        yield _check_own_name(look)
        yield from _check_peers(look)


def check_same_machine(looks: Sequence[Look]) -> Iterator[Finding]:
    """Refuse two names for one machine: their slots would be the same devices."""
    first: dict[tuple[str, str], str] = {}
    for look in looks:
        machine = look.facts.machine if look.facts is not None else None
        if machine is None:
            continue
        other = first.setdefault(machine, look.site.name)
        if other != look.site.name:
            yield Finding(
                level="error",
                host=look.site.name,
                check="machine",
                found=f"is the same machine as {other}",
                expected="a machine of its own",
                advice="name it once in the hostfile, with all of its slots",
            )


def is_loopback(address: str) -> bool:
    """Tell whether an address stays within its host."""
    return address.startswith("127.") or address == "::1"


def _no_address(look: Look, problem: str) -> Finding:
    """Report that no interface has an address by which peers know the host."""
    expected = "an interface with the address that the hostfile's name stands for"
    return _wrong_address(look, problem, expected)


def _wrong_address(look: Look, found: str, expected: str) -> Finding:
    """Report an address that does not serve, with the command that lists the others."""
    return Finding(
        level="error",
        host=look.site.name,
        check="address",
        found=found,
        expected=expected,
        command=shell_command(look.site.login, ["ip", "-brief", "address"]),
        advice="name the host in the hostfile by one of the addresses that this lists",
    )


def _check_address(look: Look) -> Finding:
    """Check that peers could use the address."""
    assert look.facts is not None
    facts = look.facts.part("address")
    found = f"{facts['address']} on {facts['interface']}"
    if not (look.num_peers and is_loopback(facts["address"])):
        return Finding(level="ok", host=look.site.name, check="address", found=found)
    return _wrong_address(look, found, "an address that the other hosts can reach")


def _check_port(look: Look) -> Finding:
    """Check that there was a port to listen at."""
    assert look.facts is not None
    facts = look.facts.part("address")
    if facts["port"] is not None:
        found = f"{facts['port']} is free"
        return Finding(level="ok", host=look.site.name, check="port", found=found)
    return Finding(
        level="error",
        host=look.site.name,
        check="port",
        found=facts["problem"],
        expected="a free port between 20000 and 32000",
        command=shell_command(look.site.login, ["ss", "-Htlnp"]),
        advice="end what listens there; this lists it",
    )


def _check_own_name(look: Look) -> Finding:
    """Check what the host takes its own names for."""
    assert look.facts is not None
    site, facts = look.site, look.facts
    names = facts.part("own_name").get("addresses", {})
    inward = [
        name
        for name, addresses in names.items()
        if name != "localhost" and any(is_loopback(address) for address in addresses)
    ]
    if not inward:
        found = ", ".join(f"{name} is {' '.join(found)}" for name, found in names.items() if found)
        found = found or "resolves to nothing there"
        return Finding(level="ok", host=site.name, check="own name", found=found)
    name = inward[0]
    address = facts.part("address")["address"]
    command = None
    if _DEBIAN_OWN in names[name] and not is_loopback(address):
        edit = ["sed", "-i", rf"s/^{re.escape(_DEBIAN_OWN)}\b/{address}/", "/etc/hosts"]
        command = shell_command(site.login, edit, as_root=facts.needs_sudo)
    return Finding(
        level="warning",
        host=site.name,
        check="own name",
        found=f"{name} is {' '.join(names[name])} there",
        expected=address,
        command=command,
        advice="trials are told the address in digits; own programs that look themselves up find "
        "the loopback",
    )


def _check_peers(look: Look) -> Iterator[Finding]:
    """Check that a connection to every peer came about."""
    assert look.facts is not None
    site = look.site
    if not look.unreached:
        found = f"reaches {look.num_peers} hosts"
        yield Finding(level="ok", host=site.name, check="peers", found=found)
    for reason, entries in groupby(sorted(look.unreached, key=_reason), key=_reason):
        peers = [peer for peer, _ in entries]
        names = ", ".join(peer.name for peer in peers)
        address = look.facts.part("address")["address"]
        allow = ["iptables", "-I", "INPUT", "-s", address, "-j", "ACCEPT"]
        lines = [shell_command(peer.login, allow, as_root=True) for peer in peers]
        yield Finding(
            level="error",
            host=site.name,
            check="peers",
            found=f"no connection to {names}: {reason}",
            expected="every host to reach every other, at ports 20000 to 32000 and above",
            command=" && ".join(lines),
            advice="if a firewall is the reason, this lets the host in until the next restart",
        )


def _reason(entry: tuple[Site, str]) -> str:
    """Return what kept a peer from being reached."""
    return entry[1]
