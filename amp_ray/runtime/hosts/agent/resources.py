"""Resources of a trial on this host: folder, variables, devices, slots, address and port.

Also the sweep, which removes the leftovers of lost agents and controllers.

An agent claims a slot by a socket with a name in Linux's abstract namespace. All users of a network
namespace (usually a machine or container) see its names, so agents see the claims of all others.
The kernel removes a name when its agent ends, however it ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import os
import pwd
import random
import re
import shutil
import socket
import struct
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .processes import describe, end_all, marked, tagged

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

FOLDER_VARIABLE = "AMP_RAY_FOLDER"  # variable with the path of the trial's folder
DEVICE_VARIABLE = "CUDA_VISIBLE_DEVICES"

INHERITED = (
    *("PATH", "HOME", "USER", "LOGNAME", "LANG", "LC_ALL", "TZ", "TMPDIR", "XDG_RUNTIME_DIR"),
    *("LD_LIBRARY_PATH", "CUDA_HOME"),
)
"""Variables that ranks inherit from the login; proxies and PYTHON* are left out."""

PROBE_BYTES = 4096  # size of the file that detects a full disk: an empty file needs no block
TRIAL_FOLDER = "amp-ray-{}-[0-9a-f]+"  # pattern of the folder names of a trial's attempts

SLOT_PREFIX = "amp-ray-slot"
MAX_NAME = 107  # maximum bytes of an abstract name, without the leading zero: unix(7)
NOT_PLAIN = re.compile(r"[^\w.-]+", re.ASCII)
SECONDS_PER_MINUTE = 60

PORTS = (20000, 32000)  # below the ephemeral range of outgoing connections
PORT_TRIES = 200

SIOCGIFCONF = 0x8912  # <linux/sockios.h>
IFREQ_BYTES, IFNAME_BYTES, IFREQ_ADDRESS = 40, 16, slice(20, 24)  # struct ifreq on 64 bit
MAX_INTERFACES = 256


def inherited() -> dict[str, str]:
    """Return the variables that every rank inherits."""
    return {name: os.environ[name] for name in INHERITED if name in os.environ}


def visible_devices(slots: Sequence[int]) -> str:
    """Return the devices of slots; a slot is an index into the devices that the login may use."""
    names = [name for name in os.environ.get(DEVICE_VARIABLE, "").split(",") if name]
    return ",".join(names[slot] if slot < len(names) else str(slot) for slot in slots)


# -------------------------------------------------------------------------------------- folders


def base_folder(name: str | None) -> Path:
    """Return the parent of all trials' folders: ``name``, or TMPDIR, or /tmp."""
    return Path(name or os.environ.get("TMPDIR") or "/tmp").expanduser()  # noqa: S108


def make_folder(folder: Path) -> None:
    """Make a trial's folder and check that it is writable."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700)
    probe = folder / ".probe"
    try:
        with probe.open("xb") as file:
            file.write(bytes(PROBE_BYTES))
        probe.unlink()
    except OSError:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def sweep(message: Mapping[str, Any], base: Path, meanwhile: Callable[[], None]) -> list[str]:
    """End the processes with an agent's tag or a trial's folder, and remove the folders.

    The message has the ``tag`` of an agent or null, ``names`` of folders in ``base``, and
    ``trials``, whose attempts' folders are all removed. Returns the processes that survive.
    """
    tag = message["tag"]
    folders = [base / name for name in message.get("names", ())]
    folders += attempt_folders(base, message.get("trials", ()))

    def listed() -> list[int]:
        pids = [] if tag is None else tagged(tag)
        for folder in folders:
            pids += marked(f"{FOLDER_VARIABLE}={folder}")
        return pids

    stubborn = end_all(listed, 0.0, meanwhile)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    return [describe(pid) for pid in stubborn]


def attempt_folders(base: Path, trials: Sequence[str]) -> list[Path]:
    """List the folders of all attempts at trials; an id does not match a longer one."""
    shapes = [re.compile(TRIAL_FOLDER.format(re.escape(trial))) for trial in trials]
    return [
        path
        for path in (base.iterdir() if shapes and base.is_dir() else ())
        if any(shape.fullmatch(path.name) for shape in shapes)
    ]


# ---------------------------------------------------------------------------------------- slots


class Slots:
    """The slots that one agent has claimed."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._held: list[socket.socket] = []

    def claim(self, slots: Sequence[int], owner: str, study: str) -> str:
        """Claim slots until the end of this process; return a message if one is taken.

        Agents of the same owner may share slots. If two agents claim a slot at the same moment,
        both give up. If a message is returned, none of ``slots`` is claimed.
        """
        devices = {_device(slot): slot for slot in slots}
        mine = [self._open(device, slot, owner, study) for device, slot in devices.items()]
        for device, slot, other, since_s, pid, user, name in _claims():
            if device in devices and other != owner:
                for claim in mine:
                    claim.close()
                minutes = max(0.0, _now_s() - since_s) / SECONDS_PER_MINUTE
                return (
                    f"slot {devices[device]} is in use by {user}: {name} (process {pid} there, "
                    f"slot {slot} of its login, for {minutes:.1f} min)"
                )
        self._held += mine
        return ""

    def _open(self, device: str, slot: int, owner: str, study: str) -> socket.socket:
        try:
            user = pwd.getpwuid(os.getuid()).pw_name
        except KeyError:
            user = str(os.getuid())
        fields = [str(slot), owner, str(int(_now_s())), str(self._pid), user[:16], study]
        name = "/".join([SLOT_PREFIX, device, *(NOT_PLAIN.sub("_", field) for field in fields)])
        opened = socket.socket(socket.AF_UNIX)
        opened.bind(f"\0{name}"[: MAX_NAME + 1])
        return opened


def _device(slot: int) -> str:
    """Return a short name of the device in a slot; see `visible_devices`."""
    return hashlib.sha256(visible_devices([slot]).encode()).hexdigest()[:8]


def _now_s() -> float:
    """Return the time since the machine started, the same in all processes."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _claims() -> Iterator[tuple[str, str, str, float, str, str, str]]:
    """Yield device, slot, owner, time, process, user and study of every claim on this machine."""
    try:
        lines = Path("/proc/net/unix").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return
    for line in lines:
        fields = line.partition(f"@{SLOT_PREFIX}/")[2].split("/")
        with contextlib.suppress(ValueError):
            device, slot, owner, since, pid, user, study = fields
            yield device, slot, owner, float(since), pid, user, study


# -------------------------------------------------------------------------------------- network


def interfaces() -> Iterator[tuple[str, str]]:
    """Yield (interface, address) of this host, aliases included."""
    buffer = bytearray(IFREQ_BYTES * MAX_INTERFACES)
    area = (ctypes.c_char * len(buffer)).from_buffer(buffer)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
        request = struct.pack("iP", len(buffer), ctypes.addressof(area))
        num_bytes = struct.unpack("iP", fcntl.ioctl(asker.fileno(), SIOCGIFCONF, request))[0]
    for start in range(0, num_bytes, IFREQ_BYTES):
        entry = bytes(buffer[start : start + IFREQ_BYTES])
        name = entry[:IFNAME_BYTES].split(b"\0", 1)[0].decode()
        yield name.split(":")[0], socket.inet_ntoa(entry[IFREQ_ADDRESS])
    table = Path("/proc/net/if_inet6")
    for line in table.read_text(encoding="ascii").splitlines() if table.exists() else ():
        digits, *_, name = line.split()
        yield name, socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))


def find_address(candidates: Sequence[str]) -> tuple[str, str]:
    """Return the first candidate that is an address of this host, in digits, and its interface.

    Names are resolved on this host, without loopback addresses: Debian maps the host's name to
    127.0.1.1, which its peers cannot reach.
    """
    interface_of = {address: name for name, address in interfaces()}
    for candidate in candidates:
        try:
            addresses = {str(entry[4][0]) for entry in socket.getaddrinfo(candidate, None)}
        except (OSError, UnicodeError):
            continue
        for address in sorted(addresses & set(interface_of)):
            if address == candidate or not address.startswith("127."):
                return address, interface_of[address]
    have = f"which has {sorted(interface_of)}"
    message = f"none of {list(candidates)} is an address of this host, {have}"
    raise OSError(errno.EADDRNOTAVAIL, message)


def free_port(address: str) -> int:
    """Return a port of `PORTS` that is free at an address."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    choose = random.SystemRandom()
    for _ in range(PORT_TRIES):
        port = choose.randrange(*PORTS)
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            try:
                probe.bind((address, port))
            except OSError:
                continue
            return port
    raise OSError(errno.EADDRINUSE, f"no free port between {PORTS[0]} and {PORTS[1]} on {address}")
