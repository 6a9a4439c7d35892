"""The files of test hosts: keys, names, users, sshd configuration."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from amp_ray.testing._namespaces import generate_key

CONTROLLER_ADDRESS: Final = "10.77.0.1"
"""Of the bridge, in a namespace of its own: it cannot clash with a real network."""

SSH_PORT: Final = 22
"""Of every host, each in its own network namespace."""

HOME: Final = "/run/home"
"""Of root on every host, on its private disk."""

_SSHD_CONFIG: Final = """
Port {port}
HostKey "{folder}/host_key"
AuthorizedKeysFile "{keys}"
PidFile none
StrictModes no
UsePAM no
UseDNS no
PrintMotd no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
MaxStartups 100:30:200
MaxSessions 100
ClientAliveInterval 2
ClientAliveCountMax 3
SetEnv TMPDIR=/run/tmp
Subsystem sftp internal-sftp
"""


def host_address(number: int) -> str:
    """Return the address of a host, counted from 1, in the network 10.77.0.0/16."""
    third, fourth = divmod(10 + number, 250)
    return f"10.77.{third}.{fourth}"


def write_files(folder: Path, addresses: Mapping[str, str]) -> None:
    """Write the files of a cluster.

    Args:
        folder: Gets ``identity`` (the key that opens every host), ``known_hosts``, and a folder
            per host.
        addresses: Of the hosts, by name.
    """
    generate_key(folder / "identity", "amp-ray-test")
    shutil.copy(folder / "identity.pub", folder / "authorized_keys")
    known = []
    for name, address in addresses.items():
        own = folder / name
        own.mkdir()
        generate_key(own / "host_key", name)
        key = (own / "host_key.pub").read_text(encoding="ascii").split()
        known.append(f"{name},{address} {key[0]} {key[1]}\n")
        (own / "hosts").write_text(_hosts(name, addresses), encoding="ascii")
        (own / "passwd").write_text(_passwd(), encoding="utf-8")
        keys = folder / "authorized_keys"
        config = _SSHD_CONFIG.format(port=SSH_PORT, folder=own, keys=keys)
        (own / "sshd_config").write_text(config, encoding="utf-8")
    (folder / "known_hosts").write_text("".join(known), encoding="ascii")


def _hosts(name: str, addresses: Mapping[str, str]) -> str:
    lines = ["127.0.0.1 localhost", f"{CONTROLLER_ADDRESS} controller"]
    lines += [f"{address} {other}" for other, address in addresses.items()]
    # Debian's own habit, and a trap for whoever resolves a host's name on that host.
    lines.append(f"127.0.1.1 {name}")
    return "\n".join(lines) + "\n"


def _passwd() -> str:
    """Return this machine's users, root with another home."""
    lines = Path("/etc/passwd").read_text(encoding="utf-8").splitlines()
    users = [line.split(":") for line in lines]
    return "".join(
        ":".join([*user[:5], HOME, user[6]] if user[0] == "root" else user) + "\n" for user in users
    )
