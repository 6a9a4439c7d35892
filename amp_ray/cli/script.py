"""Code for the scripts in ``experiments/``: run one experiment by name, wherever the script is.

``ray submit`` copies only the script to the head node. So the experiment file is searched beside
the script, in the package's data, and in the checkout that the package was installed from.
"""

from importlib import resources
from pathlib import Path
from typing import Final

import click

from amp_ray.cli.exits import run_command
from amp_ray.cli.planning import plan
from amp_ray.cli.studies import tune
from amp_ray.errors import InputError

HOSTFILE: Final = "hostfile"


def run_experiment(script: str, description: str) -> None:
    """Run the experiment of a script, and end the process with an exit code of `amp_ray.cli.exits`.

    The experiment file has the name of the script's ``__file__``, with ``.yaml``.
    """

    @click.command(
        help=f"{description} Takes the options of amp-ray plan, with --full those of amp-ray tune.",
        context_settings={"ignore_unknown_options": True, "max_content_width": 100},
    )
    @click.option("--full", is_flag=True, help="Prove the plan by real trials.")
    @click.argument("options", nargs=-1, type=click.UNPROCESSED)
    def command(*, full: bool, options: tuple[str, ...]) -> int:
        words = [str(experiment_file(Path(script))), *options]
        hostfile = find_hostfile(Path(script)) if full else None
        if hostfile is not None and not any(word.startswith("--hostfile") for word in options):
            words += ["--hostfile", str(hostfile)]
        try:
            return int((tune if full else plan).main(words, standalone_mode=False) or 0)
        except click.NoSuchOption as error:
            in_vain = plan if full else tune
            names = (
                name for option in in_vain.params for name in option.opts + option.secondary_opts
            )
            if error.option_name in names:
                why = "--full launches trials; it takes no" if full else "only --full takes"
                raise InputError(f"{why} {error.option_name}") from None
            raise

    run_command(command)


def find_hostfile(script: Path) -> Path | None:
    """Return the hostfile of a cluster's set-up: beside the script, here, or in the home folder."""
    places = (script.parent, Path(), Path.home())
    return next((place / HOSTFILE for place in places if (place / HOSTFILE).is_file()), None)


def experiment_file(script: Path) -> Path:
    """Return the path of a script's experiment file; raise if there is none."""
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
