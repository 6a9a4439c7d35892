"""Placeholders such as ``{tp}`` in the command of a user's program."""

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

PLACEHOLDERS: Final[Mapping[str, str]] = {
    "tp": "tensor parallel degree",
    "pp": "pipeline parallel degree",
    "dp": "data parallel degree",
    "micro_batch_size": "samples per micro-batch and data-parallel replica",
    "num_micro_batches": "micro-batches per optimizer step and replica",
    "global_batch_size": "samples per optimizer step",
    "num_blocks": "transformer blocks of the model",
    "recompute": (
        "what the backward pass computes again: `none`, `selective`, `per-operator`, `full` or "
        "`full:3`"
    ),
    "hidden_size": "of the model",
    "num_heads": "of the model",
    "sequence_length": "of the model",
    "vocab_size": "of the model",
    "total_steps": "warm-up and measured steps: how long the program has to train",
    "megatron_flags": "Megatron's arguments for all of this; an argument of its own",
    "ds_config": "path of a DeepSpeed configuration, written for each trial",
    "strategy": "path of the strategy as JSON",
    "node_rank": "of this host among the trial's",
    "num_nodes": "hosts of the trial",
    "slots_per_node": "ranks on this host",
    "master_addr": "address of the first host",
    "master_port": "a free port there",
    "trial_dir": "the trial's folder on this host",
    "python": "the interpreter that trains",
}
"""Every placeholder and the meaning of its value."""

SEVERAL: Final = frozenset({"megatron_flags"})  # names that expand to several arguments
_TOKEN: Final = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Values:
    """Values of placeholders, and reasons for missing ones."""

    texts: Mapping[str, str] = field(default_factory=dict)
    # Lists of arguments by placeholder; such a placeholder must be a whole argument
    several: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    # Reason for a missing value, by placeholder
    missing: Mapping[str, str] = field(default_factory=dict)

    def __or__(self, other: "Values") -> "Values":
        return Values(
            texts={**self.texts, **other.texts},
            several={**self.several, **other.several},
            missing={**self.missing, **other.missing},
        )


EXAMPLE: Final = Values(
    texts=dict.fromkeys(PLACEHOLDERS.keys() - SEVERAL, "x"), several=dict.fromkeys(SEVERAL, ())
)
"""Example values of all placeholders, to check texts before any strategy exists."""


def fill_text(text: str, values: Values) -> str:
    """Replace placeholders in a text by their values.

    ``{name}`` is a placeholder, ``{{`` and ``}}`` are braces.

    Example:
        >>> fill_text("{{{tp}}}", Values(texts={"tp": "2"}))
        '{2}'
    """

    def replacement(match: re.Match[str]) -> str:
        if match[0] in {"{{", "}}"}:
            return match[0][0]
        name = _checked(match[1], values)
        if name in SEVERAL:
            message = f"{{{name}}} stands for several arguments: it has to be one of its own"
            raise ValueError(message)
        return values.texts[name]

    return _TOKEN.sub(replacement, text)


def fill_argument(word: str, values: Values) -> tuple[str, ...]:
    """Replace placeholders in an argument by their values.

    A placeholder for several arguments must be the whole ``word``.

    Example:
        >>> fill_argument("{megatron_flags}", Values(several={"megatron_flags": ("--a", "1")}))
        ('--a', '1')
    """
    match = _TOKEN.fullmatch(word)
    if match is None or match[1] not in SEVERAL:
        return (fill_text(word, values),)
    return values.several[_checked(match[1], values)]


def _checked(name: str | None, values: Values) -> str:
    """Return ``name`` if it has a value, else raise an error; None means an unmatched brace."""
    if name is None:
        message = "found a brace that belongs to no placeholder; write {{ or }} for the brace alone"
        raise ValueError(message)
    if name not in PLACEHOLDERS:
        close = difflib.get_close_matches(name.casefold(), PLACEHOLDERS, n=1)
        hint = f"; did you mean {{{close[0]}}}?" if close else "."
        raise ValueError(
            f"found {{{name}}}, which is no placeholder{hint} Write {{{{ and }}}} for braces "
            f"alone. The placeholders are: {', '.join(PLACEHOLDERS)}"
        )
    if name in values.missing:
        raise ValueError(f"{{{name}}} has no value here: {values.missing[name]}")
    return name
