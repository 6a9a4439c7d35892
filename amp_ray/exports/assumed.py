"""What a predicted time assumes of a program: its traits, and the flag that decides each.

A trait has a row here: either the flag, key or setting that decides it in each program's export, or
the reason why none does. Exports list those of their strategy in a comment at the top.
"""

from collections.abc import Collection
from dataclasses import fields

from amp_ray.exports.chosen import Chosen
from amp_ray.runtimes.traits import Formats, RuntimeTraits
from amp_ray.shipped import Table, Words
from amp_ray.units import figure_text


class Assumed(Table):
    """The file `assumed.yaml`, which describes its fields."""

    file = "exports/assumed.yaml"
    flags: dict[str, dict[str, Words]]
    runtimes: dict[str, str]
    reasons: dict[str, Words]
    environment: dict[str, str]


def assumptions(chosen: Chosen, program: str, words: Collection[str]) -> tuple[str, ...]:
    """Return lines that tell which traits a predicted time assumes, for the head of an export.

    Args:
        chosen: The strategy, with its runtime.
        program: The format of ``export``.
        words: Flags and keys that the export has; others are off.
    """
    traits, table = chosen.experiment.traits, Assumed.shipped()
    if traits.name != table.runtimes[program]:
        return (f"the prediction is of runtime {traits.name}, which is another program",)
    names = {word.partition("=")[0] for word in words}
    lines = [
        f"  {trait.name} {_value(getattr(traits, trait.name))}: {' '.join(flags)}"
        for trait in fields(RuntimeTraits)
        if (flags := [flag for flag in table.flags[program].get(trait.name, ()) if flag in names])
    ]
    lines += [
        f"  {trait}: {text}" for trait, text in table.environment.items() if getattr(traits, trait)
    ]
    head = f"the prediction assumes these traits of runtime {traits.full_name} (docs/runtimes.md):"
    return (head, *lines) if lines else ()


def _value(value: object) -> str:
    if isinstance(value, Formats):
        return ", ".join(f"{key} {name}" for key, name in value.kept.items()) or "usual"
    if isinstance(value, tuple):
        return " ".join(value) or "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    return figure_text(value) if isinstance(value, float) else str(value)
