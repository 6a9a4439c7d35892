"""An own PID namespace for the agent, where the kernel allows one."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path
from typing import NoReturn

from .processes import PR_SET_PDEATHSIG, libc

CLONE_NEWNS, CLONE_NEWUSER, CLONE_NEWPID = 0x20000, 0x10000000, 0x20000000  # <linux/sched.h>
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REC, MS_SLAVE = 2, 4, 8, 0x4000, 0x80000  # <linux/mount.h>

WAYS = (CLONE_NEWPID | CLONE_NEWNS, CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNS)
"""As root, or as anybody; the user keeps its number either way."""


def isolate() -> str:
    """Go on as the first process of an own PID namespace, where possible.

    Returns ``namespace``, or ``none: `` and the reason.
    """
    problems = []
    for flags in WAYS:
        problem = _rehearse(flags)
        if problem:
            problems.append(problem)
            continue
        _leave(flags)
        child = os.fork()
        if child != 0:
            _guard(child)
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        _mount_proc()
        return "namespace"
    return f"none: {'; '.join(problems)}"


def _rehearse(flags: int) -> str:
    """Try in a child that is thrown away, since unshare(2) cannot be undone; say what failed."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            _leave(flags)
            first = os.fork()
            if first == 0:
                _mount_proc()
                os._exit(0)
            problem = "" if os.waitpid(first, 0)[1] == 0 else "/proc cannot be mounted"
            os.write(write_end, problem.encode())
        except OSError as error:
            os.write(write_end, str(error.strerror).encode())
            os._exit(1)  # also of the first process, which its parent sees as a failure
        os._exit(0)
    os.close(write_end)
    os.waitpid(child, 0)
    with os.fdopen(read_end, "rb") as pipe:
        return pipe.read().decode()


def _leave(flags: int) -> None:
    """Leave the user (where asked for), PID and mount namespaces; children are in the new ones."""
    user, group = os.geteuid(), os.getegid()
    _call("unshare", flags)
    if flags & CLONE_NEWUSER:
        Path("/proc/self/setgroups").write_text("deny", encoding="ascii")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1", encoding="ascii")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1", encoding="ascii")
    # Slave, not private: what the host mounts later (automounted homes) still appears.
    _call("mount", b"none", b"/", None, MS_REC | MS_SLAVE, None)


def _mount_proc() -> None:
    """Show only the new namespace in /proc; for its first process to do."""
    _call("mount", b"proc", b"/proc", b"proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, None)


def _call(name: str, *arguments: int | bytes | None) -> None:
    """Call a C function that returns 0 or sets errno."""
    if getattr(libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def _guard(child: int) -> NoReturn:
    """Stay outside the namespace: hand on signals, end with the agent's own exit code."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _frame: os.kill(child, number))
    os.close(0)
    os.close(1)
    status = os.waitpid(child, 0)[1]
    sys.stderr.flush()
    os._exit(os.WEXITSTATUS(status) if os.WIFEXITED(status) else 1)
