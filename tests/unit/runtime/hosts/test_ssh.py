"""Routes to hosts, and what answers where an SSH server should: one clear message."""

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from amp_ray.errors import HostError
from amp_ray.inputs.experiment import SshSettings
from amp_ray.inputs.hostfile import SshTarget
from amp_ray.runtime.hosts.ssh import SshHost, find_routes
from amp_ray.runtime.hosts.ssh_config import SshConfig


@pytest.fixture
def configured(tmp_path: Path) -> Callable[[str], SshConfig]:
    def make(text: str) -> SshConfig:
        (tmp_path / "config").write_text(text, encoding="utf-8")
        return SshConfig(str(tmp_path / "config"))

    return make


Configured = Callable[[str], SshConfig]


def test_a_target_wins_over_settings_and_settings_over_the_configuration(
    configured: Configured,
) -> None:
    config = configured("HostName 10.0.0.1\nUser config\nPort 7\n")
    settings = SshSettings(user="setting")
    (full,) = find_routes(SshTarget(host="a", user="own", port=5), settings, config)
    (bare,) = find_routes(SshTarget(host="a"), settings, config)
    assert (full.host, full.user, full.port) == ("10.0.0.1", "own", 5)
    assert (bare.user, bare.port) == ("setting", 7)


def test_jumps_come_after_the_target_the_nearest_last(configured: Configured) -> None:
    config = configured(
        "Host far\n  ProxyJump ssh://ada@one:7,two\nHost one two\n  ProxyJump zero\n"
    )
    routes = find_routes(SshTarget(host="far"), SshSettings(), config)
    assert [route.host for route in routes] == ["far", "two", "one", "zero"]
    assert (routes[2].user, routes[2].port) == ("ada", 7)


def test_jumps_in_a_circle_are_refused(configured: Configured) -> None:
    config = configured("Host a\n  ProxyJump b\nHost b\n  ProxyJump a\n")
    with pytest.raises(HostError, match="more than 4 ProxyJump"):
        find_routes(SshTarget(host="a"), SshSettings(), config)


def test_a_missing_identity_is_refused_by_name() -> None:
    settings = SshSettings(identities=("/no/such key",))
    with pytest.raises(HostError, match="key file /no/such key does not exist"):
        find_routes(SshTarget(host="a"), settings, SshConfig(None))


def test_one_existing_identity_of_the_configuration_is_enough(
    tmp_path: Path, configured: Configured
) -> None:
    key = tmp_path / "key"
    key.touch()
    config = configured(f"IdentityFile '/no/such key'\nIdentityFile {key}\n")
    (route,) = find_routes(SshTarget(host="a"), SshSettings(), config)
    assert route.identities == (str(key),)


NO_SERVER = "what answers there is no SSH server"
IMPATIENT_S, PATIENT_S = 2.0, 600.0


def speak_http(client: socket.socket) -> None:
    client.recv(100)
    client.sendall(b"HTTP/1.1 400 Bad Request\r\nServer: \x1b[31mx\r\n\r\nbad")


def flood(client: socket.socket) -> None:
    while True:
        client.sendall(b"x" * 2**16)


def flood_lines(client: socket.socket) -> None:
    while True:
        client.sendall(b"\x1b[2Jx\r\n" * 2**10)


def be_silent(client: socket.socket) -> None:
    while client.recv(100):
        pass


@pytest.fixture
def serve() -> Iterator[Callable[[Callable[[socket.socket], object]], str]]:
    """Listen on a free port of the loopback, and do something with every connection."""
    listeners = []

    def start(work: Callable[[socket.socket], object]) -> str:
        listener = socket.create_server(("127.0.0.1", 0))
        listeners.append(listener)

        def accept() -> None:
            with contextlib.suppress(OSError):
                client, _ = listener.accept()
                with client:
                    work(client)

        threading.Thread(target=accept, daemon=True).start()
        return f"127.0.0.1:{listener.getsockname()[1]}"

    yield start
    for listener in listeners:
        listener.close()


@pytest.mark.parametrize(
    ("work", "limit_s", "words"),
    [
        (lambda _client: None, PATIENT_S, NO_SERVER),
        (speak_http, PATIENT_S, NO_SERVER),
        (flood_lines, PATIENT_S, NO_SERVER),
        (flood, IMPATIENT_S, "no SSH server's greeting within 2.0 s"),
        (be_silent, IMPATIENT_S, "no SSH server's greeting within 2.0 s"),
        (lambda client: client.sendall(b"SSH-2.0-x\r\n" + bytes(range(256)) * 100), PATIENT_S, ""),
        (lambda client: client.sendall(b"SSH-1.0-x\r\n"), PATIENT_S, "Incompatible version"),
        (lambda client: client.sendall(b"\xff\xfe\r\n" * 9), PATIENT_S, NO_SERVER),
    ],
)
def test_what_is_no_ssh_server_is_one_line_and_no_traceback(
    serve: Callable[[Callable[[socket.socket], object]], str],
    capfd: pytest.CaptureFixture[str],
    work: Callable[[socket.socket], object],
    limit_s: float,
    words: str,
) -> None:
    name = serve(work)
    settings = SshSettings(
        known_hosts="/no/such/file", config=None, user="ada", connect_timeout_s=limit_s
    )
    with pytest.raises(HostError) as caught:
        SshHost(name, settings).connect()
    text = str(caught.value)
    assert text.startswith("ada@[127.0.0.1]:")
    assert words in text
    assert text.isprintable(), text
    for thread in threading.enumerate():
        if type(thread).__name__ == "Transport":  # paramiko's, which prints what it logs
            thread.join(120)
    assert capfd.readouterr().err == ""


def test_a_known_hosts_file_that_cannot_be_read_is_named(tmp_path: object) -> None:
    settings = SshSettings(known_hosts=str(tmp_path), config=None)
    with pytest.raises(HostError, match=rf"{tmp_path} cannot be read: Is a directory"):
        SshHost("127.0.0.1", settings).connect()
