"""What the scripts in ``experiments/`` run: one experiment by name, from wherever the script lies.

``ray submit`` copies one script alone to the head node, so the experiment file is looked for
beside the script, in the package's data, and in the checkout that the package was installed from.
"""

from importlib import resources
from pathlib import Path

import click

from amp_ray.cli.exits import run_command
from amp_ray.cli.options import calibration_options, cost_model_option, json_option, verbose_option
from amp_ray.cli.plan import plan
from amp_ray.errors import InputError


def run_experiment(script: str, description: str) -> None:
    """Run the experiment of a script and end the process with an exit code of the contract.

    Args:
        script: The script's ``__file__``; the experiment file has its name, with ``.yaml``.
        description: What ``--help`` says.
    """

    @click.command(help=description, context_settings={"max_content_width": 100})
    @click.option("--full", is_flag=True, help="Prove the plan by real trials.")
    @click.option("--budget", type=click.IntRange(min=1), help="Trials that --full may run.")
    @click.option("--top", "num_rows", type=click.IntRange(min=1), default=10, show_default=True)
    @click.option("--all", "show_all", is_flag=True, help="Show every candidate.")
    @cost_model_option
    @calibration_options
    @json_option
    @verbose_option
    @click.pass_context
    def command(
        context: click.Context, /, *, full: bool, budget: int | None, **options: object
    ) -> int:
        if full or budget is not None:
            message = (
                "--full and --budget N will run real trials; this version plans only. "
                "Leave them out to plan"
            )
            raise InputError(message)
        code: int = context.invoke(plan, experiment_path=experiment_file(Path(script)), **options)
        return code

    run_command(command)


def experiment_file(script: Path) -> Path:
    """Find the experiment file of a script.

    Raises:
        InputError: If it lies at none of the places.
    """
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
    message = f"no {name} in {', '.join(str(place.parent) for place in places)}"
    raise InputError(message)
