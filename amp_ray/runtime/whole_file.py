"""Writes files atomically, and never through a symbolic link; opens nothing but files.

This module is also sent to hosts, so it imports nothing of the package.
"""

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Final

_FLAGS: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_NAME_BYTES: Final = 8
PARTIAL: Final = ".amp-ray-*.partial"  # temporary files; a killed process leaves them


def regular(path: str, flags: int, mode: int = 0o666) -> int:
    """Open a file, as an ``opener`` for the built-in ``open``; refuse all else but ``/dev/null``.

    A pipe without a writer would block for ever, and a device may have no end.
    """
    try:
        descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, mode)
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        raise OSError(errno.ENXIO, "this is a pipe or a socket; expected a file") from error
    kind = os.fstat(descriptor).st_mode
    if stat.S_ISREG(kind) or path == os.devnull:
        return descriptor
    os.close(descriptor)
    if stat.S_ISDIR(kind):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    name = "pipe" if stat.S_ISFIFO(kind) else "device"
    raise OSError(errno.EINVAL, f"this is a {name}; expected a file")


def read_regular(path: Path, most_bytes: int) -> bytes:
    """Read a file with `regular`; raise `ValueError` if it is too long."""
    with open(path, "rb", opener=regular) as file:
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise ValueError(f"longer than {most_bytes:,} bytes")
    return data


def write_whole(path: Path, pieces: Iterable[bytes], *, mode: int = 0o666) -> None:
    """Write a temporary file with a random name in the same folder, then rename it to ``path``.

    A link at ``path`` is replaced, never followed. The umask reduces the permissions ``mode``, and
    so do the permissions of a file that is replaced: a private file stays private.
    """
    partial = path.with_name(PARTIAL.replace("*", secrets.token_hex(_NAME_BYTES)))
    descriptor = os.open(partial, _FLAGS, mode & _mode_of(path))
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.writelines(pieces)
            file.flush()
            os.fsync(descriptor)
        partial.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise


def _mode_of(path: Path) -> int:
    """Return the permissions of an existing file; all permissions if there is none."""
    with contextlib.suppress(FileNotFoundError):
        status = path.lstat()
        if stat.S_ISREG(status.st_mode):
            return stat.S_IMODE(status.st_mode)
    return 0o777
