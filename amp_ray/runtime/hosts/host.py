"""Hosts that run trials: the protocol, this machine, and the hosts of an experiment.

``ssh.py`` has the hosts behind SSH.
"""

import contextlib
import fcntl
import os
import select
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, Protocol

from amp_ray.clusters.device import is_cpu
from amp_ray.errors import HostError, InputError
from amp_ray.inputs.experiment import Experiment, SshSettings
from amp_ray.runtime.hosts.agent.resources import DEVICE_VARIABLE, visible_devices

GIVEN_UP: Final = "given up: it has not read what was sent to it"
GIVE_UP_POLL_S: Final = 0.2

PIPE_BYTES: Final = 1024 * 1024


class Channel(Protocol):
    """Stdin of a running command, and its stdout and stderr in one stream."""

    def read(self) -> bytes:
        """Wait for output; return ``b""`` at its end."""

    def write(self, data: bytes, given_up: threading.Event | None = None) -> None:
        """Write all data to stdin; block while the command does not read."""

    def close(self) -> None:
        """Close stdin; ``read`` returns ``b""`` after the last output."""


class Host(Protocol):
    """A machine that runs trials. Every method may raise `HostError`."""

    @property
    def name(self) -> str:
        """The name in the hostfile."""

    @property
    def addresses(self) -> tuple[str, ...]:
        """Addresses and names at which other hosts may reach it, best first."""

    @property
    def python(self) -> str:
        """Path of the interpreter that runs the agent."""

    @property
    def shares_slots(self) -> bool:
        """Whether slots are devices that must be claimed, since other studies may use them."""

    def connect(self) -> None:
        """Connect, unless connected."""

    def open_channel(self, argv: Sequence[str]) -> Channel:
        """Start a command and return its stdin and output."""

    def close(self) -> None:
        """End the connection."""


class LocalHost:
    """This machine; the agent is a child process."""

    def __init__(
        self,
        name: str = "localhost",
        *,
        python: str = sys.executable,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start nothing; ``environment`` is added to the variables of commands."""
        self.name = name
        self._environment = dict(environment or {})
        self.addresses = ("127.0.0.1",)
        self.python = python
        # Slots without GPUs share the CPU, so hosts that are this machine may use the same ones
        self.shares_slots = DEVICE_VARIABLE in self._environment

    def connect(self) -> None:
        """Do nothing: this machine needs no connection."""

    def open_channel(self, argv: Sequence[str]) -> Channel:
        """Start a command and return its pipes; see ``Host.open_channel``."""
        try:
            return LocalChannel(argv, {**os.environ, **self._environment})
        except OSError as error:
            message = f"{self.name}: {argv[0]} cannot be started: {error.strerror}"
            raise HostError(message) from error

    def close(self) -> None:
        """Do nothing: there is no connection."""


class LocalChannel:
    """The pipes of a child process."""

    def __init__(self, argv: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start the command in a new session, so that Ctrl-C reaches only the controller."""
        self._process = subprocess.Popen(
            argv,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            bufsize=0,
        )
        assert self._process.stdin is not None
        os.set_blocking(self._process.stdin.fileno(), False)
        with contextlib.suppress(OSError):  # above the user's limit for pipes: only slower
            fcntl.fcntl(self._process.stdin, fcntl.F_SETPIPE_SZ, PIPE_BYTES)

    def read(self) -> bytes:
        """Wait for output; at its end, reap the process and return ``b""``."""
        assert self._process.stdout is not None
        data: bytes = self._process.stdout.read(64 * 1024) or b""
        if not data:
            self._process.stdout.close()
            self._process.wait()
        return data

    def write(self, data: bytes, given_up: threading.Event | None = None) -> None:
        """Write all data to stdin; see ``Channel.write``."""
        assert self._process.stdin is not None
        pipe = self._process.stdin.fileno()
        waiting = select.poll()
        waiting.register(pipe, select.POLLOUT)
        view = memoryview(data)
        while view:
            if given_up is not None and given_up.is_set():
                raise OSError(GIVEN_UP)
            if waiting.poll(GIVE_UP_POLL_S * 1000):
                with contextlib.suppress(BlockingIOError):
                    view = view[os.write(pipe, view) :]

    def close(self) -> None:
        """Close stdin, which ends the agent's lease."""
        assert self._process.stdin is not None
        self._process.stdin.close()


# ------------------------------------------------------------------ the hosts of an experiment

MakeHost = Callable[[str], Host]  # makes a host from its name, without connecting


def experiment_folder(experiment: Experiment) -> Path:
    """Return the folder of the experiment file; relative paths start there."""
    return Path(experiment.source.file).parent


def host_groups(experiment: Experiment) -> tuple[tuple[str, ...], ...]:
    """Return the hosts of every group; without groups, the cluster's hosts are the only one."""
    return experiment.host_groups or (experiment.cluster.host_names,)


def host_maker(experiment: Experiment, ssh: SshSettings | None = None) -> MakeHost:
    """Return a function that makes the hosts of an experiment."""
    if experiment.trials.backend == "local":
        return _local_maker(experiment)
    settings = located(ssh or experiment.trials.ssh, experiment_folder(experiment))
    try:
        from amp_ray.runtime.hosts.ssh import SshHost  # noqa: PLC0415 - local trials need no paramiko
        from amp_ray.runtime.hosts.ssh_config import SshConfig  # noqa: PLC0415 - as above
    except ModuleNotFoundError as error:
        raise InputError(f"trials over SSH need {error.name}: pip install 'amp-ray[ssh]'") from None
    config = SshConfig(settings.config)
    return lambda name: SshHost(name, settings, config)


def _local_maker(experiment: Experiment) -> MakeHost:
    """Return a function that makes a host from any name; every host is this machine.

    If this machine has GPUs, each host gets different ones: the second host's slots begin where the
    first host's end, and so on through all host groups.
    """
    environments: dict[str, dict[str, str]] = {}
    first = 0
    for group in host_groups(experiment):
        for name, nodes in zip(group, experiment.cluster.machines, strict=True):
            num_gpus = sum(node.num_slots for node in nodes if not is_cpu(node.device.name))
            if num_gpus:
                slots = list(range(first, first + num_gpus))
                environments[name] = {DEVICE_VARIABLE: visible_devices(slots)}
                first += num_gpus
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
