"""Why a host could not be logged in to, and the command that mends it."""

import re
import shlex
import socket
from functools import partial
from typing import Final

from amp_ray.errors import HostError
from amp_ray.inputs.hostfile import parse_target
from amp_ray.inputs.ssh_settings import SshSettings
from amp_ray.trials.doctor.findings import Finding

_UNKNOWN_KEY: Final = re.compile(
    r"(?P<found>.*?)\. (?P<advice>Compare it .*), then add it with: (?P<command>ssh-keyscan .*)",
    re.DOTALL,
)
_CHANGED_KEY: Final = re.compile(
    r"(?P<found>.*?)\. (?P<advice>If you know why), run: (?P<command>ssh-keygen .*)", re.DOTALL
)
_REVOKED_KEY: Final = re.compile(
    r"(?P<found>.* is marked @revoked at .*?)\. (?P<advice>Whoever .*)", re.DOTALL
)
_NO_KEY_FILE: Final = re.compile(r"key file (?P<path>.*?)(, .*)? does not exist")
_REFUSED: Final = re.compile(r"login refused: .*key files tried: (?P<first>[^,;]*)")
_ENCRYPTED: Final = "encrypted"  # in what is said of a private key with a passphrase
_DEFAULTS: Final = SshSettings()


def ssh_words(name: str, settings: SshSettings) -> tuple[str, ...]:
    """Return the words that log in to a host by OpenSSH's own client, as the settings say.

    Example:
        >>> ssh_words("ada@a:2222", SshSettings(identities=("~/k",)))
        ('ssh', '-i', '~/k', '-p', '2222', 'ada@a')
    """
    target = parse_target(name)
    words = ["ssh"]
    if settings.config != _DEFAULTS.config:
        words += ["-F", settings.config or "none"]
    words += _options(settings)
    words += [word for identity in settings.identities for word in ("-i", identity)]
    words += ["-p", str(target.port)] if target.port is not None else []
    return (*words, _login(name, settings))


def login_failure(name: str, error: HostError, settings: SshSettings) -> Finding:
    """Sort what kept us from logging in by what mends it."""
    text, finding = str(error), partial(Finding, level="error", host=name)
    key = _UNKNOWN_KEY.fullmatch(text) or _CHANGED_KEY.fullmatch(text)
    if key is not None:
        return finding(
            check="host key",
            found=key["found"],
            expected=f"the host's key in {settings.known_hosts}",
            command=key["command"],
            advice=key["advice"],
        )
    revoked = _REVOKED_KEY.fullmatch(text)
    if revoked is not None:
        return finding(
            check="host key",
            found=revoked["found"],
            expected="a key that is not revoked",
            advice=revoked["advice"],
        )
    missing = _NO_KEY_FILE.search(text)
    if missing is not None:
        return finding(
            check="login",
            found=f"key file {missing['path']} does not exist",
            expected="a private key",
            command=shlex.join(["ssh-keygen", "-t", "ed25519", "-f", missing["path"]]),
            advice="or name an existing one in trials.ssh.identities",
        )
    refused = _REFUSED.search(text)
    if refused is not None:
        return _refused(name, text, refused["first"].strip(), settings)
    return _unreached(name, text, error, settings)


def _refused(name: str, text: str, identity: str, settings: SshSettings) -> Finding:
    """Report a login that the host, or the key's passphrase, refused."""
    if _ENCRYPTED in text.casefold():
        command = shlex.join(["ssh-add", identity])
        advice = "and set use_agent: true in trials.ssh: keys with a passphrase need the ssh-agent"
    else:
        target = parse_target(name)
        words = ["ssh-copy-id", *_options(settings)]
        words += ["-i", identity] if identity != "none" else []
        words += ["-p", str(target.port)] if target.port is not None else []
        command = shlex.join([*words, _login(name, settings)])
        advice = "needs another way in, such as a password; else have the key's .pub line put "
        advice += "into ~/.ssh/authorized_keys there"
    return Finding(
        level="error",
        host=name,
        check="login",
        found=text,
        expected="a key that the host accepts",
        command=command,
        advice=advice,
    )


def _unreached(name: str, text: str, error: HostError, settings: SshSettings) -> Finding:
    advice = (
        "is it up, and does nothing between here and there drop the connection? this shows more"
    )
    if isinstance(error.__cause__, socket.gaierror):
        advice = "name its address in the hostfile, or as HostName in ~/.ssh/config"
    words = ssh_words(name, settings)
    limit_s = f"{settings.connect_timeout_s:.0f}"
    return Finding(
        level="error",
        host=name,
        check="reach",
        found=text,
        expected=f"an SSH server that answers within {settings.connect_timeout_s:g} s",
        command=shlex.join([words[0], "-v", "-o", f"ConnectTimeout={limit_s}", *words[1:], "true"]),
        advice=advice,
    )


def _options(settings: SshSettings) -> list[str]:
    """Return the options that OpenSSH's commands have in common."""
    if settings.known_hosts == _DEFAULTS.known_hosts:
        return []
    return ["-o", f"UserKnownHostsFile={settings.known_hosts}"]


def _login(name: str, settings: SshSettings) -> str:
    target = parse_target(name)
    user = target.user or settings.user
    return target.host if user is None else f"{user}@{target.host}"
