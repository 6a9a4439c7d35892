from typing import Any

import pytest

from amp_ray.trials.doctor.findings import Finding
from amp_ray.trials.doctor.host_facts import HostReport
from amp_ray.trials.doctor.network import check_network, check_same_machine
from amp_ray.trials.doctor.software import Wanted
from support.host_reports import ADDRESS, healthy_report

WANTED = Wanted(python="python3")


def problems(report: HostReport) -> list[Finding]:
    return [finding for finding in check_network(report, WANTED) if finding.level != "ok"]


def test_no_interface_with_the_address_is_an_error() -> None:
    text = "none of ['a'] is an address of this host, which has ['127.0.0.1']"
    (error,) = problems(healthy_report(changes={"address": {"problem": text}}))
    assert (error.level, error.check, error.found) == ("error", "address", text)
    assert error.command == "ssh ada@a 'ip -brief address'"


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_a_loopback_address_is_an_error_among_several_hosts(address: str) -> None:
    change: dict[str, Any] = {"address": {"address": address, "interface": "lo"}}
    errors = problems(healthy_report(changes=change))
    assert [error.check for error in errors] == ["address"]
    assert problems(healthy_report(changes=change, num_peers=0)) == []


def test_no_free_port_is_an_error() -> None:
    text = "no free port between 20000 and 32000"
    change: dict[str, Any] = {"address": {"port": None, "problem": text}}
    (error,) = problems(healthy_report(changes=change))
    assert (error.level, error.check, error.found) == ("error", "port", text)


def test_an_own_name_on_the_loopback_is_a_warning_with_the_edit() -> None:
    names = {"addresses": {"a": ["127.0.1.1"]}}
    (warning,) = problems(healthy_report(changes={"own_name": names}))
    assert (warning.level, warning.found) == ("warning", "a is 127.0.1.1 there")
    assert warning.expected == ADDRESS
    assert warning.command is not None
    assert "sudo sed -i" in warning.command
    assert f"/{ADDRESS}/" in warning.command


def test_an_own_name_beside_localhost_has_no_edit_that_would_be_safe() -> None:
    names = {"addresses": {"a": ["127.0.0.1"], "localhost": ["127.0.0.1"]}}
    (warning,) = problems(healthy_report(changes={"own_name": names}))
    assert warning.command is None


def test_an_own_name_does_not_matter_on_the_only_host() -> None:
    names = {"addresses": {"a": ["127.0.1.1"]}}
    assert problems(healthy_report(changes={"own_name": names}, num_peers=0)) == []


def test_an_own_name_that_means_nothing_is_no_problem() -> None:
    assert problems(healthy_report(changes={"own_name": {"addresses": {"a": []}}})) == []


def test_peers_that_cannot_be_reached_are_told_by_reason() -> None:
    peers = [healthy_report(name).spec for name in ("b", "c", "d")]
    reasons = ["timed out", "Connection refused", "timed out"]
    report = healthy_report(unreached=tuple(zip(peers, reasons, strict=True)), num_peers=4)
    refused, late = problems(report)
    assert refused.found == "no connection to c: Connection refused"
    assert late.found == "no connection to b, d: timed out"
    allow = f"'sudo iptables -I INPUT -s {ADDRESS} -j ACCEPT'"
    assert late.command == f"ssh ada@b {allow} && ssh ada@d {allow}"


def test_two_names_for_one_machine_are_an_error_of_the_second() -> None:
    same = {"identity": {"boot_id": "x", "network": "net:[1]"}}
    changes = {"a": same, "b": None, "c": same}
    reports = [healthy_report(name, changes=changes[name]) for name in changes]
    (error,) = check_same_machine(reports)
    assert (error.host, error.found) == ("c", "is the same machine as a")


def test_hosts_of_one_kernel_with_networks_of_their_own_are_several() -> None:
    reports = [
        healthy_report(name, changes={"identity": {"boot_id": "x", "network": f"net:[{name}]"}})
        for name in ("a", "b")
    ]
    assert [*check_same_machine(reports)] == []


def test_machines_that_do_not_say_who_they_are_are_not_compared() -> None:
    reports = [healthy_report(name, changes={"identity": {"problem": "no /proc"}}) for name in "ab"]
    assert [*check_same_machine(reports)] == []
