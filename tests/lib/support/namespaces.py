"""Linux namespaces and processes as the test hosts need them."""

import contextlib
import ctypes
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_CLONE_NEWNET: Final = 0x40000000  # ``<linux/sched.h>``; Python 3.11 has no ``os.setns``
_CHILD_TIMEOUT_S: Final = 120.0
_POLL_S: Final = 0.005


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """A living process."""

    pid: int
    name: str
    command: str


@contextlib.contextmanager
def network_of(pid: int) -> Iterator[None]:
    """Move this thread, and threads that it starts, into a process's network; then move back."""
    with (
        Path("/proc/thread-self/ns/net").open("rb") as before,
        Path(f"/proc/{pid}/ns/net").open("rb") as wanted,
    ):
        _set_network(wanted.fileno())
        try:
            yield
        finally:
            _set_network(before.fileno())


def _set_network(descriptor: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns failed")


def run_in_network(pid: int, argv: Sequence[str], *, check: bool = True, text: str = "") -> None:
    """Run a command in the network namespace of a process."""
    wrapped = ["nsenter", f"--net=/proc/{pid}/ns/net", "--", *argv]
    result = subprocess.run(wrapped, capture_output=True, text=True, check=False, input=text)
    if check and result.returncode != 0:
        raise RuntimeError(f"{' '.join(argv)} failed: {result.stderr.strip()} {text!r}")


def run_ip(pid: int, lines: Sequence[str]) -> None:
    """Run several ``ip`` commands at once in the network namespace of a process."""
    run_in_network(pid, ["ip", "-batch", "-"], text="\n".join(lines) + "\n")


def generate_key(path: Path, comment: str) -> None:
    """Make an SSH key pair without a passphrase."""
    argv = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", comment, "-f", str(path)]
    subprocess.run(argv, check=True, stdin=subprocess.DEVNULL)


def child_of(pid: int) -> int:
    """Return the only child of a process; wait until it exists."""
    deadline = time.monotonic() + _CHILD_TIMEOUT_S
    children = Path(f"/proc/{pid}/task/{pid}/children")
    while time.monotonic() < deadline:
        found = children.read_text(encoding="ascii").split() if children.exists() else []
        if found:
            return int(found[0])
        time.sleep(_POLL_S)
    raise RuntimeError(f"process {pid} started no child")


def descendants(pid: int) -> tuple[Process, ...]:
    """List the living descendants of a process, in all its PID namespaces, without zombies."""
    parents: dict[int, int] = {}
    living: dict[int, Process] = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            text = (folder / "stat").read_text(encoding="utf-8", errors="replace")
            name = text[text.index("(") + 1 : text.rindex(")")]
            state, parent = text[text.rindex(")") + 1 :].split()[:2]
            parents[int(folder.name)] = int(parent)
            if state != "Z":
                raw = (folder / "cmdline").read_bytes()
                command = raw.replace(b"\0", b" ").decode("utf-8", "replace").strip()
                process = Process(pid=int(folder.name), name=name, command=command)
                living[process.pid] = process
    return tuple(process for process in living.values() if _descends(process.pid, pid, parents))


def _descends(pid: int, ancestor: int, parents: dict[int, int]) -> bool:
    seen = set()
    while pid in parents and pid not in seen:
        seen.add(pid)
        pid = parents[pid]
        if pid == ancestor:
            return True
    return False


def exists(pid: int) -> bool:
    """Return whether a process exists and is no zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return text[text.rindex(")") + 1 :].split()[0] != "Z"
