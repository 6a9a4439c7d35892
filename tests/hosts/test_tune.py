"""Studies over SSH as users run them: real trials, lost hosts, Ctrl-C, kill -9, and resuming."""

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from support.driven_study import DrivenStudy, finish
from support.host_cluster import NamespaceHost
from support.waiting import HANG_GUARD_S, wait_for

from .conftest import NEEDS_TRAINING, Bench, MakeCluster

pytestmark = pytest.mark.hosts

_LOGGER = logging.getLogger(__name__)

EXPERIMENT = """\
name: tiny
model: {{family: gpt2, num_layers: 2, hidden_size: 32, num_heads: 2, sequence_length: 16,
        vocab_size: 64}}
cluster:
  hostfile: hostfile
  nodes:
    - {{count: {count}, device: cpu, slots: 1, intra_gbit_per_s: 20, inter_gbit_per_s: 10}}
precision: fp32
optimizer: sgd
global_batch_size: {global_batch_size}
search: {{max_tp: 1, idle_devices: false}}
trials:
  backend: ssh
  steps: {steps}
  warmup_steps: {num_warmup_steps}
  timeout_s: {timeout_s}
  host_groups: {num_groups}
  {program}
  ssh: {{user: root, config: null, connect_timeout_s: {connect_timeout_s}, python: {python},
        known_hosts: {known_hosts}, identities: [{identity}]}}
"""

STAND_IN = """\
import time
import amp_ray_metric
for _ in range(20):
    with amp_ray_metric.step():
        time.sleep({step_s})
"""
"""A program for trials that needs neither torch nor a warm process."""

SLOW_STEP_S = 0.2
"""Step time that makes a trial long enough to inject a fault into it."""

CONTRACT_KEYS = {"schema", "study", "trials", "best", "calibration", "ranking"}
TRIAL_KEYS = {
    *("number", "strategy", "predicted_s", "outcome", "measured_s", "spread_s"),
    *("peak_memory_bytes", "wall_s", "reason"),
}
STUDY_FILES = {
    *("journal.jsonl", "lock", "experiment.yaml", "trials", "history.csv", "history.jsonl"),
    *("measured.csv", "calibration.json", "result.json"),
}
TRIAL_FILES = {"files", "hosts", "events.jsonl", "launch.json", "outcome.json", "rerun.sh"}


@dataclass(kw_only=True)
class Study(DrivenStudy):
    """A study on test hosts."""

    bench: Bench

    def write(self, *, step_s: float | None, **values: object) -> None:
        """Write experiment, hostfile and program.

        The program's steps take ``step_s``; None means the package's training program.
        """
        cluster = self.bench.cluster
        count = len(cluster.hosts)
        settings: dict[str, object] = {
            "count": count,
            "global_batch_size": 8 * count,
            "steps": 15,
            "num_warmup_steps": 5,
            "timeout_s": 600,
            "num_groups": 1,
            "program": 'program: {files: [a.py], metric: helper, argv: ["{python}", a.py]}',
            "connect_timeout_s": 60,
            "python": sys.executable,
            "known_hosts": cluster.known_hosts,
            "identity": cluster.identity,
        }
        if step_s is None:
            settings |= {"global_batch_size": 4, "steps": 3, "num_warmup_steps": 1, "program": ""}
        text = EXPERIMENT.format(**{**settings, **values})
        (self.folder / "tiny.yaml").write_text(text, encoding="utf-8")
        hostfile = "".join(f"{host.address} slots=1\n" for host in cluster.hosts)
        (self.folder / "hostfile").write_text(hostfile, encoding="utf-8")
        (self.folder / "a.py").write_text(STAND_IN.format(step_s=step_s), encoding="utf-8")

    @contextlib.contextmanager
    def started(
        self, *options: str, pool: str = "threads", policy: str = "predicted-order"
    ) -> Iterator[subprocess.Popen[str]]:
        """Start a driver in a new process group, as a shell does.

        The default policy is the predicted order, with which no measurement ends a study early.
        """
        words = ["tune", "tiny.yaml", "--study", "study", "--pool", pool, "--policy", policy]
        with self.python("-m", "amp_ray", *words, *options) as process:
            yield process

    def run(self, *options: str, **chosen: str) -> subprocess.CompletedProcess[str]:
        """Run a driver to its end."""
        with self.started(*options, **chosen) as process:
            return finish(process)

    @property
    def result(self) -> dict[str, Any]:
        """The study's ``result.json``."""
        record: dict[str, Any] = json.loads((self.path / "result.json").read_text(encoding="utf-8"))
        return record

    def outcomes(self) -> dict[int, dict[str, Any]]:
        """Return the outcomes in the journal; check that no trial has two."""
        ended = self.events("ended")
        by_number = {event["number"]: event for event in ended}
        assert len(by_number) == len(ended), "a trial ended twice"
        return by_number

    def wait_until_running(
        self, driver: subprocess.Popen[str], hosts: Sequence[NamespaceHost]
    ) -> None:
        """Wait until some hosts run ranks."""

        def they_do() -> bool:
            assert driver.poll() is None, finish(driver).stderr
            return all(self._logs(host) for host in hosts)

        wait_for(they_do)

    def _logs(self, host: NamespaceHost) -> list[Path]:
        return list(Path(f"/proc/{host.init_pid}/root/run/tmp").glob("amp-ray-*/a.py"))

    def busy_hosts(self) -> dict[str, list[str]]:
        """Return the processes on hosts that are up, by host."""
        programs = {host.name: self.bench.cluster.programs(host) for host in self.alive}
        return {
            name: [entry.command for entry in those] for name, those in programs.items() if those
        }

    @property
    def alive(self) -> list[NamespaceHost]:
        """The hosts that have not been killed."""
        hosts = self.bench.cluster.hosts
        return [host for host in hosts if Path(f"/proc/{host.init_pid}/root").exists()]


def seconds(event: Mapping[str, Any]) -> float:
    """Return the time of an event by the driver's clock, in seconds."""
    return float(event["seconds"])


MakeStudy = Callable[..., Study]


@pytest.fixture
def make_study(make_cluster: MakeCluster, tmp_path: Path) -> Iterator[MakeStudy]:
    """Make a study; check at the end that nothing is left of it here or on a host that is up."""
    made: list[Study] = []

    def make(num_hosts: int = 2, *, step_s: float | None, num_groups: int = 1) -> Study:
        cluster = make_cluster(num_hosts=num_hosts)
        study = Study(folder=tmp_path, bench=Bench(cluster, tmp_path))
        study.write(step_s=step_s, num_groups=num_groups)
        made.append(study)
        return study

    yield make
    for study in made:
        wait_for(lambda: not study.processes())  # noqa: B023
        study.bench.check_clean()
        assert [path.name for path in study.scratch.glob("*")] == []


@NEEDS_TRAINING
def test_a_study_over_ssh_is_planned_measured_and_kept(make_study: MakeStudy) -> None:
    study = make_study(step_s=None)
    done = study.run("--budget", "3", "--json")
    assert done.returncode == 0, done.stderr
    assert study.busy_hosts() == {}
    result = json.loads(done.stdout)
    assert result == study.result
    assert result.keys() >= CONTRACT_KEYS
    trials = result["trials"]
    assert [trial["outcome"] for trial in trials] == ["measured"] * 3
    assert all(trial.keys() >= TRIAL_KEYS for trial in trials)
    # The recommended strategy is not checked: it depends on how steady a busy machine is.
    assert result["best"]["mean_s"] == trials[result["best"]["number"]]["mean_s"]
    assert result["calibration"] is not None
    assert {path.name for path in study.path.iterdir()} == STUDY_FILES
    attempts = {path.name: path for path in (study.path / "trials").iterdir()}
    assert sorted(attempts) == ["0000-0", "0001-0", "0002-0"]
    assert all({path.name for path in each.iterdir()} == TRIAL_FILES for each in attempts.values())


def test_a_host_dies_and_its_trial_runs_once_more_on_the_other_group(
    make_study: MakeStudy,
) -> None:
    study = make_study(4, num_groups=2, step_s=SLOW_STEP_S)
    hosts = study.bench.cluster.hosts
    with study.started("--budget", "3") as driver:
        study.wait_until_running(driver, hosts[2:])
        study.bench.cluster.kill_host(hosts[3])
        done = finish(driver)
    assert done.returncode == 0, done.stderr
    (lost,) = study.events("interrupted")
    assert hosts[3].address in lost["unreachable"]
    (aside,) = study.events("set-aside")
    again = [event for event in study.events("started") if event["number"] == lost["number"]]
    assert [event["group"] for event in again] == [aside["group"], 1 - aside["group"]]
    outcomes = study.outcomes()
    assert {number: event["outcome"] for number, event in outcomes.items()} == dict.fromkeys(
        range(3), "measured"
    )
    later = [event for event in study.events("started") if seconds(event) > seconds(aside)]
    assert {event["group"] for event in later} == {1 - aside["group"]}
    assert f"group {aside['group']} is set aside" in done.stderr


@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed: 'amp-ray[ray]'")
def test_ctrl_c_ends_trials_and_keeps_everything(make_study: MakeStudy) -> None:
    study = make_study(step_s=HANG_GUARD_S)
    with study.started("--budget", "2", pool="ray") as driver:
        study.wait_until_running(driver, study.bench.cluster.hosts)
        start_s = time.monotonic()
        # A terminal sends the signal to all processes of the command, including Ray's.
        os.killpg(driver.pid, signal.SIGINT)
        wait_for(lambda: not study.busy_hosts())
        _LOGGER.info("hosts were empty after %.2f s", time.monotonic() - start_s)
        done = finish(driver)
    assert done.returncode == 130, done.stderr
    assert "--study study --resume goes on" in done.stderr
    assert [event["event"] for event in study.events()] == [
        *("study", "started", "interrupted", "stopped")
    ]
    assert study.result["ending"] == "interrupted"
    assert [trial["outcome"] for trial in study.result["trials"]] == [None]
