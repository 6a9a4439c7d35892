"""The command line: thin shells around the functions of `amp_ray.api`."""

from importlib import import_module
from typing import Final

import click

from amp_ray import __version__
from amp_ray.cli.exits import run_command

MODULES: Final = {
    **dict.fromkeys(("plan", "score", "explain", "sweep", "report", "calibrate"), "planning"),
    "slices": "slices",
    "diff": "diff",
    **dict.fromkeys(("tune", "show"), "studies"),
    **dict.fromkeys(("doctor", "profile"), "hosts"),
    **dict.fromkeys(("export", "import"), "exchange"),
    "init": "init",
}
"""Module of each command. Only the module of the command that runs is imported: a plan needs no
SSH and no export, and starts a tenth of a second sooner."""


RESEARCH: Final = ("plan", "score", "sweep", "report", "export", "slices")
"""Commands of `amp-ray research`, in which ``--cost-model`` is shown."""

_OF_SITES: Final = (*(name for name in MODULES if name != "slices"), "research")


class _Commands(click.Group):
    """Commands by name; ``names`` are shown, and all can be used."""

    names: tuple[str, ...] = _OF_SITES

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's
        return sorted(self.names)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in self.commands:
            return self.commands[cmd_name]
        # Unless the name is a command's, click suggests a similar one of all commands
        for name in (cmd_name,) if cmd_name in MODULES else MODULES:
            module = import_module(f"amp_ray.cli.{MODULES[name]}")
            self.add_command(getattr(module, "import_files" if name == "import" else name))
        return super().get_command(ctx, cmd_name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        # Click cuts a sentence at the end of the line
        rows = [
            (name, command.get_short_help_str(limit=200))
            for name in self.list_commands(ctx)
            if (command := self.get_command(ctx, name)) is not None
        ]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


class _Research(_Commands):
    names = RESEARCH


@click.group(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="amp-ray")
def commands() -> None:
    """Plan model-parallel training: which tp, pp, dp, micro-batch and stage cuts are fastest?"""


@commands.group(cls=_Research)
def research() -> None:
    """Compare published planners and schedules.

    --cost-model takes the formulas of AMP (2022), Metis (2024) or Aceso (2024), or an installed
    planner; slices cuts sequences as TeraPipe (2021) does. The commands work without this word too.
    """


def main() -> None:
    """Run a command, and end the process with one of the exit codes in `amp_ray.cli.exits`."""
    run_command(commands)
