"""From looks at hosts to findings: every check of ``amp-ray doctor``, without touching a host."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from amp_ray.trials.doctor.devices import check_devices, check_shared_devices
from amp_ray.trials.doctor.findings import Finding
from amp_ray.trials.doctor.host_facts import Look
from amp_ray.trials.doctor.machine import check_machine
from amp_ray.trials.doctor.network import check_network, check_same_machine
from amp_ray.trials.doctor.software import (
    Wanted,
    check_agreement,
    check_old_python,
    check_software,
)
from amp_ray.trials.doctor.state import check_state

_PER_HOST: Final[tuple[Callable[[Look, Wanted], Iterable[Finding]], ...]] = (
    check_software,
    check_devices,
    check_machine,
    check_state,
    check_network,
)


def check_hosts(looks: Sequence[Look], wanted: Wanted) -> tuple[Finding, ...]:
    """Judge every host, alone and among the others.

    Args:
        looks: At every host, in the experiment's order.
        wanted: What trials need.

    Returns:
        The findings host by host, those without a problem included.
    """
    alone = {look.site.name: _sound(look, wanted) for look in looks}
    known = [
        look
        for look in looks
        if look.facts is not None and not look.facts.is_old and alone[look.site.name][1]
    ]
    across = _across(known, wanted)
    return tuple(
        finding
        for name, (findings, _) in alone.items()
        for finding in (*findings, *(each for each in across if each.host == name))
    )


def _across(looks: Sequence[Look], wanted: Wanted) -> list[Finding]:
    """Judge hosts among each other."""
    return [
        *check_agreement(looks, wanted),
        *check_same_machine(looks),
        *check_shared_devices(looks),
    ]


def _sound(look: Look, wanted: Wanted) -> tuple[list[Finding], bool]:
    """Judge a host by itself; tell whether what it says of itself can be read."""
    try:
        if look.facts is not None and not look.facts.is_old:
            _across([look, look], wanted)
        return [*_alone(look, wanted)], True
    except Exception as error:  # noqa: BLE001 - a host may say anything
        found = f"an answer that no probe gives: {type(error).__name__}: {error}"
        return [
            Finding(
                level="error",
                host=look.site.name,
                check="agent Python",
                found=found,
                expected="facts about the host, as amp-ray's own probe tells them",
                advice="does something on that host print in the place of Python?",
            )
        ], False


def _alone(look: Look, wanted: Wanted) -> Iterator[Finding]:
    """Judge a host by itself."""
    if look.failure is not None:
        yield look.failure
        return
    assert look.facts is not None, "a look without a failure has facts"
    login = "this machine" if not look.site.login else f"logged in as {_user(look)}"
    yield Finding(level="ok", host=look.site.name, check="login", found=login)
    if look.facts.is_old:
        yield check_old_python(look)
        return
    for check in _PER_HOST:
        yield from check(look, wanted)


def _user(look: Look) -> str:
    """Return the user that the host knows us as."""
    assert look.facts is not None
    return str(look.facts.part("identity").get("user", "an unknown user"))
