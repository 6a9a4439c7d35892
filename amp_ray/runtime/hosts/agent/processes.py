"""Child processes: their PID namespace, their rights, and how to find and end them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

TAG_VARIABLE = "AMP_RAY_TAG"  # variable of every rank; a sweep finds processes by it
KILL_LIMIT_S = 10.0  # a process that survives SIGKILL this long hangs in the kernel
POLL_S = 0.02
OOM_SCORE = 1000  # the highest, so that the kernel kills trials first when memory runs out
_NUM_THREADS = 17  # index of num_threads in /proc/PID/stat, counted from the state: proc(5)
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_NAME, PR_SET_CHILD_SUBREAPER = 1, 4, 15, 36
PR_CAPBSET_DROP = 24  # <linux/prctl.h>

CAP_SYS_PTRACE, CAPABILITY_VERSION = 19, 0x20080522  # <linux/capability.h>

CLONE_NEWNS, CLONE_NEWUSER, CLONE_NEWPID = 0x20000, 0x10000000, 0x20000000  # <linux/sched.h>
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REC, MS_SLAVE = 2, 4, 8, 0x4000, 0x80000  # <linux/mount.h>
# Flags for root, then for other users; both keep the user id
WAYS = (CLONE_NEWPID | CLONE_NEWNS, CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNS)

libc = ctypes.CDLL(None, use_errno=True)


def living() -> list[int]:
    """List all processes, without zombies."""
    return [pid for pid, (_, alive) in _process_table().items() if alive]


def _process_table() -> dict[int, tuple[int, bool]]:
    """Map every process, zombies included, to (parent, whether it lives).

    A process looks like a zombie from the end of its first thread to the end of its last one, a
    moment later for torch's ranks. It counts as living meanwhile, since it still has its children.
    """
    table = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                words = (folder / "stat").read_bytes().rsplit(b")", 1)[1].split()
                alive = words[0] != b"Z" or int(words[_NUM_THREADS]) > 1
                table[int(folder.name)] = int(words[1]), alive
    return table


def state_of(pid: int) -> str:
    """Return the kernel's letter for a process's state, such as T for stopped; empty if gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return ""
    return text.rsplit(b")", 1)[1].split()[0].decode()


def descendants(spared: Sequence[int] = ()) -> list[int]:
    """List this process's living descendants without ``spared``, whose children are listed."""
    table = _process_table()
    below, todo = [], [os.getpid()]
    while todo:
        parent = todo.pop()
        children = [pid for pid, (above, _) in table.items() if above == parent]
        below += children
        todo += children
    return [pid for pid in below if table[pid][1] and pid not in spared]


def tagged(tag: str) -> list[int]:
    """List the processes with a tag in their environment or arguments."""
    return [*marked(f"{TAG_VARIABLE}={tag}"), *marked(tag, name="cmdline")]


def marked(mark: str, name: str = "environ") -> list[int]:
    """List the processes, except this one, whose ``environ`` or ``cmdline`` has an entry."""
    pids = []
    for pid in living():
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/{name}").read_bytes().split(b"\0")
            if mark.encode() in words and pid != os.getpid():
                pids.append(pid)
    return pids


def end_all(
    list_pids: Callable[[], list[int]], grace_s: float, meanwhile: Callable[[], None]
) -> list[int]:
    """End processes: TERM, grace, KILL until none is listed; return those that survive."""
    start = time.monotonic()
    pids = list_pids()
    send_signal(pids, signal.SIGTERM)
    send_signal(pids, signal.SIGCONT)  # a stopped process handles TERM only after CONT
    while pids and time.monotonic() - start < grace_s + KILL_LIMIT_S:
        time.sleep(POLL_S)
        meanwhile()
        pids = list_pids()
        if time.monotonic() - start >= grace_s:
            send_signal(pids, signal.SIGKILL)
    meanwhile()
    return pids


def send_signal(pids: Sequence[int], number: int) -> None:
    """Signal processes; ignore those that are gone or belong to other users."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def describe(pid: int) -> str:
    """Describe a process for a message."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return str(pid)
    return f"{pid} {b' '.join(words).decode('utf-8', 'replace').strip()}"


def num_oom_kills() -> int:
    """Return the number of out-of-memory kills since this kernel started."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/vmstat").read_text(encoding="ascii").splitlines()
        return int(dict(line.split() for line in lines).get("oom_kill", 0))
    return 0


def die_with_parent(parent: int) -> Callable[[], None]:
    """Return a ``preexec_fn``: the child dies with its parent and drops CAP_SYS_PTRACE."""

    def prepare() -> None:
        drop_ptrace()
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    return prepare


def die_first(pid: int) -> None:
    """Let the kernel's out-of-memory killer choose a child and its descendants first."""
    with contextlib.suppress(OSError):
        Path(f"/proc/{pid}/oom_score_adj").write_text(str(OOM_SCORE), encoding="ascii")


def set_dumpable(*, dumpable: bool) -> None:
    """Set whether other processes of the same user can inspect this one.

    A process that is not dumpable can be traced, and its memory and descriptors read, only with
    CAP_SYS_PTRACE. Executing a new program resets the setting.
    """
    libc.prctl(PR_SET_DUMPABLE, int(dumpable), 0, 0, 0)


def drop_ptrace() -> None:
    """Drop CAP_SYS_PTRACE permanently; without this, the ranks of root would have it."""
    libc.prctl(PR_CAPBSET_DROP, CAP_SYS_PTRACE, 0, 0, 0)
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION, 0)
    sets = (ctypes.c_uint32 * 6)()  # low words (effective, permitted, inheritable), then high
    if libc.capget(header, sets) == 0:
        for index in range(3):
            sets[index] &= ~(1 << CAP_SYS_PTRACE)
        libc.capset(header, sets)


def become_subreaper() -> None:
    """Make this process the parent of its orphaned descendants."""
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def set_name(name: str) -> None:
    """Set this process's name in process lists."""
    libc.prctl(PR_SET_NAME, name.encode(), 0, 0, 0)


def child_alarm() -> tuple[int, int]:
    """Return the ends of a pipe whose read end becomes readable when a child ends."""
    read_end, write_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    return read_end, write_end


def reap() -> Iterator[tuple[int, int]]:
    """Reap all ended children; yield (process id, wait status)."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        yield pid, status


# ------------------------------------------------------------------------------------ namespace


def isolate() -> str:
    """Enter a new PID namespace as its first process; if impossible, return ``none: REASON``."""
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
    """Try unshare(2), which cannot be undone, in a child process; return the error, if any."""
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
            os._exit(1)  # also ends the first process; its parent sees the failure
        os._exit(0)
    os.close(write_end)
    os.waitpid(child, 0)
    with os.fdopen(read_end, "rb") as pipe:
        return pipe.read().decode()


def _leave(flags: int) -> None:
    """Unshare the user (if in ``flags``), PID and mount namespaces, for new children."""
    user, group = os.geteuid(), os.getegid()
    _call("unshare", flags)
    if flags & CLONE_NEWUSER:
        Path("/proc/self/setgroups").write_text("deny", encoding="ascii")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1", encoding="ascii")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1", encoding="ascii")
    # Slave, not private: the host's later mounts (automounted homes) still appear
    _call("mount", b"none", b"/", None, MS_REC | MS_SLAVE, None)


def _mount_proc() -> None:
    """Mount /proc for the new namespace; called by its first process."""
    _call("mount", b"proc", b"/proc", b"proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, None)


def _call(name: str, *arguments: int | bytes | None) -> None:
    if getattr(libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def _guard(child: int) -> NoReturn:
    """Wait outside the namespace: forward signals, exit with the agent's exit code."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _frame: os.kill(child, number))
    os.close(0)
    os.close(1)
    status = os.waitpid(child, 0)[1]
    sys.stderr.flush()
    os._exit(os.WEXITSTATUS(status) if os.WIFEXITED(status) else 1)
