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
from importlib.metadata import PackageNotFoundError, version
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
    "cdivision": False,
    "infer_types": True,
    "initializedcheck": False,
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
    """Translate one module after the other, and compile meanwhile what is translated.

    A module that an earlier build has made from the same sources is taken from there.
    """
    sources, jobs = kernel_sources(), []
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        for name, file in _file_names().items():
            if (same := next(BUILDS.glob(f"*/{file}"), None)) is not None:
                shutil.copy(same, made / file)
                continue
            c_file = scratch / f"{name}.c"
            if name == SHARED:
                jobs.append(pool.submit(_compile_shared, c_file, made / file))
            else:
                _translate(name, sources[name], c_file)
                jobs.append(pool.submit(_compile, c_file, made / file))
        for job in jobs:
            job.result()


def _file_names() -> dict[str, str]:
    """Return the file name of every compiled module, which tells what it was made from."""
    try:
        cython = version("cython")
    except PackageNotFoundError as error:
        raise CannotCompileError("Cython is not installed") from error
    return {name: f"{name}-{digest}-{cython}{SUFFIX}" for name, digest in digests().items()}


def _translate(name: str, source: Path, c_file: Path) -> None:
    """Translate a kernel into C; in one process, since Cython's start takes a second."""
    from Cython.Compiler.Errors import CompileError  # noqa: PLC0415 - only a build needs it
    from Cython.Compiler.Main import compile as translate  # noqa: PLC0415

    try:
        done = translate(
            str(source),
            full_module_name=name,
            output_file=str(c_file),
            compiler_directives=dict(DIRECTIVES),
            include_path=[str(PACKAGE.parent)],
            language_level=3,
            shared_utility_qualified_name=SHARED,
        )
    except CompileError as error:
        raise CannotCompileError(f"{source}: {error}") from error
    if done.num_errors:
        raise CannotCompileError(f"Cython finds errors in {source}")


def _compile_shared(c_file: Path, target: Path) -> None:
    """Make the module of what all kernels need of Cython."""
    words = ["generate-shared", str(c_file), "--module-name", SHARED]
    _run([sys.executable, "-m", "cython", *words])
    _compile(c_file, target)


def _compile(c_file: Path, target: Path) -> None:
    """Compile a C source into a module."""
    include = f"-I{sysconfig.get_path('include')}"
    _run([*compiler(), *C_FLAGS, include, str(c_file), "-o", str(target)])


def _run(command: list[str]) -> None:
    """Run a command of the build."""
    ended = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    if ended.returncode:
        raise CannotCompileError(f"{shlex.join(command)}:\n{ended.stdout}{ended.stderr}")
