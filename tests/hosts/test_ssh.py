"""Connections: keys, names, configuration, quoting."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from amp_ray.errors import HostError
from amp_ray.inputs.ssh_settings import SshSettings
from amp_ray.runtime.hosts.ssh import SshHost
from amp_ray.runtime.launch.launcher import Launcher
from amp_ray.testing._namespaces import generate_key
from amp_ray.trials.launch import Launch, rank_commands
from amp_ray.trials.outcome import Measured, Unreachable

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


def test_a_rank_gets_its_words_and_variables_unchanged(bench: "Bench", launcher: Launcher) -> None:
    program = """
assert sys.argv[2:] == json.loads(open("it's $(here)/a b;c.json").read()), sys.argv
assert os.environ["HOSTILE"] == sys.argv[5], os.environ
result()
"""
    files = {"it's $(here)/a b;c.json": json.dumps(HOSTILE).encode()}
    environment = {"HOSTILE": HOSTILE[3]}
    outcome = bench.run(launcher, program, arguments=HOSTILE, files=files, environment=environment)
    assert isinstance(outcome, Measured), outcome


def test_a_command_that_takes_too_long_is_an_error(bench: "Bench") -> None:
    host = SshHost(bench.cluster.hosts[0].address, bench.ssh)
    with pytest.raises(HostError, match="took too long"):
        host.run(["sleep", "60"], timeout_s=0.3)
    host.close()


def test_an_unknown_key_is_refused_with_the_command_that_adds_it(bench: "Bench") -> None:
    settings = bench.ssh.model_copy(update={"known_hosts": str(bench.folder / "none")})
    address = bench.cluster.hosts[0].address
    with pytest.raises(HostError, match=rf"ssh-keyscan -p 22 {address} >> .*none") as caught:
        SshHost(address, settings).connect()
    assert "SHA256:" in str(caught.value)


def test_a_changed_key_is_refused_with_the_command_that_forgets_it(bench: "Bench") -> None:
    first, second = bench.cluster.hosts
    lines = bench.cluster.known_hosts.read_text(encoding="ascii").splitlines()
    wrong = bench.folder / "known_hosts"
    wrong.write_text(lines[1].replace(second.address, first.address), encoding="ascii")
    settings = bench.ssh.model_copy(update={"known_hosts": str(wrong)})
    with pytest.raises(
        HostError, match=rf"changed.*ssh-keygen -R {first.address} -f .*known_hosts"
    ):
        SshHost(first.address, settings).connect()
    assert wrong.read_text(encoding="ascii").count("\n") == 0


def test_a_wrong_identity_is_refused_by_name(bench: "Bench") -> None:
    other = bench.folder / "other"
    generate_key(other, "other")
    settings = bench.ssh.model_copy(update={"identities": (str(other),)})
    with pytest.raises(HostError, match=r"login refused: .*key files tried: .*other; ssh-agent"):
        SshHost(bench.cluster.hosts[0].address, settings).connect()


def test_a_port_where_nobody_listens_is_told(bench: "Bench") -> None:
    address = bench.cluster.hosts[0].address
    with pytest.raises(HostError, match=rf"root@\[{address}\]:2222: "):
        SshHost(f"{address}:2222", bench.ssh).connect()


def test_a_host_that_is_not_there_makes_the_trial_unreachable(bench: "Bench") -> None:
    nobody = "10.77.0.99"
    settings = bench.ssh.model_copy(update={"connect_timeout_s": 10.0})
    names = [bench.cluster.hosts[0].address, nobody]
    commands = rank_commands([sys.executable, "-c", "pass"], [(name, 0) for name in names])
    launch = Launch(trial_id="t", commands=commands, files={}, environment={})
    with Launcher([SshHost(name, settings) for name in names]) as launcher:
        outcome = launcher.run(launch, bench.folder / "t")
    assert isinstance(outcome, Unreachable)
    assert outcome.host == nobody


def test_a_missing_interpreter_is_told(bench: "Bench") -> None:
    settings = bench.ssh.model_copy(update={"python": "/opt/no such/python"})
    name = bench.cluster.hosts[0].address
    commands = rank_commands(["true"], [(name, 0)])
    launch = Launch(trial_id="t", commands=commands, files={}, environment={})
    with Launcher([SshHost(name, settings)]) as launcher:
        outcome = launcher.run(launch, bench.folder / "t")
    assert isinstance(outcome, Unreachable)
    assert "/opt/no such/python" in outcome.reason


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


def test_known_hosts_files_are_read_as_openssh_reads_them(bench: "Bench") -> None:
    """Markers, patterns, hashed names, other kinds of key, and lines that nobody can read."""
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
    with pytest.raises(HostError, match=r"marked @revoked at .*known_hosts:2\. Whoever"):
        connect(f"{address} {own}", f"@revoked * {own}")
    with pytest.raises(HostError, match=r"certificates that .*:1 trusts .* ssh-keyscan -p 22"):
        connect(f"@cert-authority 10.77.* {own} \x1b[31m company")


def test_the_hosts_of_the_configuration_may_have_files_and_a_name_for_keys(bench: "Bench") -> None:
    address = bench.cluster.hosts[0].address
    words = bench.cluster.known_hosts.read_text(encoding="ascii").split()
    known = bench.folder / "known hosts"
    known.write_text(f"alias {words[1]} {words[2]}\n", encoding="ascii")
    config = bench.folder / "config"
    config.write_text(
        f'Host *\n  User root\n  HostKeyAlias alias\n  UserKnownHostsFile none "{known}"\n'
        f"  IdentityFile {bench.cluster.identity}\n",
        encoding="ascii",
    )
    own = {"config": str(config), "known_hosts": SshSettings().known_hosts}
    settings = bench.ssh.model_copy(update=own)
    host = SshHost(address, settings)
    host.connect()
    host.close()


def test_two_studies_on_one_slot_are_told_apart_and_other_slots_are_free(bench: "Bench") -> None:
    with bench.launcher() as first, bench.launcher() as second:
        assert isinstance(bench.run(first, "result()"), Measured)
        outcome = bench.run(second, "result()")
        assert isinstance(outcome, Unreachable)
        assert "slot 0 is in use by root: trial-1 (process " in outcome.reason
        host = bench.cluster.hosts[0].address
        argv = [sys.executable, "stand_in.py", "t"]
        launch = Launch(
            trial_id="t",
            commands=rank_commands(argv, [(host, 1)]),
            files={"stand_in.py": (bench.preface + "result()").encode()},
            environment={},
        )
        assert isinstance(second.run(launch, bench.folder / "t"), Measured)


def test_a_shell_that_takes_longer_than_the_lease_to_start_is_no_lost_host(bench: "Bench") -> None:
    home = Path(f"/proc/{bench.cluster.hosts[0].init_pid}/root/run/home")
    (home / ".bashrc").write_text("sleep 12\n", encoding="ascii")
    with bench.launcher(replace(bench.settings, lease_s=10.0)) as launcher:
        assert isinstance(bench.run(launcher, "result()"), Measured)
