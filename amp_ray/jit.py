"""Compiled kernels, cached on disk in a folder that no other user can change."""

import atexit
import gc
import hashlib
import logging
import os
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from types import FunctionType
from typing import Any, Final, TypeVar

from amp_ray.owners import why_untrusted

_LOGGER = logging.getLogger(__name__)
_Function = TypeVar("_Function", bound=Callable[..., Any])


def _import_numba() -> Any:  # noqa: ANN401 - numba is untyped
    """Import numba without ``.numba_config.yaml`` of the current folder, which may import modules.

    Without a YAML library numba leaves that file alone, with a warning.
    """
    if "numba" not in sys.modules:
        yaml = sys.modules.get("yaml")
        sys.modules["yaml"] = None  # type: ignore[assignment]
        try:
            with warnings.catch_warnings(action="ignore"):
                vars(import_module("numba.core.config"))["_config_fname"] = ""
        finally:
            del sys.modules["yaml"]
            if yaml is not None:
                sys.modules["yaml"] = yaml
    return import_module("numba")


_NUMBA: Final = _import_numba()
float64, int64, njit = _NUMBA.float64, _NUMBA.int64, _NUMBA.njit
_CACHING: Final[Any] = import_module("numba.core.caching")
_EVENTS: Final[Any] = import_module("numba.core.event")
_TYPES: Final[Any] = import_module("numba.core.types")
_COMPILE: Final = "numba:compile"
COMPILING: Final = logging.getLogger("amp_ray.compiling")
"""Gets one message, before the first kernel of this process that is not in the cache."""
MOST_WAIT_S: Final = 60.0
"""Longest wait for a process that compiles; it takes about three seconds."""
_FILES: Final = "*.nbc"  # of numba's cache: machine code, as pickles


class _Compiling(_EVENTS.Listener):  # type: ignore[misc]
    """Says that the first kernel is compiled, and keeps the garbage collector out of the way.

    Numba makes many objects that stay, so a search of all objects for garbage, which takes long
    beside a large experiment, finds next to none.
    """

    def __init__(self) -> None:
        self._depth, self._is_first, self._collects = 0, True, False

    def on_start(self, _event: object) -> None:
        if self._is_first:
            self._is_first = False
            COMPILING.info("compiling, once after an installation: about five seconds")
        if not self._depth:
            self._collects = gc.isenabled()
            gc.disable()
        self._depth += 1

    def on_end(self, _event: object) -> None:
        self._depth -= 1
        if not self._depth and self._collects:
            gc.enable()


_EVENTS.register(_COMPILE, _Compiling())
_beside: dict[str, "subprocess.Popen[bytes]"] = {}


def compile_beside(module: str) -> None:
    """Compile the kernels of a module that have signatures in another process, for the cache.

    In this process the module, not yet imported, waits for that when its kernels are first called,
    at most `MOST_WAIT_S`; the other process ends then, or with this one. Nothing is started where
    there is a single processor.
    """
    if (os.cpu_count() or 1) > 1 and module not in sys.modules:
        command = [sys.executable, "-P", "-c", f"import {module}"]  # -P: not from this folder
        quiet = subprocess.DEVNULL
        with suppress(OSError):
            _beside[module] = subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=quiet)  # noqa: S603 - this interpreter
            atexit.register(_beside[module].kill)


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
        is_beside = folder is not None and function.__module__ in _beside
        # Python never calls a kernel by its address, so that wrapper is not compiled
        compiled = _NUMBA.njit(no_cfunc_wrapper=True, **options)(function)
        if folder is not None:
            _keep(compiled, folder)
        if is_beside:
            _wait_before_compiling(compiled)
        else:
            for of_arguments in signature:
                compiled.compile(of_arguments)
        kernel: _Function = compiled
        return kernel

    return decorate


def _wait_before_compiling(compiled: Any) -> None:  # noqa: ANN401 - a dispatcher
    """Make a kernel wait for the process that compiles its module, once for all its kernels."""
    compile_for = compiled.compile

    def compile_after(types: object) -> object:
        process = _beside.pop(compiled.__module__, None)
        if process is not None:
            with suppress(subprocess.TimeoutExpired):
                process.wait(MOST_WAIT_S)
            process.kill()
            process.wait()
        return compile_for(types)

    compiled.compile = compile_after


# ----------------------------------------------------------------------------- the cache


def _keep(compiled: Any, folder: str) -> None:  # noqa: ANN401 - a dispatcher
    """Give a kernel a cache in a folder, empty for numba's choice."""
    before, _NUMBA.config.CACHE_DIR = _NUMBA.config.CACHE_DIR, folder
    try:
        cache_of_kernel = _or_in_memory(folder, _Cache, compiled.py_func, folder)
    finally:
        _NUMBA.config.CACHE_DIR = before
    if cache_of_kernel is not None:
        compiled._cache = cache_of_kernel  # noqa: SLF001 - as its enable_caching does


def _or_in_memory(place: object, use: Callable[..., Any], *arguments: object) -> Any:  # noqa: ANN401
    """Return what a use of the cache returns; after any failure None, and warn once per process."""
    try:
        return use(*arguments)
    except Exception as error:  # noqa: BLE001 - whatever a disk, a pickle or LLVM raises
        level = logging.DEBUG if _has_failed else logging.WARNING
        message = "a compiled kernel in %s cannot be used, and is compiled anew: %s"
        _LOGGER.log(level, message, place, str(error) or type(error).__name__)
        _has_failed.append(True)
        return None


_has_failed: list[bool] = []


class _Cache(_CACHING.FunctionCache):  # type: ignore[misc]
    """Numba's cache of one function, whose files may be damaged and whose disk may be full."""

    def __init__(self, function: object, folder: str) -> None:
        super().__init__(function)
        if folder and not Path(self.cache_path).is_relative_to(folder):  # numba's next choice
            raise PermissionError(f"{folder} cannot be written")
        locator = self._impl.locator
        base = Path(self.cache_path, self._impl.filename_base)
        self._cache_file = _Files(base, repr((_NUMBA.__version__, locator.get_source_stamp())))

    def load_overload(self, sig: object, target_context: object) -> Any:  # noqa: ANN401
        return _or_in_memory(self.cache_path, super().load_overload, sig, target_context)

    def save_overload(self, sig: object, data: object) -> None:
        _or_in_memory(self.cache_path, super().save_overload, sig, data)


class _Files:
    """The files of a function, one for each types of arguments, with a digest of their content."""

    def __init__(self, base: Path, source: str) -> None:
        self._base, self._source = base, source

    def _path(self, key: object) -> Path:
        digest = hashlib.sha256(repr(key).encode()).hexdigest()
        return self._base.with_name(f"{self._base.name}.{digest[:16]}.nbc")

    def load(self, key: object) -> object:
        """Return what was saved for types; None without it, or if it is of another source."""
        try:
            content = self._path(key).read_bytes()
        except FileNotFoundError:
            return None
        source, digest, data = content[:32], content[32:64], content[64:]
        if hashlib.sha256(source + data).digest() != digest:
            raise ValueError(f"{self._path(key).name} is damaged")
        is_same = source == hashlib.sha256(self._source.encode()).digest()
        return pickle.loads(data) if is_same else None  # noqa: S301 - only this user can change it

    def save(self, key: object, value: object) -> None:
        source, data = hashlib.sha256(self._source.encode()).digest(), _CACHING.dumps(value)
        new = self._path(key).with_suffix(f".{os.getpid()}.tmp")
        try:
            new.write_bytes(source + hashlib.sha256(source + data).digest() + data)
            new.replace(self._path(key))
        except OSError:
            new.unlink(missing_ok=True)
            raise


@cache
def _private_cache(source: str, chosen: str) -> str | None:
    """Return the folder for numba's cache of a source file, empty for numba's choice."""
    try:
        folder = Path(_numbas_choice(source))
        if (reason := why_untrusted(folder, _FILES)) is None:
            return chosen if folder.is_relative_to(chosen) else ""
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
    folder: str = _CACHING.FunctionCache(probe).cache_path
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
