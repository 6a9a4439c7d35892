import sys
from dataclasses import replace
from pathlib import Path

import pytest

from amp_ray.errors import InputError
from amp_ray.inputs.experiment import Experiment, SshSettings
from amp_ray.runtime.hosts.host import LocalHost, experiment_folder, host_maker, located
from amp_ray.runtime.hosts.ssh import SshHost
from support.experiments import MIXED_HOST, small_experiment


def experiment(folder: Path, **ssh: str) -> Experiment:
    plain = small_experiment()
    settings = SshSettings(config=None, **ssh)  # type: ignore[arg-type]
    source = replace(plain.source, file=str(folder / "experiment.yaml"))
    return replace(plain, source=source, trials=replace(plain.trials, ssh=settings))


def test_relative_paths_start_at_the_experiment_files_folder() -> None:
    settings = SshSettings(
        known_hosts="keys/known", identities=("id", "/abs/id", "~/.ssh/id"), config="config"
    )
    resolved = located(settings, Path("/x"))
    assert (resolved.known_hosts, resolved.config) == ("/x/keys/known", "/x/config")
    assert resolved.identities == ("/x/id", "/abs/id", "~/.ssh/id")
    assert located(SshSettings(config=None), Path("/x")).config is None


def test_hosts_are_reached_by_ssh_as_the_experiment_says(tmp_path: Path) -> None:
    described = experiment(tmp_path, python="/py")
    host = host_maker(described)("someone@a:2222")
    assert isinstance(host, SshHost)
    assert (host.name, host.python) == ("someone@a:2222", "/py")
    assert experiment_folder(described) == tmp_path


def test_settings_of_a_command_win(tmp_path: Path) -> None:
    make_host = host_maker(experiment(tmp_path, python="/py"), SshSettings(python="/other"))
    assert make_host("a").python == "/other"


def test_one_machine_may_play_all_hosts(tmp_path: Path) -> None:
    described = experiment(tmp_path)
    local = replace(described, trials=replace(described.trials, backend="local"))
    host = host_maker(local)("node1")
    assert isinstance(host, LocalHost)
    assert (host.name, host.python) == ("node1", sys.executable)


def devices_of(described: Experiment, name: str) -> str:
    """Return which devices the agent of a host on this machine sees."""
    local = replace(described, trials=replace(described.trials, backend="local"))
    channel = host_maker(local)(name).open_channel(["sh", "-c", "echo $CUDA_VISIBLE_DEVICES"])
    text = channel.read().decode().strip()
    while channel.read():
        pass
    channel.close()
    return text


def test_hosts_on_one_machine_have_different_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    described = experiment(tmp_path)
    assert [devices_of(described, name) for name in ("node0", "node1")] == ["0,1", "2,3"]
    mixed = small_experiment(MIXED_HOST)
    assert [devices_of(mixed, name) for name in ("big", "node1")] == ["0,1,2", "3,4,5"]


def test_groups_on_one_machine_have_different_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,6,5,4,3,2,1,0")
    described = experiment(tmp_path)
    groups = (("node0", "node1"), ("node2", "node3"))
    grouped = replace(described, host_groups=groups)
    names = ("node0", "node1", "node2", "node3")
    assert [devices_of(grouped, name) for name in names] == ["7,6", "5,4", "3,2", "1,0"]


def test_hosts_without_gpus_see_what_this_process_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "as it is")
    described = small_experiment(
        ("device: T4", "device: cpu"), ("global_batch", "precision: fp32\nglobal_batch")
    )
    assert devices_of(described, "node1") == "as it is"


def test_without_paramiko_it_is_said_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "amp_ray.runtime.hosts.ssh", raising=False)
    monkeypatch.setitem(sys.modules, "paramiko", None)
    with pytest.raises(InputError, match=r"need paramiko: pip install 'amp-ray\[ssh\]'"):
        host_maker(experiment(tmp_path))
