"""Checks of what a host has to give: cores, memory, disk, limits."""

from collections.abc import Iterator
from typing import Final

from amp_ray.trials.doctor.findings import Finding, Level, shell_command
from amp_ray.trials.doctor.host_facts import HostReport
from amp_ray.trials.doctor.software import Wanted
from amp_ray.units import GIB, MIB

IDLE_LOAD: Final = 1.0
"""A load that the system itself, this check, and the minute before may cause."""

MIN_DISK_BYTES: Final = 16 * MIB
"""The program's own files, its job and a few pages of log."""

LOG_BYTES: Final = 16 * MIB
"""What the agent keeps of one rank's log at most: its ``log`` module's parts together."""

MIN_SHARED_BYTES: Final = 64 * MIB
"""The share of one rank in ``/dev/shm``: what containers get by default, enough for one GPU."""

NCCL_SHARED_BYTES: Final = GIB
"""What NCCL's documentation asks for where several GPUs of a host talk through it."""

MIN_OPEN_FILES: Final = 1024
"""Linux's own default; less runs out with a few dozen ranks."""


def check_machine(report: HostReport, _wanted: Wanted) -> Iterator[Finding]:
    """Check what a host has to give."""
    yield from _check_cores(report)
    yield _check_disk(report)
    yield _check_shared_memory(report)
    yield from _check_limits(report)


def unknown(report: HostReport, check: str, problem: str) -> Finding:
    """Report what could not be found out."""
    found = f"not known: {problem}"
    return Finding(level="warning", host=report.spec.name, check=check, found=found)


def _check_cores(report: HostReport) -> Iterator[Finding]:
    """Check cores, load, and the memory that CPU devices count on."""
    assert report.facts is not None
    facts, spec = report.facts.part("capacity"), report.spec
    if facts.get("problem"):
        yield unknown(report, "cores", facts["problem"])
        return
    cores = min(facts["num_cores"], facts["quota_cores"] or facts["num_cores"])
    few = cores < spec.num_slots
    yield Finding(
        level="warning" if few else "ok",
        host=spec.name,
        check="cores",
        found=f"{cores:g} cores",
        expected=f"one for each of {spec.num_slots} ranks" if few else "",
        advice="ranks take turns, and their times mean little; use fewer slots" if few else "",
    )
    load = facts["load"]
    busy = facts["num_cores"] - max(0.0, load - IDLE_LOAD) < spec.num_slots
    yield Finding(
        level="warning" if busy else "ok",
        host=spec.name,
        check="load",
        found=f"load {load:.1f} on {facts['num_cores']} cores",
        expected=f"{spec.num_slots} idle cores" if busy else "",
        command=shell_command(spec.login, ["ps", "-eo", "pid,user,pcpu,args", "--sort=-pcpu"])
        if busy
        else None,
        advice="other programs would be measured too; this lists them" if busy else "",
    )
    if not spec.has_gpu and facts["memory_bytes"] is not None:
        yield _check_memory(report, facts["memory_bytes"])


def _check_memory(report: HostReport, available: int) -> Finding:
    """Compare free memory with what the plan counts on in all slots."""
    spec = report.spec
    planned = spec.device.memory_bytes * spec.num_slots
    found = f"{available / GIB:.1f} GiB free"
    if available >= planned:
        return Finding(level="ok", host=spec.name, check="memory", found=found)
    return Finding(
        level="warning",
        host=spec.name,
        check="memory",
        found=found,
        expected=f"{spec.num_slots} x {spec.device.memory_bytes / GIB:.1f} GiB",
        advice=f"set memory_gib: {available / spec.num_slots / GIB:.2f} in cluster.nodes, or "
        "plans may not fit",
    )


def _check_disk(report: HostReport) -> Finding:
    """Check that the folder of trials can be written to and has room."""
    assert report.facts is not None
    facts, spec = report.facts.part("disk"), report.spec
    if "path" not in facts:
        return unknown(report, "disk", facts["problem"])
    path, free, problem = facts["path"], facts["free_bytes"], facts["problem"]
    wish = LOG_BYTES * (spec.num_slots + 1)
    level: Level = "ok"
    if problem is not None or (free is not None and free < MIN_DISK_BYTES):
        level = "error"
    elif free is not None and free < wish:
        level = "warning"
    room = "" if free is None else f", {_size(free)} free"
    found = f"{path}{room}" if problem is None else f"{path}: {problem}{room}"
    if level == "ok":
        return Finding(level=level, host=spec.name, check="disk", found=found)
    return Finding(
        level=level,
        host=spec.name,
        check="disk",
        found=found,
        expected=f"a folder to write to, with {_size(wish)} free for logs",
        command=_mend_disk(report, path, full=free is not None and free < wish),
        advice="or let TMPDIR name another folder for commands over SSH (SetEnv in sshd_config)",
    )


def _mend_disk(report: HostReport, path: str, *, full: bool) -> str:
    """Return what removes our own leftovers, shows who fills the disk, or lets us write."""
    assert report.facts is not None
    if not full:
        chmod = ["chmod", "1777", "--", path]
        return shell_command(report.spec.login, chmod, as_root=report.facts.needs_sudo)
    left = report.facts.part("left").get("folders", ())
    ours = [entry["path"] for entry in left if not entry["used"]]
    if ours:
        return shell_command(report.spec.login, ["rm", "-rf", "--", *ours])
    return shell_command(report.spec.login, ["du", "-xh", "--max-depth=1", "--", path])


def _check_shared_memory(report: HostReport) -> Finding:
    assert report.facts is not None
    spec, free = report.spec, report.facts.part("shared_memory").get("free_bytes")
    several = spec.num_slots > 1
    wish = NCCL_SHARED_BYTES if spec.has_gpu and several else MIN_SHARED_BYTES * spec.num_slots
    if free is not None and free >= wish:
        found = f"{_size(free)} free"
        return Finding(level="ok", host=spec.name, check="shared memory", found=found)
    resize = ["mount", "-o", f"remount,size={wish // MIB}M", "/dev/shm"]  # noqa: S108 - Linux's name
    return Finding(
        level="error" if not free and several else "warning",
        host=spec.name,
        check="shared memory",
        found="no /dev/shm" if free is None else f"{_size(free)} free in /dev/shm",
        expected=f"{_size(wish)}, through which ranks of one host talk",
        command=shell_command(spec.login, resize, as_root=report.facts.needs_sudo),
        advice="in a container, start it with --shm-size or --ipc=host",
    )


def _check_limits(report: HostReport) -> Iterator[Finding]:
    assert report.facts is not None
    facts, spec = report.facts.part("capacity"), report.spec
    if facts.get("problem"):
        return
    limits = []
    files, locked = facts["open_files"], facts["locked_bytes"]
    if files is not None and files < MIN_OPEN_FILES:
        limits.append(("nofile", f"{files} open files", f"{MIN_OPEN_FILES} or more"))
    if facts["infiniband"] and locked is not None:
        limits.append(("memlock", f"{_size(locked)} of locked memory", "unlimited for InfiniBand"))
    if not limits:
        found = f"{'any number of' if files is None else files} open files"
        yield Finding(level="ok", host=spec.name, check="limits", found=found)
    for name, found, expected in limits:
        value = "1048576" if name == "nofile" else "unlimited"
        line = f"echo '* - {name} {value}' >> /etc/security/limits.d/90-training.conf"
        yield Finding(
            level="warning",
            host=spec.name,
            check="limits",
            found=found,
            expected=expected,
            command=shell_command(spec.login, ["sh", "-c", line], as_root=report.facts.needs_sudo),
            advice="holds for new logins",
        )


def _size(num_bytes: int) -> str:
    """Write a size for people.

    Example:
        >>> _size(2**30), _size(3 * 2**20)
        ('1.0 GiB', '3 MiB')
    """
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB else f"{num_bytes // MIB} MiB"
