"""All checks of ``amp-ray doctor``: turn reports of hosts into findings, contacting no host."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Final

from amp_ray.trials.doctor.devices import check_devices
from amp_ray.trials.doctor.findings import Finding, HostReport, Level, shell_command
from amp_ray.trials.doctor.software import (
    Needs,
    Versions,
    check_agreement,
    check_old_python,
    check_software,
    versions_of,
)
from amp_ray.units import GIB, MIB

MIN_DISK_BYTES: Final = 16 * MIB  # for the program's files, its job and a few pages of log
LOG_BYTES: Final = 16 * MIB  # maximum that the agent keeps of one rank's log, all parts together
MIN_SHARED_BYTES: Final = 64 * MIB  # ``/dev/shm`` per rank; the default size in containers
NCCL_SHARED_BYTES: Final = GIB  # NCCL's need if GPUs of a host communicate through it


def check_hosts(reports: Sequence[HostReport], needs: Needs) -> tuple[Finding, ...]:
    """Check each host alone and against the other hosts; return findings ordered by host."""
    judged = [_judge(report, needs) for report in reports]
    differences = check_agreement(reports, [versions for _, versions in judged], needs)
    return tuple(
        finding
        for (findings, _), differing in zip(judged, differences, strict=True)
        for finding in (*findings, *differing)
    )


def _judge(report: HostReport, needs: Needs) -> tuple[list[Finding], Versions]:
    """Return the findings of one host, and its package versions for the comparison of hosts."""
    if report.failure is not None:
        return [report.failure], {}
    try:
        return [*_check_host(report, needs)], versions_of(report)
    except Exception as error:  # noqa: BLE001 - a host may answer anything
        return [
            report.error(
                "agent Python",
                f"an answer that no probe gives: {type(error).__name__}: {error}",
                expected="facts about the host, as amp-ray's own probe tells them",
                advice="does something on that host print in the place of Python?",
            )
        ], {}


def _check_host(report: HostReport, needs: Needs) -> Iterator[Finding]:
    user = report.part("identity").get("user", "an unknown user")
    yield report.ok("login", f"logged in as {user}" if report.spec.login else "this machine")
    if report.is_old:
        yield check_old_python(report)
        return
    yield from check_software(report, needs)
    yield from check_devices(report)
    yield _check_disk(report)
    yield _check_shared_memory(report)
    yield from _check_network(report)


def _check_disk(report: HostReport) -> Finding:
    """Check that the folder of trials is writable and has free space."""
    facts = report.part("disk")
    if "path" not in facts:
        return report.warning("disk", f"not known: {facts['problem']}")
    path, free, problem = facts["path"], facts["free_bytes"], facts["problem"]
    needed = LOG_BYTES * (report.spec.num_slots + 1)
    full = free is not None and free < needed
    room = "" if free is None else f", {_size(free)} free"
    state = f"{path}{room}" if problem is None else f"{path}: {problem}{room}"
    if problem is None and not full:
        return report.ok("disk", state)
    level: Level = "warning"
    if problem is not None or free < MIN_DISK_BYTES:
        level = "error"
    show_use, allow = ["du", "-xh", "--max-depth=1", "--", path], ["chmod", "1777", "--", path]
    return report.finding(
        level,
        "disk",
        state,
        expected=f"a folder to write to, with {_size(needed)} free for logs",
        command=report.command(show_use) if full else report.command(allow, as_root=True),
        advice="or let TMPDIR name another folder for commands over SSH (SetEnv in sshd_config)",
    )


def _check_shared_memory(report: HostReport) -> Finding:
    spec, free = report.spec, report.part("shared_memory").get("free_bytes")
    several = spec.num_slots > 1
    needed = NCCL_SHARED_BYTES if spec.has_gpu and several else MIN_SHARED_BYTES * spec.num_slots
    if free is not None and free >= needed:
        return report.ok("shared memory", f"{_size(free)} free")
    resize = ["mount", "-o", f"remount,size={needed // MIB}M", "/dev/shm"]  # noqa: S108 - Linux's name
    return report.finding(
        "error" if not free and several else "warning",
        "shared memory",
        "no /dev/shm" if free is None else f"{_size(free)} free in /dev/shm",
        expected=f"{_size(needed)}, through which ranks of one host talk",
        command=report.command(resize, as_root=True),
        advice="in a container, start it with --shm-size or --ipc=host",
    )


def _check_network(report: HostReport) -> Iterator[Finding]:
    """Check a host's address, a free port for trials, and connections to its peers."""
    facts = report.part("address")
    if "address" not in facts:
        expected = "an interface with the address that the hostfile's name stands for"
        yield _wrong_address(report, facts["problem"], expected)
        return
    address = facts["address"]
    place = f"{address} on {facts['interface']}"
    if report.num_peers and (address.startswith("127.") or address == "::1"):
        yield _wrong_address(report, place, "an address that the other hosts can reach")
    else:
        yield report.ok("address", place)
    if facts["port"] is not None:
        yield report.ok("port", f"{facts['port']} is free")
    else:
        yield report.error(
            "port",
            facts["problem"],
            expected="a free port between 20000 and 32000",
            command=report.command(["ss", "-Htlnp"]),
            advice="end what listens there; this lists it",
        )
    if report.num_peers:
        yield from _check_peers(report, address)


def _wrong_address(report: HostReport, problem: str, expected: str) -> Finding:
    """Report an unusable address, with the command that lists the host's other addresses."""
    return report.error(
        "address",
        problem,
        expected=expected,
        command=report.command(["ip", "-brief", "address"]),
        advice="name the host in the hostfile by one of the addresses that this lists",
    )


def _check_peers(report: HostReport, address: str) -> Iterator[Finding]:
    if not report.unreached:
        yield report.ok("peers", f"reaches {report.num_peers} hosts")
    for reason, entries in groupby(sorted(report.unreached, key=itemgetter(1)), itemgetter(1)):
        peers = [peer for peer, _ in entries]
        names = ", ".join(peer.name for peer in peers)
        allow = ["iptables", "-I", "INPUT", "-s", address, "-j", "ACCEPT"]
        lines = [shell_command(peer.login, allow, as_root=True) for peer in peers]
        yield report.error(
            "peers",
            f"no connection to {names}: {reason}",
            expected="every host to reach every other, at ports 20000 to 32000 and above",
            command=" && ".join(lines),
            advice="if a firewall is the reason, this lets the host in until the next restart",
        )


def _size(num_bytes: int) -> str:
    """Format a size in GiB or MiB.

    Example:
        >>> _size(2**30), _size(3 * 2**20)
        ('1.0 GiB', '3 MiB')
    """
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB else f"{num_bytes // MIB} MiB"
