"""How a plan starts by the program that it was made for: the script to run, and its files."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from amp_ray.exports.chosen import Chosen, Export
from amp_ray.exports.configs import nanotron_config
from amp_ray.exports.megatron import megatron_script
from amp_ray.exports.our_program import deepspeed_folder, torchrun_folder
from amp_ray.exports.scripts import torchrun_script
from amp_ray.exports.torchtitan import titan_config

_Writer = Callable[[Chosen], Export]

_MEGATRON: Final = ("megatron-lm", megatron_script)

_STARTS: Final[Mapping[str, tuple[str | None, _Writer]]] = {
    "deepspeed": ("deepspeed", deepspeed_folder),
    "torch": (None, torchrun_folder),
    "megatron-core": _MEGATRON,
    "megatron-lm-2022": _MEGATRON,
    "megatron": _MEGATRON,
    "nanotron": ("nanotron", nanotron_config),
    "fsdp2": ("torchtitan", titan_config),
}
"""By runtime: format of ``export`` (None if it has none), and its writer."""

_PROGRAMS: Final = {
    "nanotron": ("run_train.py", "--config-file", "nanotron.yaml"),
    "torchtitan": ("-m", "torchtitan.train", "--module", "amp_ray_titan", "--config", "planned"),
}
"""Words after ``torchrun`` for formats without a script."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """A script that starts a plan."""

    target: str | None  # the format of ``export`` that writes the files; None if there is none
    output: str  # the file that it writes, or a folder if it writes several
    script: str
    files: Mapping[str, str]  # the files that it needs, by name


def start_of(chosen: Chosen) -> Start | None:
    """Return the start of a plan; None if its runtime has no format.

    Raises:
        ValueError: If the program cannot express the strategy.
    """
    if chosen.experiment.traits.name not in _STARTS:
        return None
    target, write = _STARTS[chosen.experiment.traits.name]
    files = dict(write(chosen).files)
    output = next(iter(files)) if len(files) == 1 else "start"
    if target in _PROGRAMS:
        script = torchrun_script(chosen, _PROGRAMS[target], f"Needs {', '.join(files)} here")
    else:
        script = files.pop(next(iter(files)))
    return Start(target=target, output=output, script=script, files=files)
