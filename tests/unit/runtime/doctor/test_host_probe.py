import threading
import time
from dataclasses import replace
from functools import partial
from typing import Never

import pytest

from amp_ray.errors import HostError, InputError
from amp_ray.inputs.experiment import SshSettings
from amp_ray.runtime.doctor import HostProbe, Question, at_once
from amp_ray.runtime.hosts.host import Host, LocalHost
from amp_ray.runtime.hosts.login import LoginError
from support.experiments import small_experiment
from support.host_reports import healthy_report

HANG_GUARD_S = 300.0
TRIALS = small_experiment().trials
QUESTION = Question(trials=TRIALS, settings=SshSettings(), num_peers=2)
SPEC = healthy_report("localhost").spec


class Refusing(LocalHost):
    """A host that cannot be logged in to."""

    def connect(self) -> Never:
        message = "ada@a: Connection refused"
        raise HostError(message)


def test_a_variable_with_a_placeholder_is_not_known_yet() -> None:
    environment = {"A": "1", "B": "{tp}", "C": "@AMP_RAY_FOLDER@/x", "D": "me@home"}
    trials = replace(TRIALS, environment=environment)
    question = Question(trials=trials, settings=SshSettings(), num_peers=1)
    assert question.environment == {"A": "1", "D": "me@home"}


def test_a_probe_brings_facts_back() -> None:
    host_probe = HostProbe(SPEC, LocalHost, QUESTION)
    host_probe.ask()
    report = host_probe.report()
    host_probe.close()
    assert report.failure is None
    assert report.part("address")["address"] == "127.0.0.1"
    assert report.num_peers == 0


def test_hosts_of_a_group_try_the_way_to_each_other() -> None:
    others = [replace(SPEC, name="b"), replace(SPEC, name="c", group=1)]
    host_probes = [HostProbe(spec, LocalHost, QUESTION) for spec in (SPEC, *others)]
    for host_probe in host_probes:
        host_probe.ask()
    for host_probe in host_probes:
        host_probe.reach(host_probes)
    reports = [host_probe.report() for host_probe in host_probes]
    assert [report.num_peers for report in reports] == [1, 1, 0]
    assert [report.unreached for report in reports] == [(), (), ()]
    # A peer that has gone is told with the system's own words.
    host_probes[1].close()
    host_probes[0].reach(host_probes)
    assert host_probes[0].report().unreached == ((others[0], "Connection refused"),)
    # And a host that has gone itself reaches nobody.
    host_probes[0].close()
    host_probes[0].reach(host_probes)
    ((peer, reason),) = host_probes[0].report().unreached
    assert (peer, "connection ended" in reason) == (others[0], True)
    host_probes[2].close()


def test_a_host_that_cannot_be_made_is_a_failed_login() -> None:
    def make(_name: str) -> Host:
        message = "a: key file /k does not exist; name an existing one"
        raise LoginError(message, check="login", found="key file /k does not exist")

    host_probe = HostProbe(SPEC, make, QUESTION)
    host_probe.ask()
    failure = host_probe.report().failure
    assert failure is not None
    assert failure.check == "login"
    host_probe.close()


def test_a_name_of_no_known_form_is_bad_input() -> None:
    def make(_name: str) -> Host:
        message = "found host"
        raise InputError(message)

    with pytest.raises(InputError):
        HostProbe(SPEC, make, QUESTION)


def test_a_host_that_refuses_is_told_and_asked_no_more() -> None:
    host_probe = HostProbe(SPEC, Refusing, QUESTION)
    host_probe.ask()
    host_probe.reach([host_probe])
    report = host_probe.report()
    assert report.failure is not None
    assert (report.failure.check, report.answer) == ("reach", None)
    host_probe.close()


def test_an_interpreter_that_does_not_start_is_told() -> None:
    host_probe = HostProbe(SPEC, lambda name: LocalHost(name, python="/no/python"), QUESTION)
    host_probe.ask()
    failure = host_probe.report().failure
    assert failure is not None
    assert (failure.check, failure.expected) == (
        "agent Python",
        "/no/python to run a short program",
    )
    host_probe.close()


def test_a_host_that_has_not_answered_in_time_counts_as_one_that_does_not() -> None:
    failure = HostProbe(SPEC, LocalHost, QUESTION).report().failure
    assert failure is not None
    assert (failure.check, "no answer within" in failure.found) == ("reach", True)


def test_a_host_that_answers_when_nobody_waits_is_left_at_once() -> None:
    host_probe = HostProbe(SPEC, LocalHost, QUESTION)
    host_probe.close()
    host_probe.ask()
    assert host_probe.report().answer is None


def meet(barrier: threading.Barrier) -> None:
    barrier.wait(HANG_GUARD_S)


def wait_for(event: threading.Event) -> None:
    event.wait(HANG_GUARD_S)


def test_things_are_done_at_the_same_time() -> None:
    barrier = threading.Barrier(3)
    at_once([partial(meet, barrier)] * 3, HANG_GUARD_S)
    assert not barrier.broken


def test_one_that_is_late_is_left_to_itself() -> None:
    never = threading.Event()
    start = time.monotonic()
    done: list[int] = []
    at_once([lambda: done.append(1), partial(wait_for, never)], 1.0)
    never.set()
    assert done == [1]
    assert time.monotonic() - start < HANG_GUARD_S


def test_a_mistake_of_ours_is_not_swallowed() -> None:
    def fail() -> None:
        message = "a mistake"
        raise KeyError(message)

    with pytest.raises(KeyError, match="a mistake"):
        at_once([fail], HANG_GUARD_S)
