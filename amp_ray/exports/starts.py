"""How a plan starts by the program that it was made for: the script to run, and its files."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from amp_ray.exports.chosen import Chosen, Export, Program
from amp_ray.exports.configs import nanotron_config
from amp_ray.exports.megatron import megatron_script
from amp_ray.exports.our_program import deepspeed_folder, synthetic_program
from amp_ray.exports.scripts import torchrun_script
from amp_ray.exports.torchtitan import titan_program

_MEGATRON: Final = ("megatron-lm", megatron_script)

_SCRIPTS: Final[Mapping[str, tuple[str, Callable[[Chosen], Export]]]] = {
    "deepspeed": ("deepspeed", deepspeed_folder),
    "megatron-core": _MEGATRON,
    "megatron-lm-2022": _MEGATRON,
    "megatron": _MEGATRON,
}
"""By runtime: format of ``export`` whose first file is a script, and its writer."""


def _nanotron_program(chosen: Chosen) -> Program:
    export = nanotron_config(chosen)
    words = ("run_train.py", "--config-file", *export.files)
    return Program(words=words, files=export.files, head="For nanotron 0.4.", notes=export.notes)


_PROGRAMS: Final[Mapping[str, tuple[str | None, Callable[[Chosen], Program]]]] = {
    "torch": (None, synthetic_program),
    "nanotron": ("nanotron", _nanotron_program),
    "fsdp2": ("torchtitan", titan_program),
}
"""By runtime: format of ``export`` for the program's files (None if it has none), and the program
that ``torchrun`` starts."""


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
    runtime, target = chosen.experiment.traits.name, None
    if runtime in _SCRIPTS:
        target, write = _SCRIPTS[runtime]
        [(name, script), *others] = write(chosen).files.items()
        output = "start" if others else name
        return Start(target=target, output=output, script=script, files=dict(others))
    if runtime not in _PROGRAMS:
        return None
    target, make = _PROGRAMS[runtime]
    program = make(chosen)
    names = ", ".join(program.files)
    script = torchrun_script(chosen, program, "start.sh", program.head, f"Needs {names} here")
    return Start(target=target, output=names, script=script, files=program.files)
