"""What the scripts in ``experiments/`` run: one experiment by name, from wherever the script lies.

``ray submit`` copies one script alone to the head node, so the experiment file is looked for
beside the script, in the package's data, and in the checkout that the package was installed from.
"""

from importlib import resources
from pathlib import Path
from typing import Any, Final

import click

from amp_ray.cli.exits import run_command
from amp_ray.cli.options import (
    calibration_options,
    cost_model_option,
    hostfile_option,
    json_option,
    set_option,
    verbose_option,
    wide_option,
    workers_options,
)
from amp_ray.cli.plan import plan
from amp_ray.cli.tune import tune, tune_options
from amp_ray.errors import InputError

HOSTFILE: Final = "hostfile"

_PLAN_ONLY = ("num_rows", "show_all", "wide", "cost_model")
_BOTH = ("changes", "calibration", "transfer", "workers", "address", "json_target")


def run_experiment(script: str, description: str) -> None:
    """Run the experiment of a script and end the process with an exit code of the contract.

    The experiment file has the name of the script's ``__file__``, with ``.yaml``.
    """

    @click.command(help=description, context_settings={"max_content_width": 100})
    @click.option("--full", is_flag=True, help="Prove the plan by real trials.")
    @click.option("--budget", type=click.IntRange(min=0), help="Trials that --full may run.")
    @click.option("--top", "num_rows", type=click.IntRange(min=1), default=10, show_default=True)
    @click.option("--all", "show_all", is_flag=True, help="Show every candidate.")
    @wide_option
    @cost_model_option
    @tune_options
    @hostfile_option
    @set_option
    @calibration_options
    @workers_options
    @json_option
    @verbose_option
    @click.pass_context
    def command(
        context: click.Context,
        /,
        *,
        full: bool,
        **options: Any,  # noqa: ANN401 - those of plan and tune
    ) -> int:
        path = experiment_file(Path(script))
        if full:
            _refuse(context, [*_PLAN_ONLY], "--full launches trials; it takes no")
            chosen = {key: value for key, value in options.items() if key not in _PLAN_ONLY}
            chosen["hostfile_path"] = chosen["hostfile_path"] or find_hostfile(Path(script))
            return int(context.invoke(tune, experiment_path=path, **chosen))
        shared = {*_PLAN_ONLY, *_BOTH}
        _refuse(context, [key for key in options if key not in shared], "only --full takes")
        chosen = {key: value for key, value in options.items() if key in shared}
        return int(context.invoke(plan, experiment_path=path, **chosen))

    run_command(command)


def _refuse(context: click.Context, names: list[str], why: str) -> None:
    """Refuse options that would be ignored."""
    given = click.core.ParameterSource.COMMANDLINE
    flags = {parameter.name: parameter.opts[0] for parameter in context.command.params}
    for name in names:
        if context.get_parameter_source(name) == given:
            raise InputError(f"{why} {flags[name]}")


def find_hostfile(script: Path) -> Path | None:
    """Find a hostfile where a cluster's set-up leaves one: beside the script, here, or at home."""
    places = (script.parent, Path.cwd(), Path.home())
    return next((place / HOSTFILE for place in places if (place / HOSTFILE).is_file()), None)


def experiment_file(script: Path) -> Path:
    """Find the experiment file of a script; refuse to go on without one."""
    name = script.with_suffix(".yaml").name
    package = Path(str(resources.files("amp_ray")))
    places = (
        script.with_name(name),
        package / "data" / "experiments" / name,
        package.parent / "experiments" / name,
    )
    for place in places:
        if place.is_file():
            return place
    raise InputError(f"no {name} in {', '.join(str(place.parent) for place in places)}")
