"""What an experiment file says of the runtime and of the cost model's constants."""

from dataclasses import replace
from typing import Any, Final

from amp_ray.errors import InputError, Mistakes
from amp_ray.spec.constants import PROGRAM_SCALE, Constants
from amp_ray.spec.experiment_file import ExperimentFile
from amp_ray.spec.json_text import shown
from amp_ray.spec.traits import RUNTIMES, RuntimeTraits
from amp_ray.spec.yaml_text import Document

_LARGEST: Final = 10**15
"""Of a trait: more bytes than any cluster has."""


def build_traits(document: Document, checked: ExperimentFile) -> RuntimeTraits:
    """Return the runtime's record with the traits that the file sets; refuse unknown ones."""
    if checked.runtime not in RUNTIMES:
        message = f"found {checked.runtime!r}; expected one of {', '.join(RUNTIMES)}"
        raise InputError(message, where=document.where("runtime"))
    traits = RUNTIMES[checked.runtime]
    chosen: dict[str, Any] = {}
    mistakes = Mistakes()
    for name, value in checked.traits.items():
        with mistakes.collect(), document.at("traits", name):
            chosen[name] = _trait(traits, name, value)
    mistakes.check()
    with document.at("traits"):
        return replace(traits, **chosen)


def check_zero_stage(document: Document, zero_stage: int, traits: RuntimeTraits) -> int:
    """Return the ZeRO stage; refuse one that the runtime does not have."""
    if zero_stage <= traits.max_zero_stage:
        return zero_stage
    message = (
        f"found {zero_stage}; runtime {traits.name!r} works with zero_stage up to "
        f"{traits.max_zero_stage}"
    )
    raise InputError(message, where=document.where("zero_stage"))


def build_constants(document: Document, checked: ExperimentFile) -> Constants:
    """Return the shipped constants with those that the file sets; refuse unknown ones."""
    known = Constants.__dataclass_fields__
    mistakes = Mistakes()
    for name in checked.constants:
        with mistakes.collect():
            if name not in known:
                message = f"unknown constant {name!r}; known: {', '.join(known)}"
                raise InputError(message, where=document.where("constants", name))
    mistakes.check()
    scale = {PROGRAM_SCALE: checked.constants.get(PROGRAM_SCALE, 1.0)}
    return replace(Constants(), **{**checked.constants, PROGRAM_SCALE: 1.0}).moved(scale)


def _trait(traits: RuntimeTraits, name: str, value: object) -> bool | int | float:
    """Return a trait's new value if it is of the type that the record's own has."""
    numbers = [
        key for key in traits.__dataclass_fields__ if not isinstance(getattr(traits, key), str)
    ]
    if name not in numbers:
        message = f"unknown trait {name!r}; those that can be set: {', '.join(numbers)}"
        raise ValueError(message)
    own = getattr(traits, name)
    is_flag = isinstance(value, bool)
    if isinstance(own, bool):
        if is_flag:
            return bool(value)
        expected = "true or false"
    elif isinstance(own, int):
        if isinstance(value, int) and not is_flag and 0 <= value <= _LARGEST:
            return value
        expected = f"an integer from 0 to {_LARGEST:g}"
    else:
        if isinstance(value, int | float) and not is_flag and 0 <= value <= _LARGEST:
            return float(value)
        expected = f"a number from 0 to {_LARGEST:g}"
    message = f"found {shown(value)}; expected {expected}"
    raise ValueError(message)
