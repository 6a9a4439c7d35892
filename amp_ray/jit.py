"""Compiled kernels, cached on disk in a folder that no other user can change."""

import gc
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import FunctionType
from typing import Any, Final, TypeVar

import numba
from numba.core import event, types

from amp_ray.owners import why_untrusted

_NUMBA: Any = numba  # its settings are untyped attributes
_EVENTS: Any = event
_LOGGER = logging.getLogger(__name__)
_Function = TypeVar("_Function", bound=Callable[..., Any])
_COMPILE: Final = "numba:compile"
_TYPES: Any = types
COMPILING: Final = logging.getLogger("amp_ray.compiling")
"""Gets one message, before the first kernel of this process that is not in the cache."""
MOST_WAIT_S: Final = 60.0
"""Longest wait for a process that compiles; it takes about three seconds."""
_FILES: Final = "*.nb[ci]"  # of numba's cache: machine code, as pickles


class _Compiling(event.Listener):
    """Says that the first kernel is compiled, and keeps the garbage collector out of the way.

    Numba makes many objects that stay, so a search of all objects for garbage, which takes long
    beside a large experiment, finds next to none.
    """

    def __init__(self) -> None:
        self._depth, self._is_first, self._collects = 0, True, False

    def on_start(self, _event: object) -> None:
        """Begin a function, perhaps within another one."""
        if self._is_first:
            self._is_first = False
            COMPILING.info("compiling, once after an installation: about five seconds")
        if not self._depth:
            self._collects = gc.isenabled()
            gc.disable()
        self._depth += 1

    def on_end(self, _event: object) -> None:
        """End a function."""
        self._depth -= 1
        if not self._depth and self._collects:
            gc.enable()


_EVENTS.register(_COMPILE, _Compiling())
_beside: dict[str, "subprocess.Popen[bytes]"] = {}


def compile_beside(module: str) -> None:
    """Compile the kernels of a module that have signatures in another process, for the cache.

    In this process the module, not yet imported, waits for that when its kernels are first called.
    Nothing is started where there is a single processor.
    """
    if (os.cpu_count() or 1) > 1 and module not in sys.modules:
        command = [sys.executable, "-P", "-c", f"import {module}"]  # -P: not from this folder
        quiet = subprocess.DEVNULL
        with suppress(OSError):
            _beside[module] = subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=quiet)  # noqa: S603 - this interpreter


def tuple_type(kind: type, fields: str) -> Any:  # noqa: ANN401 - numba's types are untyped
    """Return numba's type of a named tuple of contiguous arrays.

    Args:
        kind: The class.
        fields: A word per field: ``f``, ``i`` or ``b`` for floats, integers or booleans; number of
            dimensions; ``r`` if it is read-only.
    """
    dtypes = {"f": _TYPES.float64, "i": _TYPES.int64, "b": _TYPES.boolean}
    arrays = [
        _TYPES.Array(dtypes[word[0]], int(word[1]), "C", readonly=word.endswith("r"))
        for word in fields.split()
    ]
    return _TYPES.NamedTuple(arrays, kind)


def kept(*signature: object, **options: Any) -> Callable[[_Function], _Function]:  # noqa: ANN401 - njit's
    """Compile a function as ``numba.njit`` does, and keep the result for other processes.

    Numba chooses the folder (``NUMBA_CACHE_DIR``, beside the source, or the user's cache) and runs
    the code in it. If other users could change that folder, a private one is used, or none.
    With a signature, a kernel is compiled at once, and again only for arguments of other types.
    """

    def decorate(function: _Function) -> _Function:
        if _NUMBA.config.DISABLE_JIT:
            return function
        folder = _private_cache(function.__code__.co_filename, _NUMBA.config.CACHE_DIR)
        process = _beside.get(function.__module__) if folder is not None else None
        before, _NUMBA.config.CACHE_DIR = _NUMBA.config.CACHE_DIR, folder or ""
        try:
            # Python never calls a kernel by its address, so that wrapper is not compiled
            settings = {"cache": folder is not None, "no_cfunc_wrapper": True, **options}
            compiler = _NUMBA.njit(*(signature if process is None else ()), **settings)
            compiled = compiler(function)
        finally:
            _NUMBA.config.CACHE_DIR = before
        _forget_unreadable(compiled)
        compiled.disable_compile(val=False)
        if process is not None:
            _wait_for(process, compiled)
        kernel: _Function = compiled
        return kernel

    return decorate


def _wait_for(process: "subprocess.Popen[bytes]", compiled: Any) -> None:  # noqa: ANN401
    """Make a kernel wait for a process, before it is loaded from the cache or compiled."""
    compile_for = compiled.compile

    def compile_after(types: object) -> object:
        with suppress(subprocess.TimeoutExpired):
            process.wait(MOST_WAIT_S)
        return compile_for(types)

    compiled.compile = compile_after


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
