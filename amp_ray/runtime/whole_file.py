"""The one way to write a file: whole or not at all, and through no link that lies in wait.

Hosts get this module too, so it imports nothing of the package.
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
PARTIAL: Final = ".amp-ray-*.partial"  # names of files that are being written; kills leave them


def write_whole(path: Path, pieces: Iterable[bytes], *, mode: int = 0o666) -> None:
    """Write a file under a new random name beside it, then rename it to ``path``.

    A link at ``path`` is replaced, never followed. The umask narrows ``mode`` as usual, and so does
    the file that is replaced: one that its owner has closed to others stays closed.
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
    """Return the permissions of a file that stands there; all of them if none does."""
    with contextlib.suppress(FileNotFoundError):
        status = path.lstat()
        if stat.S_ISREG(status.st_mode):
            return stat.S_IMODE(status.st_mode)
    return 0o777
