"""Kernels compiled ahead of time: what is compiled is imported instead of the sources.

A kernel is a module named ``kernels``, or one in a package of that name: typed Python that runs as
it stands and that `amp_ray.compiled.build` compiles. A build lies in a folder that is named by a
digest of what it was made from, so a build of other sources is never used. Without one, the sources
run as plain Python, and the first import says so.
"""

import sys
from os import environ
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

SHARED: Final = "amp_ray.compiled.shared"
"""Compiled module of what all compiled kernels need of Cython."""
UNCOMPILED: Final = "AMP_RAY_UNCOMPILED"
"""Variable of the environment with which kernels run as plain Python, whatever is compiled."""


def is_kernel(module: str) -> bool:
    """Return whether a module is compiled, by its name."""
    *packages, last = module.split(".")
    return packages[:1] == ["amp_ray"] and (last == "kernels" or packages[-1] == "kernels")


class _Finder:
    """Finds compiled kernels before Python finds their sources."""

    @staticmethod
    def find_spec(
        name: str, _path: "Sequence[str] | None" = None, _target: "ModuleType | None" = None
    ) -> "ModuleSpec | None":
        """Return how to load a compiled module; None to let Python look on."""
        if not (is_kernel(name) or name == SHARED) or environ.get(UNCOMPILED):
            return None
        from amp_ray.compiled.lookup import found  # noqa: PLC0415 - not before it is needed

        return found(name)


def install() -> None:
    """Make imports of kernels load compiled ones where there are any."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
