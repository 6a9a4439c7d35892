import os
import socket
from pathlib import Path

import pytest

from amp_ray.errors import AmpRayError, InputError
from amp_ray.runtime.ray_address import (
    MAX_PARENT_LENGTH,
    cause_of,
    environment_kept,
    find_address,
    gist_of,
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


def test_an_address_where_something_answers_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        assert find_address(address) == address


def test_an_address_where_nothing_answers_is_told_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    with pytest.raises(AmpRayError, match=rf"no Ray cluster at {address}: .*ray start --head"):
        find_address(address)


@pytest.mark.parametrize(
    "address", ["head", "head:x", "ray://head:10001", "head:99999", ":1", "x y"]
)
def test_what_is_no_address_is_bad_input(address: str) -> None:
    with pytest.raises(InputError, match="give host:port, auto or local"):
        find_address(address)


def test_missing_ray_is_told_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("amp_ray.runtime.ray_address.find_spec", lambda _name: None)
    with pytest.raises(InputError, match=r"pip install 'amp-ray\[ray\]'"):
        require_ray()


def test_ray_that_is_there_is_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("amp_ray.runtime.ray_address.find_spec", lambda _name: object())
    require_ray()


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
        assert Path(name).parent == Path("/tmp")  # noqa: S108
        (Path(name) / "log").touch()
    assert not Path(name).exists()


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
