"""``amp-ray``, also as ``python -m amp_ray``: quiet if it is interrupted during startup."""

import sys

_FROM_FOLDER = __name__ == "__main__" and not sys.flags.safe_path
if _FROM_FOLDER and f"{sys.path[0]}/amp_ray/__main__.py" != __file__:
    del sys.path[0]  # the current folder: modules in it are none of ours

import gc  # noqa: E402
import logging  # noqa: E402
import os  # noqa: E402

_BAD_INPUT = 2
_INTERRUPTED = 130  # as in `amp_ray.cli.exits`, whose import would be the first to be interrupted

_BESIDE = "amp_ray.partition.kernels"  # about half of what a first plan compiles


class _Compiling(logging.Handler):
    """Says what a first run waits for, and uses a second processor meanwhile."""

    def emit(self, record: logging.LogRecord) -> None:
        """Act on the message that a kernel is about to be compiled."""
        from amp_ray.jit import compile_beside  # noqa: PLC0415

        if sys.stderr is not None and sys.stderr.isatty():
            sys.stderr.write(f"amp-ray: {record.getMessage()}\n")
        compile_beside(_BESIDE)


def main() -> None:
    """Run the command line and end the process with its exit code."""
    try:
        # What is imported lives to the end, so the collector need never look at it: a tenth of a
        # short command's time.
        gc.disable()
        # A command's imports take most of a second, and Ctrl-C may come meanwhile.
        compiling = logging.getLogger("amp_ray.compiling")
        compiling.setLevel(logging.INFO)
        compiling.propagate = False
        compiling.addHandler(_Compiling())
        _check_folder()
        from amp_ray.cli import main as run  # noqa: PLC0415
    except KeyboardInterrupt:
        sys.stderr.write("amp-ray: interrupted\n")
        sys.exit(_INTERRUPTED)
    gc.freeze()
    gc.enable()
    run()


def _check_folder() -> None:
    """End the process in a removed folder, in which some packages cannot be imported."""
    try:
        os.getcwd()  # noqa: PTH109 - the import of pathlib takes time
    except FileNotFoundError:
        sys.stderr.write("amp-ray: the current folder has been removed: change to another one\n")
        sys.exit(_BAD_INPUT)


if __name__ == "__main__":
    main()
