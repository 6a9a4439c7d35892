"""Make the hosts of an experiment: each behind SSH, or this machine under all their names."""

from collections.abc import Callable
from pathlib import Path

from amp_ray.clusters.device import is_cpu
from amp_ray.errors import InputError
from amp_ray.inputs.experiment import Experiment, SshSettings
from amp_ray.runtime.hosts.agent.resources import DEVICE_VARIABLE, visible_devices
from amp_ray.runtime.hosts.host import Host, LocalHost

MakeHost = Callable[[str], Host]  # from a host's name to the host, not connected yet


def experiment_folder(experiment: Experiment) -> Path:
    """Return the folder of the experiment file; relative paths start there."""
    return Path(experiment.source.file).parent


def host_groups(experiment: Experiment) -> tuple[tuple[str, ...], ...]:
    """Return the hosts of every group; without groups, the cluster's hosts are the only one."""
    names = tuple(node.name for node in experiment.cluster.nodes)
    return experiment.host_groups or (names,)


def host_maker(experiment: Experiment, ssh: SshSettings | None = None) -> MakeHost:
    """Return a function that makes the hosts of an experiment."""
    if experiment.trials.backend == "local":
        return _local_maker(experiment)
    settings = located(ssh or experiment.trials.ssh, experiment_folder(experiment))
    try:
        from amp_ray.runtime.hosts.ssh import SshHost  # noqa: PLC0415 - local trials need no paramiko
    except ModuleNotFoundError as error:
        raise InputError(f"trials over SSH need {error.name}: pip install 'amp-ray[ssh]'") from None
    return lambda name: SshHost(name, settings)


def _local_maker(experiment: Experiment) -> MakeHost:
    """Return a function that makes this machine as a host under every name.

    If it has GPUs, each name gets different ones: the second host's slots begin where the first
    host's end, and so on through all host groups.
    """
    environments: dict[str, dict[str, str]] = {}
    first = 0
    for group in host_groups(experiment):
        for name, node in zip(group, experiment.cluster.nodes, strict=True):
            if not is_cpu(node.device.name):
                slots = list(range(first, first + node.num_slots))
                environments[name] = {DEVICE_VARIABLE: visible_devices(slots)}
                first += node.num_slots
    return lambda name: LocalHost(name, environment=environments.get(name))


def located(settings: SshSettings, base: Path) -> SshSettings:
    """Resolve relative paths of the settings against ``base``, the experiment file's folder.

    Example:
        >>> located(SshSettings(identities=("keys/a", "/b", "~/c")), Path("/x")).identities
        ('/x/keys/a', '/b', '~/c')
    """

    def locate(name: str) -> str:
        return name if name.startswith("~") else str(base / name)

    paths = {
        "known_hosts": locate(settings.known_hosts),
        "identities": tuple(locate(name) for name in settings.identities),
        "config": None if settings.config is None else locate(settings.config),
    }
    return settings.model_copy(update=paths)
