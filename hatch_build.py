"""Compiles the kernels when the package is built or installed from its sources."""

import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CompiledKernels(BuildHookInterface):  # type: ignore[misc] # no dependency of ours
    """Adds compiled kernels to a wheel; where they cannot be compiled, it stays plain Python."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile in place, which is where an editable installation looks for them."""
        sys.path.insert(0, self.root)
        from amp_ray.compiled.build import CannotCompileError, build  # noqa: PLC0415

        try:
            folder = build()
        except (CannotCompileError, OSError) as error:
            self.app.display_warning(f"inner loops stay plain Python, which is slow: {error}")
            return
        finally:
            sys.path.remove(self.root)
        if version != "editable":
            root = Path(self.root)
            build_data["pure_python"] = False
            build_data["infer_tag"] = True
            build_data["force_include"] |= {
                str(file): str(file.relative_to(root)) for file in folder.iterdir()
            }
