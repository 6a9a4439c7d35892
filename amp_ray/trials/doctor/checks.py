"""All checks of ``amp-ray doctor``: turn reports of hosts into findings, contacting no host."""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any, Final

from amp_ray.clusters.device import CATALOGUE, Device, resembles
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
LOG_BYTES: Final = 16 * MIB  # maximum size of one rank's log on a host
MIN_SHARED_BYTES: Final = 64 * MIB  # least ``/dev/shm`` per rank; the default size in containers
NCCL_SHARED_BYTES: Final = GIB  # ``/dev/shm`` that NCCL needs if GPUs communicate through it
CONTEXT_BYTES: Final = 64 * MIB  # less than any CUDA context, but more than a display server uses
USED_FRACTION: Final = 0.05  # share of a GPU's memory that may be in use; drivers reserve less
POWER_FRACTION: Final = 0.01  # a limit of power that differs by less is the planned one
Gpu = Mapping[str, Any]


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


def check_devices(report: HostReport) -> Iterator[Finding]:
    """Check the GPUs of a host for which the experiment expects GPUs."""
    if not report.spec.has_gpu:
        return
    facts, spec = report.part("gpus"), report.spec
    expected = spec.boards
    if facts["problem"] is not None:
        yield report.error(
            "devices",
            facts["problem"],
            expected=expected,
            command=report.command(["nvidia-smi"]),
            advice="install or restart the driver there until nvidia-smi lists the GPUs, or plan "
            "for device cpu",
        )
        return
    gpus = visible_gpus(facts)
    yield _check_count(report, len(gpus), expected)
    used = gpus[: spec.num_slots]
    for device, places in groupby(range(len(used)), spec.devices.__getitem__):
        slots = [*places]
        listed = "slots " + ", ".join(map(str, slots))
        where = "every slot" if len(slots) == len(used) else listed
        gpus_there = [used[slot] for slot in slots]
        yield _check_kind(report, gpus_there, device, where)
        yield _check_memory(report, gpus_there, device)
        yield _check_power(report, gpus_there, device)
    if used:
        yield _check_use(report, used)


def visible_gpus(facts: Mapping[str, Any]) -> list[Gpu]:
    """Return the GPUs that the login has access to, in the order of the slots."""
    gpus: list[Gpu] = sorted(facts.get("gpus", ()), key=lambda gpu: int(gpu["index"]))
    names = [name.strip() for name in (facts.get("visible") or "").split(",") if name.strip()]
    if not names:
        return gpus
    named = (next((gpu for gpu in gpus if _is_named(gpu, name)), None) for name in names)
    return [gpu for gpu in named if gpu is not None]


def _is_named(gpu: Gpu, name: str) -> bool:
    return name == str(gpu["index"]) or (name.startswith("GPU-") and gpu["uuid"].startswith(name))


def _check_count(report: HostReport, count: int, expected: str) -> Finding:
    num_slots = report.spec.num_slots
    if count == num_slots:
        return report.ok("devices", f"{count} GPUs")
    level: Level = "error" if count < num_slots else "warning"
    advice = f"write slots={count} in the hostfile and in cluster.nodes"
    if level == "warning":
        advice = f"trials use the first {num_slots}; to use all, {advice}"
    return report.finding(
        level,
        "devices",
        f"{count} GPUs",
        expected=expected,
        command=report.command(["nvidia-smi", "-L"]),
        advice=advice,
    )


def _check_kind(report: HostReport, gpus: Sequence[Gpu], device: Device, where: str) -> Finding:
    """Compare the driver's names with the planned device, if that is in the catalogue."""
    names = sorted({str(gpu["name"]) for gpu in gpus})
    any_name = device.name not in CATALOGUE
    if len(names) == 1 and (any_name or resembles(device.name, names[0])):
        return report.ok("device type", names[0])
    return report.warning(
        "device type",
        ", ".join(names),
        expected=f"{device.name} in {where}",
        advice="name the device that is there in cluster.nodes: predictions are for that one",
    )


def _check_memory(report: HostReport, gpus: Sequence[Gpu], device: Device) -> Finding:
    """Check that the GPU with the least memory has as much as the plan assumes."""
    planned = device.memory_bytes
    sizes = [gpu["memory_bytes"] for gpu in gpus if gpu["memory_bytes"] is not None]
    if not sizes:
        return report.ok("device memory", "the driver does not tell")
    smallest = min(sizes)
    if smallest >= planned:
        return report.ok("device memory", f"{smallest / GIB:.1f} GiB")
    return report.error(
        "device memory",
        f"{smallest / GIB:.1f} GiB",
        expected=f"{planned / GIB:.1f} GiB",
        advice=f"set memory_gib: {smallest / GIB:.2f} or less in cluster.nodes; trials would run "
        "out of memory",
    )


def _check_power(report: HostReport, gpus: Sequence[Gpu], device: Device) -> Finding:
    """Compare the lowest limit of a GPU's power with the planned one; it lowers the clock."""
    planned_w = device.power_limit_w or device.board_power_w
    limits_w = [gpu["power_limit_w"] for gpu in gpus if gpu["power_limit_w"] is not None]
    if not limits_w:
        return report.ok("device power", "the driver does not tell")
    lowest_w = min(limits_w)
    if planned_w is None or math.isclose(lowest_w, planned_w, rel_tol=POWER_FRACTION):
        return report.ok("device power", f"at most {lowest_w:g} W")
    if lowest_w > planned_w and device.power_limit_w is None:
        return report.ok("device power", f"at most {lowest_w:g} W")
    return report.warning(
        "device power",
        f"at most {lowest_w:g} W",
        expected=f"{planned_w:g} W",
        advice=f"set power_w: {lowest_w:g} in cluster.nodes: products run at the clock of that "
        "limit; or set the limit there (nvidia-smi --power-limit)",
    )


def _check_use(report: HostReport, gpus: Sequence[Gpu]) -> Finding:
    """Check that the GPUs run no process and have no memory in use."""
    uuids = {gpu["uuid"] for gpu in gpus}
    processes = [entry for entry in report.part("gpus")["processes"] if entry["uuid"] in uuids]
    if processes:
        return _busy(report, processes)
    full = [
        gpu
        for gpu in gpus
        if gpu["memory_bytes"]
        and gpu["used_bytes"]
        and gpu["used_bytes"] > USED_FRACTION * gpu["memory_bytes"]
    ]
    if not full:
        return report.ok("device use", "nothing runs")
    used = ", ".join(f"GPU {gpu['index']}: {gpu['used_bytes'] / GIB:.1f} GiB" for gpu in full)
    return report.warning(
        "device use",
        f"{used} in use, by no process that is listed",
        expected="free GPUs",
        command=report.command(["nvidia-smi"]),
        advice="a process of another container or user may hold it",
    )


def _busy(report: HostReport, processes: Sequence[Mapping[str, Any]]) -> Finding:
    sizes = [entry["memory_bytes"] for entry in processes]
    harmless = all(size is not None and size < CONTEXT_BYTES for size in sizes)
    names = ", ".join(
        f"{entry['name']} (pid {entry['pid']}"
        + (f", {entry['memory_bytes'] / GIB:.1f} GiB)" if entry["memory_bytes"] else ")")
        for entry in processes
    )
    pids = sorted({str(entry["pid"]) for entry in processes if entry["pid"]}, key=int)
    return report.finding(
        "warning" if harmless else "error",
        "device use",
        names,
        expected="nothing else on the GPUs of trials",
        command=report.command(["kill", *pids]) if pids else None,
        advice="wait for it; or end it, if it is yours",
    )


def _size(num_bytes: int) -> str:
    """Format a size in GiB or MiB.

    Example:
        >>> _size(2**30), _size(3 * 2**20)
        ('1.0 GiB', '3 MiB')
    """
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB else f"{num_bytes // MIB} MiB"
