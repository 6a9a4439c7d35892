"""``amp-ray doctor``: check every host before anything is launched."""

from dataclasses import replace
from pathlib import Path
from typing import Literal

import click

from amp_ray.cli.exits import SUCCESS, TRIALS_FAILED
from amp_ray.cli.options import experiment_argument, json_option, verbose_flag, write_json
from amp_ray.cli.output import table_console
from amp_ray.errors import InputError, Where
from amp_ray.inputs.yaml_text import parse_yaml
from amp_ray.report.doctor import diagnosis_view
from amp_ray.runtime.doctor import diagnose
from amp_ray.runtime.files import read_text
from amp_ray.runtime.hosts.host import host_maker
from amp_ray.runtime.profile.parts import load_unprofiled
from amp_ray.trials.ray_cluster_file import explain_old_keys, is_ray_cluster


@click.command()
@experiment_argument
@click.option(
    "--trials",
    "backend",
    type=click.Choice(["ssh", "local"]),
    help="Where trials would run.  [what the experiment says]",
)
@json_option
@verbose_flag
def doctor(
    *,
    experiment_path: Path,
    changes: tuple[str, ...],
    backend: Literal["ssh", "local"] | None,
    json_target: str | None,
    verbose: bool,
) -> int:
    """Check every host of EXPERIMENT.yaml, and say which command mends what is wrong.

    All hosts are looked at at the same time; nothing is changed or left on them.
    """
    _refuse_ray_cluster(experiment_path)
    experiment = load_unprofiled(experiment_path, changes)
    if backend is not None:
        experiment = replace(experiment, trials=replace(experiment.trials, backend=backend))
    diagnosis = diagnose(experiment, host_maker(experiment))
    if json_target is not None:
        write_json(diagnosis.to_json(), json_target)
    else:
        # Uncropped: commands are pasted, however narrow the terminal.
        table_console().print(diagnosis_view(diagnosis, show_all=verbose), crop=False)
    return TRIALS_FAILED if diagnosis.errors else SUCCESS


def _refuse_ray_cluster(path: Path) -> None:
    """Refuse a file for Ray's cluster launcher, of whatever age, in place of an experiment."""
    text = read_text(path)
    if not is_ray_cluster(parse_yaml(text, file=str(path))):
        return
    old = explain_old_keys(text, file=str(path))
    lines = [
        *(["keys that today's Ray no longer follows:"] if old else []),
        *(f"  {entry}" for entry in old),
    ]
    message = (
        "this is a file for Ray's cluster launcher ('ray up'), not an experiment; give the file "
        "that has 'model:' and 'cluster:'"
    )
    raise InputError("\n".join([message, *lines]), where=Where(file=str(path)))
