"""Checks of a host: cores, memory, disk, limits, its clock, and what earlier trials have left."""

from collections.abc import Iterator
from typing import Final

from amp_ray.trials.doctor.findings import Finding, Level
from amp_ray.trials.doctor.host_facts import HostReport
from amp_ray.trials.doctor.software import Wanted
from amp_ray.units import GIB, MIB

IDLE_LOAD: Final = 1.0  # a load that the system itself, this check, and the minute before may cause
MIN_DISK_BYTES: Final = 16 * MIB  # the program's own files, its job and a few pages of log
LOG_BYTES: Final = 16 * MIB  # what the agent keeps of a rank's log: its module's parts together
MIN_SHARED_BYTES: Final = 64 * MIB  # a rank's share of ``/dev/shm``: what containers get by default
NCCL_SHARED_BYTES: Final = GIB  # what NCCL asks for where several GPUs of a host talk through it
MIN_OPEN_FILES: Final = 1024  # Linux's own default; less runs out with a few dozen ranks
# Beyond it logs of different hosts cannot be read together. Outcomes and times do not depend on it:
# each host measures with its own monotonic clock.
MAX_OFFSET_S: Final = 1.0
_MINUTE_S: Final = 60.0


def check_machine(report: HostReport, _wanted: Wanted) -> Iterator[Finding]:
    """Check what a host has to give, its clock, and what lies about."""
    yield from _check_cores(report)
    yield _check_disk(report)
    yield _check_shared_memory(report)
    yield from _check_limits(report)
    yield _check_clock(report)
    yield from _check_leftovers(report)


def unknown(report: HostReport, check: str, problem: str) -> Finding:
    """Report what could not be found out."""
    return report.warning(check, f"not known: {problem}")


def _check_cores(report: HostReport) -> Iterator[Finding]:
    facts, spec = report.part("capacity"), report.spec
    if facts.get("problem"):
        yield unknown(report, "cores", facts["problem"])
        return
    cores = min(facts["num_cores"], facts["quota_cores"] or facts["num_cores"])
    few = cores < spec.num_slots
    yield report.finding(
        "warning" if few else "ok",
        "cores",
        f"{cores:g} cores",
        expected=f"one for each of {spec.num_slots} ranks" if few else "",
        advice="ranks take turns, and their times mean little; use fewer slots" if few else "",
    )
    load = facts["load"]
    busy = facts["num_cores"] - max(0.0, load - IDLE_LOAD) < spec.num_slots
    yield report.finding(
        "warning" if busy else "ok",
        "load",
        f"load {load:.1f} on {facts['num_cores']} cores",
        expected=f"{spec.num_slots} idle cores" if busy else "",
        command=report.command(["ps", "-eo", "pid,user,pcpu,args", "--sort=-pcpu"])
        if busy
        else None,
        advice="other programs would be measured too; this lists them" if busy else "",
    )
    if not spec.has_gpu and facts["memory_bytes"] is not None:
        yield _check_memory(report, facts["memory_bytes"])


def _check_memory(report: HostReport, available: int) -> Finding:
    spec = report.spec
    planned = spec.device.memory_bytes * spec.num_slots
    found = f"{available / GIB:.1f} GiB free"
    if available >= planned:
        return report.ok("memory", found)
    return report.warning(
        "memory",
        found,
        expected=f"{spec.num_slots} x {spec.device.memory_bytes / GIB:.1f} GiB",
        advice=f"set memory_gib: {available / spec.num_slots / GIB:.2f} in cluster.nodes, or "
        "plans may not fit",
    )


def _check_disk(report: HostReport) -> Finding:
    """Check that the folder of trials can be written to and has room."""
    facts, spec = report.part("disk"), report.spec
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
        return report.finding(level, "disk", found)
    return report.finding(
        level,
        "disk",
        found,
        expected=f"a folder to write to, with {_size(wish)} free for logs",
        command=_mend_disk(report, path, full=free is not None and free < wish),
        advice="or let TMPDIR name another folder for commands over SSH (SetEnv in sshd_config)",
    )


def _mend_disk(report: HostReport, path: str, *, full: bool) -> str:
    """Return what removes our own leftovers, shows who fills the disk, or lets us write."""
    if not full:
        chmod = ["chmod", "1777", "--", path]
        return report.command(chmod, as_root=True)
    left = report.part("left").get("folders", ())
    ours = [entry["path"] for entry in left if not entry["used"]]
    if ours:
        return report.command(["rm", "-rf", "--", *ours])
    return report.command(["du", "-xh", "--max-depth=1", "--", path])


def _check_shared_memory(report: HostReport) -> Finding:
    spec, free = report.spec, report.part("shared_memory").get("free_bytes")
    several = spec.num_slots > 1
    wish = NCCL_SHARED_BYTES if spec.has_gpu and several else MIN_SHARED_BYTES * spec.num_slots
    if free is not None and free >= wish:
        return report.ok("shared memory", f"{_size(free)} free")
    resize = ["mount", "-o", f"remount,size={wish // MIB}M", "/dev/shm"]  # noqa: S108 - Linux's name
    return report.finding(
        "error" if not free and several else "warning",
        "shared memory",
        "no /dev/shm" if free is None else f"{_size(free)} free in /dev/shm",
        expected=f"{_size(wish)}, through which ranks of one host talk",
        command=report.command(resize, as_root=True),
        advice="in a container, start it with --shm-size or --ipc=host",
    )


def _check_limits(report: HostReport) -> Iterator[Finding]:
    facts = report.part("capacity")
    if facts.get("problem"):
        return
    limits = []
    files, locked = facts["open_files"], facts["locked_bytes"]
    if files is not None and files < MIN_OPEN_FILES:
        limits.append(("nofile", f"{files} open files", f"{MIN_OPEN_FILES} or more"))
    if facts["infiniband"] and locked is not None:
        limits.append(("memlock", f"{_size(locked)} of locked memory", "unlimited for InfiniBand"))
    if not limits:
        yield report.ok("limits", f"{'any number of' if files is None else files} open files")
    for name, found, expected in limits:
        value = "1048576" if name == "nofile" else "unlimited"
        line = f"echo '* - {name} {value}' >> /etc/security/limits.d/90-training.conf"
        yield report.warning(
            "limits",
            found,
            expected=expected,
            command=report.command(["sh", "-c", line], as_root=True),
            advice="holds for new logins",
        )


def _size(num_bytes: int) -> str:
    """Write a size for people.

    Example:
        >>> _size(2**30), _size(3 * 2**20)
        ('1.0 GiB', '3 MiB')
    """
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB else f"{num_bytes // MIB} MiB"


def _check_clock(report: HostReport) -> Finding:
    """Compare clocks; what the question itself took is in the host's favour."""
    clock = report.clock
    if clock is None:
        return unknown(report, "clock", "the host did not tell its time")
    side = "ahead of" if clock.offset_s > 0 else "behind"
    found = f"{abs(clock.offset_s):.3f} s {side} this machine (+-{clock.uncertainty_s:.3f} s)"
    if abs(clock.offset_s) - clock.uncertainty_s <= MAX_OFFSET_S:
        return report.ok("clock", found)
    return report.warning(
        "clock",
        found,
        expected=f"within {MAX_OFFSET_S:g} s",
        command=report.command(["timedatectl", "set-ntp", "true"], as_root=True),
        advice="times in logs cannot be compared; outcomes do not depend on it. If this machine's "
        "own clock is wrong, every host is reported",
    )


def _check_leftovers(report: HostReport) -> Iterator[Finding]:
    """Tell trials that run now from what is left of others."""
    facts = report.part("left")
    if "folders" not in facts:
        yield unknown(report, "leftovers", facts["problem"])
        return
    folders = [entry for entry in facts["folders"] if not entry["used"]]
    processes = [entry for entry in facts["processes"] if not entry["used"]]
    if facts["num_agents"]:
        # An agent's folder is empty of processes before its ranks start and while it tidies up.
        yield report.warning(
            "leftovers",
            f"{facts['num_agents']} agents of trials are at work",
            expected="no other trials",
            advice="another study or profile runs here; wait for it, or what is measured is both",
        )
    elif folders:
        paths = [entry["path"] for entry in folders]
        age_s = min(entry["age_s"] for entry in folders)
        yield report.warning(
            "leftovers",
            f"{len(paths)} folders of earlier trials, the last from {_age(age_s)} ago",
            expected="none",
            command=report.command(["rm", "-rf", "--", *paths]),
            advice="their agents are gone; they only take room",
        )
    if processes:
        pids = [str(entry["pid"]) for entry in processes]
        yield report.warning(
            "leftovers",
            "; ".join(entry["command"] for entry in processes),
            expected="no process of earlier trials",
            command=report.command(["kill", "-KILL", *pids]),
            advice="their agent is gone",
        )
    if not (folders or processes or facts["num_agents"]):
        yield report.ok("leftovers", "none")


def _age(seconds: float) -> str:
    """Write an age for people.

    Example:
        >>> _age(5), _age(7200)
        ('5 s', '120 min')
    """
    return f"{seconds:.0f} s" if seconds < _MINUTE_S else f"{seconds / _MINUTE_S:.0f} min"
