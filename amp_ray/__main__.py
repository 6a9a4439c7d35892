"""``amp-ray``, also as ``python -m amp_ray``: quiet if it is interrupted during startup."""

import gc
import sys

_INTERRUPTED = 130  # as in `amp_ray.cli.exits`, whose import would be the first to be interrupted

_COMPILING = "amp-ray: compiling, once after an installation: about ten seconds\n"


def main() -> None:
    """Run the command line and end the process with its exit code."""
    try:
        # What is imported lives to the end, so the collector need never look at it: a tenth of a
        # short command's time.
        gc.disable()
        # A command's imports take most of a second, and Ctrl-C may come meanwhile.
        if sys.stderr is not None and sys.stderr.isatty():
            from amp_ray.jit import before_compiling  # noqa: PLC0415

            before_compiling(lambda: sys.stderr.write(_COMPILING))
        from amp_ray.cli import main as run  # noqa: PLC0415
    except KeyboardInterrupt:
        sys.stderr.write("amp-ray: interrupted\n")
        sys.exit(_INTERRUPTED)
    gc.freeze()
    gc.enable()
    run()


if __name__ == "__main__":
    main()
