"""The command line: thin shells around the functions of `amp_ray.api`."""

import click

from amp_ray import __version__
from amp_ray.cli.diff import diff
from amp_ray.cli.exchange import export, import_files
from amp_ray.cli.exits import run_command
from amp_ray.cli.hosts import doctor, profile
from amp_ray.cli.init import init
from amp_ray.cli.planning import calibrate, explain, plan, report, score, sweep
from amp_ray.cli.slices import slices
from amp_ray.cli.studies import show, tune


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="amp-ray")
def commands() -> None:
    """Plan model-parallel training: which tp, pp, dp, micro-batch and stage cuts are fastest?"""


for command in (
    *(plan, score, explain, sweep, report, calibrate, slices, diff),
    *(tune, show, doctor, profile, export, import_files, init),
):
    commands.add_command(command)


def main() -> None:
    """Run a command, and end the process with one of the exit codes in `amp_ray.cli.exits`."""
    run_command(commands)
