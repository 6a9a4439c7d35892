"""Test hosts on which our real training program runs, and fails on purpose."""

import contextlib
import json
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from amp_ray.errors import InterruptedTrialError
from amp_ray.inputs.experiment import Experiment
from amp_ray.runtime.hosts.link import AgentSettings
from amp_ray.runtime.hosts.ssh import SshHost
from amp_ray.runtime.launch.launcher import Launcher
from amp_ray.runtime.launch.program_files import program_files
from amp_ray.runtimes.traits import RUNTIMES
from amp_ray.strategies.candidate import Candidate
from amp_ray.strategies.strategy import Stage, StageOptions, Strategy
from amp_ray.trials.command import trial_launch, trial_reader, trial_warm_up
from amp_ray.trials.launch import Launch
from amp_ray.trials.outcome import Outcome
from support.experiments import experiment_from
from support.host_cluster import NamespaceHost
from support.launching import warm
from support.namespaces import Process
from support.waiting import wait_for

from .conftest import Bench

FAULTS: Final = Path(__file__).with_name("trial_faults.py")
PROGRAM: Final = "amp_ray/training/__main__.py"
INJECTION: Final = b"import trial_faults; trial_faults.inject()\n"
FAULT_FILE: Final = "fault.json"

SETTINGS: Final = AgentSettings(heartbeat_s=0.5)

GUARD_S: Final = 600.0
"""Time limit of a trial, against hangs."""

MANY_STEPS: Final = 1_000_000
"""Number of steps of trials that end only by a failure."""


NUM_SLOTS: Final = 2

TEXT: Final = """\
name: tiny
model: {{family: gpt2, num_layers: 4, hidden_size: 32, num_heads: 4, sequence_length: 16,
        vocab_size: 61}}
cluster:
  hostfile: hostfile
  nodes:
    - {{count: {count}, device: cpu, slots: 2, intra_gbit_per_s: 20, inter_gbit_per_s: 10}}
precision: fp32
optimizer: sgd
global_batch_size: 8
trials:
  backend: ssh
  steps: 3
  warmup_steps: 1
  timeout_s: 600
  ssh: {{user: root, config: null, connect_timeout_s: 60, python: {python},
        known_hosts: {known_hosts}, identities: [{identity}]}}
"""


def strategy(bounds: tuple[int, ...], placement: tuple[int, ...], *, dp: int = 1) -> Strategy:
    """Return a pipeline; devices 0 and 1 belong to the first host, 2 and 3 to the second."""
    num_micro_batches = 4 // dp
    candidate = Candidate(
        micro_batch_size=2,
        options=StageOptions(tp=1, dp=dp),
        pp=len(bounds) - 1,
        num_micro_batches=num_micro_batches,
    )
    return Strategy.uniform(candidate, bounds, placement)


PIPELINE: Final = strategy((0, 3, 7), (0, 2))
"""A pipeline with rank 0 on the first host and rank 1 on the second."""

ALL_SLOTS: Final = strategy((0, 3, 7), (0, 1, 2, 3), dp=2)


UNEQUAL: Final = Strategy(
    stages=(
        Stage(first_layer=0, end_layer=3, options=StageOptions(tp=2, dp=1), shares=(4,)),
        Stage(first_layer=3, end_layer=7, options=StageOptions(tp=1, dp=2), shares=(3, 1)),
    ),
    micro_batch_size=4,
    num_micro_batches=2,
    placement=(0, 1, 2, 3),
)
"""A strategy with different stages, for runtime torch."""


def make_experiment(bench: Bench) -> Experiment:
    """Return an experiment on the hosts of a bench."""
    names = [host.address for host in bench.cluster.hosts]
    hostfile = "".join(f"{name} slots={NUM_SLOTS}\n" for name in names)
    text = TEXT.format(
        count=len(names),
        python=sys.executable,
        known_hosts=bench.cluster.known_hosts,
        identity=bench.cluster.identity,
    )
    return experiment_from(text, {"hostfile": hostfile})


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A trial that failed."""

    outcome: Outcome
    seconds: float  # from the injection until the outcome was known and the hosts were clean
    folder: Path


class TrialBench:
    """Our training program on the hosts of a bench, forked from warm processes."""

    def __init__(self, bench: Bench) -> None:
        """Use a bench, without connecting to its hosts yet."""
        self.bench = bench
        self.hosts = bench.cluster.hosts
        self.names = [host.address for host in self.hosts]
        self.experiment = make_experiment(bench)
        self.python = self.experiment.trials.ssh.python
        warm_up = trial_warm_up(self.experiment, self.python)
        assert warm_up is not None
        self.ssh = self.experiment.trials.ssh
        hosts = [SshHost(name, self.ssh) for name in self.names]
        self.launcher = Launcher(hosts, SETTINGS, warm_up=warm_up, listener=self._hear)
        self._files = program_files(self.experiment, Path())
        self._lock = threading.Lock()
        self._said: list[Mapping[str, Any]] = []

    def close(self) -> None:
        """End everything; check that nothing is left on any host that is up."""
        self.launcher.close()
        wait_for(lambda: all(map(self._is_clean, self.hosts)))

    @property
    def alive(self) -> list[NamespaceHost]:
        """Hosts that are up."""
        return [host for host in self.hosts if Path(f"/proc/{host.init_pid}/root").exists()]

    def programs(self, host: NamespaceHost) -> tuple[Process, ...]:
        return self.bench.cluster.programs(host)

    def state(self, host: NamespaceHost) -> tuple[set[int], list[str]]:
        """Return the processes and folders of a host."""
        return {process.pid for process in self.programs(host)}, self.bench.folders_on(host)

    def _is_clean(self, host: NamespaceHost) -> bool:
        """Return whether a host is down, or has no process and folder of a trial."""
        return host not in self.alive or self.state(host) == (set(), [])

    # ------------------------------------------------------------------ trials

    def launch(
        self,
        chosen: Strategy,
        *,
        fault: Mapping[str, Any] | None = None,
        runtime: str = "deepspeed",
        **changes: Any,  # noqa: ANN401 - fields of TrialSettings
    ) -> Launch:
        """Return a trial in which every rank has a child process; with ``fault``, a rank fails."""
        self.bench.num_trials += 1
        trials = replace(self.experiment.trials, **changes)
        launch = trial_launch(
            replace(self.experiment, trials=trials, traits=RUNTIMES[runtime]),
            chosen,
            trial_id=f"study-{self.bench.num_trials}",
            hosts=self.names,
            files=self._files,
            python=self.python,
        )
        files = {
            **launch.files,
            PROGRAM: INJECTION + launch.files[PROGRAM],
            FAULTS.name: FAULTS.read_bytes(),
            FAULT_FILE: json.dumps(fault or {}).encode(),
        }
        return replace(launch, files=files)

    def run(self, launch: Launch) -> Ended:
        """Run a trial in which a rank makes itself fail; check that the hosts are as before."""
        warm(self.launcher)
        before = [self.state(host) for host in self.hosts]
        ended = self._run(launch)
        assert [self.state(host) for host in self.hosts] == before
        return ended

    def run_and_inject(
        self, launch: Launch, inject: Callable[[], object], *, lost: NamespaceHost | None = None
    ) -> Ended:
        """Run a trial of many steps; call ``inject`` once every rank has done a step.

        Check that the hosts are as before afterwards, except that the agent of the host ``lost``
        has died, with all processes that it started.
        """
        warm(self.launcher)
        before = {host.name: self.state(host) for host in self.hosts}
        self._said.clear()
        ended: list[Ended] = []

        def work() -> None:
            with contextlib.suppress(InterruptedTrialError):  # a test that fails gives up
                ended.append(self._run(launch))

        thread = threading.Thread(target=work)
        thread.start()
        try:
            wait_for(lambda: ended or self._num_first_steps() == len(launch.commands), GUARD_S)
            assert not ended, ended
            start = time.monotonic()
            inject()
            thread.join(GUARD_S)
            wait_for(lambda: lost is None or self._is_clean(lost))
            seconds = time.monotonic() - start
        finally:
            self.launcher.interrupt()
            thread.join()
        kept = [host for host in self.hosts if host is not lost]
        for host in kept:
            after, then = self.state(host), before[host.name]
            left = [process for process in self.programs(host) if process.pid not in then[0]]
            assert after == then, f"{host.name}: {then} before, {after} after: {left}, {ended}"
        return replace(ended[0], seconds=seconds)

    def rank(self, number: int) -> Process:
        """Return the process of a rank that has done a step."""
        with self._lock:
            ((name, pid),) = {
                (event["host"], event["pid"]) for event in self._said if event["rank"] == number
            }
        (ended,) = [
            process
            for host in self.alive
            for process in self.programs(host)
            if host.name == name and inner_pid(process.pid) == pid and process.name != "sleep"
        ]
        return ended

    def _run(self, launch: Launch) -> Ended:
        """Run a trial; measure from the mark that a failing rank has left, or from the start."""
        start = time.monotonic()
        folder = self.bench.folder / launch.trial_id
        outcome = self.launcher.run(launch, folder, reader=trial_reader(self.experiment))
        end = time.monotonic()
        marks = [path.read_text(encoding="ascii") for path in folder.glob("hosts/*/rank-injected*")]
        return Ended(outcome=outcome, seconds=end - float(max(marks, default=start)), folder=folder)

    def _hear(self, event: Mapping[str, Any]) -> None:
        with self._lock:
            self._said.append(event)

    def _num_first_steps(self) -> int:
        with self._lock:
            return sum(event["event"] == "first_step" for event in self._said)


def inner_pid(pid: int) -> int:
    """Return a process's number in its innermost PID namespace; 0 if it is gone."""
    try:
        text = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except OSError:
        return 0
    (line,) = [line for line in text.splitlines() if line.startswith("NSpid:")]
    return int(line.split()[-1])
