"""Where a Ray cluster is, and how it knows its friends: all of it that needs no Ray."""

import contextlib
import functools
import os
import secrets
import shutil
import socket
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Final
from urllib.parse import urlsplit

from amp_ray.errors import AmpRayError, InputError

LOCAL: Final = "local"
"""The address of a cluster of this machine alone, which is started and ended by us."""

AUTO: Final = "auto"
"""The address of the cluster that was started on this machine last."""

REACH_TIMEOUT_S: Final = 5.0
"""To open a connection to a cluster's head; Ray itself would try for a minute."""

MAX_PARENT_LENGTH: Final = 24
"""Of the folder for temporary files: paths of Ray's sockets, 80 letters longer, may have 107."""

_GUESSES: Final = " Some common causes include"
"""What Ray adds to the death of every worker, whatever it died of."""


def require_ray() -> None:
    """Refuse to go on without Ray.

    Raises:
        InputError: If it is not installed; with the command that installs it.
    """
    if find_spec("ray") is None:
        message = "this needs Ray, which is not installed: pip install 'amp-ray[ray]'"
        raise InputError(message)


def find_address(address: str | None) -> str:
    """Return the address that counts: the given one, or RAY_ADDRESS, or a cluster of our own.

    Raises:
        InputError: If it can be none.
        AmpRayError: If nothing answers there.
    """
    found = address or os.environ.get("RAY_ADDRESS") or LOCAL
    if found not in {LOCAL, AUTO}:
        _check(found)
    return found


def _check(address: str) -> None:
    """See whether anything is there, since Ray takes long to say so."""
    try:
        parts = urlsplit(f"//{address}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if host is None or port is None or "/" in address:
        message = f"{address!r} is no address of a Ray cluster: give host:port, auto or local"
        raise InputError(message)
    try:
        socket.create_connection((host, port), timeout=REACH_TIMEOUT_S).close()
    except OSError as error:
        message = (
            f"no Ray cluster at {address}: {error}; start one with ray up or "
            f"ray start --head --port {port}, or leave the address out"
        )
        raise AmpRayError(message) from error


@contextlib.contextmanager
def session_folder() -> Iterator[str]:
    """Make the folder of a new cluster's sockets and logs, and remove it at the end.

    Ray's own choice is one folder for all clusters, where the last one started is noted for
    everybody and nothing is ever removed.
    """
    parent = tempfile.gettempdir()
    parent = parent if len(parent) <= MAX_PARENT_LENGTH else "/tmp"  # noqa: S108 - mkdtemp's is safe
    folder = tempfile.mkdtemp(prefix="amp-ray-", dir=parent)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def environment_kept() -> Iterator[None]:
    """Take back at the end what Ray and we have told other processes by variables."""
    before = _set_by_ray()
    try:
        yield
    finally:
        for name in _set_by_ray():
            del os.environ[name]
        os.environ.update(before)


def _set_by_ray() -> dict[str, str]:
    """Return the variables that are Ray's business."""
    return {
        name: text
        for name, text in os.environ.items()
        if name.startswith("RAY_") or name == "PYTHONBREAKPOINT"
    }


def set_token() -> None:
    """Have a new cluster ask for a token that only children of this process know.

    A cluster that ``ray.init`` starts asks for one unless RAY_AUTH_MODE says otherwise (set here
    it would be too late: Ray reads it once, when it is imported); Ray's own choice would be a
    file in the home folder, for good. A token that the environment has stays.
    """
    if not {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys():
        os.environ["RAY_AUTH_TOKEN"] = _token()


@functools.cache
def _token() -> str:
    """Return the token of this process: Ray reads it only once."""
    return secrets.token_hex()


def cause_of(error: BaseException) -> str:
    """Say why Ray could not start or connect: the first error tells most."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = gist_of(error) if "Traceback" in str(error) else str(error).strip()
    if "Version mismatch" in text:
        text += "\ninstall the same versions of Ray and Python here and on the cluster"
    return text


def gist_of(error: BaseException) -> str:
    """Return the line of one of Ray's long messages that says what happened, no guesses."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1].partition(_GUESSES)[0] if lines else type(error).__name__
