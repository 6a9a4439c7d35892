"""Who is reached how: ``user@host:port``, and what the settings add."""

import getpass
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from amp_ray.errors import HostError
from amp_ray.inputs.hostfile import SshTarget, parse_target
from amp_ray.inputs.ssh_settings import SshSettings

Lookup = Callable[[str], Mapping[str, Any]]  # what OpenSSH's configuration says, in lower case
DEFAULT_PORT: Final = 22  # of SSH, RFC 4251
_DEFAULT_KNOWN_HOSTS: Final = SshSettings().known_hosts
_MAX_JUMPS: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """One connection's end, after target, settings and configuration have had their say."""

    host: str
    port: int
    user: str
    identities: tuple[str, ...]
    known_hosts: tuple[str, ...]
    key_name: str


def find_routes(
    target: SshTarget, settings: SshSettings, lookup: Lookup, depth: int = 0
) -> tuple[Route, ...]:
    """Return the target's own route, then those of hosts to jump through, the nearest last."""
    found = lookup(target.host)
    if "proxycommand" in found or depth > _MAX_JUMPS:
        raise HostError(
            f"{target.host}: {settings.config} asks for a ProxyCommand, which is not supported "
            f"(use ProxyJump), or for more than {_MAX_JUMPS} ProxyJump in a row"
        )
    host = str(found.get("hostname", target.host))
    port = target.port or int(found.get("port", DEFAULT_PORT))
    own = Route(
        host=host,
        port=port,
        user=str(target.user or settings.user or found.get("user") or getpass.getuser()),
        identities=_identities(target.host, settings, found),
        known_hosts=_known_hosts(settings, found),
        key_name=str(found.get("hostkeyalias") or known_hosts_name(host, port)),
    )
    jumps = [name for name in found.get("proxyjump", "none").split(",") if name != "none"]
    through = [
        route
        for name in reversed(jumps)
        for route in find_routes(parse_target(name), settings, lookup, depth + 1)
    ]
    return own, *through


def _identities(host: str, settings: SshSettings, found: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the key files to try; those of the settings must exist, of the configuration one."""
    listed = settings.identities or tuple(found.get("identityfile", ()))
    paths = tuple(str(Path(name).expanduser()) for name in listed)
    missing = [path for path in paths if not Path(path).is_file()]
    if missing and (settings.identities or len(missing) == len(paths)):
        raise HostError(
            f"{host}: key file {', '.join(missing)} does not exist; name an existing one as "
            "identity file, or make one with: ssh-keygen -t ed25519"
        )
    return tuple(path for path in paths if path not in missing)


def _known_hosts(settings: SshSettings, found: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the known_hosts files: the one of the settings, or those that OpenSSH reads."""
    if settings.known_hosts != _DEFAULT_KNOWN_HOSTS:
        return (settings.known_hosts,)
    listed = [
        name
        for key, default in (
            ("userknownhostsfile", f"{_DEFAULT_KNOWN_HOSTS} {_DEFAULT_KNOWN_HOSTS}2"),
            ("globalknownhostsfile", "/etc/ssh/ssh_known_hosts /etc/ssh/ssh_known_hosts2"),
        )
        for name in shlex.split(str(found.get(key, default)))
        if name != "none"
    ]
    return tuple(listed) or (settings.known_hosts,)


def known_hosts_name(host: str, port: int) -> str:
    """Return how a known_hosts file names a host.

    Example:
        >>> known_hosts_name("a", 22), known_hosts_name("a", 2222)
        ('a', '[a]:2222')
    """
    return host if port == DEFAULT_PORT else f"[{host}]:{port}"


def add_key_command(host: str, port: int, settings: SshSettings) -> str:
    """Return the command that makes a host's key known.

    Example:
        >>> add_key_command("a", 22, SshSettings(known_hosts="keys"))
        'ssh-keyscan -p 22 a >> keys'
    """
    scan = shlex.join(["ssh-keyscan", "-p", str(port), host])
    return f"{scan} >> {_shell_path(settings.known_hosts)}"


def forget_key_command(host: str, port: int, settings: SshSettings) -> str:
    """Return the command that forgets a host's key.

    Example:
        >>> forget_key_command("a", 2222, SshSettings(known_hosts="~/my keys"))
        "ssh-keygen -R '[a]:2222' -f ~/'my keys'"
    """
    forget = shlex.join(["ssh-keygen", "-R", known_hosts_name(host, port)])
    return f"{forget} -f {_shell_path(settings.known_hosts)}"


def _shell_path(path: str) -> str:
    """Quote a path for a person's shell, which has to see the tilde."""
    return f"~/{shlex.quote(path[2:])}" if path.startswith("~/") else shlex.quote(path)
