"""Ray dies or hangs during a search or a study, or never answers."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.namespaces import descendants

pytestmark = pytest.mark.integration

HANG_GUARD_S = 400.0

COMMON = """
import logging, os, sys, time
logging.basicConfig(format="%(message)s", stream=sys.stdout)
from amp_ray.runtime.ray import actors
# Ray is left in its own time: a process that ends in the middle of it can crash in Ray's threads
actors.LOST_TIMEOUT_S, actors.START_TIMEOUT_S = 4.0, 300.0
"""

SEARCH = (
    COMMON
    + """
from amp_ray.runtime.ray.searching import ALONE, Workers, search_candidates
from amp_ray.search.amp_ray_planner import AmpRayPlanner
from amp_ray.search.space import uniform_candidates
from support.experiments import small_experiment

class SlowPlanner(AmpRayPlanner):
    def plan(self, candidate):
        if candidate.micro_batch_size > 1 and os.getpid() != home:
            time.sleep(3.0)
        return super().plan(candidate)

def progress(done, _total):
    if done == 1 and not seen:
        seen.append(done)
        print("connected", flush=True)

home, seen = os.getpid(), []
experiment = small_experiment()
candidates = uniform_candidates(experiment)
slow, quick = SlowPlanner(experiment=experiment), AmpRayPlanner(experiment=experiment)
found = search_candidates(slow, candidates, workers=Workers(num=2), progress=progress)
assert repr(found) == repr(search_candidates(quick, candidates, workers=ALONE))
print("same ranking", flush=True)
"""
)

TRIALS = (
    COMMON
    + """
from pathlib import Path
from amp_ray.errors import InterruptedTrialError
from amp_ray.runtime.study.pool import Task

class Runner:
    def __init__(self, group):
        pass
    def run(self, task):
        time.sleep(600.0)

with actors.connect("local", num_cpus=1):
    pool = actors.actor_pool(Runner, 2)
    pool.start(Task(number=0, attempt=0, trial_id="long", strategy=None, folder=Path("t")), 1)
    print("connected", flush=True)
    while not (finished := pool.wait(1.0)):
        pass
    print(type(finished[0].outcome).__name__, finished[0].outcome.error, flush=True)
    pool.close()
"""
)


def stranger(**variables: str) -> dict[str, str]:
    """Return an environment without the variables of other tests' Ray."""
    own = {name: text for name, text in os.environ.items() if not name.startswith("RAY_")}
    return {**own, **variables}


def lines_after(program: str, victim: str, number: signal.Signals) -> list[str]:
    """Run a program; once it is connected, send a signal to a process of its Ray."""
    with (
        tempfile.TemporaryDirectory(dir="/tmp", ignore_cleanup_errors=True) as folder,
        subprocess.Popen(
            [sys.executable, "-c", program],
            stdout=subprocess.PIPE,
            env=stranger(TMPDIR=folder),
            text=True,
        ) as process,
    ):
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "connected\n"
            [pid] = [child.pid for child in descendants(process.pid) if child.name == victim]
            os.kill(pid, number)
            out, _ = process.communicate(timeout=HANG_GUARD_S)
            assert process.returncode == 0
        finally:
            process.kill()
    return out.splitlines()


DEATHS = [
    ("raylet", signal.SIGKILL, "its process on this machine, the raylet, has died"),
    ("gcs_server", signal.SIGKILL, "its head: [Errno 111] Connection refused"),
    ("gcs_server", signal.SIGSTOP, "its head: no answer in 2 s"),
]


@pytest.mark.parametrize(("victim", "number", "reason"), DEATHS)
def test_a_search_goes_on_in_its_process(victim: str, number: signal.Signals, reason: str) -> None:
    warning, result = lines_after(SEARCH, victim, number)
    assert warning.startswith("the Ray cluster at ")
    assert warning.endswith(f" is lost: {reason}. The search goes on in this process")
    assert result == "same ranking"


@pytest.mark.parametrize(("victim", "number", "reason"), DEATHS[:1])
def test_a_trial_under_a_ray_that_is_lost_is_a_fault_of_this_machine(
    victim: str, number: signal.Signals, reason: str
) -> None:
    [*_, fault] = lines_after(TRIALS, victim, number)
    assert fault.startswith("Fault the Ray cluster at ")
    assert fault.endswith(f" is lost: {reason}")


@contextmanager
def silent() -> Iterator[str]:
    """Accept connections and never answer."""
    with socket.create_server(("127.0.0.1", 0), backlog=50) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def plan(repository: Path, *options: str, **variables: str) -> subprocess.CompletedProcess[str]:
    experiment = repository / "experiments" / "homogeneous.yaml"
    return subprocess.run(
        [sys.executable, "-m", "amp_ray", "plan", str(experiment), "--json", *options],
        env=stranger(**variables),
        capture_output=True,
        text=True,
        check=False,
        timeout=HANG_GUARD_S,
    )


def test_a_new_ray_takes_the_place_of_one_that_never_answers(repository: Path) -> None:
    with silent() as address:
        done = plan(repository, "--workers", "2", RAY_ADDRESS=address)
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith(f"RAY_ADDRESS: no Ray cluster at {address}: no answer in 5 s; ")
    assert json.loads(done.stdout)["ranking"] == json.loads(plan(repository).stdout)["ranking"]


def test_an_address_that_never_answers_is_told(repository: Path) -> None:
    start_s = time.monotonic()
    with silent() as address:
        done = plan(repository, "--address", address)
    assert (done.returncode, done.stdout) == (4, "")
    assert done.stderr.startswith(f"amp-ray: no Ray cluster at {address}: no answer in 5 s; ")
    assert time.monotonic() - start_s < HANG_GUARD_S
