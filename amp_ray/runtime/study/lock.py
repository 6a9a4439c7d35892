"""One driver per study: a lock that dies with its process, and says whose it is."""

import contextlib
import fcntl
import json
import os
import time
from pathlib import Path
from typing import Any, Final, Self

from amp_ray.errors import AmpRayError, InputError, Where
from amp_ray.runtime.study.events import now

LOCK: Final = "lock"

# A driver that has just taken the lock writes its name a moment later; until then that of the one
# before may stand there
_NUM_LOOKS: Final = 50
_PAUSE_S: Final = 0.02
_MOST_BYTES: Final = 4096  # of a name; more is none of ours
_START_FIELD: Final = 19  # of ``/proc/PID/stat`` after the state, which follows the name in ()


class StudyLock:
    """The lock of a study's folder.

    The kernel's lock on the open file is the arbiter: it ends with the process, however that
    ends, so a stale one breaks by itself and two drivers cannot both break it. The file's content
    tells people whose it is, and guards folders that several machines share: their file system
    may keep the kernels' locks apart. There, the lock of a driver that was killed on another
    machine has to be removed by hand. The file itself stays, since a driver that waits may hold
    it open.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / LOCK
        self._descriptor = -1
        self.broken: str | None = None

    def acquire(self) -> None:
        """Take the lock; ``broken`` then names the driver that had it and died, if one did."""
        descriptor = self._lock()
        try:
            self.broken = self._take_over(descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor = descriptor

    def release(self) -> None:
        """Give the lock back."""
        if self._descriptor < 0:
            return
        with contextlib.suppress(OSError):
            os.ftruncate(self._descriptor, 0)
        os.close(self._descriptor)
        self._descriptor = -1

    def __enter__(self) -> Self:
        self.acquire()
        return self

    def __exit__(self, *_error: object) -> None:
        self.release()

    def _lock(self) -> int:
        """Return the open file with the kernel's lock on it."""
        holder: dict[str, Any] = {}
        for _look in range(_NUM_LOOKS):
            descriptor = self._open()
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.samestat(os.fstat(descriptor), self.path.stat()):
                    return descriptor
            except BlockingIOError:
                holder = _read(descriptor)
            except FileNotFoundError:
                pass  # removed by hand since it was opened: once more, with a new one
            except OSError as error:
                os.close(descriptor)
                raise AmpRayError(
                    f"{self.path}: cannot be locked ({error.strerror}): keep studies on a file "
                    "system with locks"
                ) from error
            os.close(descriptor)
            if holder and not _is_gone(holder):
                break
            time.sleep(_PAUSE_S)
        raise InputError(f"{self.path.parent} is being driven by {_describe(holder)}")

    def _take_over(self, descriptor: int) -> str | None:
        """Write whose it is now; return whose it was, if that driver died."""
        holder = {**_here(), "pid": os.getpid(), "start": _start(os.getpid()), "since": now()}
        before = _read(descriptor)
        is_ours = {**before, "since": holder["since"]} == holder
        if before and not is_ours and not _is_gone(before):
            raise InputError(
                f"{self.path.parent} is being driven by {_describe(before)}, or was until that "
                f"ended without a trace; if you are sure that it has, remove {self.path}"
            )
        try:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(holder).encode() + b"\n", 0)
        except OSError as error:
            raise self._unusable(error) from error
        return _describe(before) if before else None

    def _open(self) -> int:
        try:
            return os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise self._unusable(error) from error

    def _unusable(self, error: OSError) -> InputError:
        return InputError(f"cannot be written: {error.strerror}", where=Where(file=str(self.path)))


def _read(descriptor: int) -> dict[str, Any]:
    """Read whose lock it is; empty if nobody's, or if that is just being written."""
    with contextlib.suppress(ValueError, OSError):
        holder = json.loads(os.pread(descriptor, _MOST_BYTES, 0))
        if isinstance(holder, dict):
            return holder
    return {}


def _describe(holder: dict[str, Any]) -> str:
    if not holder:
        return "another driver"
    return f"process {holder.get('pid')} on {holder.get('host')} since {holder.get('since')}"


def _is_gone(holder: dict[str, Any]) -> bool:
    """Tell whether a driver has ended for sure that has no lock in this kernel."""
    here = _here()
    if holder.get("boot") != here["boot"]:
        # The same machine has been started again since, or it is another one.
        return (holder.get("host"), holder.get("machine")) == (here["host"], here["machine"])
    if holder.get("pids") != here["pids"]:
        return True  # a container's: its numbers mean nothing here, but its kernel is this one
    pid = holder.get("pid")
    start = _start(pid) if isinstance(pid, int) else None
    return start is None or start != holder.get("start")


def _here() -> dict[str, str]:
    """Return what tells this machine, its run and this process's numbering from others."""
    pids = ""
    with contextlib.suppress(OSError):
        pids = str(Path("/proc/self/ns/pid").readlink())
    return {
        "host": os.uname().nodename,
        "machine": _line("/etc/machine-id"),
        "boot": _line("/proc/sys/kernel/random/boot_id"),
        "pids": pids,
    }


def _start(pid: int) -> str | None:
    """Return when a process was started, in ticks; None if there is none, or only its remains."""
    fields = _line(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return fields[_START_FIELD] if fields and fields[0] not in {"X", "Z"} else None


def _line(path: str) -> str:
    """Return the content of a small file of the system; empty if there is none."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
