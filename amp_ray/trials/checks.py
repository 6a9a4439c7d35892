"""From looks at hosts to findings: every check of ``amp-ray doctor``, without touching a host."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final

from amp_ray.trials.check_devices import check_devices, check_shared_devices
from amp_ray.trials.check_machine import check_machine
from amp_ray.trials.check_network import check_network, check_same_machine
from amp_ray.trials.check_software import (
    Wanted,
    check_agreement,
    check_old_python,
    check_software,
)
from amp_ray.trials.check_state import check_state
from amp_ray.trials.findings import Finding
from amp_ray.trials.host_facts import Look

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
    known = [look for look in looks if look.facts is not None and not look.facts.is_old]
    across = [
        *check_agreement(known, wanted),
        *check_same_machine(known),
        *check_shared_devices(known),
    ]
    by_host: Mapping[str, list[Finding]] = {
        look.site.name: [finding for finding in across if finding.host == look.site.name]
        for look in looks
    }
    return tuple(
        finding for look in looks for finding in (*_alone(look, wanted), *by_host[look.site.name])
    )


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
