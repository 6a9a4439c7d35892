"""The runner of trials with hosts whose agents follow a script."""

import json
import pickle
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from amp_ray.errors import HostError, InputError
from amp_ray.inputs.experiment import Experiment, OwnProgram
from amp_ray.runtime.hosts.host import host_groups
from amp_ray.runtime.study.pool import Task, TrialRunner, make_runner, portable
from amp_ray.strategies.strategy import Strategy
from amp_ray.trials.outcome import Measured
from support.checked import grid_of
from support.driving import task_of
from support.experiments import small_experiment
from support.scripted_host import SETTINGS, Message, ScriptedHost, file_messages, well_behaved

CANDIDATE = grid_of(tp=2, micro_batch_size=2, pp=2, num_micro_batches=4)
STRATEGY = Strategy.uniform(CANDIDATE, (0, 4, 9))
GROUPS = (("a", "b"), ("c", "d"))


def experiment(**trials: Any) -> Experiment:  # noqa: ANN401 - TrialSettings' own
    plain = small_experiment()
    return replace(plain, host_groups=GROUPS, trials=replace(plain.trials, **trials))


def training(message: Message) -> Iterable[Message | bytes]:
    """Answer like an agent whose ranks train."""
    kind = message.get("kind")
    if kind == "warm":
        yield {"kind": "warm", "problem": "", "import_s": 0.1}
    if kind == "job":
        job = json.loads(message["files"]["job.json"])
        result = json.dumps({"trial_id": job["trial_id"], "step_s": [0.5, 0.5]}).encode()
        yield from file_messages("result.json", result)
    yield from well_behaved(message)


class Hosts:
    """Makes scripted hosts and remembers them.

    Args:
        refuses: Of every host, see ``ScriptedHost``.
    """

    def __init__(self, refuses: str | None = None) -> None:
        """Have made none yet."""
        self.refuses = refuses
        self.made: dict[str, ScriptedHost] = {}

    def __call__(self, name: str) -> ScriptedHost:
        self.made[name] = ScriptedHost(name, training, refuses=self.refuses)
        return self.made[name]

    def heard(self, name: str, kind: str) -> list[Message]:
        return [message for message in self.made[name].heard if message.get("kind") == kind]


def task(folder: Path, number: int = 0, strategy: Strategy = STRATEGY) -> Task:
    return task_of(f"study-{number}", folder, strategy=strategy)


def test_a_strategy_becomes_a_measurement(tmp_path: Path) -> None:
    hosts = Hosts()
    runner = TrialRunner(experiment(), 0, hosts, SETTINGS)
    outcome = runner.run(task(tmp_path))
    runner.close()
    assert isinstance(outcome, Measured)
    assert outcome.measured_s == 0.5
    (job,) = hosts.heard("b", "job")
    assert [rank["rank"] for rank in job["ranks"]] == [2, 3]
    assert "amp_ray/training/__main__.py" in job["files"]
    assert (tmp_path / "study-0/outcome.json").exists()


def test_each_group_has_hosts_of_its_own(tmp_path: Path) -> None:
    hosts = Hosts()
    runner = TrialRunner(experiment(), 1, hosts, SETTINGS)
    runner.run(task(tmp_path))
    runner.close()
    assert [*hosts.made] == ["c", "d"]
    assert len(hosts.heard("d", "job")) == 1


def test_agents_and_warm_processes_stay_between_trials(tmp_path: Path) -> None:
    hosts = Hosts()
    runner = TrialRunner(experiment(), 0, hosts, SETTINGS)
    for number in range(3):
        assert isinstance(runner.run(task(tmp_path, number)), Measured)
    runner.close()
    assert hosts.made["a"].num_agents == 1
    (warm,) = hosts.heard("a", "warm")
    assert warm["python"] == hosts.made["a"].python


def test_the_interpreter_that_trains_may_be_another(tmp_path: Path) -> None:
    hosts = Hosts()
    runner = TrialRunner(experiment(python="/opt/py"), 0, hosts, SETTINGS)
    runner.run(task(tmp_path))
    runner.close()
    (job,), (warm,) = hosts.heard("a", "job"), hosts.heard("a", "warm")
    assert {rank["argv"][0] for rank in job["ranks"]} == {warm["python"]} == {"/opt/py"}


def test_what_cannot_be_launched_starts_nothing(tmp_path: Path) -> None:
    hosts = Hosts()
    runner = TrialRunner(experiment(), 0, hosts, SETTINGS)
    with pytest.raises(InputError, match="bounds end at 8"):
        runner.run(task(tmp_path, strategy=Strategy.uniform(CANDIDATE, (0, 4, 8))))
    runner.close()
    assert hosts.made["a"].num_agents == 0
    assert [*tmp_path.iterdir()] == []


def test_a_file_of_the_users_that_is_missing_is_told_before_anything_starts() -> None:
    program = OwnProgram(argv=("python3", "train.py"), files=("train.py",))
    with pytest.raises(InputError, match=r"train\.py cannot be read: No such file"):
        TrialRunner(experiment(program=program), 0, Hosts(), SETTINGS)


def test_a_runner_can_be_made_in_another_process(tmp_path: Path) -> None:
    given = portable(experiment(backend="local"))
    make = pickle.loads(pickle.dumps(partial(make_runner, given)))  # noqa: S301 - our own
    runner = make(1)
    assert isinstance(runner, TrialRunner)
    runner.close()


def test_relative_paths_mean_the_same_in_every_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert portable(experiment()).source.file == str(tmp_path / "test.yaml")


def test_a_missing_key_file_is_told_when_the_runner_is_made() -> None:
    given = experiment()
    ssh = given.trials.ssh.model_copy(update={"identities": ("no-such-key",), "config": None})
    given = replace(given, trials=replace(given.trials, ssh=ssh))
    with pytest.raises(HostError, match="no-such-key does not exist"):
        make_runner(given, 0)


def test_without_groups_the_cluster_is_the_only_one() -> None:
    plain = small_experiment()
    alone = replace(plain, host_groups=())
    assert host_groups(alone) == (("node0", "node1"),)
    assert host_groups(experiment()) == GROUPS
