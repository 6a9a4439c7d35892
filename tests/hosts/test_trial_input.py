"""Hosts that cannot run a trial: the doctor says so before anything starts, the trial after."""

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from amp_ray.errors import HostError
from amp_ray.inputs.experiment import Experiment
from amp_ray.runtime.doctor import require_ready_hosts
from amp_ray.runtime.study.pool import Task, make_runner
from amp_ray.strategies.strategy import Strategy
from amp_ray.trials.outcome import Crashed, Outcome, Unreachable
from support.experiments import experiment_from

from .conftest import Bench, wait_for
from .trial_experiment import PIPELINE, experiment_text, make_experiment, strategy

pytestmark = pytest.mark.hosts

PYTHON = "/run/home/python"
"""On each host's own disk."""


def run(bench: Bench, experiment: Experiment, chosen: Strategy) -> Outcome:
    """Run one trial and leave; nothing of ours may run or lie on the hosts afterwards."""
    runner = make_runner(experiment, 0)
    task = Task(number=1, attempt=0, trial_id="t-1", strategy=chosen, folder=bench.folder / "t-1")
    try:
        return runner.run(task)
    finally:
        runner.close()
        wait_for(lambda: not any(map(bench.cluster.programs, bench.cluster.hosts)))
        assert [bench.folders_on(host) for host in bench.cluster.hosts] == [[], []]


@pytest.mark.skipif(
    not (find_spec("torch") and find_spec("deepspeed")),
    reason="torch and DeepSpeed are not installed: pip install 'amp-ray[training]'",
)
def test_a_python_without_torch_on_one_host(bench: Bench) -> None:
    for host, flag in zip(bench.cluster.hosts, ("", "-S"), strict=True):
        script = Path(f"/proc/{host.init_pid}/root{PYTHON}")
        script.write_text(f'#!/bin/sh\nexec {sys.executable} {flag} "$@"\n', encoding="utf-8")
        script.chmod(0o755)
    experiment = make_experiment(bench, python=PYTHON)
    first, second = (host.address for host in bench.cluster.hosts)
    with pytest.raises(HostError) as caught:
        require_ready_hosts(experiment)
    message = str(caught.value)
    assert f"{second}: torch: no torch" in message
    assert f"root@{second} '{sys.executable} -m pip install" in message
    assert first not in message
    # Who goes on without the check is told by the trial.
    outcome = run(bench, experiment, PIPELINE)
    assert isinstance(outcome, Crashed), outcome
    assert (outcome.rank, outcome.host) == (1, second)
    assert "ModuleNotFoundError: No module named " in outcome.reason
    assert "; install it on that host" in outcome.reason


def test_a_host_that_is_not_there(bench: Bench) -> None:
    names = [*(host.address for host in bench.cluster.hosts), "10.77.0.99"]
    hostfile = "".join(f"{name} slots=2\n" for name in names)
    experiment = experiment_from(experiment_text(bench, count=3), {"hostfile": hostfile})
    with pytest.raises(HostError) as caught:
        require_ready_hosts(experiment)
    assert "10.77.0.99" in str(caught.value)
    assert "\n" + names[0] not in str(caught.value)
    outcome = run(bench, experiment, strategy((0, 3, 7), (0, 4)))
    assert isinstance(outcome, Unreachable), outcome
    assert outcome.host == "10.77.0.99"
