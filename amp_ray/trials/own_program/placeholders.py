"""Placeholders such as ``{tp}`` in the command of a user's own program."""

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
    "gradient_accumulation_steps": "the same, by DeepSpeed's name",
    "global_batch_size": "samples per optimizer step",
    "num_layers": "layers of the chain that `bounds` count in",
    "bounds": "cuts of that chain, as in `0,3,6`",
    "stage_layers": "layers of each stage, as in `3,3`",
    "num_blocks": "transformer blocks of the model",
    "stage_blocks": "transformer blocks of each stage, as in `2,2`",
    "recompute": "what the backward pass computes again: `none`, `selective`, `full` or `full:3`",
    "zero_stage": "ZeRO stage",
    "precision": "`fp16`, `bf16`, `fp32` or `fp8`",
    "hidden_size": "of the model",
    "num_heads": "of the model",
    "sequence_length": "of the model",
    "vocab_size": "of the model",
    "steps": "optimizer steps to measure",
    "warmup_steps": "steps before them",
    "total_steps": "both together: how long the program has to train",
    "megatron_flags": "Megatron's arguments for all of this; an argument of its own",
    "ds_config": "path of a DeepSpeed configuration, written for each trial",
    "hostfile": "path of a hostfile with the trial's hosts and ranks",
    "strategy": "path of the strategy as JSON",
    "rank": "of this process; not with `per: node`",
    "local_rank": "of this process on its host; not with `per: node`",
    "world_size": "ranks of the trial",
    "node_rank": "of this host among the trial's",
    "num_nodes": "hosts of the trial",
    "slots_per_node": "ranks on this host",
    "master_addr": "address of the first host",
    "master_port": "a free port there",
    "trial_id": "unique name of the trial",
    "trial_dir": "the trial's folder on this host",
    "python": "the interpreter that trains",
}
"""Every placeholder and what stands in its place."""

SEVERAL: Final = frozenset({"megatron_flags"})
"""Placeholders for several arguments."""

_TOKEN: Final = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Values:
    """What stands in place of the placeholders."""

    texts: Mapping[str, str] = field(default_factory=dict)
    # Arguments by the name of a placeholder that stands alone
    several: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    # Why a placeholder has no value here, by name
    missing: Mapping[str, str] = field(default_factory=dict)

    def __or__(self, other: "Values") -> "Values":
        """Return both; the other's win."""
        return Values(
            texts={**self.texts, **other.texts},
            several={**self.several, **other.several},
            missing={**self.missing, **other.missing},
        )


def names_in(text: str) -> tuple[str, ...]:
    """List the placeholders of a text.

    Example:
        >>> names_in("--tp={tp} {{literal}} {pp}")
        ('tp', 'pp')
    """
    return tuple(
        _known(match[1]) for match in _TOKEN.finditer(text) if match[0] not in {"{{", "}}"}
    )


def fill_text(text: str, values: Values) -> str:
    """Put values in place of the placeholders of a text.

    ``{name}`` is a placeholder, ``{{`` and ``}}`` are braces.

    Example:
        >>> fill_text("{{{tp}}}", Values(texts={"tp": "2"}))
        '{2}'
    """

    def replacement(match: re.Match[str]) -> str:
        if match[0] in {"{{", "}}"}:
            return match[0][0]
        return _value(_known(match[1]), values)

    return _TOKEN.sub(replacement, text)


def fill_argument(word: str, values: Values) -> tuple[str, ...]:
    """Put values in place of the placeholders of an argument.

    Returns the argument, or those for which a placeholder stands alone.

    Example:
        >>> fill_argument("{megatron_flags}", Values(several={"megatron_flags": ("--a", "1")}))
        ('--a', '1')
    """
    match = _TOKEN.fullmatch(word)
    if match is None or match[1] not in SEVERAL:
        return (fill_text(word, values),)
    if match[1] in values.missing:
        raise ValueError(_without_value(match[1], values))
    return values.several[match[1]]


def _known(name: str | None) -> str:
    """Return the name of a placeholder that exists; None is a brace without a partner."""
    if name is None:
        message = "found a brace that belongs to no placeholder; write {{ or }} for the brace alone"
        raise ValueError(message)
    if name not in PLACEHOLDERS:
        close = difflib.get_close_matches(name.casefold(), PLACEHOLDERS, n=1)
        hint = f"; did you mean {{{close[0]}}}?" if close else "."
        known = ", ".join(PLACEHOLDERS)
        raise ValueError(
            f"found {{{name}}}, which is no placeholder{hint} Write {{{{ and }}}} for braces "
            f"alone. The placeholders are: {known}"
        )
    return name


def _value(name: str, values: Values) -> str:
    """Return the text of a placeholder that stands among other text."""
    if name in SEVERAL:
        message = f"{{{name}}} stands for several arguments and has to be an argument of its own"
        raise ValueError(message)
    if name in values.missing:
        raise ValueError(_without_value(name, values))
    return values.texts[name]


def _without_value(name: str, values: Values) -> str:
    """Say why a placeholder cannot be filled in."""
    return f"{{{name}}} has no value here: {values.missing[name]}"
