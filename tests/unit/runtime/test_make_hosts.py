import sys
from dataclasses import replace
from pathlib import Path

import pytest

from amp_ray.errors import InputError
from amp_ray.runtime.host import LocalHost
from amp_ray.runtime.make_hosts import experiment_folder, host_maker, located
from amp_ray.runtime.ssh import SshHost
from amp_ray.spec.access import SshSettings
from amp_ray.spec.experiment import Experiment
from amp_ray.testing.experiments import small_experiment


def experiment(folder: Path, **ssh: str) -> Experiment:
    plain = small_experiment()
    settings = SshSettings(config=None, **ssh)  # type: ignore[arg-type]
    document = replace(plain.document, file=str(folder / "experiment.yaml"))
    return replace(plain, document=document, trials=replace(plain.trials, ssh=settings))


def test_relative_paths_start_at_the_experiment_files_folder() -> None:
    settings = SshSettings(
        known_hosts="keys/known", identities=("id", "/abs/id", "~/.ssh/id"), config="config"
    )
    found = located(settings, Path("/x"))
    assert (found.known_hosts, found.config) == ("/x/keys/known", "/x/config")
    assert found.identities == ("/x/id", "/abs/id", "~/.ssh/id")
    assert located(SshSettings(config=None), Path("/x")).config is None


def test_hosts_are_reached_by_ssh_as_the_experiment_says(tmp_path: Path) -> None:
    given = experiment(tmp_path, python="/py")
    host = host_maker(given)("someone@a:2222")
    assert isinstance(host, SshHost)
    assert (host.name, host.python) == ("someone@a:2222", "/py")
    assert experiment_folder(given) == tmp_path


def test_settings_of_a_command_win(tmp_path: Path) -> None:
    make_host = host_maker(experiment(tmp_path, python="/py"), SshSettings(python="/other"))
    assert make_host("a").python == "/other"


def test_one_machine_may_play_all_hosts(tmp_path: Path) -> None:
    given = experiment(tmp_path)
    local = replace(given, trials=replace(given.trials, backend="local"))
    host = host_maker(local)("node1")
    assert isinstance(host, LocalHost)
    assert (host.name, host.python) == ("node1", sys.executable)


def test_without_paramiko_it_is_said_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "amp_ray.runtime.ssh", raising=False)
    monkeypatch.setitem(sys.modules, "paramiko", None)
    with pytest.raises(InputError, match=r"need paramiko: pip install 'amp-ray\[ssh\]'"):
        host_maker(experiment(tmp_path))
