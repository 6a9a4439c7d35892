"""How a plan starts by the program that it was made for: the script to run, and its files."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from amp_ray.exports.chosen import Chosen, Export
from amp_ray.exports.configs import nanotron_config
from amp_ray.exports.megatron import megatron_script
from amp_ray.exports.our_program import deepspeed_folder, slurm_folder
from amp_ray.exports.scripts import torchrun_script
from amp_ray.exports.torchtitan import titan_config

_MEGATRON: Final = ("megatron-lm", megatron_script, ())

_STARTS: Final[Mapping[str, tuple[str, Callable[[Chosen], Export], tuple[str, ...]]]] = {
    "deepspeed": ("deepspeed", deepspeed_folder, ()),
    "torch": ("slurm", slurm_folder, ()),
    "megatron-core": _MEGATRON,
    "megatron-lm-2022": _MEGATRON,
    "megatron": _MEGATRON,
    "nanotron": ("nanotron", nanotron_config, ("run_train.py", "--config-file", "nanotron.yaml")),
    "fsdp2": (
        *("torchtitan", titan_config),
        ("-m", "torchtitan.train", "--module", "amp_ray_titan", "--config", "planned"),
    ),
}
"""By runtime: format of ``export``, its writer, and words of the program if it writes no script."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """A script that starts a plan."""

    target: str  # the format of ``export`` that writes the files
    name: str  # the file to write, or a folder if there are several
    script: str
    config: str = ""  # that file's text, if the script is not in it


def start_of(chosen: Chosen) -> Start | None:
    """Return the start of a plan; None if its runtime has no format.

    Raises:
        ValueError: If the program cannot express the strategy.
    """
    if chosen.experiment.traits.name not in _STARTS:
        return None
    target, write, words = _STARTS[chosen.experiment.traits.name]
    export = write(chosen)
    [name, first], *more = export.files.items()
    if not words:
        return Start(target=target, name="start" if more else name, script=first)
    script = torchrun_script(chosen, words, f"needs {name} in the current folder")
    return Start(target=target, name=name, script=script, config=first)
