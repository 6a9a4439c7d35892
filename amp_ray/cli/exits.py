"""Exit codes, the same for every command, and the one place that turns errors into them."""

import sys
from typing import Final

import click

from amp_ray.errors import AmpRayError, InputError, printable

SUCCESS: Final = 0
FAILURE: Final = 1
"""Of helper programs beside the command line, and of a mistake of ours; no result has it."""

BAD_INPUT: Final = 2
NOT_FEASIBLE: Final = 3
TRIALS_FAILED: Final = 4
INTERRUPTED: Final = 130


def run_command(command: click.Command) -> None:
    """Run a command on the process's arguments and end the process with its exit code."""
    try:
        code = command.main(standalone_mode=False) or SUCCESS
    except (click.Abort, KeyboardInterrupt):
        code = _complain("interrupted", INTERRUPTED)
    except click.ClickException as error:
        error.show()
        code = BAD_INPUT
    except InputError as error:
        for part in error.parts:
            _complain("\n".join(map(printable, str(part).split("\n"))), BAD_INPUT)
        code = BAD_INPUT
    except AmpRayError as error:  # hosts, disks, a Ray cluster: what trials and searches run on
        code = _complain(str(error), TRIALS_FAILED)
    sys.exit(code)


def _complain(message: str, code: int) -> int:
    """Write one message where people look for it and programs do not."""
    click.echo(f"amp-ray: {message}", err=True)
    return code
