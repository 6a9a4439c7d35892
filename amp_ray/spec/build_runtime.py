"""What an experiment file says of the runtime and of the cost model's constants."""

import math
from dataclasses import replace
from typing import Any

from amp_ray.errors import InputError
from amp_ray.spec.constants import PROGRAM_SCALE, Constants
from amp_ray.spec.experiment_file import ExperimentFile
from amp_ray.spec.traits import RUNTIMES, RuntimeTraits
from amp_ray.spec.yaml_text import Document


def build_traits(document: Document, checked: ExperimentFile) -> RuntimeTraits:
    """Return the record of the runtime with the traits that the file sets.

    Args:
        document: For the places of mistakes.
        checked: Its content.

    Raises:
        InputError: If the runtime or a trait is unknown, a trait has another type, or the
            runtime lacks the ZeRO stage.
    """
    if checked.runtime not in RUNTIMES:
        message = f"found {checked.runtime!r}; expected one of {', '.join(RUNTIMES)}"
        raise InputError(message, where=document.where("runtime"))
    traits = RUNTIMES[checked.runtime]
    chosen: dict[str, Any] = {}
    for name, value in checked.traits.items():
        with document.at("traits", name):
            chosen[name] = _trait(traits, name, value)
    with document.at("traits"):
        traits = replace(traits, **chosen)
    if checked.zero_stage > traits.max_zero_stage:
        message = (
            f"found {checked.zero_stage}; runtime {traits.name!r} works with zero_stage up to "
            f"{traits.max_zero_stage}"
        )
        raise InputError(message, where=document.where("zero_stage"))
    return traits


def build_constants(document: Document, checked: ExperimentFile) -> Constants:
    """Return the shipped constants with those that the file sets.

    Raises:
        InputError: If a constant is unknown.
    """
    known = Constants.__dataclass_fields__
    for name in checked.constants:
        if name not in known:
            message = f"unknown constant {name!r}; known: {', '.join(known)}"
            raise InputError(message, where=document.where("constants", name))
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
        if isinstance(value, int) and not is_flag and value >= 0:
            return value
        expected = "an integer of at least 0"
    else:
        if isinstance(value, int | float) and not is_flag and 0 <= value < math.inf:
            return float(value)
        expected = "a number of at least 0"
    message = f"found {value!r}; expected {expected}"
    raise ValueError(message)
