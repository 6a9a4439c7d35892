"""``python -m amp_ray.compiled`` compiles the kernels for this Python."""

import sys

from amp_ray.compiled.build import CannotCompileError, build

if __name__ == "__main__":
    try:
        build()
    except (CannotCompileError, OSError) as error:
        sys.exit(f"inner loops stay plain Python, which is slow: {error}")
