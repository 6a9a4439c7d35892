"""Which slots of this host are in use, and by whom: names of sockets that live as long as agents.

Names in Linux's abstract namespace belong to a network namespace, as a rule a machine or container,
and to no user: every agent there sees those of all others, and they go with it, however it ends.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pwd
import re
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING

from .job import visible_devices

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

PREFIX = "amp-ray-slot"
MAX_NAME = 107
"""Of an abstract name, without its first byte: unix(7)."""

NOT_PLAIN = re.compile(r"[^\w.-]+", re.ASCII)
SECONDS_PER_MINUTE = 60


class Slots:
    """The slots of one agent."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._held: list[socket.socket] = []

    def claim(self, slots: Sequence[int], owner: str, study: str) -> str:
        """Hold some slots until the end of this process.

        Agents of the same owner may share slots. Two that claim one at the same moment both see
        each other, and both step back. Returns who holds one of them already, if anybody does; then
        nothing is held.
        """
        devices = {_device(slot): slot for slot in slots}
        mine = [self._open(device, slot, owner, study) for device, slot in devices.items()]
        for device, slot, other, since_s, pid, user, name in _claims():
            if device in devices and other != owner:
                for each in mine:
                    each.close()
                minutes = max(0.0, _now_s() - since_s) / SECONDS_PER_MINUTE
                return (
                    f"slot {devices[device]} is in use by {user}: {name} (process {pid} there, "
                    f"slot {slot} of its login, for {minutes:.1f} min)"
                )
        self._held += mine
        return ""

    def _open(self, device: str, slot: int, owner: str, study: str) -> socket.socket:
        """Make the name that others see."""
        try:
            user = pwd.getpwuid(os.getuid()).pw_name
        except KeyError:
            user = str(os.getuid())
        fields = [str(slot), owner, str(int(_now_s())), str(self._pid), user[:16], study]
        name = "/".join([PREFIX, device, *(NOT_PLAIN.sub("_", field) for field in fields)])
        opened = socket.socket(socket.AF_UNIX)
        opened.bind(f"\0{name}"[: MAX_NAME + 1])
        return opened


def _device(slot: int) -> str:
    """Name the device in a slot in a few letters; a login that sees some GPUs only counts those."""
    return hashlib.sha256(visible_devices([slot]).encode()).hexdigest()[:8]


def _now_s() -> float:
    """Return the time since the machine started, which all of its processes share."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _claims() -> Iterator[tuple[str, str, str, float, str, str, str]]:
    """Yield device, slot, owner, time, process, user and study of every claim on this machine."""
    try:
        lines = Path("/proc/net/unix").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return
    for line in lines:
        fields = line.partition(f"@{PREFIX}/")[2].split("/")
        with contextlib.suppress(ValueError):
            device, slot, owner, since, pid, user, study = fields
            yield device, slot, owner, float(since), pid, user, study
