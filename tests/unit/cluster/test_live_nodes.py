from collections.abc import Mapping
from typing import Any

import pytest

from amp_ray.errors import AmpRayError, HostError, InputError
from amp_ray.inputs.hostfile import HostSlots
from cluster.make_hostfile import LiveNode, expected_nodes, live_nodes, to_hostfile, wait_for_nodes


def record(
    address: str, *, gpus: float = 4, kind: str = "T4", head: bool = False, alive: bool = True
) -> dict[str, Any]:
    """Return an entry as Ray 2.60 gives it; the resources of the dead are gone."""
    resources = {f"node:{address}": 1.0, "CPU": 48.0, "memory": 1.0e9}
    if gpus:
        resources |= {"GPU": gpus, f"accelerator_type:{kind}": 1.0}
    if head:
        resources["node:__internal_head__"] = 1.0
    return {
        "NodeID": f"{hash(address):x}",
        "Alive": alive,
        "NodeManagerAddress": address,
        "NodeManagerHostname": "host",
        "Resources": resources if alive else {},
    }


def addresses(records: list[dict[str, Any]]) -> list[str]:
    return [node.address for node in live_nodes(records)]


def hosts(records: list[dict[str, Any]], **options: Any) -> list[HostSlots]:  # noqa: ANN401
    return list(to_hostfile(live_nodes(records), **options))


def test_a_record_becomes_a_node() -> None:
    (node,) = live_nodes([record("10.0.0.1", head=True)])
    assert node == LiveNode(address="10.0.0.1", num_devices=4, kind="T4", is_head=True)


def test_the_dead_are_left_out() -> None:
    assert addresses([record("10.0.0.1", alive=False), record("10.0.0.2")]) == ["10.0.0.2"]


def test_the_head_comes_first_and_the_others_by_the_number_of_their_address() -> None:
    found = [record("10.0.0.10"), record("10.0.0.9"), record("10.0.0.50", head=True)]
    assert addresses(found) == ["10.0.0.50", "10.0.0.9", "10.0.0.10"]


def test_nodes_with_the_heads_kind_of_device_follow_the_head() -> None:
    found = [
        record("10.0.0.1", kind="A10G"),
        record("10.0.0.2", kind="V100"),
        record("10.0.0.3", kind="V100", head=True),
        record("10.0.0.4", kind="T4"),
    ]
    assert addresses(found) == ["10.0.0.3", "10.0.0.2", "10.0.0.1", "10.0.0.4"]


@pytest.mark.parametrize("reverse", [False, True])
def test_the_order_does_not_depend_on_rays(reverse: bool) -> None:  # noqa: FBT001 - a case
    found = [record("b"), record("a"), record("10.0.0.1"), record("10.0.0.2", head=True)]
    assert addresses(found[::-1] if reverse else found) == ["10.0.0.2", "a", "b", "10.0.0.1"]


def test_a_machine_that_ray_lists_twice_counts_once() -> None:
    found = [record("10.0.0.1", gpus=4), record("10.0.0.1", gpus=2, head=True)]
    assert hosts(found) == [HostSlots(host="10.0.0.1", num_slots=4)]
    assert live_nodes(found)[0].is_head


def test_slots_are_the_gpus() -> None:
    found = [record("10.0.0.1", gpus=8, head=True), record("10.0.0.2", gpus=2)]
    assert [entry.num_slots for entry in hosts(found)] == [8, 2]


def test_given_slots_count_for_every_host_with_or_without_gpus() -> None:
    found = [record("10.0.0.1", gpus=0, head=True), record("10.0.0.2")]
    assert [entry.num_slots for entry in hosts(found, num_slots=3)] == [3, 3]


def test_a_machine_without_gpus_is_no_host() -> None:
    found = [record("10.0.0.1", gpus=0, head=True), record("10.0.0.2")]
    assert [entry.host for entry in hosts(found)] == ["10.0.0.2"]


def test_the_head_is_left_out_on_request() -> None:
    found = [record("10.0.0.1", head=True), record("10.0.0.2")]
    assert [entry.host for entry in hosts(found, with_head=False)] == ["10.0.0.2"]


def test_kinds_are_ordered_as_asked_for_with_the_head_first_in_its_own() -> None:
    found = [
        record("10.0.0.1", kind="T4"),
        record("10.0.0.3", kind="T4", head=True),
        record("10.0.0.2", kind="V100"),
    ]
    ordered = hosts(found, kinds=["V100", "T4"])
    assert [entry.host for entry in ordered] == ["10.0.0.2", "10.0.0.3", "10.0.0.1"]


def test_a_kind_that_is_not_there_is_refused_by_name() -> None:
    with pytest.raises(InputError, match=r"no node with A100: found 10\.0\.0\.1 \(4 T4\)"):
        hosts([record("10.0.0.1", head=True)], kinds=["A100"])


@pytest.mark.parametrize("options", [{"with_head": False}, {}])
def test_a_hostfile_without_hosts_is_refused(options: Mapping[str, Any]) -> None:
    gpus = 4 if options else 0
    with pytest.raises(InputError, match="no host is left"):
        hosts([record("10.0.0.1", gpus=gpus, head=True)], **options)


@pytest.mark.parametrize("address", ["127.0.1.1", "::1", "localhost"])
def test_an_address_that_only_its_owner_reaches_is_refused(address: str) -> None:
    with pytest.raises(HostError, match=f"the head as {address}.*--node-ip-address"):
        hosts([record(address, head=True), record("10.0.0.2")])


def test_a_machine_on_its_own_may_be_known_by_any_address() -> None:
    assert hosts([record("127.0.0.1", head=True)]) == [HostSlots(host="127.0.0.1", num_slots=4)]


def test_the_number_of_nodes_is_that_of_all_types_and_the_head() -> None:
    types = {"head": {"max_workers": 0}, "v100": {"min_workers": 2}, "t4": {"min_workers": 1}}
    assert expected_nodes({"available_node_types": types}) == 4


def test_a_file_without_node_types_names_no_number() -> None:
    assert expected_nodes({"provider": {}}) is None


def test_waiting_ends_as_soon_as_enough_nodes_are_alive() -> None:
    one, two = record("10.0.0.1", head=True), record("10.0.0.2")
    answers = iter([[], [one], [one, two]])
    nodes = wait_for_nodes(lambda: next(answers), 2, timeout_s=60)
    assert [node.address for node in nodes] == ["10.0.0.1", "10.0.0.2"]


def test_more_nodes_than_expected_are_welcome() -> None:
    both = [record("10.0.0.1", head=True), record("10.0.0.2")]
    assert len(wait_for_nodes(lambda: both, 1, timeout_s=0)) == 2


def test_too_few_nodes_are_an_error_that_names_those_that_are_there() -> None:
    found = [record("10.0.0.1", head=True), record("10.0.0.2", alive=False)]
    with pytest.raises(AmpRayError, match=r"1 of 2 nodes are alive .*10\.0\.0\.1 \(4 T4\)"):
        wait_for_nodes(lambda: found, 2, timeout_s=0)


def test_a_machine_that_ray_lists_twice_does_not_make_up_for_a_missing_one() -> None:
    found = [record("10.0.0.1", head=True), record("10.0.0.1")]
    with pytest.raises(AmpRayError, match="1 of 2 nodes"):
        wait_for_nodes(lambda: found, 2, timeout_s=0)
