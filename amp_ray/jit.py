"""Compiled kernels, cached on disk in a folder that no other user can change."""

import logging
import os
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import FunctionType
from typing import Any, Final, TypeVar

import numba
from numba.core import event

from amp_ray.owners import why_untrusted

_NUMBA: Any = numba  # its settings are untyped attributes
_EVENTS: Any = event
_LOGGER = logging.getLogger(__name__)
_Function = TypeVar("_Function", bound=Callable[..., Any])
_COMPILE: Final = "numba:compile"
_FILES: Final = "*.nb[ci]"  # of numba's cache: machine code, as pickles


def before_compiling(say: Callable[[], object]) -> None:
    """Call a function once, as soon as a kernel is compiled instead of loaded from the cache."""

    class _First(event.Listener):
        def on_start(self, _event: object) -> None:
            _EVENTS.unregister(_COMPILE, self)
            say()

        def on_end(self, _event: object) -> None:
            """Needed by numba."""

    _EVENTS.register(_COMPILE, _First())


def kept(*signature: str, **options: Any) -> Callable[[_Function], _Function]:  # noqa: ANN401 - njit's
    """Compile a function as ``numba.njit`` does, and keep the result for other processes.

    Numba chooses the folder (``NUMBA_CACHE_DIR``, beside the source, or the user's cache) and runs
    the code in it. If other users could change that folder, a private one is used, or none.
    """

    def decorate(function: _Function) -> _Function:
        if _NUMBA.config.DISABLE_JIT:
            return function
        folder = _private_cache(function.__code__.co_filename, _NUMBA.config.CACHE_DIR)
        before, _NUMBA.config.CACHE_DIR = _NUMBA.config.CACHE_DIR, folder or ""
        try:
            # Python never calls a kernel by its address, so that wrapper is not compiled
            settings = {"cache": folder is not None, "no_cfunc_wrapper": True, **options}
            compiler = _NUMBA.njit(*signature, **settings)
            compiled = compiler(function)
        finally:
            _NUMBA.config.CACHE_DIR = before
        _forget_unreadable(compiled)
        kernel: _Function = compiled
        return kernel

    return decorate


def _forget_unreadable(compiled: Any) -> None:  # noqa: ANN401 - a dispatcher
    """Empty the cache of a kernel if it cannot be read, so that the kernel is compiled again.

    Numba unpickles all of it before it compares versions of the source. That fails for a cache of
    another version of this package that names a module which is gone.
    """
    try:
        compiled._cache._cache_file._load_index()  # noqa: SLF001 - no public function reads it
    except Exception:  # noqa: BLE001 - whatever a pickle raises; also where numba has no such function
        with suppress(AttributeError, OSError):
            compiled._cache.flush()  # noqa: SLF001


@cache
def _private_cache(source: str, chosen: str) -> str | None:
    """Return the folder for numba's cache of a source file, empty for numba's choice."""
    try:
        folder = Path(_numbas_choice(source))
        if (reason := why_untrusted(folder, _FILES)) is None:
            return chosen
    except (OSError, RuntimeError) as error:
        folder, reason = Path(source).parent, str(error)
    # Modules differ in their folders, but hardly in the reason: one remark is enough.
    level = logging.DEBUG if _users_cache.cache_info().currsize else logging.WARNING
    private = _users_cache()
    where = "in memory, at every start" if private is None else f"once, and kept in {private}"
    _LOGGER.log(level, "kernels are compiled %s, not loaded from %s: %s", where, folder, reason)
    return private


def _numbas_choice(source: str) -> str:
    """Return numba's cache folder for a source file, without loading anything from it."""
    probe = FunctionType(why_untrusted.__code__.replace(co_filename=source), globals())
    folder: str = _NUMBA.njit(cache=True)(probe).stats.cache_path
    return folder


@cache
def _users_cache() -> str | None:
    """Return a folder below this user's cache, if no other user can change it."""
    try:
        base = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
        folder = base / "amp-ray"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        is_private = all(
            why_untrusted(path, _FILES) is None for path in (folder, *folder.iterdir())
        )
    except (OSError, RuntimeError):
        return None
    return str(folder) if is_private else None
