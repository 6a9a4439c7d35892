"""Address, folder and token of a Ray cluster, and checks that it answers; does not import Ray."""

import contextlib
import functools
import logging
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

_LOGGER = logging.getLogger(__name__)
LOCAL: Final = "local"  # a cluster on this machine that we start and end
AUTO: Final = "auto"  # the cluster that was last started on this machine
REACH_TIMEOUT_S: Final = 5.0  # for a cluster's head to answer; Ray would try for minutes
START_VARIABLE: Final = "RAY_raylet_start_wait_time_s"  # read by Ray's C++ part, whole seconds
MAX_PARENT_LENGTH: Final = 22  # letters; Ray adds 84 for its socket paths, which are limited to 107
_GUESSES: Final = " Some common causes include"  # beginning of Ray's guesses about a dead worker


class RayUnavailableError(AmpRayError):
    """Ray cannot be used, or was lost; callers can go on without it."""


def require_ray(what: str) -> None:
    """Raise `InputError` if Ray is not installed; ``what`` names the part that needs Ray."""
    if find_spec("ray") is None:
        raise InputError(f"{what} needs Ray, which is not installed: pip install 'amp-ray[ray]'")


def find_address(address: str | None) -> str:
    """Return ``address``, or RAY_ADDRESS, or ``local``, in this order.

    If no Ray answers at RAY_ADDRESS, warn and return ``local``. Raises `RayUnavailableError` if
    none answers at ``address``.
    """
    if address is not None:
        check_address(address)
        return address
    address = os.environ.get("RAY_ADDRESS") or LOCAL
    try:
        check_address(address)
    except AmpRayError as error:
        _LOGGER.warning("RAY_ADDRESS: %s. A Ray of this machine alone is used instead", error)
        return LOCAL
    return address


def split_address(address: str) -> tuple[str, int]:
    """Split ``host:port``; an IPv6 address may be in brackets."""
    try:
        parts = urlsplit(f"//{address}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if host is None or port is None or "/" in address:
        message = f"{address!r} is no address of a Ray cluster: give host:port, auto or local"
        raise InputError(message)
    return host, port


def check_form(address: str) -> None:
    """Raise `InputError` if an address is malformed."""
    if address not in {LOCAL, AUTO}:
        split_address(address)


def check_address(address: str) -> None:
    """Raise `RayUnavailableError` if no Ray answers; accept ``auto`` and ``local`` unchecked."""
    if address in {LOCAL, AUTO}:
        return
    _, port = split_address(address)
    problem = head_problem(address)
    if problem is not None:
        raise RayUnavailableError(
            f"no Ray cluster at {address}: {problem}; start one with ray up or "
            f"ray start --head --port {port}, or leave the address out"
        )


def head_problem(address: str, timeout_s: float = REACH_TIMEOUT_S) -> str | None:
    """Return why no head of a Ray cluster answers at ``host:port``; None if one does.

    An open connection proves nothing, since the kernel accepts it for a hanging process, too. A
    head is a gRPC server, which sends the first bytes after the connection is open.
    """
    try:
        with socket.create_connection(split_address(address), timeout=timeout_s) as connection:
            return None if connection.recv(1) else "it ends the connection at once"
    except TimeoutError:
        return f"no answer in {timeout_s:g} s"
    except OSError as error:
        return str(error)


def listens(path: str) -> bool:
    """Return whether a process listens at a unix socket."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(REACH_TIMEOUT_S)
        try:
            connection.connect(path)
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:  # busy
            return True
    return True


@contextlib.contextmanager
def session_folder() -> Iterator[str]:
    """Make a folder for a new cluster's sockets and logs; remove it at the end.

    Ray's default folder is shared by all clusters and never cleaned, and the address ``auto`` would
    find the cluster there. Ray makes its folder writable for all users, so the folder lies in a
    parent that only this user may enter.
    """
    parent = tempfile.gettempdir()
    parent = parent if len(parent) <= MAX_PARENT_LENGTH else "/tmp"  # noqa: S108 - mkdtemp is safe
    folder = tempfile.mkdtemp(prefix="amp-ray-", dir=parent)
    inner = os.path.join(folder, "r")  # noqa: PTH118 - Ray wants text
    try:
        os.mkdir(inner)  # noqa: PTH102 - Ray wants text
        yield inner
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def environment_kept() -> Iterator[None]:
    """Restore the environment variables that Ray and this package change."""
    before = _set_by_ray()
    try:
        yield
    finally:
        for name in _set_by_ray():
            del os.environ[name]
        os.environ.update(before)


def _set_by_ray() -> dict[str, str]:
    return {
        name: text
        for name, text in os.environ.items()
        if name.startswith("RAY_") or name == "PYTHONBREAKPOINT"
    }


def set_token() -> None:
    """Set a token for a new cluster, known only to this process and its children.

    A cluster of ``ray.init`` requires a token, unless RAY_AUTH_MODE sets another mode. (Ray reads
    RAY_AUTH_MODE on import, so it cannot be set here.) Without a token, Ray would write a permanent
    token file into the home folder. A token in the environment is kept.
    """
    if not {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys():
        os.environ["RAY_AUTH_TOKEN"] = _token()


@functools.cache
def _token() -> str:
    """Return this process's token; cached, since Ray reads it only once."""
    return secrets.token_hex()


def cause_of(error: BaseException) -> str:
    """Return why Ray could not start or connect, from the first error of the chain."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = gist_of(error) if "Traceback" in str(error) else str(error).strip()
    if "Version mismatch" in text:
        text += "\ninstall the same versions of Ray and Python here and on the cluster"
    return text


def gist_of(error: BaseException) -> str:
    """Return the informative line of one of Ray's long messages, without its guesses."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1].partition(_GUESSES)[0] if lines else type(error).__name__
