"""The files of cluster/, checked by Ray's and AWS's own rules, offline."""

import copy
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any, Final

import botocore.session
import pytest
import yaml
from botocore.validate import ParamValidator
from ray.autoscaler._private.util import prepare_config, validate_config

from amp_ray.inputs.hostfile import parse_hostfile

AWS: Final = {
    "aws-homogeneous": {"g4dn.12xlarge": 4},
    "aws-het-cluster": {"p3.8xlarge": 3, "g4dn.12xlarge": 1},
    "aws-het-model": {"p3.8xlarge": 4},
}
"""What each file starts, the head among them."""

ALL: Final = ["local", *AWS]

OUTDATED: Final = {
    *("head_node", "worker_nodes", "initial_workers", "min_workers", "autoscaling_mode"),
    "target_utilization_fraction",
}
"""Keys of older versions, which Ray 2.60 refuses or ignores."""

Config = dict[str, Any]


def load(repository: Path, name: str) -> Config:
    text = (repository / "cluster" / f"{name}.yaml").read_text(encoding="utf-8")
    config: Config = yaml.safe_load(text)
    return config


def prepared(config: Config) -> Config:
    result: Config = prepare_config(copy.deepcopy(config))
    return result


def node_configs(config: Config) -> dict[str, Config]:
    return {name: kind["node_config"] for name, kind in config["available_node_types"].items()}


def num_nodes(config: Config, name: str) -> int:
    """Count the nodes of a type, as Ray does: the head's own does not count among its workers."""
    is_head = bool(name == config["head_node_type"])
    return int(config["available_node_types"][name].get("min_workers", 0)) + is_head


def complaints(node_config: Config) -> str:
    """Return what AWS's own description of RunInstances finds wrong with a node's configuration."""
    shape = botocore.session.Session().get_service_model("ec2").operation_model("RunInstances")
    # These Ray adds itself when it starts instances of the type.
    request = {**node_config, "MinCount": 1, "MaxCount": 1, "SubnetId": "subnet-0"}
    report = ParamValidator().validate(request, shape.input_shape)
    return str(report.generate_report())


# ------------------------------------------------------------------------ Ray's and AWS's rules


@pytest.mark.parametrize("name", ALL)
def test_ray_accepts_the_file(repository: Path, name: str) -> None:
    validate_config(prepared(load(repository, name)))


@pytest.mark.parametrize("name", AWS)
def test_aws_accepts_every_node_configuration(repository: Path, name: str) -> None:
    configs = node_configs(load(repository, name))
    assert {kind: complaints(config) for kind, config in configs.items()} == dict.fromkeys(
        configs, ""
    )


@pytest.mark.parametrize(
    "mistake",
    [
        {"InstanceTyp": "m5.large"},
        {"Placement": "group"},
        {"Placement": {"Group": "group"}},
        {"SecurityGroupIds": "sg-1"},
        {"BlockDeviceMappings": [{"Ebs": {"VolumeSize": "200"}}]},
    ],
)
def test_aws_check_notices_mistakes(repository: Path, mistake: Config) -> None:
    config = node_configs(load(repository, "aws-homogeneous"))["head"]
    assert complaints(config | mistake) != ""


@pytest.mark.parametrize("name", ALL)
def test_no_file_has_keys_of_another_age(repository: Path, name: str) -> None:
    assert not load(repository, name).keys() & OUTDATED


# ----------------------------------------------------------------------------- what is started


@pytest.mark.parametrize("name", AWS)
def test_the_instances_are_those_of_the_experiment(repository: Path, name: str) -> None:
    config = load(repository, name)
    found: dict[str, int] = {}
    for kind, node_config in node_configs(config).items():
        instance = node_config["InstanceType"]
        found[instance] = found.get(instance, 0) + num_nodes(config, kind)
    assert found == AWS[name]


@pytest.mark.parametrize("name", ALL)
def test_all_workers_start_and_no_more(repository: Path, name: str) -> None:
    config = prepared(load(repository, name))
    types = config["available_node_types"].values()
    assert sum(kind["min_workers"] for kind in types) == config["max_workers"] == 3


@pytest.mark.parametrize("name", AWS)
def test_nodes_share_one_placement_group_in_one_zone(repository: Path, name: str) -> None:
    config = load(repository, name)
    groups = {node["Placement"]["GroupName"] for node in node_configs(config).values()}
    assert groups == {config["cluster_name"]}
    assert re.fullmatch(r"[a-z]+-[a-z]+-\d[a-z]", config["provider"]["availability_zone"])


def test_every_cluster_has_a_name_of_its_own(repository: Path) -> None:
    assert len({load(repository, name)["cluster_name"] for name in ALL}) == len(ALL)


@pytest.mark.parametrize("name", AWS)
def test_identifiers_of_aws_are_well_formed(repository: Path, name: str) -> None:
    for node in node_configs(load(repository, name)).values():
        assert re.fullmatch("ami-[0-9a-f]{17}", node["ImageId"])
        assert all(re.fullmatch("sg-[0-9a-f]{17}", group) for group in node["SecurityGroupIds"])


def test_the_local_head_is_started_at_the_address_that_the_provider_names(
    repository: Path,
) -> None:
    config = load(repository, "local")
    assert f"--node-ip-address={config['provider']['head_ip']} " in " ".join(
        config["head_start_ray_commands"]
    )


# ------------------------------------------------------------------------------------ security


@pytest.mark.parametrize("name", ALL)
def test_every_node_asks_for_the_token(repository: Path, name: str) -> None:
    config = load(repository, name)
    commands = [*config["head_start_ray_commands"], *config["worker_start_ray_commands"]]
    starts = [command for command in commands if "ray start" in command]
    assert len(starts) == 2
    assert all("export RAY_AUTH_MODE=token" in command for command in starts)
    assert "~/.ray/auth_token" in config["file_mounts"]


@pytest.mark.parametrize("name", ALL)
def test_nothing_is_opened_to_the_world(repository: Path, name: str) -> None:
    config = prepared(load(repository, name))
    assert "0.0.0.0" not in str(config)  # noqa: S104 - looked for, not listened on
    assert "--include-dashboard=false" in str(config["head_start_ray_commands"])


@pytest.mark.parametrize("name", AWS)
def test_ray_makes_no_security_group_with_an_open_port(repository: Path, name: str) -> None:
    # For a node type without any, Ray makes a group that lets the world in at port 22.
    assert all(node["SecurityGroupIds"] for node in node_configs(load(repository, name)).values())


# ------------------------------------------------------------------------------ setup commands

TOOL: Final = """#!/bin/sh
case "$*" in
  *"pip install"*) [ "$1" = -m ] && mkdir -p ~/.local/bin && cp "$0" ~/.local/bin/uv ;;
  *venv*) for folder; do :; done; mkdir -p "$folder/bin" && cp "$0" "$folder/bin/python" ;;
esac
echo "$@" >> ~/calls
"""
"""Stands in for python3 and uv: notes its arguments, and makes the files that they make."""


def run_setup(config: Config, home: Path) -> None:
    """Run the commands of a head in a shell as Ray does."""
    for command in config["head_setup_commands"]:
        subprocess.run(
            ["/bin/bash", "-c", f"source ~/.bashrc; export OMP_NUM_THREADS=1 && ({command})"],
            env={"HOME": str(home), "PATH": f"{home / 'tools'}:/usr/bin:/bin"},
            check=True,
            timeout=600,
        )


@pytest.fixture(scope="module", params=ALL)
def config(request: pytest.FixtureRequest, repository: Path) -> Config:
    """Every file, as Ray completes it."""
    return prepared(load(repository, request.param))


@pytest.fixture(scope="module")
def home(config: Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a home, with tools that need no network, and run the setup commands in it."""
    folder = tmp_path_factory.mktemp("home")
    for name in ("tools", ".ray", ".ssh", "amp-ray-dist"):
        (folder / name).mkdir()
    (folder / "tools" / "python3").write_text(TOOL, encoding="utf-8")
    (folder / "tools" / "python3").chmod(0o755)
    (folder / ".ray" / "auth_token").write_text("secret", encoding="utf-8")
    (folder / ".bashrc").write_text("case $- in *i*) ;; *) return ;; esac\n", encoding="utf-8")
    for age_s, version in enumerate(("0.10.0", "0.9.0")):
        wheel = folder / "amp-ray-dist" / f"amp_ray-{version}-py3-none-any.whl"
        wheel.write_text("", encoding="utf-8")
        os.utime(wheel, (1e9 - age_s, 1e9 - age_s))
    run_setup(config, folder)
    return folder


def test_setup_commands_run_twice_change_nothing_the_second_time(
    config: Config, home: Path
) -> None:
    def files() -> dict[str, str]:
        found = [home / ".bashrc", home / ".ssh" / "config"]
        return {path.name: path.read_text(encoding="utf-8") for path in found if path.exists()}

    once = files()
    run_setup(config, home)
    assert files() == once
    assert once[".bashrc"].count("amp-ray/bin") == 1


def test_setup_installs_the_newest_wheel_with_the_extras_that_trials_need(home: Path) -> None:
    calls = (home / "calls").read_text(encoding="utf-8")
    install, *_again = [line for line in calls.splitlines() if "[ray,ssh,training]" in line]
    assert re.search(rf"{home}/amp-ray-dist/amp_ray-0.10.0-py3-none-any.whl\[", install)
    assert "ray==2.60.0" in install


def test_a_command_over_ssh_finds_the_installed_python(home: Path) -> None:
    # What sshd's shell does: it reads .bashrc, which returns early in shells for one command.
    done = subprocess.run(
        ["/bin/bash", "-c", "source ~/.bashrc; command -v python; echo $RAY_AUTH_MODE"],
        env={"HOME": str(home), "PATH": "/usr/bin:/bin"},
        check=True,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.stdout.split() == [f"{home}/amp-ray/bin/python", "token"]


def test_setup_keeps_the_token_to_its_owner(home: Path) -> None:
    assert (home / ".ray" / "auth_token").stat().st_mode & 0o777 == 0o600


# ---------------------------------------------------------------------- README, hostfile.example


def test_example_hostfile_fits_the_heterogeneous_cluster(repository: Path) -> None:
    text = (repository / "cluster" / "hostfile.example").read_text(encoding="utf-8")
    assert [entry.num_slots for entry in parse_hostfile(text)] == [4, 4, 4, 4]


def test_readme_names_only_files_that_are_there(repository: Path) -> None:
    text = (repository / "cluster" / "README.md").read_text(encoding="utf-8")
    named = set(re.findall(r"(?:cluster|experiments)/[\w-]+\.(?:py|yaml)", text))
    assert {
        name for name in named - {"cluster/X.yaml"} if not (repository / name).exists()
    } == set()
    assert len(named) > 5


@pytest.mark.parametrize("name", AWS)
def test_readmes_command_puts_the_ids_into_every_node(
    repository: Path, name: str, tmp_path: Path
) -> None:
    text = (repository / "cluster" / "README.md").read_text(encoding="utf-8")
    (expression,) = re.findall(r"sed -i \"(.*?)\" ", text)
    file = tmp_path / "cluster.yaml"
    shutil.copy(repository / "cluster" / f"{name}.yaml", file)
    subprocess.run(
        ["/bin/bash", "-c", f'sed -i "{expression}" "$FILE"'],
        env={"AMI": "ami-0123456789abcdef0", "SG": "sg-0fedcba9876543210", "FILE": str(file)},
        check=True,
        timeout=600,
    )
    nodes = node_configs(yaml.safe_load(file.read_text(encoding="utf-8"))).values()
    assert {node["ImageId"] for node in nodes} == {"ami-0123456789abcdef0"}
    assert {group for node in nodes for group in node["SecurityGroupIds"]} == {
        "sg-0fedcba9876543210"
    }
