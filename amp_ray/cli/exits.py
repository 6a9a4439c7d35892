"""Exit codes, the same for every command, and the one place that turns errors into them."""

import sys
from typing import Final

import click

from amp_ray.cli.output import OutputError, ReaderGoneError, guard_output
from amp_ray.errors import AmpRayError, InputError, NotFeasibleError, told
from amp_ray.redaction import redact
from amp_ray.runtime.files import remembered_inputs

SUCCESS: Final = 0
FAILURE: Final = 1
"""Of helper programs beside the command line, and of a mistake of ours; no result has it."""

BAD_INPUT: Final = 2
NOT_FEASIBLE: Final = 3
TRIALS_FAILED: Final = 4
"""Also where what a command runs on is broken: hosts, a disk, a Ray cluster, standard output."""

INTERRUPTED: Final = 130

LONGEST_LINE: Final = 1000  # characters of a message about one mistake

READER_GONE: Final = 141
"""What a shell reports of a program that wrote into a pipe that nobody reads: 128 + SIGPIPE."""


def run_command(command: click.Command) -> None:
    """Run a command on the process's arguments and end the process with its exit code."""
    guard_output()
    try:
        code = _run(command)
        sys.stdout.flush()  # a failure after this would have no exit code
    except ReaderGoneError:  # quiet, as other programs are: the reader has what it wanted
        code = READER_GONE
    except OutputError as error:
        code = _complain(str(error), TRIALS_FAILED)
    sys.exit(code)


def _run(command: click.Command) -> int:
    """Run a command; turn errors other than those of its output into messages and exit codes."""
    try:
        with remembered_inputs():
            return command.main(standalone_mode=False) or SUCCESS
    except (click.Abort, KeyboardInterrupt):
        return _complain("interrupted", INTERRUPTED)
    except click.ClickException as error:
        vars(error).update(message=redact(error.message))  # click takes it for final
        error.show()
        return BAD_INPUT
    except InputError as error:
        for message in told(error.parts):
            _complain("\n".join(map(_cut, message.split("\n"))), BAD_INPUT)
        return BAD_INPUT
    except NotFeasibleError as error:
        return _complain(str(error), NOT_FEASIBLE)
    except OutputError:
        raise
    except AmpRayError as error:
        return _complain(str(error), TRIALS_FAILED)


def _cut(line: str) -> str:
    """Cut a line that quotes something very long."""
    return line if len(line) <= LONGEST_LINE else f"{line[:LONGEST_LINE]}..."


def _complain(message: str, code: int) -> int:
    """Write one message to standard error; return the exit code."""
    click.echo(f"amp-ray: {message}", err=True)
    return code
