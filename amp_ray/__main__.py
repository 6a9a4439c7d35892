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


class _Uncompiled(logging.Handler):
    """Says that the inner loops run as plain Python."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write the message as one line."""
        if sys.stderr is not None:
            sys.stderr.write(f"amp-ray: {record.getMessage()}\n")


def main() -> None:
    """Run the command line and end the process with its exit code."""
    try:
        # What is imported lives to the end, so the collector need never look at it: a tenth of a
        # short command's time.
        gc.disable()
        # A command's imports take most of a second, and Ctrl-C may come meanwhile.
        compiled = logging.getLogger("amp_ray.compiled")
        compiled.propagate = False
        compiled.addHandler(_Uncompiled())
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
