"""Makes the hosts of a launcher ready, before a test measures or counts anything on them."""

from amp_ray.errors import HostError
from amp_ray.runtime.hosts.link import Message
from amp_ray.runtime.launch.launcher import Launcher


def warm(launcher: Launcher) -> dict[str, Message]:
    """Start all agents and wait until their warm processes are ready, as a trial does.

    Returns for each host a message with ``problem`` (empty if none) and ``import_s``.
    """
    group = launcher.group
    errors = group.open(dict.fromkeys(group.names, ()))
    if errors:
        raise HostError("; ".join(errors.values()))
    return group.warm(group.names)
