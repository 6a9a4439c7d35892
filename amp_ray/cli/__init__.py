"""The command line: thin shells around the package, one module per command."""

import sys

import click

from amp_ray import __version__
from amp_ray.cli.exits import BAD_INPUT, INTERRUPTED
from amp_ray.cli.plan import plan
from amp_ray.cli.score import score
from amp_ray.errors import AmpRayError, InputError


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="amp-ray")
def commands() -> None:
    """Plan model-parallel training: which tp, pp, dp, micro-batch and stage cuts are fastest?"""


commands.add_command(plan)
commands.add_command(score)


def main() -> None:
    """Run a command and end with an exit code of the contract.

    0 success, 2 bad input, 3 no feasible strategy, 4 trials failed, 130 interrupted.
    """
    try:
        sys.exit(commands.main(standalone_mode=False) or 0)
    except click.Abort:
        _complain("interrupted")
        sys.exit(INTERRUPTED)
    except click.ClickException as error:
        error.show()
        sys.exit(BAD_INPUT)
    except InputError as error:
        _complain(str(error))
        sys.exit(BAD_INPUT)
    except AmpRayError as error:
        _complain(str(error))
        sys.exit(1)


def _complain(message: str) -> None:
    """Write one message where people look for it and programs do not."""
    click.echo(f"amp-ray: {message}", err=True)
