"""What this host is and has left: cores, memory, disk, limits, GPUs, and what lies about."""

from __future__ import annotations

import contextlib
import getpass
import os
import re
import resource
import secrets
import socket
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .job import DEVICE_VARIABLE, FOLDER_VARIABLE, base_folder, make_folder
from .processes import TAG_VARIABLE, describe, living

if TYPE_CHECKING:
    from collections.abc import Iterator

    Facts = dict[str, Any]

SMI_TIMEOUT_S = 20.0
"""Without persistence mode the driver takes seconds per GPU to wake up."""

GPU_QUERY = ("index", "uuid", "memory.total", "memory.used", "name")
PROCESS_QUERY = ("gpu_uuid", "pid", "used_memory", "process_name")
"""Names come last: they may hold commas."""

MIB = 2**20
KIB = 1024

GROUPS = Path("/proc/self/cgroup")
CGROUPS = Path("/sys/fs/cgroup")

FOLDERS = re.compile(r"amp-ray-([\w.-]+-[0-9a-f]{8}|[0-9a-f]{16}-warm)")
"""How folders of trials and of warm processes are called."""

AGENT_TAG = re.compile(rb"amp-ray-[0-9a-f]{16}")


def identity() -> Facts:
    """Say who answers; hosts that share kernel and network are one machine."""
    return {
        "hostname": socket.gethostname(),
        "uid": os.getuid(),
        "user": _user(),
        "boot_id": Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip(),
        "network": os.readlink("/proc/self/ns/net"),  # noqa: PTH115 - Path.readlink is of 3.9
    }


def capacity() -> Facts:
    """Count cores, free memory and limits."""
    memory = Path("/proc/meminfo").read_text(encoding="ascii")
    available = re.search(r"^MemAvailable:\s+(\d+) kB", memory, re.MULTILINE)
    return {
        "num_cores": len(os.sched_getaffinity(0)),
        "quota_cores": quota_cores(),
        "load": os.getloadavg()[0],
        "memory_bytes": int(available[1]) * KIB if available is not None else None,
        "open_files": _limit(resource.RLIMIT_NOFILE),
        "locked_bytes": _limit(resource.RLIMIT_MEMLOCK),
        "infiniband": sorted(path.name for path in Path("/sys/class").glob("infiniband/*")),
    }


def quota_cores(groups: Path = GROUPS, root: Path = CGROUPS) -> float | None:
    """Find the smallest CPU quota of this process's control groups, of either version."""
    quotas: list[float] = []
    with contextlib.suppress(OSError):
        for line in groups.read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers or "cpu" in controllers.split(","):
                top = root / controllers if controllers else root
                folder = top / path.strip("/")
                inside = [up for up in (folder, *folder.parents) if top in (up, *up.parents)]
                quotas += [quota for up in inside for quota in _quotas(up)]
    return min(quotas, default=None)


def disk(base: str | None) -> Facts:
    """Look at the folder of all trials' folders: how much is free, and may we write?"""
    folder = base_folder(base)
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    problem = None if existing.is_dir() else f"{existing} is no folder"
    probe = existing / f"amp-ray-doctor-{secrets.token_hex(4)}"
    try:
        if problem is None:
            make_folder(probe)
            probe.rmdir()
    except OSError as error:
        problem = error.strerror or str(error)
    return {"path": str(folder), "free_bytes": free_bytes(existing), "problem": problem}


def free_bytes(folder: Path) -> int | None:
    """Return what a user may still write to a file system."""
    with contextlib.suppress(OSError):
        found = os.statvfs(folder)
        return found.f_bavail * found.f_frsize
    return None


def gpus() -> Facts:
    """Ask the driver's own tool for GPUs and for what computes on them."""
    try:
        rows = list(_query("gpu", GPU_QUERY))
        processes = list(_query("compute-apps", PROCESS_QUERY))
    except FileNotFoundError:
        problem = "nvidia-smi is not there"
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        problem = f"nvidia-smi: {error}"
    else:
        ours = {pid for pid, _ in _marked(TAG_VARIABLE)}
        return {
            "gpus": [_gpu(row) for row in rows],
            "processes": [_gpu_process(row, ours) for row in processes],
            "visible": os.environ.get(DEVICE_VARIABLE),
            "problem": None,
        }
    return {"gpus": [], "processes": [], "visible": None, "problem": problem}


def leftovers(base: str | None) -> Facts:
    """List folders and processes of trials, and whether an agent is at work on them."""
    tags = {pid: tag for pid, tag in _marked(TAG_VARIABLE) if AGENT_TAG.fullmatch(tag)}
    used = {os.fsdecode(path) for _, path in _marked(FOLDER_VARIABLE)}
    agents = set(_agents())
    folders = []
    now = time.time()
    with contextlib.suppress(OSError):
        for path in sorted(base_folder(base).iterdir()):
            with contextlib.suppress(OSError):
                found = path.stat()
                if FOLDERS.fullmatch(path.name) and found.st_uid == os.getuid():
                    age_s = max(0.0, now - found.st_mtime)
                    folders.append({"path": str(path), "age_s": age_s, "used": str(path) in used})
    processes = [
        {"pid": pid, "command": describe(pid), "used": tag in agents} for pid, tag in tags.items()
    ]
    return {"folders": folders, "processes": processes, "num_agents": len(agents)}


def resolve(name: str) -> list[str]:
    """Return the addresses that a name stands for on this host."""
    with contextlib.suppress(OSError, UnicodeError):
        return sorted({str(entry[4][0]) for entry in socket.getaddrinfo(name, None)})
    return []


def _user() -> str:
    """Return the name of the user, or the number where there is none."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def _limit(kind: int) -> int | None:
    """Return a soft limit; None for none."""
    soft, _ = resource.getrlimit(kind)
    return None if soft == resource.RLIM_INFINITY else soft


def _quotas(folder: Path) -> Iterator[float]:
    """Yield the CPU quota of one control group, if it has one."""
    with contextlib.suppress(OSError, ValueError):
        quota, period = (folder / "cpu.max").read_text(encoding="ascii").split()
        yield int(quota) / int(period)
    with contextlib.suppress(OSError, ValueError):
        quota = (folder / "cpu.cfs_quota_us").read_text(encoding="ascii")
        period = (folder / "cpu.cfs_period_us").read_text(encoding="ascii")
        if int(quota) > 0:
            yield int(quota) / int(period)


def _query(what: str, keys: tuple[str, ...]) -> Iterator[list[str]]:
    """Yield the rows of a query, each as long as ``keys``."""
    argv = ["nvidia-smi", f"--query-{what}={','.join(keys)}", "--format=csv,noheader,nounits"]
    ended = subprocess.run(argv, capture_output=True, text=True, timeout=SMI_TIMEOUT_S, check=False)
    if ended.returncode != 0:
        words = (ended.stdout.strip() or ended.stderr.strip()).splitlines()
        raise ValueError(words[0] if words else f"exit code {ended.returncode}")
    for line in ended.stdout.splitlines():
        if line.strip():
            cells = [cell.strip() for cell in line.split(",", len(keys) - 1)]
            if len(cells) != len(keys):
                raise ValueError(f"cannot read {line!r}")
            yield cells


def _gpu(cells: list[str]) -> Facts:
    index, uuid, total, used, name = cells
    memory = {"memory_bytes": _mib(total), "used_bytes": _mib(used)}
    return {"index": int(index), "uuid": uuid, "name": name, **memory}


def _gpu_process(cells: list[str], ours: set[int]) -> Facts:
    uuid, pid, used, name = cells
    number = int(pid) if pid.isdigit() else 0
    facts = {"uuid": uuid, "pid": number, "name": name, "memory_bytes": _mib(used)}
    return {**facts, "ours": number in ours}


def _mib(text: str) -> int | None:
    """Read a number of MiB; some boards and containers do not tell."""
    return int(text) * MIB if text.isdigit() else None


def _marked(variable: str) -> Iterator[tuple[int, bytes]]:
    """Yield (process id, value) of every process that we may look at and that has a variable."""
    start = f"{variable}=".encode()
    for pid in living():
        with contextlib.suppress(OSError):
            for word in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                if word.startswith(start):
                    yield pid, word[len(start) :]


def _agents() -> Iterator[bytes]:
    """Yield the tags of the agents on this host."""
    for pid in living():
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
            if AGENT_TAG.fullmatch(words[-1]):
                yield words[-1]
