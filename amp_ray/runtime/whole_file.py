"""Writes files atomically, and never through a symbolic link.

This module is also sent to hosts, so it imports nothing of the package.
"""

import contextlib
import os
import secrets
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Final

_FLAGS: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_NAME_BYTES: Final = 8
PARTIAL: Final = ".amp-ray-*.partial"  # temporary files; a killed process leaves them


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
