"""Studies over SSH with random faults: no trial is lost or runs twice, and nothing is left behind.

``make soak N=200`` injects 200 faults; AMP_RAY_SEED sets the seed, to repeat a run.
"""

import contextlib
import logging
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

from support.host_cluster import NamespaceHost
from support.waiting import HANG_GUARD_S, wait_for

from .conftest import Bench, MakeCluster
from .test_tune import Study

if TYPE_CHECKING:
    import subprocess

pytestmark = pytest.mark.hosts

_LOGGER = logging.getLogger(__name__)

NUM_FAULTS: Final = int(os.environ.get("AMP_RAY_SOAK", "2"))
NUM_FAULTS_PER_STUDY: Final = 2
BUDGET: Final = 3
MAX_RESUMES: Final = 8
STEP_S: Final = 0.02
PLAUSIBLE_S: Final = (STEP_S, 50 * STEP_S)
"""Possible step times: on a busy machine a sleep may take longer, but never less time."""


class SoakStudy(Study):
    """A study of a program that sleeps: a trial takes about half a second."""

    def outcomes(self) -> dict[int, dict[str, Any]]:
        """Return the outcomes in the journal, without those of `taken_back` trials."""
        outcomes: dict[int, dict[str, Any]] = {}
        for event in self.events():
            if event["event"] == "ended":
                assert event["number"] not in outcomes, "a trial ended twice"
                outcomes[event["number"]] = event
            for number in (event.get("alike") or {}).get("numbers", ()):
                del outcomes[number]
        return outcomes

    def taken_back(self) -> set[int]:
        """Return the trials that ran again after a stop for a common crash."""
        stops = [event.get("alike") or {} for event in self.events("stopped")]
        return {number for alike in stops for number in alike.get("numbers", ())}

    def processes_of(self, host: NamespaceHost, *, agents: bool) -> list[int]:
        """List the agents of a host, or the processes that they have started."""
        programs = self.bench.cluster.programs(host)
        return [entry.pid for entry in programs if ("amp_ray_agent" in entry.command) == agents]


# ---------------------------------------------------------------------------- faults


@dataclass(frozen=True)
class Scene:
    """A running driver and the host that a fault hits; its methods are the faults."""

    study: SoakStudy
    driver: "subprocess.Popen[str]"
    host: NamespaceHost
    draw: random.Random

    def kill_driver(self) -> None:
        self.driver.kill()

    def press_ctrl_c(self) -> None:
        os.killpg(self.driver.pid, signal.SIGINT)

    def kill_agents(self) -> None:
        _signal(self.study.processes_of(self.host, agents=True), signal.SIGKILL)

    def freeze_agents(self) -> None:
        agents = self.study.processes_of(self.host, agents=True)
        _signal(agents, signal.SIGSTOP)
        time.sleep(self.draw.uniform(0.5, 9.0))
        _signal(agents, signal.SIGCONT)

    def kill_ranks(self) -> None:
        _signal(self.study.processes_of(self.host, agents=False), signal.SIGKILL)

    def kill_sessions(self) -> None:
        self.study.bench.cluster.kill_ssh_sessions(self.host)

    def cut_link(self) -> None:
        self.study.bench.cluster.set_link(self.host, up=False)
        time.sleep(self.draw.uniform(0.2, 9.0))
        self.study.bench.cluster.set_link(self.host, up=True)

    def fill_disk(self) -> None:
        ballast = Path(f"/proc/{self.host.init_pid}/root/run/ballast")
        with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
            while file.write(bytes(2**20)):
                pass
        time.sleep(self.draw.uniform(0.2, 3.0))
        ballast.unlink()


FAULTS: Final = (
    *(Scene.kill_driver, Scene.press_ctrl_c, Scene.kill_agents, Scene.freeze_agents),
    *(Scene.kill_ranks, Scene.kill_sessions, Scene.cut_link, Scene.fill_disk),
)


def _signal(pids: list[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


# ---------------------------------------------------------------------------- the test


@pytest.fixture
def study(make_cluster: MakeCluster, tmp_path: Path) -> Callable[[str], SoakStudy]:
    """Make studies, one after the other on the same two hosts."""
    cluster = make_cluster()

    def make(name: str) -> SoakStudy:
        folder = tmp_path / name
        folder.mkdir()
        made = SoakStudy(folder=folder, bench=Bench(cluster, folder))
        made.write(step_s=STEP_S)
        return made

    return make


def test_faults_at_random_lose_double_and_leave_nothing(
    study: Callable[[str], SoakStudy],
) -> None:
    seed = int(os.environ.get("AMP_RAY_SEED") or random.SystemRandom().randrange(2**32))
    draw = random.Random(seed)
    injected: Counter[str] = Counter()
    outcomes: Counter[str] = Counter()
    num_studies = 0
    while injected.total() < NUM_FAULTS:
        num_studies += 1
        one = study(f"{num_studies}")
        try:
            _run_with_faults(one, draw, injected)
        except BaseException:
            _LOGGER.exception("seed %d, study %d, %s", seed, num_studies, dict(injected))
            raise
        outcomes.update(str(event["outcome"]) for event in one.outcomes().values())
    summary = f"seed {seed}: {num_studies} studies; faults {dict(injected)}; {dict(outcomes)}"
    _LOGGER.info(summary)
    print(summary)  # noqa: T201 - what `make soak` shows


def _run_with_faults(study: SoakStudy, draw: random.Random, injected: Counter[str]) -> None:
    """Drive a study to its end, with a fault in each of the first drivers' runs."""
    before: dict[int, dict[str, object]] = {}
    errors = ""
    for number in range(MAX_RESUMES):
        resume = ["--resume"] if study.events() else []
        num_events = len(study.events())
        with study.started("--budget", str(BUDGET), "--no-doctor", *resume) as driver:
            if number < NUM_FAULTS_PER_STUDY:
                _wait_for_more(study, driver, num_events)
                time.sleep(draw.uniform(0.0, 2.5))
                fault = draw.choice(FAULTS)
                injected[fault.__name__] += 1
                fault(Scene(study, driver, draw.choice(study.bench.cluster.hosts), draw))
            errors = driver.communicate(timeout=HANG_GUARD_S)[1]
        assert driver.returncode in {0, 4, 130, -signal.SIGINT, -signal.SIGKILL}, errors
        assert "Traceback" not in errors, errors
        wait_for(lambda: not study.busy_hosts() and not study.processes())
        ended = study.outcomes()
        kept = before.keys() - study.taken_back()
        assert all(ended.get(key) == before[key] for key in kept), "an outcome was lost or changed"
        before = dict(ended)
        if driver.returncode == 0:
            break
    _check_end(study, errors)


def _wait_for_more(study: SoakStudy, driver: "subprocess.Popen[str]", num_events: int) -> None:
    """Wait until the journal has more than ``num_events`` events."""
    wait_for(lambda: len(study.events()) > num_events or driver.poll() is not None)


def _check_end(study: SoakStudy, errors: str) -> None:
    """Check that every trial has an outcome with possible figures, and that hosts are clean."""
    ended = study.outcomes()
    assert sorted(ended) == list(range(BUDGET)), errors
    for event in ended.values():
        if event["outcome"] == "measured":
            assert PLAUSIBLE_S[0] <= event["measured_s"] <= PLAUSIBLE_S[1], event
    hosts = study.bench.cluster.hosts
    assert [study.bench.folders_on(host) for host in hosts] == [[]] * len(hosts)
    assert [path.name for path in study.scratch.glob("*")] == []
