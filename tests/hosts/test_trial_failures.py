"""Every way in which real training over SSH can fail.

Tests check the outcome's kind, cause, rank and host, the time until it is reported, and that hosts
are clean. The times are in the properties of the tests (``pytest --junitxml``) and in their output
(``pytest -rP``).
"""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import pytest

from amp_ray.trials.outcome import Crashed, Measured, TimedOut, Unreachable
from support.host_cluster import HostCluster, why_unavailable
from support.launching import warm
from support.trial_runs import events_of

from .conftest import NEEDS_TRAINING, Bench, require
from .trial_bench import ALL_SLOTS, MANY_STEPS, PIPELINE, SETTINGS, UNEQUAL, Ended, TrialBench

pytestmark = [pytest.mark.hosts, NEEDS_TRAINING]

PROMPT_S = 1.0
SLOWER = 60.0
"""Factor of the limits of an idle machine: a test fails only if it would wait for ever."""


class Measure(Protocol):
    """Takes a failure, or the seconds until its report, and the limit on an idle machine."""

    def __call__(self, ended: Ended | float, bound_s: float = PROMPT_S) -> None: ...


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrialBench]:
    """Two hosts for all tests that do not destroy them; checks at the end that nothing is left."""
    require(why_unavailable())
    with HostCluster(num_hosts=2, disk_bytes=2**24) as cluster, cluster.inside():
        bench = TrialBench(Bench(cluster, tmp_path_factory.mktemp("trials")))
        yield bench
        bench.close()


@pytest.fixture
def measure(record_property: Callable[[str, object], None]) -> Measure:
    """Record the time until a failure was reported, and check that it is within the limit."""

    def check(ended: Ended | float, bound_s: float = PROMPT_S) -> None:
        seconds = ended if isinstance(ended, float) else ended.seconds
        record_property("bound_s", bound_s)
        record_property("seconds", round(seconds, 3))
        sys.stdout.write(f"told and clean after {seconds:.2f} s, bound {bound_s:g} s\n")
        assert seconds < bound_s * SLOWER

    return check


@pytest.mark.parametrize("runtime", ["deepspeed", "torch"])
def test_a_rank_that_raises_in_a_step(shared: TrialBench, measure: Measure, runtime: str) -> None:
    fault = {"rank": 3, "how": "raise", "backward_pass": 3}
    strategy = UNEQUAL if runtime == "torch" else ALL_SLOTS
    ended = shared.run(shared.launch(strategy, fault=fault, runtime=runtime))
    outcome = ended.outcome
    assert isinstance(outcome, Crashed), outcome
    assert (outcome.kind, outcome.rank, outcome.host) == ("crash", 3, shared.names[1])
    assert outcome.reason == f"rank 3 on {shared.names[1]}: ValueError: no such layer"
    assert outcome.lines[-1] == "ValueError: no such layer"
    measure(ended)


def test_a_rank_that_is_killed(shared: TrialBench, measure: Measure) -> None:
    launch = shared.launch(ALL_SLOTS, steps=MANY_STEPS)
    ended = shared.run_and_inject(launch, lambda: os.kill(shared.rank(2).pid, signal.SIGKILL))
    outcome = ended.outcome
    assert isinstance(outcome, Crashed), outcome
    assert (outcome.kind, outcome.rank, outcome.host) == ("killed", 2, shared.names[1])
    assert "signal 9" in outcome.reason
    measure(ended)


def test_a_rank_that_hangs(shared: TrialBench, measure: Measure) -> None:
    launch = shared.launch(PIPELINE, steps=MANY_STEPS, timeout_s=60.0)
    ended = shared.run_and_inject(launch, lambda: os.kill(shared.rank(1).pid, signal.SIGSTOP))
    outcome = ended.outcome
    assert isinstance(outcome, TimedOut), outcome
    assert outcome.timeout_s == launch.timeout_s
    # The other rank is named, too, unless the end of this rank has ended it before.
    assert outcome.reason.startswith("still running after 60 s: rank ")
    assert outcome.reason.endswith(f"rank 1 on {shared.names[1]} (stopped by a signal)")
    # The rank's stack, most recent call first: it was within a step, or waiting for other ranks.
    assert any("in timed_step" in line for line in outcome.lines), outcome.lines
    measure(outcome.wall_s - launch.timeout_s)


def test_a_disk_that_fills_up(shared: TrialBench, measure: Measure) -> None:
    fault = {"rank": 0, "how": "disk", "backward_pass": 3}
    try:
        ended = shared.run(shared.launch(PIPELINE, fault=fault))
    finally:
        Path(f"/proc/{shared.hosts[0].init_pid}/root/run/home/filler").unlink()
    outcome = ended.outcome
    assert isinstance(outcome, Crashed), outcome
    assert (outcome.kind, outcome.rank, outcome.host) == ("disk", 0, shared.names[0])
    assert "No space left on device" in outcome.reason
    measure(ended)


def test_a_disk_that_is_full(shared: TrialBench) -> None:
    warm(shared.launcher)
    filler = Path(f"/proc/{shared.hosts[1].init_pid}/root/run/filler")
    with filler.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(1 << 16))
    try:
        ended = shared.run(shared.launch(PIPELINE))
    finally:
        filler.unlink()
    outcome = ended.outcome
    assert isinstance(outcome, Crashed), outcome
    assert (outcome.kind, outcome.rank, outcome.host) == ("disk", None, shared.names[1])
    assert events_of(ended.folder, "started") == []


def test_a_clock_that_is_off(shared: TrialBench) -> None:
    fault = {"rank": 1, "how": "clock", "seconds": -3600.0}
    outcome = shared.run(shared.launch(PIPELINE, fault=fault)).outcome
    assert isinstance(outcome, Measured), outcome
    assert 0 < outcome.measured_s < outcome.wall_s


def test_a_session_that_is_killed(shared: TrialBench, measure: Measure) -> None:
    second = shared.hosts[1]
    launch = shared.launch(PIPELINE, steps=MANY_STEPS)
    kill = shared.bench.cluster.kill_ssh_sessions
    ended = shared.run_and_inject(launch, lambda: kill(second), lost=second)
    outcome = ended.outcome
    assert isinstance(outcome, Unreachable), outcome
    assert outcome.host == second.address
    measure(ended)


def test_a_link_that_goes_down(shared: TrialBench, measure: Measure) -> None:
    second = shared.hosts[1]
    launch = shared.launch(PIPELINE, steps=MANY_STEPS)
    set_link = shared.bench.cluster.set_link
    try:
        ended = shared.run_and_inject(launch, lambda: set_link(second, up=False), lost=second)
    finally:
        set_link(second, up=True)
    outcome = ended.outcome
    assert isinstance(outcome, Unreachable), outcome
    assert outcome.host == second.address
    measure(ended, SETTINGS.lease_s + PROMPT_S)
