"""Address, folder and token of a Ray cluster, and whether it answers; no Ray is imported."""

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
LOCAL: Final = "local"  # of this machine alone, started and ended by us
AUTO: Final = "auto"  # the address of the cluster that was started on this machine last
REACH_TIMEOUT_S: Final = 5.0  # for a cluster's head to answer; Ray itself would try for minutes
START_VARIABLE: Final = "RAY_raylet_start_wait_time_s"  # read by Ray's C++ part, whole seconds
MAX_PARENT_LENGTH: Final = 22  # of a temporary folder: sockets are 84 letters longer, of 107
_GUESSES: Final = " Some common causes include"  # what Ray adds to the death of every worker


class RayUnavailableError(AmpRayError):
    """Ray cannot be used, or no longer; what it did can be done without it."""


def require_ray(what: str) -> None:
    """Refuse to go on without Ray."""
    if find_spec("ray") is None:
        raise InputError(f"{what} needs Ray, which is not installed: pip install 'amp-ray[ray]'")


def find_address(address: str | None) -> str:
    """Return the address that counts: the given one, or RAY_ADDRESS, or a cluster of our own.

    Where RAY_ADDRESS leads nowhere, a warning says so, and a cluster of our own takes its place.
    Raises `RayUnavailableError` if no Ray answers there.
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
    """Take ``host:port`` apart."""
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
    """Refuse what can be no address."""
    if address not in {LOCAL, AUTO}:
        split_address(address)


def check_address(address: str) -> None:
    """Raise `RayUnavailableError` if no Ray answers; Ray looks for ``auto``, ``local`` itself."""
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
    """Tell why no head of a Ray cluster answers at ``host:port``; None if one does.

    That a connection opens is not enough: the kernel accepts it for a process that hangs, too. A
    head, being a server of gRPC, is the first to speak.
    """
    try:
        with socket.create_connection(split_address(address), timeout=timeout_s) as connection:
            return None if connection.recv(1) else "it ends the connection at once"
    except TimeoutError:
        return f"no answer in {timeout_s:g} s"
    except OSError as error:
        return str(error)


def listens(path: str) -> bool:
    """Tell whether a process has a unix socket open."""
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
    """Make the folder of a new cluster's sockets and logs, and remove it at the end.

    Ray's own choice is one folder for all clusters, where the last one started is noted for
    everybody and nothing is ever removed. Ray lets every user of the machine write into the
    folder that it is given, so that is a folder in one that only this user may enter.
    """
    parent = tempfile.gettempdir()
    parent = parent if len(parent) <= MAX_PARENT_LENGTH else "/tmp"  # noqa: S108 - mkdtemp's is safe
    folder = tempfile.mkdtemp(prefix="amp-ray-", dir=parent)
    inner = os.path.join(folder, "r")  # noqa: PTH118 - Ray wants text
    try:
        os.mkdir(inner)  # noqa: PTH102 - Ray wants text
        yield inner
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


def allow_slow_start(limit_s: float) -> None:
    """Have Ray wait so long for a node that starts, unless the environment has a limit already.

    Ray itself gives up after 30 s, which a busy machine exceeds.
    """
    os.environ.setdefault(START_VARIABLE, str(round(limit_s)))


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
