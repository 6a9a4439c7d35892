"""Checks of addresses: an interface has the hostfile's, peers reach it, no host is named twice."""

import re
from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Final

from amp_ray.trials.doctor.findings import Finding, shell_command
from amp_ray.trials.doctor.host_facts import HostReport
from amp_ray.trials.doctor.software import Wanted

_DEBIAN_OWN: Final = "127.0.1.1"  # what Debian writes into ``/etc/hosts`` for a host's own name


def check_network(report: HostReport, _wanted: Wanted) -> Iterator[Finding]:
    """Check a host's address, its own name, a port, and the way to its peers."""
    facts = report.part("address")
    if "address" not in facts:
        expected = "an interface with the address that the hostfile's name stands for"
        yield _wrong_address(report, facts["problem"], expected)
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
            yield report.error(
                "machine",
                f"is the same machine as {other}",
                expected="a machine of its own",
                advice="name it once in the hostfile, with all of its slots",
            )


def is_loopback(address: str) -> bool:
    """Tell whether an address stays within its host."""
    return address.startswith("127.") or address == "::1"


def _wrong_address(report: HostReport, found: str, expected: str) -> Finding:
    """Report an address that does not serve, with the command that lists the others."""
    return report.error(
        "address",
        found,
        expected=expected,
        command=report.command(["ip", "-brief", "address"]),
        advice="name the host in the hostfile by one of the addresses that this lists",
    )


def _check_address(report: HostReport) -> Finding:
    facts = report.part("address")
    found = f"{facts['address']} on {facts['interface']}"
    if not (report.num_peers and is_loopback(facts["address"])):
        return report.ok("address", found)
    return _wrong_address(report, found, "an address that the other hosts can reach")


def _check_port(report: HostReport) -> Finding:
    facts = report.part("address")
    if facts["port"] is not None:
        return report.ok("port", f"{facts['port']} is free")
    return report.error(
        "port",
        facts["problem"],
        expected="a free port between 20000 and 32000",
        command=report.command(["ss", "-Htlnp"]),
        advice="end what listens there; this lists it",
    )


def _check_own_name(report: HostReport) -> Finding:
    names = report.part("own_name").get("addresses", {})
    inward = [
        name
        for name, addresses in names.items()
        if name != "localhost" and any(is_loopback(address) for address in addresses)
    ]
    if not inward:
        found = ", ".join(f"{name} is {' '.join(found)}" for name, found in names.items() if found)
        return report.ok("own name", found or "resolves to nothing there")
    name = inward[0]
    address = report.part("address")["address"]
    command = None
    if _DEBIAN_OWN in names[name] and not is_loopback(address):
        edit = ["sed", "-i", rf"s/^{re.escape(_DEBIAN_OWN)}\b/{address}/", "/etc/hosts"]
        command = report.command(edit, as_root=True)
    return report.warning(
        "own name",
        f"{name} is {' '.join(names[name])} there",
        expected=address,
        command=command,
        advice="trials are told the address in digits; own programs that look themselves up find "
        "the loopback",
    )


def _check_peers(report: HostReport) -> Iterator[Finding]:
    if not report.unreached:
        yield report.ok("peers", f"reaches {report.num_peers} hosts")
    for reason, entries in groupby(sorted(report.unreached, key=itemgetter(1)), itemgetter(1)):
        peers = [peer for peer, _ in entries]
        names = ", ".join(peer.name for peer in peers)
        address = report.part("address")["address"]
        allow = ["iptables", "-I", "INPUT", "-s", address, "-j", "ACCEPT"]
        lines = [shell_command(peer.login, allow, as_root=True) for peer in peers]
        yield report.error(
            "peers",
            f"no connection to {names}: {reason}",
            expected="every host to reach every other, at ports 20000 to 32000 and above",
            command=" && ".join(lines),
            advice="if a firewall is the reason, this lets the host in until the next restart",
        )
