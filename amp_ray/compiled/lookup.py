"""The builds of compiled kernels, and which of them is made of the present sources."""

import logging
import sys
from collections.abc import Iterator
from functools import cache
from hashlib import sha256
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec
from importlib.util import spec_from_file_location
from os import scandir
from pathlib import Path
from typing import Final

from amp_ray.compiled import SHARED

PACKAGE: Final = Path(__file__).parents[1]
BUILDS: Final = Path(__file__).parent / "built"
"""Folder of the builds, one for each digest and kind of Python."""
SUFFIX: Final = EXTENSION_SUFFIXES[0]

_LOGGER = logging.getLogger("amp_ray.compiled")


def kernel_sources() -> dict[str, Path]:
    """Return the source file of every kernel module, by module name, in order of the names."""
    paths = [Path(path) for path in _kernel_files(str(PACKAGE), is_inside=False)]
    relative = [path.relative_to(PACKAGE.parent).with_suffix("") for path in paths]
    return dict(sorted(zip((".".join(path.parts) for path in relative), paths, strict=True)))


def _kernel_files(folder: str, *, is_inside: bool) -> Iterator[str]:
    """Yield the kernel files below a folder; ``is_inside``: its name is ``kernels``."""
    with scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir():
                yield from _kernel_files(entry.path, is_inside=entry.name == "kernels")
            elif entry.name == "kernels.py" or (
                is_inside and entry.name.endswith(".py") and entry.name != "__init__.py"
            ):
                yield entry.path


def digests() -> dict[str, str]:
    """Return a digest of all that each compiled module is made from, by name.

    That is its source, the way to compile it, and the declarations (``.pxd``) of all kernels.
    """
    sources = kernel_sources()
    declarations = (path.with_suffix(".pxd") for path in sources.values())
    common = (path for path in declarations if path.exists())
    of_all = _digest(Path(__file__).with_name("build.py"), *common)
    return {SHARED: of_all} | {name: _digest(path, first=of_all) for name, path in sources.items()}


def _digest(*paths: Path, first: str = "") -> str:
    """Return a digest of a text and the contents of files."""
    content = sha256(first.encode())
    for path in paths:
        content.update(sha256(path.read_bytes()).digest())
    return content.hexdigest()[:16]


def build_folder() -> Path:
    """Return the folder for the build of the present sources for this Python."""
    build = sha256(repr(digests()).encode()).hexdigest()[:16]
    return BUILDS / f"{build}{SUFFIX.removesuffix('.so')}"


def found(module: str) -> ModuleSpec | None:
    """Return how to load a compiled module; None if it is not compiled."""
    path = _built().get(module)
    return None if path is None else spec_from_file_location(module, path)


@cache
def _built() -> dict[str, Path]:
    """Return the compiled modules of the present sources; if there are none, say that once."""
    folder = build_folder()
    built = {file.name.partition("-")[0]: file for file in folder.glob(f"*{SUFFIX}")}
    if not built:
        _LOGGER.warning("%s", why_uncompiled())
    return built


def why_uncompiled() -> str:
    """Say that kernels run as plain Python, and what to do."""
    from amp_ray.compiled.build import missing_packages  # noqa: PLC0415 - rare, and takes time

    missing = " ".join(missing_packages())
    install = f"install {missing} (Debian: apt-get install {missing}), then " if missing else ""
    compile_them = f"{sys.executable} -m amp_ray.compiled"
    return (
        f"inner loops run as plain Python, which is slow; to compile them: {install}{compile_them}"
    )
