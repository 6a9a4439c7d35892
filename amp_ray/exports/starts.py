"""The training program of each runtime, and how a plan starts by it: a script, and its files."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from amp_ray.exports.chosen import Chosen, Program
from amp_ray.exports.configs import nanotron_program
from amp_ray.exports.megatron import megatron_program, megatron_script
from amp_ray.exports.our_program import deepspeed_folder, synthetic_program
from amp_ray.exports.scripts import torchrun_script
from amp_ray.exports.torchtitan import titan_program

_Programs = Mapping[str, tuple[str | None, Callable[[Chosen], Program]]]

_MEGATRON: Final = ("megatron-lm", megatron_program)

PROGRAMS: Final[_Programs] = {
    "deepspeed": ("deepspeed", synthetic_program),
    "torch": (None, synthetic_program),
    "megatron-core": _MEGATRON,
    "megatron-lm-2022": _MEGATRON,
    "megatron": _MEGATRON,
    "nanotron": ("nanotron", nanotron_program),
    "fsdp2": ("torchtitan", titan_program),
}
"""By runtime: the format of ``export`` that writes the program's files (None if there is none), and
the program, of which a launcher starts every rank."""

_SCRIPTS: Final = {"deepspeed": deepspeed_folder, "megatron-lm": megatron_script}
"""Formats whose first file is a script that starts the plan."""


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
    runtime = chosen.experiment.traits.name
    if runtime not in PROGRAMS:
        return None
    target, make = PROGRAMS[runtime]
    if target in _SCRIPTS:
        [(name, script), *others] = _SCRIPTS[target](chosen).files.items()
        output = "start" if others else name
        return Start(target=target, output=output, script=script, files=dict(others))
    program = make(chosen)
    names = ", ".join(program.files)
    script = torchrun_script(chosen, program, "start.sh", program.head, f"Needs {names} here")
    return Start(target=target, output=names, script=script, files=program.files)
