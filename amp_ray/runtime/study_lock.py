"""One driver per study: a lock that dies with its process, and says whose it is."""

import contextlib
import fcntl
import json
import os
import socket
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from amp_ray.errors import AmpRayError, InputError
from amp_ray.runtime.study_events import now

LOCK: Final = "lock"


class StudyLock:
    """The lock of a study's folder.

    The kernel's lock on the open file is the arbiter: it ends with the process, however that
    ends, so a stale one breaks by itself and two drivers cannot both break it. The file's content
    only tells people whose it is; the file is never removed, since a waiting driver might hold
    the old one open.
    """

    def __init__(self, folder: Path) -> None:
        """Name the folder; nothing is locked yet."""
        self.path = folder / LOCK
        self._descriptor = -1
        self.broken: str | None = None

    def acquire(self) -> None:
        """Take the lock.

        Afterwards ``broken`` names the driver that had it and died, if one did.

        Raises:
            InputError: If a driver at work has it; by pid and host.
            AmpRayError: If the file cannot be written, or the file system has no locks.
        """
        try:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            message = f"{self.path}: cannot be written: {error.strerror}"
            raise AmpRayError(message) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _describe(_read(descriptor))
            os.close(descriptor)
            message = f"the study in {self.path.parent} is being driven by {holder}"
            raise InputError(message) from None
        except OSError as error:
            os.close(descriptor)
            message = (
                f"{self.path}: cannot be locked ({error.strerror}): keep studies on a file system "
                "with locks"
            )
            raise AmpRayError(message) from error
        self._descriptor = descriptor
        before = _read(descriptor)
        self.broken = _describe(before) if before else None
        self._write({"pid": os.getpid(), "host": socket.gethostname(), "since": now()})

    def release(self) -> None:
        """Give the lock back."""
        if self._descriptor < 0:
            return
        with contextlib.suppress(OSError):
            os.ftruncate(self._descriptor, 0)
        os.close(self._descriptor)
        self._descriptor = -1

    def __enter__(self) -> Self:
        """Take the lock."""
        self.acquire()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Give it back."""
        self.release()

    def _write(self, holder: dict[str, Any]) -> None:
        """Tell people whose it is."""
        try:
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, json.dumps(holder).encode() + b"\n", 0)
        except OSError as error:
            os.close(self._descriptor)
            self._descriptor = -1
            message = f"{self.path}: cannot be written: {error.strerror}"
            raise AmpRayError(message) from error


def _read(descriptor: int) -> dict[str, Any]:
    """Read whose lock it is; empty if nobody's, or if that is just being written."""
    with contextlib.suppress(ValueError, OSError):
        holder = json.loads(os.pread(descriptor, 4096, 0))
        if isinstance(holder, dict):
            return holder
    return {}


def _describe(holder: dict[str, Any]) -> str:
    """Name a driver."""
    if not holder:
        return "another driver"
    return f"process {holder.get('pid')} on {holder.get('host')} since {holder.get('since')}"
