"""Recompute: activations that the backward pass computes again instead of keeping them."""

import re
from dataclasses import dataclass
from functools import total_ordering
from typing import Any, Final, Literal, cast, get_args

from amp_ray.errors import shown

RecomputeKind = Literal["none", "selective", "per-operator", "full", "auto"]
RecomputeModule = Literal["mlp", "moe_act", "layernorm", "mla_up_proj"]
"""Parts of a block beside the attention core, by Megatron-LM's names."""

KINDS: Final[tuple[RecomputeKind, ...]] = get_args(RecomputeKind)
"""Kinds from least to most recompute; ``auto`` means that it is not chosen yet."""

_WORD: Final = re.compile(r"(none|per-operator|(?:selective|full)(?=:|$))(?::([1-9][0-9]{0,5}))?")


@total_ordering
@dataclass(frozen=True, slots=True, kw_only=True)
class Recompute:
    """The part of a block that is recomputed, and the number of such blocks in a stage.

    ``selective`` recomputes the attention core (scores, softmax, dropout, context);
    ``per-operator`` all operators but every other product and attention, whose results are kept;
    ``full`` a whole block, so that only its input is kept. Embeddings and heads are never
    recomputed.

    Raises:
        ValueError: If the kind is unknown or takes no number of layers, or the number is below 1.

    References:
        Korthikanti et al., arXiv:2205.05198, sections 5 and 6; Megatron-LM's
        ``--recompute-method block`` takes the first layers of a stage, too. ``per-operator`` is
        torchtitan's selective activation checkpoint, option ``op``.
    """

    # ``auto`` is for candidates only: the search chooses for every stage
    kind: RecomputeKind = "none"
    layers: int | None = None  # blocks of the stage, from its first on; None means all

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"recompute is one of {', '.join(KINDS)}, found {self.kind!r}")
        if self.layers is None:
            return
        if self.kind not in {"selective", "full"}:
            raise ValueError(f"recompute {self.kind!r} has no layers, found {self.layers}")
        if self.layers < 1:
            message = f"recompute of {self.layers} layers: expected at least 1, or kind 'none'"
            raise ValueError(message)

    def __str__(self) -> str:
        """Return its text in a column of a strategies file: ``full`` or ``full:3``."""
        return self.kind if self.layers is None else f"{self.kind}:{self.layers}"

    def __lt__(self, other: "Recompute") -> bool:
        return self._order < other._order

    @property
    def whole(self) -> "Recompute":
        """The same kind for all blocks of a stage."""
        return self if self.layers is None else Recompute(kind=self.kind)

    @property
    def _order(self) -> tuple[int, bool, int]:
        return KINDS.index(self.kind), self.layers is None, self.layers or 0

    def to_json(self) -> str | dict[str, Any]:
        """Return the kind, or a mapping if only some of the blocks are recomputed."""
        return self.kind if self.layers is None else {"kind": self.kind, "layers": self.layers}


NO_RECOMPUTE: Final = Recompute()
SELECTIVE: Final = Recompute(kind="selective")
PER_OPERATOR: Final = Recompute(kind="per-operator")
FULL: Final = Recompute(kind="full")
AUTO: Final = Recompute(kind="auto")


def parse_recompute(word: str) -> Recompute:
    """Read a kind but ``auto``; ``selective`` and ``full`` may have a number of layers.

    Raises:
        ValueError: If it is none of these.

    Example:
        >>> parse_recompute("full:3")
        Recompute(kind='full', layers=3)
    """
    match = _WORD.fullmatch(word)
    if match is None:
        kinds = ", ".join(KINDS[:-1])
        message = f"found {shown(word)}; expected one of {kinds}; or full:3 for three blocks"
        raise ValueError(message)
    layers = None if match[2] is None else int(match[2])
    return Recompute(kind=cast("RecomputeKind", match[1]), layers=layers)
