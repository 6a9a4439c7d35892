"""Bad input for trials over SSH: one message, before anything starts, and the hosts left clean."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from amp_ray.errors import HostError, InputError
from amp_ray.inputs.experiment import Experiment
from amp_ray.runtime.doctor.diagnosis import require_ready_hosts
from amp_ray.runtime.files import load_experiment
from amp_ray.runtime.launch.trial_runner import TrialRunner, make_runner
from amp_ray.runtime.study.pool import Task
from amp_ray.strategies.strategy import StageOptions, Strategy
from amp_ray.strategies.zero import Zero
from amp_ray.testing.hosts import HostCluster, why_unavailable
from amp_ray.trials.outcome import Crashed, Measured, Outcome, Unreachable

from .conftest import Bench, require, wait_for
from .trial_experiment import PIPELINE, experiment_text, make_experiment, strategy

pytestmark = pytest.mark.hosts

PYTHON = "/run/home/python"
"""On each host's own disk."""

PROGRAM = """
import os, sys
for number in range(30):
    print(os.environ["RANK"], number)
if sys.argv[1] == "tell":
    print("took 0.5 s\\ntook 0.5 s\\ntook 0.5 s\\ntook 0.5 s")
"""

OWN = """\
  program:
    argv: ["{{python}}", train.py, {argument}]
    files: [train.py]
    metric: {{pattern: "took ([0-9.]+) s"}}
"""


@pytest.fixture(scope="module")
def module_bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    require(why_unavailable())
    with HostCluster(num_hosts=2) as cluster, cluster.inside():
        yield Bench(cluster, tmp_path_factory.mktemp("trials"))


@pytest.fixture
def place(module_bench: Bench, tmp_path: Path) -> Iterator["Place"]:
    """Two hosts; whatever was refused, nothing of ours may run or lie on them afterwards."""
    found = Place(module_bench, tmp_path)
    yield found
    wait_for(lambda: not any(map(found.bench.cluster.programs, found.hosts)))
    assert [found.bench.folders_on(host) for host in found.hosts] == [[], []]


class Place:
    """Hosts without agents, and trials as a study runs them."""

    def __init__(self, bench: Bench, folder: Path) -> None:
        """Take hosts on which nothing runs."""
        self.bench = bench
        self.folder = folder
        self.hosts = bench.cluster.hosts
        self.names = [host.address for host in self.hosts]

    def run(self, experiment: Experiment, chosen: Strategy = PIPELINE) -> Outcome:
        """Run one trial and leave."""
        runner = make_runner(experiment, "ssh", 0)
        try:
            return self.run_with(runner, chosen)
        finally:
            runner.close()

    def run_with(self, runner: TrialRunner, chosen: Strategy) -> Outcome:
        folder = self.folder / "study-1"
        return runner.run(
            Task(number=1, attempt=0, trial_id="study-1", strategy=chosen, folder=folder)
        )

    def load(self, text: str, hostfile: str | None = None) -> Experiment:
        """Load an experiment from files, as every command does."""
        named = "".join(f"{name} slots=2\n" for name in self.names)
        (self.folder / "hostfile").write_text(hostfile or named, encoding="utf-8")
        path = self.folder / "tiny.yaml"
        path.write_text(text, encoding="utf-8")
        return load_experiment(path)

    @contextmanager
    def pythons(self, *flags: str) -> Iterator[None]:
        """Give each host a Python of its own, for a while."""
        scripts = [Path(f"/proc/{host.init_pid}/root{PYTHON}") for host in self.hosts]
        for script, flag in zip(scripts, flags, strict=True):
            script.write_text(f'#!/bin/sh\nexec {sys.executable} {flag} "$@"\n', encoding="utf-8")
            script.chmod(0o755)
        yield
        for script in scripts:
            script.unlink()


# -------------------------------------------------------------------------------------- the hosts


@pytest.mark.skipif(
    not (find_spec("torch") and find_spec("deepspeed")),
    reason="torch and DeepSpeed are not installed: pip install 'amp-ray[training]'",
)
def test_a_python_without_torch_on_one_host(place: Place) -> None:
    experiment = make_experiment(place.bench, python=PYTHON)
    first, second = place.names
    with place.pythons("", "-S"):
        with pytest.raises(HostError) as caught:
            require_ready_hosts(experiment)
        # Who goes on without the check is told by the trial.
        outcome = place.run(experiment)
    told = str(caught.value)
    assert f"{second}: torch: no torch" in told
    assert f"root@{second} '{sys.executable} -m pip install" in told
    assert first not in told
    assert isinstance(outcome, Crashed), outcome
    assert (outcome.rank, outcome.host) == (1, second)
    assert "ModuleNotFoundError: No module named " in outcome.reason
    assert "; install it on that host" in outcome.reason


def test_a_missing_key_file(place: Place) -> None:
    experiment = make_experiment(place.bench, identity=place.folder / "nokey")
    with pytest.raises(HostError, match=f"ssh-keygen -t ed25519 -f {place.folder}/nokey"):
        require_ready_hosts(experiment)
    with pytest.raises(HostError, match=f"{place.folder}/nokey"):
        make_runner(experiment, "ssh", 0)


def test_a_changed_host_key(place: Place) -> None:
    first, second = place.hosts
    known_hosts = place.bench.cluster.known_hosts.read_text(encoding="ascii")
    key = known_hosts.splitlines()[0].replace(first.address, second.address)
    path = place.folder / "known_hosts"
    path.write_text(f"{known_hosts.splitlines()[0]}\n{key}\n", encoding="ascii")
    experiment = make_experiment(place.bench, known_hosts=path)
    mend = f"ssh-keygen -R {second.address} -f {path}"
    with pytest.raises(HostError) as caught:
        require_ready_hosts(experiment)
    assert mend in str(caught.value)
    outcome = place.run(experiment)
    assert isinstance(outcome, Unreachable), outcome
    assert outcome.host == second.address
    assert "key has changed" in outcome.reason
    assert mend in outcome.reason


def test_a_host_that_is_not_there(place: Place) -> None:
    text = experiment_text(place.bench, count=3)
    named = [*place.names, "10.77.0.99"]
    experiment = place.load(text, "".join(f"{name} slots=2\n" for name in named))
    with pytest.raises(HostError) as caught:
        require_ready_hosts(experiment)
    assert "10.77.0.99" in str(caught.value)
    assert "\n" + place.names[0] not in str(caught.value)
    outcome = place.run(experiment, strategy((0, 3, 7), (0, 4)))
    assert isinstance(outcome, Unreachable), outcome
    assert outcome.host == "10.77.0.99"


# ---------------------------------------------------------------------------------- the experiment


@pytest.mark.parametrize(
    ("nodes", "hostfile", "message"),
    [
        ("", "{0} slots=2\n{1} slots=4\n", "found 2; host '{1}' has slots=4 in 'hostfile'"),
        ("", "{0} slots=2\n", "describes 2 hosts and hostfile 'hostfile' names 1"),
        (
            "  links: [{{between: ['{0}', node1], gbit_per_s: 1}}]\n",
            "{0} slots=2\n{1} slots=2\n",
            "host 'node1' is not one of {0}, {1}",
        ),
    ],
)
def test_a_hostfile_and_a_cluster_that_disagree(
    place: Place, nodes: str, hostfile: str, message: str
) -> None:
    text = experiment_text(place.bench).replace(
        "precision:", nodes.format(*place.names) + "precision:"
    )
    with pytest.raises(InputError) as caught:
        place.load(text, hostfile.format(*place.names))
    assert str(caught.value).startswith(f"{place.folder}/tiny.yaml:")
    assert message.format(*place.names) in str(caught.value)


def other_stages() -> Strategy:
    """Return a strategy whose stages have different tp."""
    stages = [replace(PIPELINE.stages[0], options=StageOptions(tp=2, dp=1)), PIPELINE.stages[1]]
    return replace(PIPELINE, stages=tuple(stages), placement=(0, 1, 2))


def sharded(stage: int) -> Strategy:
    """Return the pipeline with a ZeRO stage."""
    options = replace(PIPELINE.stages[0].options, zero=Zero(stage=stage))
    stages = (replace(own, options=options) for own in PIPELINE.stages)
    return replace(PIPELINE, stages=tuple(stages))


@pytest.mark.parametrize(
    ("chosen", "changes", "message"),
    [
        (strategy((0, 3, 6), (0, 2)), {}, "bounds end at 6, the model has 7 layers"),
        (strategy((0, 3, 8), (0, 2)), {}, "bounds end at 8, the model has 7 layers"),
        (other_stages(), {}, "different tp or dp"),
        (strategy((0, 3, 7), (0, 4)), {}, "on device 4, the cluster has devices 0 to 3"),
        (sharded(2), {}, "pipelines with zero_stage 0 or 1, found 2: set pp 1"),
        (PIPELINE, {"global_batch_size": 16}, "8 samples per step, global_batch_size is 16"),
    ],
)
def test_a_strategy_that_cannot_be_launched(
    place: Place, chosen: Strategy, changes: dict[str, Any], message: str
) -> None:
    experiment = replace(make_experiment(place.bench), **changes)
    with pytest.raises(InputError, match=message):
        place.run(experiment, chosen)
    assert not (place.folder / "study-1").exists()


# --------------------------------------------------------------------------------- the own program


def own_text(place: Place, argument: str) -> str:
    (place.folder / "train.py").write_text(PROGRAM, encoding="utf-8")
    return experiment_text(place.bench) + OWN.format(argument=argument)


def test_an_unknown_placeholder(place: Place) -> None:
    experiment = place.load(own_text(place, '"--tp={t}"'))
    with pytest.raises(InputError) as caught:
        place.run(experiment)
    assert "trials.program.argv.2: found {t}, which is no" in str(caught.value)
    assert "did you mean {tp}?" in str(caught.value)


def test_a_file_that_is_missing(place: Place) -> None:
    text = own_text(place, "tell")
    (place.folder / "train.py").unlink()
    with pytest.raises(InputError, match=r"train\.py cannot be read: No such file"):
        place.run(place.load(text))


def test_a_metric_that_never_appears(place: Place) -> None:
    outcome = place.run(place.load(own_text(place, "nothing")))
    assert isinstance(outcome, Crashed), outcome
    assert outcome.kind == "no-result"
    assert "'took ([0-9.]+) s'" in outcome.reason
    assert outcome.lines == tuple(f"0 {number}" for number in range(10, 30))


def test_a_metric_that_appears(place: Place) -> None:
    outcome = place.run(place.load(own_text(place, "tell")))
    assert isinstance(outcome, Measured), outcome
    assert outcome.measured_s == 0.5
