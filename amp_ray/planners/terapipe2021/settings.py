"""The published settings of TeraPipe: models, and how each was divided.

Figures of tables 1 and 2 of Li et al., arXiv:2102.07988, and of the configurations of its release,
restated. All ran on nodes of eight V100-16, at most 48 of them.
"""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedModel:
    """A GPT model whose feed-forward part is four times as wide as the residual stream."""

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    sequence_length: int
    most_sequences: int  # largest batch slice that was measured


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedSetting:
    """One published setting: a model, its batch and its parallel degrees."""

    model: str
    batch: int  # sequences per replica and step
    tp: int
    pp: int
    dp: int
    num_nodes: int

    @property
    def layers_per_stage(self) -> int:
        """Whole layers of a stage, as the release counts them."""
        return MODELS[self.model].num_layers // self.pp


def _model(
    name: str, num_layers: int, hidden_size: int, num_heads: int, rest: tuple[int, int]
) -> PublishedModel:
    return PublishedModel(
        name=name,
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=num_heads,
        sequence_length=rest[0],
        most_sequences=rest[1],
    )


MODELS: Final = {
    model.name: model
    for model in (
        _model("gpt3-1b", 24, 2048, 16, (2048, 72)),
        _model("gpt3-13b", 40, 5120, 40, (2048, 32)),
        _model("gpt3-44b", 96, 6144, 48, (2048, 16)),
        _model("gpt3-175b", 96, 12288, 96, (2048, 2)),
        _model("gpt3-13b-4096", 40, 5120, 40, (4096, 8)),
        _model("gpt3-13b-6144", 40, 5120, 40, (6144, 4)),
        _model("gpt3-13b-8192", 40, 5120, 40, (8192, 2)),
    )
}

_DIVIDED: Final = {  # (batch, tp, pp, dp) by model and nodes
    ("gpt3-1b", 24): (
        (8, 1, 24, 8),
        (16, 1, 24, 8),
        (36, 8, 12, 2),
        (48, 8, 24, 1),
        (48, 8, 12, 2),
        (72, 8, 24, 1),
    ),
    ("gpt3-13b", 40): (
        (2, 1, 40, 8),
        (4, 1, 40, 8),
        (7, 1, 40, 8),
        (12, 8, 20, 2),
        (16, 8, 20, 2),
        (20, 8, 40, 1),
        (20, 8, 20, 2),
        (32, 8, 40, 1),
    ),
    ("gpt3-44b", 48): ((8, 8, 48, 1), (4, 8, 24, 2), (2, 1, 96, 4)),
    ("gpt3-175b", 48): ((2, 8, 48, 1), (2, 4, 96, 1)),
    ("gpt3-13b-4096", 40): ((8, 8, 40, 1),),
    ("gpt3-13b-6144", 40): ((4, 8, 40, 1),),
    ("gpt3-13b-8192", 40): ((2, 8, 40, 1),),
}

SETTINGS: Final = tuple(
    PublishedSetting(model=model, batch=batch, tp=tp, pp=pp, dp=dp, num_nodes=num_nodes)
    for (model, num_nodes), divided in _DIVIDED.items()
    for batch, tp, pp, dp in divided
)
