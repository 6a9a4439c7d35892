"""Compile the kernels with Cython and the C compiler of this machine.

``python -m amp_ray.compiled`` does so in place; so does the installation from sources.
"""

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Final

from amp_ray.compiled import SHARED
from amp_ray.compiled.lookup import (
    BUILDS,
    PACKAGE,
    SUFFIX,
    build_folder,
    digests,
    kernel_sources,
)

DIRECTIVES: Final[Mapping[str, object]] = {
    "auto_pickle": False,
    "boundscheck": False,
    "cdivision": True,
    "infer_types": True,
    "initializedcheck": False,
    "language_level": 3,
    "wraparound": False,
}
"""Cython's directives for all kernels: they rely on the tests that run them uncompiled."""

C_FLAGS: Final = ("-shared", "-fPIC", "-O2", "-fwrapv", "-ffp-contract=off", "-DNDEBUG", "-w")
"""Strict IEEE arithmetic, without fused operations: results equal those of Python to the bit."""


class CannotCompileError(Exception):
    """The kernels cannot be compiled on this machine."""


def compiler() -> list[str]:
    """Return the command of the C compiler, empty without one; ``CC`` names another one."""
    chosen = shlex.split(os.environ.get("CC", ""))
    for command in [chosen] if chosen else [["cc"], ["gcc"], ["clang"]]:
        if shutil.which(command[0]):
            return command
    return []


def missing_packages() -> list[str]:
    """Return the Debian packages that compiling needs and that this machine lacks."""
    has_headers = Path(sysconfig.get_path("include"), "Python.h").exists()
    return [
        *([] if compiler() else ["gcc", "libc6-dev"]),
        *([] if has_headers else ["python3-dev"]),
    ]


def build() -> Path:
    """Compile all kernels, if there is no build of the present sources; return the folder.

    Builds of other sources for this kind of Python are removed.

    Raises:
        CannotCompileError: Without a compiler or headers, or if they fail.
    """
    folder = build_folder()
    if not folder.exists():
        if missing := missing_packages():
            raise CannotCompileError(f"missing Debian packages: {' '.join(missing)}")
        BUILDS.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=BUILDS, prefix=".") as scratch:
            made = Path(scratch, "made")
            made.mkdir()
            _compile_all(Path(scratch), made)
            if not folder.exists():  # another process may have been faster
                made.rename(folder)
    for other in BUILDS.glob(f"*{SUFFIX.removesuffix('.so')}"):
        if other != folder:
            shutil.rmtree(other, ignore_errors=True)
    return folder


def _compile_all(scratch: Path, made: Path) -> None:
    """Compile every kernel, as many at once as there are processors."""
    sources = {SHARED: None, **kernel_sources()}
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        for compiled in [
            pool.submit(_compile, name, sources[name], scratch, made / file)
            for name, file in _file_names().items()
        ]:
            compiled.result()


def _file_names() -> dict[str, str]:
    """Return the file name of every compiled module, which tells what it was made from."""
    return {
        name: f"{name}-{digest}-{version('cython')}{SUFFIX}" for name, digest in digests().items()
    }


def _compile(name: str, source: Path | None, scratch: Path, target: Path) -> None:
    """Make a compiled module, or take it from an earlier build."""
    for same in BUILDS.glob(f"*/{target.name}"):
        shutil.copy(same, target)
        return
    c_file = str(scratch / f"{name}.c")
    cython = [sys.executable, "-m", "cython"]
    if source is None:
        _run([*cython, "generate-shared", c_file, "--module-name", name])
    else:
        directives = ",".join(f"{name}={value}" for name, value in DIRECTIVES.items())
        of_module = ["-X", directives, "--shared", SHARED, "--module-name", name]
        _run([*cython, *of_module, str(source), "-o", c_file])
    include = f"-I{sysconfig.get_path('include')}"
    _run([*compiler(), *C_FLAGS, include, c_file, "-o", str(target)])


def _run(command: list[str]) -> None:
    """Run a command of the build in the folder that holds the package."""
    ended = subprocess.run(  # noqa: S603 - programs that this module names
        command, cwd=PACKAGE.parent, capture_output=True, text=True, check=False
    )
    if ended.returncode:
        raise CannotCompileError(f"{shlex.join(command)}:\n{ended.stdout}{ended.stderr}")
