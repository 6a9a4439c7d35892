"""GPT-2 and llama-like language models as lists of layers."""

from dataclasses import replace
from functools import partial

from torch import Tensor, nn

from amp_ray.training.experts import ExpertParallel, MixtureOfExperts
from amp_ray.training.layer_spec import LayerSpec
from amp_ray.training.parallel import TensorParallel
from amp_ray.training.shapes import TextShape
from amp_ray.training.token_window import TokenWindow
from amp_ray.training.transformer import WEIGHT_STD, Block, BlockShape, norm
from amp_ray.training.vocabulary import TokenEmbedding, logits
from amp_ray.training.weights import LayerWeights

TIED_KEY = "token_embedding"


class Head(nn.Module):
    """Logits from a table of the head's own."""

    def __init__(self, shape: TextShape, parallel: TensorParallel, weights: LayerWeights) -> None:
        """Make the table."""
        super().__init__()
        self.table = TokenEmbedding(shape, parallel, weights, with_positions=False)

    def forward(self, value: Tensor) -> Tensor:
        """Return this rank's part of the logits."""
        return logits(self.table, value)


class FinalNorm(nn.Module):
    """The norm between the last block and the head."""

    def __init__(self, shape: BlockShape) -> None:
        """Make the norm of the style."""
        super().__init__()
        self.norm = norm(shape)

    def forward(self, value: Tensor) -> Tensor:
        """Return the same shape."""
        return self.norm(value)


def text_layers(
    shape: TextShape,
    parallel: TensorParallel,
    seed: int,
    window: TokenWindow | None = None,
    spread: ExpertParallel | None = None,
) -> list[LayerSpec]:
    """Return embedding, blocks, norm and head, to be built on the stages that own them.

    ``window`` says which tokens a pass sees; without it sequences are whole. ``spread`` are the
    ranks that hold the experts together; without them tp divides experts as other weights.
    """
    block = BlockShape(
        hidden_size=shape.hidden_size,
        num_heads=shape.num_heads,
        num_key_value_heads=shape.num_key_value_heads,
        feed_forward_size=shape.feed_forward_size,
        num_blocks=shape.num_layers,
        std=WEIGHT_STD,
        style="llama" if shape.family == "llama" else "gpt",
        causal=True,
        own_head_size=shape.head_size,
    )
    weights = partial(LayerWeights, seed=seed, tp_rank=parallel.rank, tp=parallel.size)
    positions = shape.family == "gpt2"
    first, last = weights(layer=0), weights(layer=shape.num_layers + 2)
    tied = shape.tied_embedding
    start = LayerSpec(
        module=TokenEmbedding,
        arguments=(shape, parallel, first),
        keywords={"with_positions": positions, "window": window},
        tied_key=TIED_KEY if tied else None,
    )
    end = LayerSpec(module=Head, arguments=(shape, parallel, last))
    if tied:  # both ends start from layer 0's weights
        end = replace(start, keywords={"with_positions": False}, forward_fn=logits)
    experts = {"make_feed_forward": partial(MixtureOfExperts, model=shape, spread=spread)}
    blocks = [
        LayerSpec(
            module=Block,
            arguments=(block, parallel, weights(layer=index + 1), window),
            keywords=experts if shape.num_experts and index >= shape.first_dense_layers else {},
        )
        for index in range(shape.num_layers)
    ]
    return [start, *blocks, LayerSpec(module=FinalNorm, arguments=(block,)), end]
