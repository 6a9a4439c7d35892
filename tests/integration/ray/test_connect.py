"""Local clusters, each started by a separate process: their remains, and their authentication."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest

from amp_ray.runtime.ray.address import START_VARIABLE
from support.namespaces import descendants, exists
from support.waiting import HANG_GUARD_S, wait_for

pytestmark = pytest.mark.integration


SLOW_TO_GO = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")
"""Ray's helper processes, which outlive all others: they try for 60 s to report the loss."""

TWICE = """
import os, signal, sys
before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
environment = dict(os.environ)
from amp_ray.runtime.ray.actors import connect, num_cluster_cpus
import ray
for num_cpus in (1, 2):
    with connect("local", num_cpus=num_cpus):
        assert num_cluster_cpus() == num_cpus
        with connect("local", num_cpus=7):  # the connection that is there
            assert num_cluster_cpus() == num_cpus
        assert before == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
        print("connected", flush=True)
        print(ray.get_runtime_context().gcs_address, os.environ["RAY_AUTH_TOKEN"], flush=True)
        sys.stdin.readline()
assert {**os.environ, "RAY_CLIENT_MODE": ""} == {**environment, "RAY_CLIENT_MODE": ""}
"""

SEARCH = """
import sys, time
from amp_ray.runtime.ray import actors
from amp_ray.runtime.ray.searching import Workers, search_candidates
from amp_ray.search.space import uniform_candidates
from amp_ray.search.amp_ray_planner import AmpRayPlanner
from support.experiments import small_experiment

class SlowPlanner(AmpRayPlanner):
    def plan(self, candidate):
        time.sleep(0.5 if candidate.micro_batch_size == 1 else 600)
        return super().plan(candidate)

def progress(done, _total):
    if done == 1:
        print("connected", flush=True)

actors.START_TIMEOUT_S = 300.0
experiment = small_experiment()
planner = SlowPlanner(experiment=experiment)
try:
    candidates = uniform_candidates(experiment)
    search_candidates(planner, candidates, workers=Workers(num=2), progress=progress)
except KeyboardInterrupt:
    sys.exit(130)
"""

TRIAL = """
import threading
from pathlib import Path
from amp_ray.runtime.ray.actors import actor_pool, connect
from amp_ray.runtime.study.pool import Task

class Waiting:
    def __init__(self, group):
        del group
    def run(self, task):
        print("runs", task)
        threading.Event().wait()

with connect("local", num_cpus=1):
    pool = actor_pool(Waiting, 2)
    for group in range(2):
        pool.start(
            Task(number=group, attempt=0, trial_id="t", strategy=None, folder=Path("t")), group
        )
    print("connected", flush=True)
    pool.wait(600.0)
"""

JOIN = """
import sys
from amp_ray.errors import AmpRayError
from amp_ray.runtime.ray.actors import connect
try:
    with connect(sys.argv[1]):
        print("in")
except AmpRayError as error:
    print(error)
"""


@contextmanager
def started(program: str) -> Iterator[subprocess.Popen[str]]:
    """Run a program until it says that it is connected; check at the end that all has ended."""
    pipe = subprocess.PIPE
    with (
        tempfile.TemporaryDirectory(dir="/tmp", ignore_cleanup_errors=True) as folder,
        subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=pipe,
            stdout=pipe,
            env={**stranger(), "TMPDIR": folder},
            text=True,
            start_new_session=True,
        ) as process,
    ):
        try:
            wait_for_word(process)
            children = descendants(process.pid)
            assert {"gcs_server", "raylet"} <= {child.name for child in children}
            yield process
            killed = process.returncode < 0
            wait_until_gone(
                [child.pid for child in children if not killed or child.command not in SLOW_TO_GO]
            )
            assert killed or list(Path(folder).iterdir()) == []
        finally:
            process.kill()


def stranger() -> dict[str, str]:
    """Return an environment without the variables of other tests' Ray."""
    return {name: text for name, text in os.environ.items() if not name.startswith("RAY_")}


def test_ray_knows_the_limit_for_a_slow_start() -> None:
    """Ray's compiled part reads the variable, but Ray does not document its name."""
    compiled = find_spec("ray._raylet")
    assert compiled is not None
    assert compiled.origin is not None
    name = START_VARIABLE.removeprefix("RAY_").encode()
    assert name in Path(compiled.origin).read_bytes()


def wait_for_word(process: subprocess.Popen[str]) -> None:
    """Wait until a program prints that it is connected."""
    assert process.stdout is not None
    assert process.stdout.readline() == "connected\n"


def go_on(process: subprocess.Popen[str]) -> None:
    """Send the line for which a program waits."""
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def wait_until_gone(pids: list[int]) -> None:
    """Wait until all processes have ended."""
    wait_for(lambda: not any(map(exists, pids)), told=lambda: [*filter(exists, pids)])


def test_only_who_has_the_token_gets_in_and_nothing_is_left_when_another_cluster_follows() -> None:
    with started(TWICE) as process:
        assert process.stdout is not None
        first = descendants(process.pid)
        address, token = process.stdout.readline().split()
        right = join(address, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=token)
        refused = join(address)
        go_on(process)
        wait_for_word(process)
        assert not {child.pid for child in first} & {
            child.pid for child in descendants(process.pid)
        }
        go_on(process)
        assert process.wait(HANG_GUARD_S) == 0
    assert right == "in"
    assert refused.startswith(f"the Ray cluster at {address} cannot be used: ")
    assert "Authentication token is missing or incorrect" in refused


def test_ctrl_c_ends_a_search_and_its_cluster() -> None:
    with started(SEARCH) as process:
        os.killpg(process.pid, signal.SIGINT)  # to every process of the group, as a terminal does
        assert process.wait(HANG_GUARD_S) == 130


def test_actors_end_with_a_driver_that_is_killed() -> None:
    with started(TRIAL) as process:
        process.kill()
        assert process.wait(HANG_GUARD_S) == -signal.SIGKILL


LATE = f"""
import os, ray
from amp_ray.errors import AmpRayError
from amp_ray.runtime.ray.actors import connect

def late(**_):
    raise Exception("late after " + os.environ["{START_VARIABLE}"])

ray.init = late
for variables in ({{}}, {{"{START_VARIABLE}": "7"}}):
    os.environ.update(variables)
    try:
        with connect("local", num_cpus=1):
            print("in")
    except AmpRayError as error:
        print(error)
"""


def test_a_ray_that_does_not_start_in_its_time_is_told_as_one_that_cannot_be_used() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", LATE],
        env=stranger(),
        capture_output=True,
        text=True,
        check=True,
        timeout=HANG_GUARD_S,
    )
    message = "the Ray cluster at local cannot be used: late after"
    assert ended.stdout.splitlines() == [f"{message} 120", f"{message} 7"]


def join(address: str, **environment: str) -> str:
    """Try to join a cluster, once instead of Ray's twenty times."""
    environment = {**stranger(), "RAY_NUM_REDIS_GET_RETRIES": "1", **environment}
    argv = [sys.executable, "-c", JOIN, address]
    done = subprocess.run(
        argv, env=environment, capture_output=True, text=True, check=True, timeout=HANG_GUARD_S
    )
    return done.stdout.strip()
