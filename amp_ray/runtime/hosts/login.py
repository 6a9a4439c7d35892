"""Reasons why the login to a host failed, and the commands that fix them."""

import shlex
import socket
from collections.abc import Sequence
from typing import Final

from amp_ray.errors import HostError
from amp_ray.inputs.experiment import SshSettings
from amp_ray.inputs.hostfile import parse_target
from amp_ray.redaction import redact
from amp_ray.trials.doctor.findings import Finding

_ENCRYPTED: Final = "encrypted"  # in error messages about a private key with a passphrase
_DEFAULTS: Final = SshSettings()


class LoginError(HostError):
    """The login to a reachable host failed; the doctor shows the command that fixes the login.

    ``details`` are fields of a `Finding`, without level and host.
    """

    def __init__(self, message: str, **details: str) -> None:
        super().__init__(message)
        self.details = details


def ssh_words(name: str, settings: SshSettings) -> tuple[str, ...]:
    """Return the ``ssh`` command that logs in to a host with the same settings.

    Example:
        >>> ssh_words("ada@a:2222", SshSettings(identities=("~/k",)))
        ('ssh', '-i', '~/k', '-p', '2222', 'ada@a')
    """
    words = ["ssh"]
    if settings.config != _DEFAULTS.config:
        words += ["-F", settings.config or "none"]
    return (*words, *_words(name, settings, settings.identities))


def login_failure(name: str, error: HostError, settings: SshSettings) -> Finding:
    """Return the doctor's finding about a failed login."""
    if isinstance(error, LoginError):
        details = {**error.details, "found": redact(error.details["found"])}
        return Finding(level="error", host=name, **details)
    advice = (
        "is it up, and does nothing between here and there drop the connection? this shows more"
    )
    if isinstance(error.__cause__, socket.gaierror):
        advice = "name its address in the hostfile, or as HostName in ~/.ssh/config"
    first, *words = ssh_words(name, settings)
    limit_s = f"{settings.connect_timeout_s:.0f}"
    return Finding(
        level="error",
        host=name,
        check="reach",
        found=str(error),
        expected=f"an SSH server that answers within {settings.connect_timeout_s:g} s",
        command=shlex.join([first, "-v", "-o", f"ConnectTimeout={limit_s}", *words, "true"]),
        advice=advice,
    )


def refused(
    name: str, message: str, identities: Sequence[str], settings: SshSettings
) -> LoginError:
    """Return the error of a login that the host refused, or whose key needs a passphrase."""
    if _ENCRYPTED in message.casefold():
        command = shlex.join(["ssh-add", *(identities[:1] or ["none"])])
        advice = "and set use_agent: true in trials.ssh: keys with a passphrase need the ssh-agent"
    else:
        command = shlex.join(["ssh-copy-id", *_words(name, settings, identities[:1])])
        advice = (
            "needs another way in, such as a password; else have the key's .pub line put "
            "into ~/.ssh/authorized_keys there"
        )
    expected = "a key that the host accepts"
    return LoginError(
        message, check="login", found=message, expected=expected, command=command, advice=advice
    )


def _words(name: str, settings: SshSettings, identities: Sequence[str]) -> list[str]:
    target = parse_target(name)
    words = []
    if settings.known_hosts != _DEFAULTS.known_hosts:
        words += ["-o", f"UserKnownHostsFile={settings.known_hosts}"]
    words += [word for identity in identities for word in ("-i", identity)]
    words += ["-p", str(target.port)] if target.port is not None else []
    user = target.user or settings.user
    return [*words, target.host if user is None else f"{user}@{target.host}"]
