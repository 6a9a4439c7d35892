"""Connections: keys, names, configuration, quoting."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from amp_ray.errors import HostError
from amp_ray.inputs.experiment import SshSettings
from amp_ray.runtime.hosts.ssh import SshHost
from amp_ray.runtime.launch.launcher import Launcher
from amp_ray.trials.launch import Launch, rank_commands
from amp_ray.trials.outcome import Measured

if TYPE_CHECKING:
    from tests.hosts.conftest import Bench

pytestmark = pytest.mark.hosts

HOSTILE = ["a b", "'", '"', "$(touch hurt)", "; touch hurt", "`id`", "*", "\n", "", "-n", "ü", "\\"]


def test_a_command_gets_its_words_unchanged(bench: "Bench") -> None:
    program = "import sys; sys.stdout.write(repr(sys.argv[1:]) + sys.stdin.read())"
    host = SshHost(bench.cluster.hosts[0].address, bench.ssh)
    ended = host.run([sys.executable, "-c", program, *HOSTILE], timeout_s=120, text="stdin")
    host.close()
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout == repr(HOSTILE) + "stdin"


def test_a_command_that_takes_too_long_is_an_error(bench: "Bench") -> None:
    host = SshHost(bench.cluster.hosts[0].address, bench.ssh)
    with pytest.raises(HostError, match="took too long"):
        host.run(["sleep", "5"], timeout_s=0.3)
    host.close()


def test_a_port_where_nobody_listens_is_told(bench: "Bench") -> None:
    address = bench.cluster.hosts[0].address
    with pytest.raises(HostError, match=rf"root@\[{address}\]:2222: "):
        SshHost(f"{address}:2222", bench.ssh).connect()


def test_the_configuration_names_hosts_users_keys_and_jumps(bench: "Bench") -> None:
    first, second = bench.cluster.hosts
    config = bench.folder / "config"
    lines = [
        "Host *\n  User root",
        f"  IdentityFile {bench.cluster.identity}",
        f"Host near\n  HostName {first.address}",
        f"Host far\n  HostName {second.address}\n  ProxyJump near",
    ]
    config.write_text("\n".join(lines) + "\n", encoding="ascii")
    settings = bench.ssh.model_copy(update={"config": str(config), "identities": (), "user": None})
    far = SshHost("far", settings)
    assert far.run(["hostname"], timeout_s=120).stdout == "host2\n"
    ended = far.run(["sh", "-c", "echo $SSH_CONNECTION"], timeout_s=120)
    far.close()
    assert ended.stdout.split()[0] == first.address


def test_hosts_by_name_get_an_address_that_their_peers_can_reach(bench: "Bench") -> None:
    """Debian maps a host's own name to 127.0.1.1, and the test hosts do so too."""
    config = bench.folder / "config"
    pairs = [f"Host {host.name}\n  HostName {host.address}" for host in bench.cluster.hosts]
    config.write_text("\n".join(pairs) + "\n", encoding="ascii")
    settings = bench.ssh.model_copy(update={"config": str(config)})
    program = (
        "import json, os\n"
        "values = [os.environ[name] for name in ('MASTER_ADDR', 'GLOO_SOCKET_IFNAME')]\n"
        "record = {'trial_id': 't', 'step_s': [1.0], 'seen': values}\n"
        "open('result.json', 'w').write(json.dumps(record))\n"
    )
    names = [host.name for host in bench.cluster.hosts]
    commands = rank_commands([sys.executable, "-c", program], [(name, 0) for name in names])
    launch = Launch(trial_id="t", commands=commands, files={}, environment={})
    with Launcher([SshHost(name, settings) for name in names]) as launcher:
        outcome = launcher.run(launch, bench.folder / "t")
    assert isinstance(outcome, Measured), outcome
    seen = [(bench.folder / "t/hosts" / name / "result.json").read_text("utf-8") for name in names]
    expected = f'"seen": ["{bench.cluster.hosts[0].address}", "eth0"]'
    assert all(expected in text for text in seen)


def test_what_a_login_prints_does_not_disturb(bench: "Bench") -> None:
    home = Path(f"/proc/{bench.cluster.hosts[0].init_pid}/root/run/home")
    (home / ".bashrc").write_text("echo Welcome; echo {1} >&2\n", encoding="ascii")
    with bench.launcher() as launcher:
        assert isinstance(bench.run(launcher, "result()"), Measured)
    (home / ".bashrc").unlink()


def test_known_hosts_files_are_read_as_openssh_reads_them(bench: "Bench") -> None:
    """The files have markers, patterns, hashed names, other kinds of key, and unreadable lines."""
    address = bench.cluster.hosts[0].address
    lines = bench.cluster.known_hosts.read_text(encoding="ascii").splitlines()
    own, other = (" ".join(line.split()[1:3]) for line in lines[:2])
    path = bench.folder / "known_hosts"
    settings = bench.ssh.model_copy(update={"known_hosts": str(path)})

    def connect(*texts: str) -> None:
        path.write_text("".join(f"{text}\n" for text in texts), encoding="ascii")
        host = SshHost(address, settings)
        host.connect()
        host.close()

    connect("# comment", f"@cert-authority * {other}", f"@revoked * {other}", f"{address} {own} x")
    connect(f"{address} ssh-rsa AAA=broken", "one word", f"10.77.0.* {other}", f"*,!b {own}")
    connect(f"{address} key-of-the-future AAAA", f"@unknown {address} {other}", f"{address} {own}")
    with pytest.raises(
        HostError, match=r"changed: expected SHA256:.*known_hosts:1\), found SHA256"
    ):
        connect(f"{address} {other}")


def test_the_hosts_of_the_configuration_may_have_files_and_a_name_for_keys(bench: "Bench") -> None:
    address = bench.cluster.hosts[0].address
    words = bench.cluster.known_hosts.read_text(encoding="ascii").split()
    known = bench.folder / "known hosts"
    known.write_text(f"alias {words[1]} {words[2]}\n", encoding="ascii")
    config = bench.folder / "config"
    config.write_text(
        f'Host *\n  User root\n  HostKeyAlias alias\n  UserKnownHostsFile "{known}"\n'
        f"  IdentityFile {bench.cluster.identity}\n",
        encoding="ascii",
    )
    own = {"config": str(config), "known_hosts": SshSettings().known_hosts}
    settings = bench.ssh.model_copy(update=own)
    host = SshHost(address, settings)
    host.connect()
    host.close()
