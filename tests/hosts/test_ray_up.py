"""Ray's cluster launcher with cluster/local.yaml on test hosts; the last host is the laptop."""

import contextlib
import hashlib
import importlib.util
import json
import os
import re
import secrets
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from amp_ray.runtime.ray.address import START_VARIABLE
from support.host_cluster import HostCluster, NamespaceHost, why_unavailable
from support.waiting import wait_for

from .conftest import NEEDS_TRAINING

pytestmark = pytest.mark.hosts

NUM_WORKERS: Final = 2
HOME: Final = "/run/home"
"""Home of root on every test host."""
DISK_BYTES: Final = 2**29
"""Size of each host's disk, for Ray's logs and sockets."""
HANG_GUARD_S: Final = 900.0
NUM_SLOTS: Final = 1
"""Slots of every host: a trial has one rank per host."""

RAY_FOLDER: Final = "/run/tmp"
"""Folder for Ray's sessions, instead of /tmp, which test hosts share with this machine."""

PROBE: Final = """
import json, os, sys
with open("probe.json", "w") as file:
    json.dump({"arguments": sys.argv[1:], "token": os.environ.get("RAY_AUTH_MODE")}, file)
sys.exit(3)
"""


EXPERIMENT: Final = """\
name: tiny
model: {family: gpt2, num_layers: 2, hidden_size: 32, num_heads: 2, sequence_length: 16,
        vocab_size: 64}
cluster:
  nodes:
    - {count: 3, device: cpu, slots: 1, intra_gbit_per_s: 20, inter_gbit_per_s: 10}
precision: fp32
optimizer: sgd
global_batch_size: 6
search: {idle_devices: false}
trials: {backend: ssh, budget: 10, steps: 3, warmup_steps: 1, timeout_s: 600}
"""


def why_not() -> str | None:
    """Return why Ray's launcher cannot be tested here; None if it can."""
    if shutil.which("rsync") is None:
        return "ray up needs rsync: install the Debian package rsync"
    if importlib.util.find_spec("ray") is None:
        return "ray up needs Ray: install it with make EXTRAS=dev,ssh,ray venv"
    return why_unavailable()


class Cluster:
    """Test hosts as `ray up` finds them: reachable by a key, with Python and Ray installed."""

    def __init__(self, hosts: HostCluster, repository: Path) -> None:
        """Use running hosts: head, workers and laptop, in this order."""
        self.hosts = hosts
        self.repository = repository
        # The name decides in which folder of /tmp Ray's ssh keeps its connections.
        self.name = f"amp-ray-{secrets.token_hex(4)}"
        self.head, *self.workers = hosts.hosts[:-1]
        self.laptop = hosts.hosts[-1]

    def home(self, host: NamespaceHost) -> Path:
        return Path(f"/proc/{host.init_pid}/root{HOME}")

    def furnish(self) -> None:
        """Prepare the hosts as the README says."""
        rsync = Path(shutil.which("rsync") or "").parent
        for host in (self.head, *self.workers):
            # The place in which the setup commands would make an environment.
            (self.home(host) / "amp-ray").symlink_to(sys.prefix)
            slow = f"{START_VARIABLE}={os.environ[START_VARIABLE]}"
            profile = f"export PATH=$PATH:{rsync} RAY_TMPDIR={RAY_FOLDER} {slow}\n"
            (self.home(host) / ".bashrc").write_text(profile, encoding="utf-8")
            (self.home(host) / ".ssh").mkdir()
        home = self.home(self.laptop)
        for folder in (".ray", ".ssh", "dist"):
            (home / folder).mkdir()
        (home / ".ray" / "auth_token").write_text(secrets.token_hex(32), encoding="ascii")
        shutil.copy(self.hosts.identity, home / ".ssh" / "amp-ray")
        (home / ".ssh" / "amp-ray").chmod(0o600)
        (home / "local.yaml").write_text(yaml.safe_dump(self.config()), encoding="utf-8")
        (home / "probe.py").write_text(PROBE, encoding="utf-8")

    def config(self) -> dict[str, Any]:
        """Return cluster/local.yaml with the changes that it asks for, but without downloads."""
        text = (self.repository / "cluster" / "local.yaml").read_text(encoding="utf-8")
        documented = yaml.safe_load(text)["provider"]["head_ip"]
        config: dict[str, Any] = yaml.safe_load(text.replace(documented, self.head.address))
        config["provider"]["worker_ips"] = [host.address for host in self.workers]
        config["auth"]["ssh_user"] = "root"
        config["cluster_name"] = self.name
        commands = config["setup_commands"]
        config["setup_commands"] = [word for word in commands if "pip install" not in word]
        assert len(config["setup_commands"]) == len(commands) - 1
        return config

    def run(
        self, *argv: str, host: NamespaceHost | None = None, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on a host, by default on the laptop: in all its namespaces, in its home."""
        target = str((host or self.laptop).init_pid)
        rsync = Path(shutil.which("rsync") or "").parent
        folders = [Path(sys.executable).parent, rsync, "/usr/bin", "/bin", "/usr/sbin", "/sbin"]
        return subprocess.run(
            [
                *("nsenter", "--target", target, "--net", "--uts", "--mount", "--pid", "--ipc"),
                *("--", "sh", "-c", 'cd && exec "$@"', "sh", *argv),
            ],
            env={
                "HOME": HOME,
                "PATH": ":".join(map(str, folders)),
                "RAY_TMPDIR": RAY_FOLDER,
                "RAY_USAGE_STATS_ENABLED": "0",
                "TMPDIR": RAY_FOLDER,
                **environment,
            },
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=HANG_GUARD_S,
            check=False,
        )

    def ray(self, command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run one of Ray's launcher commands on the laptop; a failure is a result."""
        options = ["-y"] if command in {"up", "down"} else []
        return self.run("ray", command, *options, "local.yaml", *arguments)

    def submit(self, script: Path | str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Submit a script to the head, as the README says."""
        return self.ray("submit", str(script), "--", *arguments)

    def forget(self) -> None:
        """Remove the files that Ray's ssh connections leave in this machine's /tmp."""
        digest = hashlib.sha256(self.name.encode()).hexdigest()[:10]
        for folder in Path("/tmp").glob(f"ray_ssh_*/{digest}"):  # noqa: S108 - Ray's choice
            shutil.rmtree(folder)
            with contextlib.suppress(OSError):
                folder.parent.rmdir()

    def ray_processes(self) -> list[str]:
        """List the processes on the head and the workers, except for ssh's open connections."""
        return [
            f"{host.name}: {process.command[:80]}"
            for host in (self.head, *self.workers)
            for process in self.hosts.programs(host)
            if not process.name.startswith("ssh")
        ]


def said(done: subprocess.CompletedProcess[str]) -> str:
    """Return all output of a command, for messages."""
    return f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"


@pytest.fixture(scope="module")
def cluster(repository: Path) -> Iterator[Cluster]:
    """Start a cluster for all tests; stop it at the end, and check that nothing is left."""
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    with (
        contextlib.ExitStack() as stack,
        HostCluster(num_hosts=NUM_WORKERS + 2, disk_bytes=DISK_BYTES) as hosts,
    ):
        cluster = Cluster(hosts, repository)
        stack.callback(cluster.forget)  # called last, when no process runs any more
        cluster.furnish()
        up = cluster.ray("up")
        assert up.returncode == 0, said(up)
        # This also counts the nodes: the tests are valid only if all of them are there.
        writer = repository / "cluster" / "make_hostfile.py"
        done = cluster.submit(writer, "--slots", str(NUM_SLOTS), "--output", "hostfile")
        assert done.returncode == 0, said(done)
        for argument in readme_commands(repository):
            done = cluster.ray("exec", argument)
            assert done.returncode == 0, said(done)
        yield cluster
        stop = on_every_node(cluster, "ray", "stop")
        assert stop.returncode == 0, said(stop)
        down = cluster.ray("down")
        assert down.returncode == 0, said(down)
        wait_for(lambda: not cluster.ray_processes(), told=cluster.ray_processes)


def readme_commands(repository: Path) -> list[str]:
    """Return the commands of cluster/README.md that let the head log in to the other nodes."""
    text = (repository / "cluster" / "README.md").read_text(encoding="utf-8")
    lines = re.findall(r"\$ (ray exec cluster/(?:X|local)\.yaml \".*\")$", text, re.MULTILINE)
    commands = [shlex.split(line)[-1] for line in lines]
    assert [word for command in commands for word in ("scan", "printf") if word in command] == [
        "scan",
        "printf",
    ]
    return commands


def on_every_node(cluster: Cluster, *argv: str) -> subprocess.CompletedProcess[str]:
    """Run a command on the head and the workers, from the head."""
    return cluster.submit(cluster.repository / "cluster" / "on_every_node.py", *argv)


def test_all_workers_start_and_stand_in_the_hostfile_behind_the_head(cluster: Cluster) -> None:
    text = (cluster.home(cluster.head) / "hostfile").read_text(encoding="utf-8")
    hosts = [cluster.head, *cluster.workers]
    assert text == "".join(f"{host.address} slots={NUM_SLOTS}\n" for host in hosts)


def test_a_missing_node_is_an_error_on_the_laptop_too(cluster: Cluster) -> None:
    script = cluster.repository / "cluster" / "make_hostfile.py"
    done = cluster.submit(script, "--expect", str(NUM_WORKERS + 2), "--timeout", "0")
    assert done.returncode == 1, said(done)
    assert f"{NUM_WORKERS + 1} of {NUM_WORKERS + 2} nodes are alive" in done.stdout


def test_an_argument_of_a_submitted_script_arrives_split_at_its_spaces(cluster: Cluster) -> None:
    # As the README warns, Ray quotes nothing, and an exit code of 3 arrives as 1.
    done = cluster.submit("probe.py", "--budget", "10", "two words")
    assert done.returncode == 1, said(done)
    probe = json.loads((cluster.home(cluster.head) / "probe.json").read_text(encoding="utf-8"))
    assert probe == {"arguments": ["--budget", "10", "two", "words"], "token": "token"}


def test_an_experiment_runs_from_the_heads_home(cluster: Cluster) -> None:
    script = cluster.repository / "experiments" / "het_cluster.py"
    done = cluster.submit(script, "--top", "2", "--json", "plan.json")
    assert done.returncode == 0, said(done)
    plan = json.loads((cluster.home(cluster.head) / "plan.json").read_text(encoding="utf-8"))
    assert plan["experiment"] == "het_cluster"
    assert len(plan["ranking"]) == 2


@NEEDS_TRAINING
def test_a_submitted_script_proves_its_plan_by_trials_on_all_hosts(cluster: Cluster) -> None:
    home = cluster.home(cluster.laptop)
    script = cluster.repository / "experiments" / "het_cluster.py"
    shutil.copy(script, home / "tiny.py")  # any script: only the file beside it differs
    (home / "tiny.yaml").write_text(EXPERIMENT, encoding="utf-8")
    sent = cluster.ray("rsync-up", "tiny.yaml", "~/tiny.yaml")
    assert sent.returncode == 0, said(sent)
    options = ["--policy", "predicted-order", "--json", "result.json"]
    done = cluster.submit("tiny.py", "--full", "--budget", "2", *options)
    assert done.returncode == 0, said(done)
    at_head = cluster.home(cluster.head)
    result = json.loads((at_head / "result.json").read_text(encoding="utf-8"))
    assert [trial["outcome"] for trial in result["trials"]] == ["measured", "measured"]
    (first,) = (at_head / "tiny-study" / "trials").glob("0000-0")
    hosts = {path.name for path in (first / "hosts").iterdir()}
    assert hosts == {host.address for host in (cluster.head, *cluster.workers)}


def test_a_command_runs_on_every_node(cluster: Cluster) -> None:
    done = on_every_node(cluster, "hostname")
    assert done.returncode == 0, said(done)
    for host in (cluster.head, *cluster.workers):
        assert f"{host.address}: {host.name}" in done.stdout
        assert f"{host.address}: exit code 0" in done.stdout


def test_strangers_without_the_token_are_turned_away(cluster: Cluster) -> None:
    status = ["ray", "status", "--address", f"{cluster.head.address}:6379"]
    welcome = cluster.run(*status, host=cluster.head, RAY_AUTH_MODE="token")
    assert welcome.returncode == 0, said(welcome)
    stranger = cluster.run(*status, host=cluster.head, RAY_AUTH_MODE="disabled")
    assert stranger.returncode != 0, said(stranger)
    assert "InvalidAuthToken" in stranger.stderr


def test_the_token_is_readable_by_its_owner_alone(cluster: Cluster) -> None:
    for host in (cluster.head, *cluster.workers):
        assert (cluster.home(host) / ".ray" / "auth_token").stat().st_mode & 0o777 == 0o600
