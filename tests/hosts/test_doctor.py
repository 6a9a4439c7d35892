"""The doctor on real hosts: it finds each problem, its command fixes it, and nothing is left."""

import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from amp_ray.inputs.experiment import Experiment
from amp_ray.runtime.doctor import Diagnosis, diagnose
from amp_ray.runtime.hosts.host import host_maker
from amp_ray.trials.doctor.findings import Finding
from support.experiments import experiment_from
from support.namespaces import generate_key
from support.waiting import wait_for

from .conftest import CONNECT_S, Bench, MakeCluster

pytestmark = pytest.mark.hosts

PYTHON = "/run/tmp/python"
"""Path of an interpreter on each host's private disk."""

EXPERIMENT = """\
name: tiny
model: {{family: gpt2, num_layers: 4, hidden_size: 16, num_heads: 2, sequence_length: 8,
        vocab_size: 32}}
cluster:
  hostfile: hostfile
  nodes:
    - {{count: {count}, device: cpu, slots: 1, intra_gbit_per_s: 20, inter_gbit_per_s: 20,
        memory_gib: 0.1}}
precision: fp32
global_batch_size: 4
trials:
  ssh: {{user: root, config: null, connect_timeout_s: {connect_timeout_s}, python: {python},
        known_hosts: {known_hosts}, identities: [{identity}]}}
"""


class Ward:
    """The hosts of a bench as an experiment, and the doctor's findings about them."""

    def __init__(self, bench: Bench) -> None:
        """Use a bench; its first host is healthy in every test."""
        self.bench = bench
        self.names = [host.address for host in bench.cluster.hosts]
        self.known_hosts = bench.cluster.known_hosts
        self.identity = bench.cluster.identity
        self.python = sys.executable
        self.connect_timeout_s = CONNECT_S

    @property
    def text(self) -> str:
        """The experiment file."""
        return EXPERIMENT.format(
            count=len(self.names),
            connect_timeout_s=self.connect_timeout_s,
            python=self.python,
            known_hosts=self.known_hosts,
            identity=self.identity,
        )

    @property
    def hostfile(self) -> str:
        """The hostfile that the experiment names."""
        return "".join(f"{name} slots=1\n" for name in self.names)

    @property
    def experiment(self) -> Experiment:
        return experiment_from(self.text, {"hostfile": self.hostfile})

    def diagnose(self) -> Diagnosis:
        experiment = self.experiment
        return diagnose(experiment, host_maker(experiment))

    def problem(self, position: int, check: str, level: str = "error") -> Finding:
        """Return the only finding of a check; check that no other host has an error."""
        diagnosis = self.diagnose()
        name = self.names[position]
        assert {finding.host for finding in diagnosis.errors} <= {name}
        (finding,) = [
            finding
            for finding in diagnosis.findings
            if (finding.host, finding.check, finding.level) == (name, check, level)
        ]
        return finding

    def run(self, command: str | None) -> str:
        """Run the command of a finding in a shell, as a user would."""
        assert command is not None
        argv = self.bench.cluster.controller_command(["sh", "-c", command])
        return subprocess.run(argv, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def ward(bench: Bench) -> Ward:
    """Two hosts and the doctor's findings about them."""
    return Ward(bench)


def test_hosts_that_are_well_have_no_error(ward: Ward) -> None:
    diagnosis = ward.diagnose()
    assert diagnosis.errors == []
    checks = {finding.check for finding in diagnosis.findings if finding.level == "ok"}
    assert checks >= {"login", "agent Python", "Python", "torch", "disk", "shared memory"}
    assert checks >= {"address", "port", "peers"}
    addresses = [finding.found for finding in diagnosis.findings if finding.check == "address"]
    assert addresses == [f"{name} on eth0" for name in ward.names]


def test_a_host_that_is_down_delays_no_other(ward: Ward) -> None:
    ward.names.append("10.77.0.99")
    ward.connect_timeout_s = 10
    start = time.monotonic()
    finding = ward.problem(2, "reach")
    # One limit of 10 s for all, not one for every host and step.
    assert time.monotonic() - start < 120
    assert "10.77.0.99" in finding.found
    assert finding.command is not None
    assert finding.command.startswith("ssh -v -o ConnectTimeout=10")


def test_an_unknown_key_is_mended_by_the_command(ward: Ward) -> None:
    lines = ward.known_hosts.read_text(encoding="ascii").splitlines()
    ward.known_hosts = ward.bench.folder / "known_hosts"
    ward.known_hosts.write_text(lines[0] + "\n", encoding="ascii")
    finding = ward.problem(1, "host key")
    assert "SHA256:" in finding.found
    ward.run(finding.command)
    assert ward.diagnose().errors == []


def test_a_changed_key_is_mended_by_the_command(ward: Ward) -> None:
    first, second = ward.bench.cluster.hosts
    lines = ward.known_hosts.read_text(encoding="ascii").splitlines()
    key = lines[0].replace(first.address, second.address).replace(first.name, second.name)
    ward.known_hosts = ward.bench.folder / "known_hosts"
    ward.known_hosts.write_text(f"{lines[0]}\n{key}\n", encoding="ascii")
    finding = ward.problem(1, "host key")
    assert "changed" in finding.found
    ward.run(finding.command)
    assert ward.diagnose().errors == []


def test_a_refused_key_is_told_with_its_name(ward: Ward) -> None:
    ward.identity = ward.bench.folder / "other"
    generate_key(ward.identity, "other")
    errors = ward.diagnose().errors
    assert [finding.check for finding in errors] == ["login"] * 2
    assert errors[1].command == shlex.join(
        [
            *("ssh-copy-id", "-o", f"UserKnownHostsFile={ward.known_hosts}"),
            *("-i", str(ward.identity), f"root@{ward.names[1]}"),
        ]
    )


def test_a_python_that_is_not_there_is_told_and_others_are_listed(ward: Ward) -> None:
    ward.python = "/opt/no/python"
    errors = ward.diagnose().errors
    assert [finding.check for finding in errors] == ["agent Python"] * 2
    assert "/opt/no/python" in errors[0].found
    assert "/usr/bin/python3" in ward.run(errors[0].command)


def test_a_full_disk_is_told(make_cluster: MakeCluster, tmp_path: Path) -> None:
    ward = Ward(Bench(make_cluster(disk_bytes=2**25), tmp_path))
    disk = Path(f"/proc/{ward.bench.cluster.hosts[1].init_pid}/root/run/tmp/data")
    filler = ["/usr/bin/head", "-c", str(2**26), "/dev/zero"]
    with disk.open("wb") as file:
        assert subprocess.run(filler, stdout=file, stderr=subprocess.PIPE, check=False).returncode
    finding = ward.problem(1, "disk")
    assert "/run/tmp: No space left on device, 0 MiB free" in finding.found
    assert "/run/tmp" in ward.run(finding.command)
    disk.unlink()
    ward.bench.check_clean()


def test_peers_that_drop_connections_are_named(make_cluster: MakeCluster, tmp_path: Path) -> None:
    ward = Ward(Bench(make_cluster(num_hosts=3), tmp_path))
    first, second, third = ward.bench.cluster.hosts
    # Each of the two hosts drops packets to the other; both still answer the controller.
    ward.bench.cluster.run_in(second, ["ip", "route", "add", "blackhole", third.address])
    errors = ward.diagnose().errors
    assert {(finding.host, finding.check) for finding in errors} == {
        (second.address, "peers"),
        (third.address, "peers"),
    }
    by_host = {finding.host: finding for finding in errors}
    assert third.address in by_host[second.address].found
    assert first.address not in by_host[second.address].found
    assert f"iptables -I INPUT -s {second.address} -j ACCEPT" in str(
        by_host[second.address].command
    )


def test_a_killed_doctor_leaves_nothing_on_any_host(ward: Ward) -> None:
    slow = ward.bench.folder / "slow"
    slow.write_text("#!/bin/sh\nsleep 300\n", encoding="utf-8")
    slow.chmod(0o755)
    path = ward.bench.folder / "tiny.yaml"
    text = ward.text.replace("trials:\n", f"trials:\n  python: {slow}\n")
    path.write_text(text, encoding="utf-8")
    (ward.bench.folder / "hostfile").write_text(ward.hostfile, encoding="utf-8")
    command = [sys.executable, "-m", "amp_ray", "doctor", str(path)]
    cluster = ward.bench.cluster
    with subprocess.Popen(cluster.controller_command(command)) as process:
        wait_for(
            lambda: all(
                any("sleep" in program.command for program in cluster.programs(host))
                for host in cluster.hosts
            )
        )
        process.kill()
    wait_for(lambda: not any(cluster.programs(host) for host in cluster.hosts))
