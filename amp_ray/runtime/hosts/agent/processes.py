"""Processes below this one: the namespace that they live in, what they may do, how they end."""

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

TAG_VARIABLE = "AMP_RAY_TAG"  # of every rank, by which a sweep finds it and its children
KILL_LIMIT_S = 10.0  # a process that survives SIGKILL so long hangs in the kernel
POLL_S = 0.02
OOM_SCORE = 1000  # the highest: where memory runs out, the kernel ends a trial before anything else
_NUM_THREADS = 17  # place of the number of threads in /proc/PID/stat after the state: proc(5)
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_NAME, PR_SET_CHILD_SUBREAPER = 1, 4, 15, 36
PR_CAPBSET_DROP = 24  # <linux/prctl.h>

CAP_SYS_PTRACE, CAPABILITY_VERSION = 19, 0x20080522  # <linux/capability.h>

CLONE_NEWNS, CLONE_NEWUSER, CLONE_NEWPID = 0x20000, 0x10000000, 0x20000000  # <linux/sched.h>
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REC, MS_SLAVE = 2, 4, 8, 0x4000, 0x80000  # <linux/mount.h>
# As root, or as anybody; the user keeps its number either way
WAYS = (CLONE_NEWPID | CLONE_NEWNS, CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNS)

libc = ctypes.CDLL(None, use_errno=True)


def living() -> list[int]:
    """List all processes that have not ended."""
    return [pid for pid, (_, alive) in _process_table().items() if alive]


def _process_table() -> dict[int, tuple[int, bool]]:
    """Map every process, ended ones that nobody has reaped included, to (parent, whether it lives).

    A process whose first thread has ended looks like a zombie while other threads still end, which
    takes torch's ranks a moment; until then its children are its own.
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
    """Return the kernel's letter for what a process does, T if it is stopped; empty if gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return ""
    return text.rsplit(b")", 1)[1].split()[0].decode()


def descendants(spared: Sequence[int] = ()) -> list[int]:
    """List the living processes below this one, but for the spared ones themselves."""
    table = _process_table()
    below, todo = [], [os.getpid()]
    while todo:
        parent = todo.pop()
        children = [pid for pid, (above, _) in table.items() if above == parent]
        below += children
        todo += children
    return [pid for pid in below if table[pid][1] and pid not in spared]


def tagged(tag: str) -> list[int]:
    """List the processes that carry a tag in their environment or as an argument."""
    return [*marked(f"{TAG_VARIABLE}={tag}"), *marked(tag, name="cmdline")]


def marked(mark: str, name: str = "environ") -> list[int]:
    """List the processes other than this one with a word among their variables or arguments."""
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
    """End processes: TERM, grace, KILL until none is listed; return those that would not go."""
    start = time.monotonic()
    pids = list_pids()
    send_signal(pids, signal.SIGTERM)
    send_signal(pids, signal.SIGCONT)  # a stopped process takes TERM only when it goes on
    while pids and time.monotonic() - start < grace_s + KILL_LIMIT_S:
        time.sleep(POLL_S)
        meanwhile()
        pids = list_pids()
        if time.monotonic() - start >= grace_s:
            send_signal(pids, signal.SIGKILL)
    meanwhile()
    return pids


def send_signal(pids: Sequence[int], number: int) -> None:
    """Signal processes, of which some may be gone or belong to others."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def describe(pid: int) -> str:
    """Name a process for a person."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return str(pid)
    return f"{pid} {b' '.join(words).decode('utf-8', 'replace').strip()}"


def num_oom_kills() -> int:
    """Count what this kernel's out-of-memory killer has killed since it started."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/vmstat").read_text(encoding="ascii").splitlines()
        return int(dict(line.split() for line in lines).get("oom_kill", 0))
    return 0


def die_with_parent(parent: int) -> Callable[[], None]:
    """Make what a new child does first: bind its life to its parent's, and take less power."""

    def prepare() -> None:
        drop_ptrace()
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    return prepare


def die_first(pid: int) -> None:
    """Let the kernel end a child, and what it starts, before anything else of a full memory."""
    with contextlib.suppress(OSError):
        Path(f"/proc/{pid}/oom_score_adj").write_text(str(OOM_SCORE), encoding="ascii")


def set_dumpable(*, dumpable: bool) -> None:
    """Open this process to others of its user, or close it.

    While it is closed, nobody without CAP_SYS_PTRACE can read its memory, trace it, or open or copy
    its descriptors. A new program (execve) opens it again.
    """
    libc.prctl(PR_SET_DUMPABLE, int(dumpable), 0, 0, 0)


def drop_ptrace() -> None:
    """Give up CAP_SYS_PTRACE for good, as far as this process has it: root's ranks do."""
    libc.prctl(PR_CAPBSET_DROP, CAP_SYS_PTRACE, 0, 0, 0)
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION, 0)
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable; then their upper halves
    if libc.capget(header, sets) == 0:
        for index in range(3):
            sets[index] &= ~(1 << CAP_SYS_PTRACE)
        libc.capset(header, sets)


def become_subreaper() -> None:
    """Let orphaned descendants come back to this process."""
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def set_name(name: str) -> None:
    """Set what process lists show as this process's name."""
    libc.prctl(PR_SET_NAME, name.encode(), 0, 0, 0)


def child_alarm() -> tuple[int, int]:
    """Make a pipe whose read end becomes readable when a child ends."""
    read_end, write_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    return read_end, write_end


def reap() -> Iterator[tuple[int, int]]:
    """Yield (process id, wait status) of every child that has ended."""
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
    """Go on as the first process of an own PID namespace, or say ``none: `` and why not."""
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
