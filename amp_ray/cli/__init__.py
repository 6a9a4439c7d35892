"""The command line: thin shells around the package, one module per command."""

import click

from amp_ray import __version__
from amp_ray.cli.calibrate import calibrate_command
from amp_ray.cli.diff import diff
from amp_ray.cli.doctor import doctor
from amp_ray.cli.exits import run_command
from amp_ray.cli.explain import explain
from amp_ray.cli.export import export
from amp_ray.cli.import_files import import_files
from amp_ray.cli.init import init
from amp_ray.cli.plan import plan
from amp_ray.cli.profile import profile
from amp_ray.cli.report import report
from amp_ray.cli.score import score
from amp_ray.cli.show import show
from amp_ray.cli.slices import slices
from amp_ray.cli.sweep import sweep
from amp_ray.cli.tune import tune


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="amp-ray")
def commands() -> None:
    """Plan model-parallel training: which tp, pp, dp, micro-batch and stage cuts are fastest?"""


for command in (
    *(calibrate_command, diff, doctor, explain, export, import_files, init, plan, profile),
    *(report, score, show, slices, sweep, tune),
):
    commands.add_command(command)


def main() -> None:
    """Run a command and end the process with one of the exit codes in `amp_ray.cli.exits`."""
    run_command(commands)
