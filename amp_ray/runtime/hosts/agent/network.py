"""This host's addresses, interfaces and free ports."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import random
import socket
import struct
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

PORTS = (20000, 32000)  # below the kernel's ephemeral range: no outgoing connection takes one
PORT_TRIES = 200

SIOCGIFCONF = 0x8912  # <linux/sockios.h>
IFREQ_BYTES, IFNAME_BYTES, IFREQ_ADDRESS = 40, 16, slice(20, 24)  # struct ifreq on 64 bit
MAX_INTERFACES = 256


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
    """Return the first candidate that is ours, in digits, and its interface.

    A name is resolved here too, but not into the loopback network: Debian maps a host's own name
    to 127.0.1.1, which its peers cannot reach.
    """
    own = {address: name for name, address in interfaces()}
    for candidate in candidates:
        try:
            found = {str(entry[4][0]) for entry in socket.getaddrinfo(candidate, None)}
        except (OSError, UnicodeError):
            continue
        for address in sorted(found & set(own)):
            if address == candidate or not address.startswith("127."):
                return address, own[address]
    message = f"none of {list(candidates)} is an address of this host, which has {sorted(own)}"
    raise OSError(errno.EADDRNOTAVAIL, message)


def free_port(address: str) -> int:
    """Find a port that this kernel lets us listen on."""
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
