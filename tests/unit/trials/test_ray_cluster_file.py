import pytest

from amp_ray.inputs.yaml_text import parse_yaml
from amp_ray.trials.ray_cluster_file import OldKey, explain_old_keys, is_ray_cluster

OLD = """\
cluster_name: default
min_workers: 3
initial_workers: 3
autoscaling_mode: default
target_utilization_fraction: 0.8
provider:
  type: aws
  region: us-west-2
auth:
  ssh_user: ubuntu
head_node:
  InstanceType: p3.8xlarge
worker_nodes:
  InstanceType: p3.8xlarge
"""
"""As files for Ray looked in 2020."""

NEW = """\
cluster_name: default
max_workers: 3
provider: {type: aws, region: us-west-2}
auth: {ssh_user: ubuntu}
head_node_type: head
available_node_types:
  head: {resources: {}, node_config: {InstanceType: p3.8xlarge}}
"""

LOCAL = """\
provider: {type: local, head_ip: a, worker_ips: [b]}
min_workers: 1
"""


def old_keys(text: str) -> dict[str, OldKey]:
    return {old.key: old for old in explain_old_keys(text, file="ray.yaml")}


def test_every_old_key_is_named_in_the_order_of_the_file() -> None:
    assert list(old_keys(OLD)) == [
        "min_workers",
        "initial_workers",
        "autoscaling_mode",
        "target_utilization_fraction",
        "head_node",
        "worker_nodes",
    ]


def test_a_file_of_today_has_no_old_keys() -> None:
    assert old_keys(NEW) == {}


def test_a_message_leads_to_the_line_of_the_key() -> None:
    assert str(old_keys(OLD)["head_node"]).startswith("ray.yaml:11: head_node: ")


@pytest.mark.parametrize(
    ("key", "replacement"),
    [
        ("head_node", "head_node_type"),
        ("worker_nodes", "available_node_types"),
        ("initial_workers", "min_workers in each node type"),
        ("autoscaling_mode", "upscaling_speed"),
        ("target_utilization_fraction", "upscaling_speed"),
        ("min_workers", "min_workers in each node type"),
    ],
)
def test_the_replacement_of_a_key_is_named(key: str, replacement: str) -> None:
    assert replacement in old_keys(OLD)[key].advice


def test_the_silent_limit_of_two_workers_on_aws_is_told() -> None:
    assert "max_workers here" in old_keys(OLD)["min_workers"].advice


def test_no_limit_is_told_where_the_file_sets_one() -> None:
    assert "max_workers" not in old_keys(OLD + "max_workers: 3\n")["min_workers"].advice


def test_min_workers_is_of_use_with_ones_own_machines() -> None:
    assert "min_workers" not in old_keys(LOCAL)


@pytest.mark.parametrize("key", ["head_node", "worker_nodes", "initial_workers"])
def test_ones_own_machines_need_no_node_types(key: str) -> None:
    advice = old_keys(f"{LOCAL}{key}: {{}}\n")[key].advice
    assert "provider." in advice
    assert "available_node_types" not in advice


def test_a_provider_without_a_type_is_no_reason_to_fail() -> None:
    assert list(old_keys("provider: aws\ninitial_workers: 1\n")) == ["initial_workers"]


@pytest.mark.parametrize("text", [OLD, NEW, LOCAL + "cluster_name: x\n", "auth: {}\nhead_node: {}"])
def test_a_cluster_file_is_recognised(text: str) -> None:
    assert is_ray_cluster(parse_yaml(text, file="x.yaml"))


@pytest.mark.parametrize(
    "text",
    [
        "name: a\nmodel: {family: gpt2}\ncluster: {nodes: []}\n",
        "provider: me\nname: a\n",
        "head_node: a\nname: b\n",
    ],
)
def test_other_files_are_no_cluster_files(text: str) -> None:
    assert not is_ray_cluster(parse_yaml(text, file="x.yaml"))
