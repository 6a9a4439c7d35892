"""Hosts behind SSH: the only module that imports paramiko."""

import base64
import binascii
import contextlib
import hashlib
import hmac
import logging
import re
import shlex
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any, Final, NoReturn

import paramiko

from amp_ray.errors import HostError
from amp_ray.inputs.experiment import SshSettings
from amp_ray.inputs.hostfile import SshTarget, parse_target
from amp_ray.runtime.hosts.host import GIVE_UP_POLL_S, GIVEN_UP, Channel
from amp_ray.runtime.hosts.login import LoginError, refused
from amp_ray.runtime.hosts.ssh_config import DEFAULT_PORT, SshConfig
from amp_ray.runtime.whole_file import read_regular

AUTHORITY: Final = "@cert-authority"
REVOKED: Final = "@revoked"
_NUM_FIELDS: Final = 3  # fields of a line of known_hosts: names, key type, key
_HASHED: Final = "|1|"  # prefix of a hashed name
_DEFAULT_KNOWN_HOSTS: Final = SshSettings().known_hosts
_MAX_JUMPS: Final = 4
_MOST_KNOWN_BYTES: Final = 2**28  # of a known_hosts file: a million hosts
_MS_PER_S: Final = 1000
_READ_BYTES: Final = 64 * 1024
_TCP_TIMEOUT_S: Final = 5.0  # limit for unacknowledged bytes: paramiko's keepalive detects no loss

_REVOKED_ADVICE: Final = (
    "Whoever answers with it may be anybody: give the host a new key, and ask whoever keeps "
    "that file"
)
_UNKNOWN_ADVICE: Final = (
    "Compare it with the host's own (ssh-keygen -lf /etc/ssh/ssh_host_*_key.pub there)"
)
_NO_GREETING: Final = (
    *("No existing session", "Error reading SSH protocol banner"),
    "Indecipherable protocol version",
)
"""Paramiko's errors if the TCP connection works, but no SSH server answers."""

# Silence paramiko: its threads print tracebacks of failures that are also raised as exceptions
logging.getLogger("paramiko").setLevel(logging.CRITICAL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """Resolved address and credentials of one SSH connection."""

    host: str
    port: int
    user: str
    identities: tuple[str, ...]
    known_hosts: tuple[str, ...]
    key_name: str


def find_routes(
    target: SshTarget, settings: SshSettings, config: SshConfig, depth: int = 0
) -> tuple[Route, ...]:
    """Return the target's route, then those of its jump hosts, the nearest one last."""
    user = target.user or settings.user
    options = config.lookup(replace(target, user=user))
    if depth > _MAX_JUMPS:
        raise HostError(f"{target.host}: more than {_MAX_JUMPS} ProxyJump in a row")
    route = Route(
        host=options.host,
        port=options.port,
        user=options.user,
        identities=_identities(target.host, settings, options.identities),
        known_hosts=_known_hosts(settings, options.known_hosts),
        key_name=options.host_key_alias or known_hosts_name(options.host, options.port),
    )
    routes = [route]
    for jump in reversed(options.jumps):
        through = find_routes(jump, settings, config, depth + 1)
        # As with `ssh -J one,two`, only the first jump host may name jump hosts of its own
        routes += through if jump is options.jumps[0] else through[:1]
    return tuple(routes)


def _identities(host: str, settings: SshSettings, configured: Sequence[str]) -> tuple[str, ...]:
    """Return the key files to try: all of the settings, or OpenSSH's that exist, if any does.

    Raises `LoginError` if one of the settings does not exist.
    """
    listed = settings.identities or configured
    paths = tuple(str(Path(name).expanduser()) for name in listed)
    missing = [path for path in paths if not Path(path).is_file()]
    if missing and settings.identities:
        raise _without_key(host, missing)
    return tuple(path for path in paths if path not in missing) or paths


def _without_key(host: str, missing: Sequence[str]) -> LoginError:
    return LoginError(
        f"{host}: key file {', '.join(missing)} does not exist; name an existing one as "
        "identity file, or make one with: ssh-keygen -t ed25519",
        check="login",
        found=f"key file {missing[0]} does not exist",
        expected="a private key",
        command=shlex.join(["ssh-keygen", "-t", "ed25519", "-f", missing[0]]),
        advice="or name an existing one in trials.ssh.identities",
    )


def _known_hosts(settings: SshSettings, configured: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """Return the known_hosts files: the one in the settings, or else OpenSSH's."""
    if settings.known_hosts != _DEFAULT_KNOWN_HOSTS:
        return (settings.known_hosts,)
    defaults: dict[str, Sequence[str]] = {
        "userknownhostsfile": (_DEFAULT_KNOWN_HOSTS, f"{_DEFAULT_KNOWN_HOSTS}2"),
        "globalknownhostsfile": ("/etc/ssh/ssh_known_hosts", "/etc/ssh/ssh_known_hosts2"),
    }
    listed = [name for names in (defaults | {**configured}).values() for name in names]
    return tuple(listed) or (settings.known_hosts,)


class SshHost:
    """A host behind SSH, with one connection that stays open between trials."""

    def __init__(self, name: str, settings: SshSettings, config: SshConfig | None = None) -> None:
        """Resolve the routes to ``[user@]host[:port]``; open no connection yet.

        ``config`` is that of the settings, if it has been read for another host.
        """
        self.name = name
        self.python = settings.python
        self.shares_slots = True
        self._settings = settings
        config = SshConfig(settings.config) if config is None else config
        self._route, *jumps = find_routes(parse_target(name), settings, config)
        self._hops = [*reversed(jumps), self._route]
        self._lock = threading.Lock()
        self._clients: list[paramiko.SSHClient] = []

    @property
    def addresses(self) -> tuple[str, ...]:
        """The address to which the name resolves here, and the names themselves."""
        names = (self._route.host, parse_target(self.name).host)
        addresses: list[str] = []
        with contextlib.suppress(OSError, UnicodeError):
            addresses = [str(entry[4][0]) for entry in socket.getaddrinfo(names[0], None)]
        return tuple(dict.fromkeys([*addresses, *names]))

    def connect(self) -> None:
        """Connect, unless connected."""
        self._connected()

    def run(
        self, argv: Sequence[str], *, timeout_s: float, text: str = ""
    ) -> CompletedProcess[str]:
        """Run a short command; ``text`` is its stdin."""
        with self._errors():
            session = self._start(argv)
            session.settimeout(timeout_s)
            output = session.makefile("rb")
            error = session.makefile_stderr("rb")
            with session, output, error:
                session.sendall(text.encode())
                session.shutdown_write()
                texts = output.read(), error.read()
                code = session.recv_exit_status()
        decoded = [data.decode("utf-8", "replace") for data in texts]
        return CompletedProcess(argv, code, *decoded)

    def open_channel(self, argv: Sequence[str]) -> Channel:
        """Start a command and return its stdin and output; see ``Host.open_channel``."""
        with self._errors():
            session = self._start(argv)
            session.set_combine_stderr(True)
            return SshChannel(session)

    def close(self) -> None:
        """End the connection."""
        with self._lock:
            self._disconnect()

    def _start(self, argv: Sequence[str]) -> paramiko.Channel:
        """Start a command; only here are arguments quoted for the remote shell."""
        transport = self._connected().get_transport()
        assert transport is not None
        limit_s = self._settings.connect_timeout_s
        session = transport.open_session(timeout=limit_s)
        # Paramiko waits for ever for a server that does not answer the request
        giving_up = threading.Timer(limit_s, session.close)
        giving_up.daemon = True
        giving_up.start()
        try:
            session.exec_command(f"exec {shlex.join(argv)}")
        except paramiko.SSHException as error:
            if giving_up.is_alive():
                raise
            raise TimeoutError from error
        finally:
            giving_up.cancel()
        return session

    def _connected(self) -> paramiko.SSHClient:
        """Return the connection; open it first if there is none."""
        with self._lock:
            transport = self._clients[-1].get_transport() if self._clients else None
            if transport is None or not transport.is_active():
                self._disconnect()
                try:
                    for route in self._hops:
                        self._clients.append(self._open(route))
                except BaseException:
                    self._disconnect()
                    raise
            return self._clients[-1]

    def _disconnect(self) -> None:
        while self._clients:
            self._clients.pop().close()

    def _open(self, route: Route) -> paramiko.SSHClient:
        """Open one connection, through the last open jump host if there is one."""
        settings = self._settings
        timeout_s = settings.connect_timeout_s
        client = paramiko.SSHClient()
        check = HostKeyCheck(route, settings)
        client.set_missing_host_key_policy(check)
        start = time.monotonic()
        try:
            tunnel = self._tunnel(route)
            client.connect(
                route.host,
                port=route.port,
                username=route.user,
                key_filename=list(route.identities) or None,  # type: ignore[arg-type] # a list is accepted, too
                allow_agent=settings.use_agent,
                look_for_keys=False,
                timeout=timeout_s,
                banner_timeout=timeout_s,
                auth_timeout=timeout_s,
                channel_timeout=timeout_s,
                sock=tunnel,
                transport_factory=check.make_transport,
            )
        except (paramiko.SSHException, OSError, EOFError, ValueError, HostError) as error:
            client.close()
            is_late = time.monotonic() - start > timeout_s
            _explain(error, self.name, route, settings, is_late=is_late)
        transport = client.get_transport()
        if transport is not None and tunnel is None and isinstance(transport.sock, socket.socket):
            limit_ms = int(_TCP_TIMEOUT_S * _MS_PER_S)
            transport.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, limit_ms)
        return client

    def _tunnel(self, route: Route) -> paramiko.Channel | None:
        """Open a tunnel from the last open jump host to the next host; None if no jump host is."""
        transport = self._clients[-1].get_transport() if self._clients else None
        if transport is None:
            return None
        origin = ("127.0.0.1", 0)
        limit_s = self._settings.connect_timeout_s
        return transport.open_channel(
            "direct-tcpip", (route.host, route.port), origin, timeout=limit_s
        )

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (paramiko.SSHException, OSError, EOFError) as error:
            what = "took too long" if isinstance(error, TimeoutError) else str(error)
            raise HostError(f"{self.name}: {what or type(error).__name__}") from error


class SshChannel:
    """A running command behind SSH."""

    def __init__(self, session: paramiko.Channel) -> None:
        self._session = session
        self._session.settimeout(GIVE_UP_POLL_S)

    def read(self) -> bytes:
        """Wait for output."""
        while True:
            with contextlib.suppress(TimeoutError):
                return self._session.recv(_READ_BYTES)

    def write(self, data: bytes, given_up: threading.Event | None = None) -> None:
        """Write all data to stdin; see ``Channel.write``."""
        while data:
            if given_up is not None and given_up.is_set():
                raise OSError(GIVEN_UP)
            with contextlib.suppress(TimeoutError):
                num_bytes = self._session.send(data[:_READ_BYTES])
                if num_bytes == 0:
                    raise OSError("the connection is closed")
                data = data[num_bytes:]

    def close(self) -> None:
        """Close stdin, which ends the agent's lease; the agent's last messages still arrive."""
        with contextlib.suppress(EOFError, paramiko.SSHException):
            self._session.shutdown_write()


# ------------------------------------------------------------- known_hosts, as sshd(8) describes


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownKey:
    """One line of a known_hosts file."""

    file: str
    line: int  # counted from 1
    marker: str  # ``@cert-authority``, ``@revoked`` or empty
    names: tuple[str, ...]
    kind: str  # key type, such as ``ssh-ed25519``
    data: bytes  # the public key, encoded as in RFC 4253

    @property
    def where(self) -> str:
        """``FILE:LINE``, for messages."""
        return f"{self.file}:{self.line}"

    @property
    def fingerprint(self) -> str:
        """Fingerprint in the format of ``ssh-keygen -l``."""
        digest = base64.b64encode(hashlib.sha256(self.data).digest()).decode()
        return f"SHA256:{digest.rstrip('=')}"

    def is_of(self, name: str) -> bool:
        """Return whether the line applies to a host; ``name`` is from `known_hosts_name`.

        Example:
            >>> key = KnownKey(
            ...     file="f", line=1, marker="", names=("*.a", "!b.a"), kind="k", data=b""
            ... )
            >>> key.is_of("c.a"), key.is_of("b.a"), key.is_of("C.A")
            (True, False, True)
        """
        matching = [
            pattern for pattern in self.names if _matches(pattern.removeprefix("!"), name.lower())
        ]
        return bool(matching) and not any(pattern.startswith("!") for pattern in matching)


def read_known_hosts(files: Iterable[str]) -> tuple[KnownKey, ...]:
    """Read all lines of several files; skip files that cannot be read, as OpenSSH does."""
    keys: list[KnownKey] = []
    for name in files:
        try:
            data = read_regular(Path(name).expanduser(), _MOST_KNOWN_BYTES)
        except FileNotFoundError:
            continue
        except (OSError, RuntimeError, ValueError) as error:
            reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
            raise HostError(f"known_hosts file {name} cannot be read: {reason}") from None
        keys += _keys(name, data.decode("utf-8", "replace"))
    return tuple(keys)


def _keys(file: str, text: str) -> Iterator[KnownKey]:
    for number, line in enumerate(text.split("\n"), start=1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        marker = words.pop(0) if words[0].startswith("@") else ""
        if marker not in {"", AUTHORITY, REVOKED} or len(words) < _NUM_FIELDS:
            continue
        try:
            data = base64.b64decode(words[2], validate=True)
        except (binascii.Error, ValueError):
            continue
        names = tuple(words[0].split(","))
        yield KnownKey(file=file, line=number, marker=marker, names=names, kind=words[1], data=data)


def _matches(pattern: str, name: str) -> bool:
    """Return whether a host's name, in lower case, matches a pattern or a hashed name."""
    if pattern.startswith(_HASHED):
        salt, _, digest = pattern.removeprefix(_HASHED).partition("|")
        try:
            expected = hmac.digest(base64.b64decode(salt), name.encode(), "sha1")
            return hmac.compare_digest(expected, base64.b64decode(digest))
        except (binascii.Error, ValueError):
            return False
    shape = re.escape(pattern.lower()).replace(r"\*", ".*").replace(r"\?", ".")
    return re.fullmatch(shape, name) is not None


def known_hosts_name(host: str, port: int) -> str:
    """Return a host's name in the notation of known_hosts files.

    Example:
        >>> known_hosts_name("a", 22), known_hosts_name("a", 2222)
        ('a', '[a]:2222')
    """
    return host if port == DEFAULT_PORT else f"[{host}]:{port}"


def _shell_path(path: str) -> str:
    """Quote a path for a shell, but not a leading ``~/``.

    Example:
        >>> _shell_path("~/my keys")
        "~/'my keys'"
    """
    return f"~/{shlex.quote(path[2:])}" if path.startswith("~/") else shlex.quote(path)


class HostKeyCheck(paramiko.MissingHostKeyPolicy):
    """Accepts the keys of known_hosts files; refuses others, naming a command that adds the key.

    Paramiko's reader of these files supports no markers, no patterns and only one key per type. So
    paramiko gets no file: it asks about every key, and the key is checked here.
    """

    def __init__(self, route: Route, settings: SshSettings) -> None:
        self._route, self._settings = route, settings
        keys = read_known_hosts(route.known_hosts)
        self._revoked = [key for key in keys if key.marker == REVOKED]
        matching = [key for key in keys if key.is_of(route.key_name)]
        self._trusted = [key for key in matching if not key.marker]
        self._authorities = [key for key in matching if key.marker == AUTHORITY]

    def make_transport(self, sock: Any, **options: Any) -> paramiko.Transport:  # noqa: ANN401 - paramiko's
        """Prefer the host's key types with a known key, since a host offers several types."""
        transport = paramiko.Transport(sock, **options)
        algorithms = transport.get_security_options()
        kinds = {key.kind for key in self._trusted}
        algorithms.key_types = sorted(
            algorithms.key_types,
            key=lambda name: ("ssh-rsa" if name.startswith("rsa-") else name) not in kinds,
        )
        return transport

    def missing_host_key(
        self, client: paramiko.SSHClient, hostname: str, key: paramiko.PKey
    ) -> None:
        """Return if the host's key is trusted; raise `LoginError` otherwise."""
        del client
        data = key.asbytes()
        shown = f"{hostname}: its {key.get_name()} key {key.fingerprint}"
        places = [revoked.where for revoked in self._revoked if revoked.data == data]
        if places:
            problem = f"{shown} is marked {REVOKED} at {places[0]}"
            raise LoginError(
                f"{problem}. {_REVOKED_ADVICE}",
                check="host key",
                found=problem,
                expected="a key that is not revoked",
                advice=_REVOKED_ADVICE,
            )
        if any(trusted.data == data for trusted in self._trusted):
            return
        if self._trusted:
            first, route = self._trusted[0], self._route
            problem = (
                f"{route.user}@{known_hosts_name(route.host, route.port)}: its key has changed: "
                f"expected {first.fingerprint} ({first.where}), found {key.fingerprint}"
            )
            raise self._refusal(problem, "If you know why", "run", first.file)
        problem = f"{shown} is not in {', '.join(self._route.known_hosts)}"
        if self._authorities:
            problem += (
                f", and the certificates that {self._authorities[0].where} trusts ({AUTHORITY}) "
                "cannot be checked here"
            )
        file = self._route.known_hosts[0]
        raise self._refusal(problem, _UNKNOWN_ADVICE, "then add it with", file)

    def _refusal(self, problem: str, advice: str, lead: str, file: str) -> LoginError:
        """Return the error about an untrusted key, with a command that corrects ``file``."""
        host, port, path = self._route.host, self._route.port, _shell_path(file)
        command = f"{shlex.join(['ssh-keyscan', '-p', str(port), host])} >> {path}"
        if self._trusted:
            forget = shlex.join(["ssh-keygen", "-R", known_hosts_name(host, port)])
            command = f"{forget} -f {path} && {command}"
        return LoginError(
            f"{problem}. {advice}, {lead}: {command}",
            check="host key",
            found=problem,
            expected=f"the host's key in {self._settings.known_hosts}",
            command=command,
            advice=advice,
        )


def _explain(
    error: Exception, name: str, route: Route, settings: SshSettings, *, is_late: bool
) -> NoReturn:
    place = f"{route.user}@{known_hosts_name(route.host, route.port)}"
    match error:
        case HostError():
            raise error
        case FileNotFoundError() if (
            route.identities
        ):  # the connection works, the first key is missing
            raise _without_key(name, route.identities) from error
        case paramiko.AuthenticationException():
            keys = ", ".join(route.identities) or "none"
            agent = "asked" if settings.use_agent else "not asked (use_agent is off)"
            text = f"login refused: {error}; key files tried: {keys}; ssh-agent {agent}"
            raise refused(name, f"{place}: {text}", route.identities, settings) from error
        case paramiko.SSHException() if str(error).startswith(_NO_GREETING):
            late = is_late or str(error) == _NO_GREETING[0]
            text = f"what answers there is no SSH server ({error})"
            if late:
                text = f"no SSH server's greeting within {settings.connect_timeout_s} s"
        case TimeoutError():
            text = f"no answer within {settings.connect_timeout_s} s"
        case OSError():
            text = error.strerror or str(error)
        case _:
            text = str(error) or type(error).__name__
    raise HostError(f"{place}: {text}") from error
