import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from amp_ray.errors import InputError
from amp_ray.runtime.ray.address import (
    MAX_PARENT_LENGTH,
    RayUnavailableError,
    cause_of,
    environment_kept,
    find_address,
    gist_of,
    head_problem,
    listens,
    require_ray,
    session_folder,
    set_token,
)

TOKENS = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")


@pytest.fixture(autouse=True)
def no_ray_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Begin with an environment that knows nothing of Ray."""
    for name in [name for name in os.environ if name.startswith("RAY_")]:
        monkeypatch.delenv(name)


def test_a_cluster_of_our_own_is_the_default() -> None:
    assert find_address(None) == "local"


def test_the_environment_names_the_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    assert find_address(None) == "auto"
    assert find_address("local") == "local"


SETTINGS = bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""What a server of gRPC sends first."""


@contextmanager
def listener(answer: bytes | None) -> Iterator[str]:
    """Accept connections and answer once; None never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        connections = []

        def accept() -> None:
            while True:
                try:
                    connections.append(server.accept()[0])
                except OSError:
                    return
                if answer is not None:
                    connections[-1].sendall(answer)

        thread = threading.Thread(target=accept)
        thread.start()
        try:
            yield f"127.0.0.1:{server.getsockname()[1]}"
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()
            for connection in connections:
                connection.close()


@contextmanager
def dropped() -> Iterator[str]:
    """Listen where new connections are dropped without a word, as behind a firewall."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server:
        address = server.getsockname()
        with contextlib.ExitStack() as stack:
            for _ in range(4):  # the queue is full after some
                client = stack.enter_context(socket.socket())
                client.settimeout(0.0)
                client.connect_ex(address)
            yield f"127.0.0.1:{address[1]}"


def test_an_address_where_a_head_answers_is_taken() -> None:
    with listener(SETTINGS) as address:
        assert find_address(address) == address


def test_what_accepts_connections_and_does_not_speak_first_is_no_head(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(head_problem, "__defaults__", (0.2,))
    problem = r"no answer in 0\.2 s"
    with listener(None) as address, pytest.raises(RayUnavailableError, match=problem):
        find_address(address)


def test_a_head_behind_dropped_packets_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_problem, "__defaults__", (0.5,))
    with dropped() as address, pytest.raises(RayUnavailableError, match=r"no answer in 0\.5 s"):
        find_address(address)


def test_an_address_where_nothing_listens_is_told_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    with pytest.raises(RayUnavailableError, match=rf"no Ray cluster at {address}: .*ray start --h"):
        find_address(address)


@pytest.mark.parametrize("address", ["ray://head:10001", "127.0.0.1:1"])
def test_an_address_of_the_environment_that_leads_nowhere_is_replaced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, address: str
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    assert find_address(None) == "local"
    (message,) = caplog.messages
    assert message.startswith("RAY_ADDRESS: ")
    assert address in message
    assert message.endswith("A Ray of this machine alone is used instead")


def test_a_socket_listens_until_its_process_is_gone(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    assert not listens(path)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen(0)
        assert listens(path)
    assert not listens(path)


@pytest.mark.parametrize(
    "address", ["head", "head:x", "ray://head:10001", "head:99999", ":1", "x y"]
)
def test_what_is_no_address_is_bad_input(address: str) -> None:
    with pytest.raises(InputError, match="give host:port, auto or local"):
        find_address(address)


def test_missing_ray_is_told_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("amp_ray.runtime.ray.address.find_spec", lambda _name: None)
    with pytest.raises(InputError, match=r"^this needs Ray, .* pip install 'amp-ray\[ray\]'"):
        require_ray("this")


def test_ray_that_is_there_is_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("amp_ray.runtime.ray.address.find_spec", lambda _name: object())
    require_ray("this")


def test_a_new_cluster_gets_one_token_per_process() -> None:
    tokens = []
    for _ in range(2):
        with environment_kept():
            set_token()
            tokens.append(os.environ["RAY_AUTH_TOKEN"])
    assert len(tokens[0]) == 64
    assert tokens[0] == tokens[1]
    assert "RAY_AUTH_TOKEN" not in os.environ


@pytest.mark.parametrize("name", TOKENS)
def test_what_the_environment_says_of_tokens_stays(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "mine")
    set_token()
    assert {key: os.environ[key] for key in TOKENS if key in os.environ} == {name: "mine"}


def test_variables_of_ray_are_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "mine")
    before = dict(os.environ)
    with environment_kept():
        os.environ["RAY_ADDRESS"] = "other"
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ["PYTHONBREAKPOINT"] = "ray"
    assert dict(os.environ) == before


@pytest.mark.parametrize("length", [MAX_PARENT_LENGTH, 90])
def test_the_session_folder_is_removed_and_its_path_short(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, length: int
) -> None:
    base = "/tmp" if length == MAX_PARENT_LENGTH else str(tmp_path / ("x" * length))  # noqa: S108
    monkeypatch.setattr("tempfile.gettempdir", lambda: base)
    with session_folder() as name:
        outer = Path(name).parent
        assert outer.parent == Path("/tmp")  # noqa: S108
        (Path(name) / "log").touch()
        assert (
            len(name) + len("/session_2026-11-22_07-15-07_607439_4194304/sockets/plasma_store")
            < 108
        )
    assert not outer.exists()


def test_the_first_cause_is_told() -> None:
    error = ConnectionError("Failed to connect")
    error.__cause__ = RuntimeError("Failed.\nTraceback ...\nray.AuthenticationError: no token\n")
    assert cause_of(error) == "ray.AuthenticationError: no token"


def test_other_versions_are_told_with_what_to_do() -> None:
    told = cause_of(RuntimeError("Version mismatch: the cluster has\n  Ray: 1\nhere\n  Ray: 2\n"))
    assert told.splitlines()[1] == "  Ray: 1"
    assert told.endswith("install the same versions of Ray and Python here and on the cluster")


def test_an_error_without_words_has_a_name() -> None:
    assert gist_of(RuntimeError()) == "RuntimeError"


def test_the_gist_of_an_error_is_what_happened_without_guesses() -> None:
    text = "The actor died.\n\tclass: A\nWorker exits: End of file. Some common causes include: (1)"
    assert gist_of(RuntimeError(text)) == "Worker exits: End of file."
