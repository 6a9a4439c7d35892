"""Kernels as plain Python, beside the compiled ones."""

import sys
from importlib import import_module
from typing import Any

import pytest

from amp_ray.compiled import UNCOMPILED
from amp_ray.compiled.lookup import kernel_sources


def uncompiled(name: str) -> Any:  # noqa: ANN401 - a module with other functions than mypy knows
    """Import a module of kernels, and the kernels that it uses, as plain Python.

    The modules that the process has imported stay what they are.
    """
    package, _, attribute = name.rpartition(".")
    parent = import_module(package)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(UNCOMPILED, "1")
        patch.setattr(parent, attribute, getattr(parent, attribute, None), raising=False)
        before = {module: sys.modules.pop(module, None) for module in kernel_sources()}
        try:
            return import_module(name)
        finally:
            for module, compiled in before.items():
                sys.modules.pop(module, None)
                if compiled is not None:
                    sys.modules[module] = compiled
