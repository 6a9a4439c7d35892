"""The models of the AMP paper, as chains of layers with the planner's counts per layer.

The artifact describes a model as a list of entries. For GPT-2, every entry is a layer of the chain.
For TransGAN, only the work layers are, and in the list a stage ends right after the entry of its
last work layer.
"""

from dataclasses import dataclass
from itertools import pairwise

from amp_ray.errors import InputError

PARAMETERS_PER_SQUARED_HIDDEN_SIZE = 12
"""Weights of a transformer layer divided by hidden size squared: attention 4, MLP 8."""

# The artifact's GPT-2 list: [embedding, no-op, transformer layers, no-op, no-op, output embedding,
# no-op]. Every entry is a layer of the chain: it has a time, and a cut may follow it.
GPT2_ENTRIES_BEFORE = 2
GPT2_ENTRIES_AFTER = 4
GPT2_OUTPUT_EMBEDDING_FROM_END = 2

# The artifact's TransGAN list of 56 entries: the first linear layer and two more, 12 large layers,
# 26 entries without work, 12 small layers, 3 entries without work.
TRANSGAN_SCALES = 6
TRANSGAN_ENTRIES_BEFORE = 3
TRANSGAN_ENTRIES_BETWEEN = 26
TRANSGAN_ENTRIES_AFTER = 3
TRANSGAN_HIDDEN_SIZE_RATIO = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """A model in the form that the published planner uses."""

    # Shape ``(num_layers,)``. Index of each layer's entry in the published list.
    work_entries: tuple[int, ...]
    num_entries: int  # length of the published list
    num_transformer_layers: int  # transformer layers, split evenly for one micro-batch
    even_split_extra: tuple[int, int]  # other layers that this split puts before and after them
    # Shape ``(num_layers,)``. Elements of one sample sent after a layer.
    boundary_elements: tuple[float, ...]
    # Shape ``(num_layers,)``. Whether the elements are divided by ``tp``.
    boundary_split_by_tp: tuple[bool, ...]
    # Shape ``(num_layers,)``. Parameters of a layer, before division by ``tp``.
    layer_parameters: tuple[float, ...]
    embedding_layers: tuple[int, ...]  # layers that hold the embedding
    embedding_parameters: float  # counted once for a stage with any of these layers

    @property
    def num_layers(self) -> int:
        """Layers of the chain; for TransGAN fewer than ``num_entries``."""
        return len(self.work_entries)


def gpt2_chain(
    *, num_layers: int, hidden_size: int, sequence_length: int, vocab_size: int
) -> Chain:
    """Describe GPT-2: an embedding, the transformer layers, the output embedding, four no-ops.

    Args:
        num_layers: Transformer layers ``n``; the chain has ``n + 6``.
        hidden_size: ``h``.
        sequence_length: ``s``; ``s * h`` elements per sample leave a layer.
        vocab_size: ``v``; ``s * v / tp`` elements leave the output embedding.

    Returns:
        The chain. A no-op passes its input on.
    """
    length = GPT2_ENTRIES_BEFORE + num_layers + GPT2_ENTRIES_AFTER
    output = length - GPT2_OUTPUT_EMBEDDING_FROM_END
    num_wide = length - output
    return Chain(
        work_entries=tuple(range(length)),
        num_entries=length,
        num_transformer_layers=num_layers,
        even_split_extra=(GPT2_ENTRIES_BEFORE, GPT2_ENTRIES_AFTER),
        boundary_elements=(float(sequence_length * hidden_size),) * output
        + (float(sequence_length * vocab_size),) * num_wide,
        boundary_split_by_tp=(False,) * output + (True,) * num_wide,
        layer_parameters=(0.0,) * GPT2_ENTRIES_BEFORE
        + (_layer_parameters(hidden_size),) * num_layers
        + (0.0,) * GPT2_ENTRIES_AFTER,
        embedding_layers=(0, output),
        embedding_parameters=float(hidden_size * vocab_size),
    )


def transgan_chain(*, depth: tuple[int, ...], hidden_size: int, bottom_width: int) -> Chain:
    """Describe the TransGAN generator: a linear layer, large layers, small layers.

    Args:
        depth: Transformer layers per scale; the published list is known only for models with layers
            at the first scale (hidden size ``h``) and the last (``h / 64``).
        hidden_size: ``h``.
        bottom_width: Side of the first feature map; as in the artifact, ``h * bottom_width**2``
            elements per sample leave every layer, which is too few after up-sampling.

    Returns:
        The chain. The first linear layer counts as a work layer without parameters.

    Raises:
        ValueError: If a scale between the first and the last has layers.
    """
    if len(depth) != TRANSGAN_SCALES or any(depth[1:-1]):
        msg = (
            f"depth={depth}: the published list is known for {TRANSGAN_SCALES} scales with layers "
            "at the first and the last only, such as (12, 0, 0, 0, 0, 12)"
        )
        raise ValueError(msg)
    num_large, num_small = depth[0], depth[-1]
    first_small = TRANSGAN_ENTRIES_BEFORE + num_large + TRANSGAN_ENTRIES_BETWEEN
    end_small = first_small + num_small
    num_layers = 1 + num_large + num_small
    small_hidden_size = hidden_size // TRANSGAN_HIDDEN_SIZE_RATIO
    return Chain(
        work_entries=(
            0,
            *range(TRANSGAN_ENTRIES_BEFORE, TRANSGAN_ENTRIES_BEFORE + num_large),
            *range(first_small, end_small),
        ),
        num_entries=end_small + TRANSGAN_ENTRIES_AFTER,
        num_transformer_layers=num_large + num_small,
        # The split starts counting at the linear layer, so the last layer is left over.
        even_split_extra=(0, 1),
        boundary_elements=(float(hidden_size * bottom_width**2),) * num_layers,
        boundary_split_by_tp=(False,) * num_layers,
        layer_parameters=(
            0.0,
            *(_layer_parameters(hidden_size),) * num_large,
            *(_layer_parameters(small_hidden_size),) * num_small,
        ),
        embedding_layers=(),
        embedding_parameters=0.0,
    )


def list_bounds(chain: Chain, work_bounds: tuple[int, ...]) -> tuple[int, ...]:
    """Translate bounds in layers to bounds in entries of the published list.

    A stage ends right after its last work layer, the last stage at the end of the list.
    """
    inner = (chain.work_entries[bound - 1] + 1 for bound in work_bounds[1:-1])
    return (0, *inner, chain.num_entries)


def work_bounds(chain: Chain, bounds: tuple[int, ...]) -> tuple[int, ...]:
    """Translate bounds in entries of the published list to bounds in layers.

    Raises:
        ValueError: If the bounds do not cover the list.
        InputError: If they leave a stage without a work layer.
    """
    entries = tuple(sum(entry < bound for entry in chain.work_entries) for bound in bounds)
    if bounds[:1] != (0,) or bounds[-1] != chain.num_entries:
        msg = f"bounds={bounds} must run from 0 to {chain.num_entries}, the length of the list"
        raise ValueError(msg)
    if any(first >= end for first, end in pairwise(entries)):
        msg = (
            f"bounds={bounds} leave a stage without a work layer: every stage needs one of the "
            f"entries {chain.work_entries}"
        )
        raise InputError(msg)  # a user's strategy may be so; the published planner's never is
    return entries


def _layer_parameters(hidden_size: int) -> float:
    """Return the weights of one transformer layer, without biases and norms."""
    return float(PARAMETERS_PER_SQUARED_HIDDEN_SIZE * hidden_size**2)
