"""Several SSH hosts on one machine, made of Linux namespaces, for tests and demonstrations.

Every host has its own network, PID, mount, UTS and IPC namespace, its own
``/proc``, ``/run``, home and temporary folder, its own sshd with its own host key,
a shaped link to a common bridge and an optional CPU quota. The bridge lives in a
namespace too, so there is no route to anything else and no address, port or
interface name can clash with the machine's own.

Nothing needs a name on the machine: the namespaces live as long as a keeper process,
which ends when the pipe to this process closes. So if this process dies, even by
SIGKILL, the hosts, their links, cgroups and folder disappear.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final, Self

from amp_ray.units import BITS_PER_BYTE, MIB
from support import namespaces
from support.namespaces import generate_key

_READY_TIMEOUT_S: Final = 120.0
_POLL_S: Final = 0.02
_TBF_TICKS_PER_S: Final = 250  # minimum of common kernels; a bucket must hold one tick's bytes
_TBF_MIN_BURST_BYTES: Final = 64 * 1024

# The keeper is PID 1 of the outer PID namespace and reads the pipe; all hosts end with it.
_KEEPER: Final = """
unshare --net --mount --pid --fork --kill-child=KILL --mount-proc sh -c 'echo ready; exec cat >&2'
rm -rf -- "$1"
for try in 1 2 3 4 5 6 7 8 9 10; do
  [ -d "$2" ] || break
  rmdir -- "$2"/* "$2" 2>/dev/null || sleep 0.1
done
"""

_ENTER_QUOTA: Final = '[ -z "$1" ] || echo $$ > "$1/cgroup.procs"; shift; exec "$@"'

# Runs as PID 1 of a host: name, folder with the host's files, size of its private disk, home.
_INIT: Final = """
set -e
hostname "$1"
mount --make-rprivate /
mount -t proc proc /proc
mount -t tmpfs tmpfs /dev/shm
mount -t tmpfs -o "size=$3,mode=755" tmpfs /run
mkdir -p /run/sshd /run/tmp "$4"
mount --bind "$2/hosts" /etc/hosts
mount --bind "$2/passwd" /etc/passwd
exec /usr/sbin/sshd -D -e -f "$2/sshd_config"
"""


_PERIOD_US: Final = 20_000  # period of CPU quotas: shorter than the kernel's, for short steps
_DEFAULT_SHARES: Final = {1: 1024, 2: 100}  # weight of one task; the cluster runs one per core
_MOST_SHARES: Final = {1: 262_144, 2: 10_000}  # maximum that the kernel accepts


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuQuota:
    """A cgroup with one child group per host."""

    version: int  # version of the cgroup file system; 0 if none can be used
    folder: str | None  # folder of the cgroup; None if none can be used
    reason: str | None  # reason why quotas cannot be used; None if they can

    @classmethod
    def create(cls, name: str, weight: int = 1) -> Self:
        """Make the parent group, if this machine allows it.

        ``weight`` is the group's share of the CPUs, relative to one busy program per core.
        """
        root = Path("/sys/fs/cgroup")
        version = 2 if (root / "cgroup.controllers").exists() else 1
        folder = root / name if version == 2 else root / "cpu" / name
        try:
            folder.mkdir()
            _prepare(folder, version, weight)
        except OSError as error:
            if folder.is_dir():
                folder.rmdir()
            return cls(version=0, folder=None, reason=f"no CPU controller: {error}")
        return cls(version=version, folder=str(folder), reason=None)

    def add(self, host: str) -> str | None:
        """Make the group of a host; return its folder, or None if there are no quotas."""
        if self.folder is None:
            return None
        group = Path(self.folder) / host
        group.mkdir()
        return str(group)

    def limit(self, host: str, cores: float | None) -> None:
        """Set the quota of a host."""
        if self.folder is None:
            raise RuntimeError(self.reason)
        quota = None if cores is None else int(cores * _PERIOD_US)
        group = Path(self.folder) / host
        if self.version == 1:
            (group / "cpu.cfs_period_us").write_text(str(_PERIOD_US), encoding="ascii")
            text = "-1" if quota is None else str(quota)
            (group / "cpu.cfs_quota_us").write_text(text, encoding="ascii")
        else:
            text = f"{'max' if quota is None else quota} {_PERIOD_US}"
            (group / "cpu.max").write_text(text, encoding="ascii")


def _prepare(folder: Path, version: int, weight: int) -> None:
    """Set the parent's weight and, in version 2, enable the CPU controller for its children."""
    shares = _DEFAULT_SHARES[version] * (os.cpu_count() or 1) * weight
    text = str(min(shares, _MOST_SHARES[version]))
    if version == 1:
        (folder / "cpu.shares").write_text(text, encoding="ascii")
        return
    for group in (folder.parent, folder):
        (group / "cgroup.subtree_control").write_text("+cpu", encoding="ascii")
    (folder / "cpu.weight").write_text(text, encoding="ascii")


CONTROLLER_ADDRESS: Final = "10.77.0.1"  # address of the bridge, in its own namespace: no clash
SSH_PORT: Final = 22  # port of every host's sshd, each in its own network namespace
HOME: Final = "/run/home"  # home of root on every host, on the host's private disk

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
    """Write keys and names of a cluster, and a folder for each host, by the hosts' addresses."""
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
    # As in Debian; a program that resolves a host's name on that host gets a useless address.
    lines.append(f"127.0.1.1 {name}")
    return "\n".join(lines) + "\n"


def _passwd() -> str:
    """Return this machine's users, root with another home."""
    lines = Path("/etc/passwd").read_text(encoding="utf-8").splitlines()
    users = [line.split(":") for line in lines]
    return "".join(
        ":".join([*user[:5], HOME, user[6]] if user[0] == "root" else user) + "\n" for user in users
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class NamespaceHost:
    """One test host."""

    name: str  # host name, ``host1`` and so on
    address: str  # IPv4 address on the common network
    init_pid: int  # process id, in this process's namespace, of the host's PID 1
    folder: Path  # where its keys, configuration and sshd log are


def why_unavailable() -> str | None:
    """Return why this machine cannot make test hosts; None if it can."""
    if os.geteuid() != 0:
        return "test hosts need root"
    tools = ("unshare", "nsenter", "ip", "tc", "ssh-keygen", "/usr/sbin/sshd")
    missing = [tool for tool in tools if shutil.which(tool) is None]
    if missing:
        return f"test hosts need {', '.join(missing)}: apt-get install openssh-server iproute2"
    probe = ["unshare", "--net", "--mount", "--pid", "--fork", "--mount-proc", "true"]
    result = subprocess.run(probe, capture_output=True, text=True, check=False)
    return None if result.returncode == 0 else f"unshare failed: {result.stderr.strip()}"


class HostCluster:
    """Test hosts, from two to a few hundred, alive inside a ``with`` block."""

    def __init__(
        self,
        *,
        num_hosts: int = 2,
        link_bits_per_s: int | None = None,
        disk_bytes: int = 256 * MIB,
        weight: int = 1,
    ) -> None:
        """Start the hosts and wait until every sshd answers.

        Args:
            num_hosts: Number of hosts.
            link_bits_per_s: Rate of every host's link in each direction; None for no limit.
            disk_bytes: Size of each host's private disk, which holds its home and temporary files.
            weight: Share of the CPUs of all hosts together, relative to one busy program per core.
                With a large weight and quotas, hosts get their cores even on a busy machine.
        """
        self.folder = Path(tempfile.mkdtemp(prefix="amp-ray-hosts-"))
        name = f"amp-ray-hosts-{os.getpid()}-{self.folder.name[-8:]}"
        self._quota = CpuQuota.create(name, weight)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._streams: list[IO[bytes]] = []
        try:
            self._keeper_pid = self._start_keeper()
            names = [f"host{number}" for number in range(1, num_hosts + 1)]
            addresses = [host_address(number) for number in range(1, num_hosts + 1)]
            write_files(self.folder, dict(zip(names, addresses, strict=True)))
            self.hosts = tuple(
                self._start_host(name, address, disk_bytes)
                for name, address in zip(names, addresses, strict=True)
            )
            self._wait_until_ready()
            for host in self.hosts:
                self.shape(host, link_bits_per_s)
        except BaseException:
            self.close()
            raise

    @property
    def known_hosts(self) -> Path:
        """The file of all host keys, so that no key has to be trusted on first use."""
        return self.folder / "known_hosts"

    @property
    def identity(self) -> Path:
        """The private key that opens every host for root."""
        return self.folder / "identity"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        """End every process of every host and remove links, cgroups and folder."""
        for process in self._processes[::-1]:
            if process.stdin is not None:
                process.stdin.close()
        for process in self._processes[::-1]:
            process.wait(timeout=_READY_TIMEOUT_S)
            if process.stdout is not None:
                process.stdout.close()
        for stream in self._streams:
            stream.close()
        self._processes.clear()
        shutil.rmtree(self.folder, ignore_errors=True)

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Move this thread, and threads that it starts, into the controller's network."""
        with namespaces.network_of(self._switch_pid):
            yield

    def controller_command(self, argv: Sequence[str]) -> list[str]:
        """Wrap a command so that it runs in the controller's network."""
        return ["nsenter", f"--net=/proc/{self._switch_pid}/ns/net", "--", *argv]

    def run_in(self, host: NamespaceHost, argv: Sequence[str]) -> subprocess.CompletedProcess[str]:
        """Run a command inside all namespaces of a host."""
        flags = ["--net", "--uts", "--mount", "--pid", "--ipc"]
        wrapped = ["nsenter", "--target", str(host.init_pid), *flags, "--", *argv]
        return subprocess.run(wrapped, capture_output=True, text=True, check=True)

    def shape(self, host: NamespaceHost, bits_per_s: int | None) -> None:
        """Limit the link of a host in both directions; None lifts the limit.

        Token buckets hold within 5 % between 50 Mbit/s and 5 Gbit/s; beyond that
        the CPU is the limit.
        """
        for pid, device in ((host.init_pid, "eth0"), (self._switch_pid, f"v-{host.name}")):
            command = ["tc", "qdisc", "del", "dev", device, "root"]
            namespaces.run_in_network(pid, command, check=False)
            if bits_per_s is not None:
                tick_bytes = bits_per_s // BITS_PER_BYTE // _TBF_TICKS_PER_S
                burst = max(_TBF_MIN_BURST_BYTES, 2 * tick_bytes)
                command = ["tc", "qdisc", "add", "dev", device, "root", "tbf"]
                limits = ["rate", f"{bits_per_s}bit", "burst", str(burst), "latency", "50ms"]
                namespaces.run_in_network(pid, [*command, *limits])

    def set_link(self, host: NamespaceHost, *, up: bool) -> None:
        """Set a host's link up or down; connections get no message when it goes down."""
        state = "up" if up else "down"
        namespaces.run_in_network(host.init_pid, ["ip", "link", "set", "eth0", state])

    def limit_cpu(self, host: NamespaceHost, cores: float | None) -> None:
        """Limit a host to a number of cores; None lifts the limit."""
        self._quota.limit(host.name, cores)

    @property
    def why_no_quota(self) -> str | None:
        """Reason why CPU quotas are not possible here; None if they are."""
        return self._quota.reason

    def kill_host(self, host: NamespaceHost) -> None:
        """Crash a host: SIGKILL to its PID 1 ends all its processes."""
        os.kill(host.init_pid, signal.SIGKILL)

    def kill_ssh_sessions(self, host: NamespaceHost) -> None:
        """Kill the sshd of every open connection by SIGKILL, but not the listening one."""
        for process in namespaces.descendants(host.init_pid):
            if process.name.startswith("sshd"):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)

    def programs(self, host: NamespaceHost) -> tuple[namespaces.Process, ...]:
        """List the living processes of a host that are not sshd; zombies do not count."""
        found = namespaces.descendants(host.init_pid)
        return tuple(process for process in found if not process.name.startswith("sshd"))

    def _start_keeper(self) -> int:
        """Start the keeper; return the id of the process that holds the bridge's namespace."""
        argv = ["sh", "-c", _KEEPER, "sh", str(self.folder), self._quota.folder or ""]
        keeper = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        self._processes.append(keeper)
        assert keeper.stdout is not None  # a pipe was asked for
        if keeper.stdout.readline() != b"ready\n":
            raise RuntimeError("the namespaces of the test hosts could not be made")
        self._switch_pid = namespaces.child_of(namespaces.child_of(keeper.pid))
        lines = ["link set lo up", "link add br0 type bridge", "link set br0 up"]
        lines.append(f"addr add {CONTROLLER_ADDRESS}/16 dev br0")
        namespaces.run_ip(self._switch_pid, lines)
        return self._switch_pid

    def _start_host(self, name: str, address: str, disk_bytes: int) -> NamespaceHost:
        folder = self.folder / name
        new = ["--net", "--uts", "--mount", "--pid", "--ipc"]
        argv = ["sh", "-c", _ENTER_QUOTA, "sh", self._quota.add(name) or ""]
        argv += ["nsenter", "--target", str(self._switch_pid), "--pid", "--mount", "--"]
        argv += ["unshare", *new, "--fork", "--kill-child=KILL"]
        argv += ["sh", "-c", _INIT, "sh", name, str(folder), str(disk_bytes), HOME]
        log = (folder / "sshd.log").open("wb")
        self._streams.append(log)
        null = subprocess.DEVNULL
        process = subprocess.Popen(argv, stdin=null, stdout=log, stderr=log, start_new_session=True)
        self._processes.append(process)
        init_pid = namespaces.child_of(namespaces.child_of(process.pid))
        link = f"link add v-{name} type veth peer name eth0 netns {init_pid}"
        namespaces.run_ip(self._switch_pid, [link, f"link set v-{name} master br0 up"])
        lines = ["link set lo up", f"addr add {address}/16 dev eth0", "link set eth0 up"]
        namespaces.run_ip(init_pid, lines)
        return NamespaceHost(name=name, address=address, init_pid=init_pid, folder=folder)

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + _READY_TIMEOUT_S
        with self.inside():
            for host in self.hosts:
                while not _greets(host.address):
                    if time.monotonic() > deadline:
                        log = (host.folder / "sshd.log").read_text(encoding="utf-8")
                        raise RuntimeError(f"{host.name} did not come up: {log.strip()}")
                    time.sleep(_POLL_S)


def _greets(address: str) -> bool:
    try:
        with socket.create_connection((address, SSH_PORT), timeout=1) as connection:
            return connection.recv(4) == b"SSH-"
    except OSError:
        return False
