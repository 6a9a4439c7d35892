"""The programs of cluster/ as modules: they are scripts, and no package."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

LoadScript = Callable[[str], ModuleType]


@pytest.fixture
def load_script(repository: Path) -> LoadScript:
    """Load a program of cluster/ by name, without running it."""

    def load(name: str) -> ModuleType:
        path = repository / "cluster" / f"{name}.py"
        spec = importlib.util.spec_from_file_location(f"cluster_{name}", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load
