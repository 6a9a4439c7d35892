"""From an experiment's settings to hosts: this machine under all names, or each behind SSH."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from amp_ray.errors import InputError
from amp_ray.runtime.host import Host, LocalHost
from amp_ray.spec.access import SshSettings
from amp_ray.spec.experiment import Experiment

MakeHost = Callable[[str], Host]
"""From a host's name to the host, which opens nothing yet."""


def experiment_folder(experiment: Experiment) -> Path:
    """Return the folder of the experiment file, where relative paths start."""
    return Path(experiment.document.file).parent


def host_maker(experiment: Experiment, ssh: SshSettings | None = None) -> MakeHost:
    """Return what makes the hosts of an experiment.

    Args:
        experiment: Its ``trials`` say whether they are this machine, and how else they are reached.
        ssh: Settings instead of those of ``trials``.

    Raises:
        InputError: If SSH is asked for and not installed.
    """
    if experiment.trials.backend == "local":
        return LocalHost
    settings = located(ssh or experiment.trials.ssh, experiment_folder(experiment))
    try:
        from amp_ray.runtime.ssh import SshHost  # noqa: PLC0415 - local trials need no paramiko
    except ModuleNotFoundError as error:
        message = f"trials over SSH need {error.name}: pip install 'amp-ray[ssh]'"
        raise InputError(message) from None
    return lambda name: SshHost(name, settings)


def located(settings: SshSettings, base: Path) -> SshSettings:
    """Lead relative paths of settings to the folder of the experiment file.

    Example:
        >>> located(SshSettings(identities=("keys/a", "/b", "~/c")), Path("/x")).identities
        ('/x/keys/a', '/b', '~/c')
    """

    def locate(name: str) -> str:
        return name if name.startswith("~") else str(base / name)

    return replace(
        settings,
        known_hosts=locate(settings.known_hosts),
        identities=tuple(locate(name) for name in settings.identities),
        config=None if settings.config is None else locate(settings.config),
    )
