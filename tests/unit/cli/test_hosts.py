"""The commands that look at hosts: doctor and profile."""

import json
from pathlib import Path

import pytest

from amp_ray.cli.exits import TRIALS_FAILED
from amp_ray.errors import HostError
from amp_ray.runtime.hosts.host import Host
from support.checked import check_ended
from support.commands import Run
from support.experiments import PICTURE_MODEL, SMALL, TEXT_MODEL

ON_CPU = SMALL.replace("device: T4", "memory_gib: 0.01, device: cpu") + "precision: fp32\n"
RAY_CLUSTER = """\
cluster_name: old
provider: {type: local, head_ip: 192.0.2.1}
auth: {ssh_user: ada}
"""


@pytest.fixture
def on_cpu(tmp_path: Path) -> Path:
    """The small experiment, for this machine."""
    path = tmp_path / "small.yaml"
    path.write_text(ON_CPU, encoding="utf-8")
    return path


@pytest.fixture
def with_hosts(on_cpu: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The small experiment with a hostfile, and hosts that nobody can reach."""
    text = ON_CPU.replace("cluster:\n", "cluster:\n  hostfile: hosts\n")
    on_cpu.write_text(text, encoding="utf-8")
    (on_cpu.parent / "hosts").write_text("a slots=2\nb slots=2\n", encoding="utf-8")

    def refuse(name: str) -> Host:
        message = f"ada@{name}: Connection refused"
        raise HostError(message)

    monkeypatch.setattr("amp_ray.cli.hosts.host_maker", lambda _experiment: refuse)
    return on_cpu


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("doctor", "none.yaml"), "no such file"),
        (("doctor", "small.yaml", "--trials", "ray"), "--trials"),
        (("profile", "small.yaml"), "--output"),
        (("profile", "none.yaml", "-o", "p"), "no such file"),
    ],
)
def test_a_missing_file_or_a_wrong_option_is_bad_input(
    amp_ray: Run,
    on_cpu: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.chdir(on_cpu.parent)
    check_ended(amp_ray(*words), 2, message)
    assert not Path("p").exists()


def test_an_experiment_without_hosts_is_bad_input(amp_ray: Run, on_cpu: Path) -> None:
    check_ended(amp_ray("doctor", on_cpu), 2, "cluster.hostfile", "--trials local")


def test_this_machine_as_json(amp_ray: Run, on_cpu: Path, tmp_path: Path) -> None:
    target = tmp_path / "found.json"
    ended = amp_ray("doctor", on_cpu, "--trials", "local", "--json", target)
    record = json.loads(target.read_text(encoding="utf-8"))
    # Torch may not be installed here.
    assert ended.code == (0 if record["ok"] else 4)
    assert (ended.out, ended.err) == ("", "")
    assert (record["schema"], record["experiment"]) == (1, "small")
    assert [host["name"] for host in record["hosts"]] == ["localhost"]
    checks = {entry["check"] for entry in record["findings"]}
    assert {"agent Python", "Python", "disk", "port"} <= checks


def test_hosts_with_an_error_end_with_4_and_a_table(amp_ray: Run, with_hosts: Path) -> None:
    ended = amp_ray("doctor", with_hosts)
    assert (ended.code, ended.err) == (4, "")
    assert "small: 2 hosts" in ended.out
    assert ended.out.count("ssh -v -o ConnectTimeout=10") == 2
    assert ended.out.splitlines()[-1] == "2 errors"


def test_a_profile_that_is_not_there_yet_does_not_matter(amp_ray: Run, with_hosts: Path) -> None:
    text = with_hosts.read_text(encoding="utf-8")
    with_hosts.write_text(text + "profile: {source: table, path: none}\n", encoding="utf-8")
    assert amp_ray("doctor", with_hosts).code == 4


def test_a_ray_cluster_file_is_refused(amp_ray: Run, tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(RAY_CLUSTER, encoding="utf-8")
    ended = amp_ray("doctor", path)
    assert (ended.code, ended.out) == (2, "")
    assert "Ray's cluster launcher" in ended.err


# ------------------------------------------------------------------------- profile


def test_another_list_of_layers_is_bad_input(amp_ray: Run, tmp_path: Path) -> None:
    path = tmp_path / "e.yaml"
    path.write_text(SMALL + "runtime: amp-2022\n", encoding="utf-8")
    check_ended(amp_ray("profile", path, "-o", tmp_path / "p", "--local"), 2, "layer list")


def missing_key(amp_ray: Run, folder: Path, *options: str) -> str:
    """Profile hosts whose key file does not exist; return the message, which names the file."""
    path = folder / "e.yaml"
    ssh = "{identities: [keys/own], config: null}"
    path.write_text(SMALL + f"trials: {{ssh: {ssh}}}\n", encoding="utf-8")
    ended = amp_ray("profile", path, "-o", folder / "p", *options)
    assert ended.code == TRIALS_FAILED
    return ended.err


def test_hosts_are_reached_as_the_experiment_says(amp_ray: Run, tmp_path: Path) -> None:
    assert f"key file {tmp_path}/keys/own does not exist" in missing_key(amp_ray, tmp_path)


def test_options_win_and_start_at_the_current_folder(
    amp_ray: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    message = missing_key(amp_ray, tmp_path, "--identity", "other", "--known-hosts", "known")
    assert f"key file {here}/other does not exist" in message


def test_pictures_have_no_slices_to_measure(amp_ray: Run, tmp_path: Path) -> None:
    path = tmp_path / "e.yaml"
    path.write_text(SMALL.replace(TEXT_MODEL, PICTURE_MODEL), encoding="utf-8")
    check_ended(
        amp_ray("profile", path, "-o", tmp_path / "p", "--local", "--token-slices"),
        2,
        "no sequence to cut into token slices",
    )
