"""Test hosts, and a bench that runs small programs on them as trials."""

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from amp_ray.inputs.experiment import SshSettings
from amp_ray.runtime.hosts.link import AgentSettings
from amp_ray.runtime.hosts.ssh import SshHost
from amp_ray.runtime.launch.launcher import Launcher
from amp_ray.trials.launch import Launch, WarmUp, rank_commands
from amp_ray.trials.outcome import Outcome
from support.host_cluster import HostCluster, NamespaceHost, why_unavailable
from support.waiting import HANG_GUARD_S, wait_for

"""Limit against hangs; nothing takes so long, even on a slow and busy machine."""

NEEDS_TRAINING = pytest.mark.skipif(
    not (find_spec("torch") and find_spec("deepspeed")),
    reason="torch and DeepSpeed are not installed: pip install 'amp-ray[training]'",
)

CONNECT_S = 60.0
"""Limit for a connection; a host that is down is told by the network before."""

SETTINGS = AgentSettings(heartbeat_s=0.5, grace_s=0.3)
DISK_BYTES = 2**26


MakeCluster = Callable[..., HostCluster]


class Bench:
    """A cluster, and methods that run a program on its hosts as a trial."""

    def __init__(self, cluster: HostCluster, folder: Path) -> None:
        """Use a running cluster; ``folder`` gets the trials' folders."""
        self.cluster = cluster
        self.folder = folder
        self.settings = SETTINGS
        self.preface = PREFACE
        self.ssh = SshSettings(
            known_hosts=str(cluster.known_hosts),
            identities=(str(cluster.identity),),
            config=None,
            user="root",
            python=sys.executable,
            connect_timeout_s=CONNECT_S,
        )
        self.outcome: Outcome | None = None
        self.num_trials = 0

    def launcher(
        self, settings: AgentSettings = SETTINGS, warm_up: WarmUp | None = None
    ) -> Launcher:
        hosts = [SshHost(host.address, self.ssh) for host in self.cluster.hosts]
        return Launcher(hosts, settings, warm_up=warm_up)

    def launch(self, program: str, *, slots: int = 1, **options: Any) -> Launch:  # noqa: ANN401 - Launch's own
        """Return a trial with ``slots`` ranks on each host; hosts alternate from rank to rank."""
        self.num_trials += 1
        places = [(host.address, slot) for slot in range(slots) for host in self.cluster.hosts]
        trial_id = f"trial-{self.num_trials}"
        argv = [sys.executable, "-u", "stand_in.py", trial_id, *options.pop("arguments", ())]
        files = {"stand_in.py": (PREFACE + program).encode(), **options.pop("files", {})}
        values: dict[str, Any] = {"environment": {}, "timeout_s": HANG_GUARD_S, **options}
        commands = rank_commands(argv, places)
        return Launch(trial_id=trial_id, commands=commands, files=files, **values)

    def run(self, launcher: Launcher, program: str, **options: Any) -> Outcome:  # noqa: ANN401
        launch = self.launch(program, **options)
        return launcher.run(launch, self.folder / launch.trial_id)

    def run_and_inject(
        self,
        launcher: Launcher,
        program: str,
        inject: Callable[[], None],
        **options: Any,  # noqa: ANN401
    ) -> tuple[Outcome, float]:
        """Run a trial; call ``inject`` once every rank is ready.

        Returns the outcome, and the seconds from the call to the outcome.
        """
        launch = self.launch(program, **options)

        def work() -> None:
            self.outcome = launcher.run(launch, self.folder / launch.trial_id)

        thread = threading.Thread(target=work)
        thread.start()
        self.wait_until_ready()
        inject()
        start = time.monotonic()
        thread.join(HANG_GUARD_S)
        assert self.outcome is not None
        return self.outcome, time.monotonic() - start

    def wait_until_ready(self) -> None:
        """Wait until a rank on every host has called ``ready()``."""
        wait_for(lambda: all(self.marks(host) for host in self.cluster.hosts))

    def marks(self, host: NamespaceHost) -> list[Path]:
        disk = Path(f"/proc/{host.init_pid}/root/run/tmp")
        return list(disk.glob("amp-ray-*/ready"))

    def ranks_on(self, host: NamespaceHost) -> list[str]:
        """List the living processes of a host, without those of an idle agent."""
        programs = [process.command for process in self.cluster.programs(host)]
        return [command for command in programs if "amp_ray_agent" not in command]

    def folders_on(self, host: NamespaceHost) -> list[str]:
        disk = Path(f"/proc/{host.init_pid}/root/run/tmp")
        return [path.name for path in disk.iterdir()]

    def check_clean(self) -> None:
        """Check that no program or file of a trial is left on any host that is up."""
        hosts = self.cluster.hosts
        alive = [host for host in hosts if Path(f"/proc/{host.init_pid}/root").exists()]
        wait_for(lambda: not any(self.cluster.programs(host) for host in alive))
        assert [self.folders_on(host) for host in alive] == [[]] * len(alive)

    @property
    def last(self) -> Path:
        """Folder of the last trial."""
        return self.folder / f"trial-{self.num_trials}"


PREFACE = """
import json, os, signal, socket, subprocess, sys, time
rank = int(os.environ["RANK"])
def ready():
    open("ready", "w").close()
def result(**more):
    if rank == 0:
        with open("result.json", "w") as file:
            json.dump({"trial_id": sys.argv[1], "step_s": [0.9, 0.2, 0.2, 0.2], **more}, file)
"""
"""Beginning of every stand-in program."""


def require(reason: str | None) -> None:
    """Skip the test if there is a ``reason``."""
    if reason is not None:
        pytest.skip(reason)


@pytest.fixture
def make_cluster() -> Iterator[MakeCluster]:
    """Make test hosts for a single test."""
    require(why_unavailable())
    with contextlib.ExitStack() as stack:

        def make(**options: Any) -> HostCluster:  # noqa: ANN401 - HostCluster's own
            cluster = stack.enter_context(HostCluster(**{"disk_bytes": DISK_BYTES, **options}))
            stack.enter_context(cluster.inside())
            return cluster

        yield make


@pytest.fixture(scope="module")
def two_hosts() -> Iterator[HostCluster]:
    """Two hosts, shared by all tests of a module that neither kill nor change them."""
    require(why_unavailable())
    with HostCluster(disk_bytes=DISK_BYTES) as cluster, cluster.inside():
        yield cluster


@pytest.fixture
def bench(two_hosts: HostCluster, tmp_path: Path) -> Iterator[Bench]:
    """Two hosts, with this test's thread in their network; checks that nothing is left."""
    bench = Bench(two_hosts, tmp_path)
    yield bench
    bench.check_clean()


@pytest.fixture
def small_bench(make_cluster: MakeCluster, tmp_path: Path) -> Bench:
    """Two hosts with a disk of 4 MiB."""
    return Bench(make_cluster(disk_bytes=2**22), tmp_path)


@pytest.fixture
def launcher(bench: Bench) -> Iterator[Launcher]:
    """A launcher with agents on both hosts of a bench."""
    with bench.launcher() as opened:
        yield opened
