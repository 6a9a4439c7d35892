import threading
import time
from dataclasses import replace
from functools import partial
from typing import Never

import pytest

from amp_ray.errors import HostError, InputError
from amp_ray.runtime.doctor.host_probe import Visit, at_once, make_question
from amp_ray.runtime.hosts.host import Host, LocalHost
from amp_ray.spec.access import SshSettings
from amp_ray.spec.own_program import OwnProgram
from support.experiments import small_experiment
from support.looks import healthy_look

HANG_GUARD_S = 300.0
TRIALS = small_experiment().trials
QUESTION = make_question(TRIALS, SshSettings(), deep=False, num_peers=2)
SITE = healthy_look("localhost").site


class Refusing(LocalHost):
    """A host that cannot be logged in to."""

    def connect(self) -> Never:
        message = "ada@a: Connection refused"
        raise HostError(message)


def test_a_variable_with_a_placeholder_is_not_known_yet() -> None:
    environment = {"A": "1", "B": "{tp}", "C": "@AMP_RAY_FOLDER@/x", "D": "me@home"}
    program = OwnProgram(argv=("run", "x"), cwd="/code")
    trials = replace(TRIALS, environment=environment, program=program)
    question = make_question(trials, SshSettings(), deep=False, num_peers=1)
    assert question.environment == {"A": "1", "D": "me@home"}
    assert (question.program, question.cwd) == ("run", "/code")


def test_importing_gets_more_time() -> None:
    assert replace(QUESTION, deep=True).limit_s > QUESTION.limit_s > 3 * 10


def test_a_visit_brings_facts_and_the_clock_back() -> None:
    visit = Visit(SITE, LocalHost, QUESTION)
    visit.ask()
    look = visit.look()
    visit.close()
    assert look.failure is None
    assert look.facts is not None
    assert look.facts.part("address")["address"] == "127.0.0.1"
    assert look.clock is not None
    assert look.num_peers == 0


def test_hosts_of_a_group_try_the_way_to_each_other() -> None:
    others = [replace(SITE, name="b"), replace(SITE, name="c", group=1)]
    visits = [Visit(site, LocalHost, QUESTION) for site in (SITE, *others)]
    for visit in visits:
        visit.ask()
    for visit in visits:
        visit.reach(visits)
    looks = [visit.look() for visit in visits]
    assert [look.num_peers for look in looks] == [1, 1, 0]
    assert [look.unreached for look in looks] == [(), (), ()]
    # A peer that has gone is told with the system's own words.
    visits[1].close()
    visits[0].reach(visits)
    assert visits[0].look().unreached == ((others[0], "Connection refused"),)
    # And a host that has gone itself reaches nobody.
    visits[0].close()
    visits[0].reach(visits)
    ((peer, reason),) = visits[0].look().unreached
    assert (peer, "connection ended" in reason) == (others[0], True)
    visits[2].close()


def test_a_host_that_cannot_be_made_is_a_failed_login() -> None:
    def make(_name: str) -> Host:
        message = "a: key file /k does not exist; name an existing one"
        raise HostError(message)

    visit = Visit(SITE, make, QUESTION)
    visit.ask()
    failure = visit.look().failure
    assert failure is not None
    assert failure.check == "login"
    visit.close()


def test_a_name_of_no_known_form_is_bad_input() -> None:
    def make(_name: str) -> Host:
        message = "found host"
        raise InputError(message)

    with pytest.raises(InputError):
        Visit(SITE, make, QUESTION)


def test_a_host_that_refuses_is_told_and_asked_no_more() -> None:
    visit = Visit(SITE, Refusing, QUESTION)
    visit.ask()
    visit.reach([visit])
    look = visit.look()
    assert look.failure is not None
    assert (look.failure.check, look.facts) == ("reach", None)
    visit.close()


def test_an_interpreter_that_does_not_start_is_told() -> None:
    visit = Visit(SITE, lambda name: LocalHost(name, python="/no/python"), QUESTION)
    visit.ask()
    failure = visit.look().failure
    assert failure is not None
    assert (failure.check, failure.expected) == (
        "agent Python",
        "/no/python to run a short program",
    )
    visit.close()


def test_a_host_that_has_not_answered_in_time_counts_as_one_that_does_not() -> None:
    failure = Visit(SITE, LocalHost, QUESTION).look().failure
    assert failure is not None
    assert (failure.check, "no answer within" in failure.found) == ("reach", True)


def test_a_host_that_answers_when_nobody_waits_is_left_at_once() -> None:
    visit = Visit(SITE, LocalHost, QUESTION)
    visit.close()
    visit.ask()
    assert visit.look().facts is None


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
