"""Models, layers and shapes: a model is a chain of layers, a layer a list of operators."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from itertools import accumulate
from typing import Any, Final, Literal

from amp_ray.memo import memoised
from amp_ray.models.operator import AllReduce, Elementwise, Experts, Gemm, Operator

LayerKind = Literal["embedding", "block", "norm", "head", "loss", "other", "noop"]


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One unit of the chain that a partition may cut after."""

    name: str
    kind: LayerKind  # kind of layer, such as block, embedding or head
    operators: tuple[Operator, ...]  # its work; empty for a layer that only passes data on
    output_elements: float  # elements per sample that cross the boundary after it
    output_sharded: bool = False  # whether tensor-parallel ranks each hold a part of them
    # Parameters that another layer of the chain holds too (the embedding table of a language
    # model); their gradients are added between the two stages
    tied_parameters: int = 0
    # The experts among its operators; None for a layer that has none
    experts: Experts | None = None

    @cached_property
    def gemms(self) -> tuple[Gemm, ...]:
        """Its matrix products."""
        return tuple(op for op in self.operators if isinstance(op, Gemm))

    @cached_property
    def elementwise(self) -> tuple[Elementwise, ...]:
        """Its memory-bound kernels."""
        return tuple(op for op in self.operators if isinstance(op, Elementwise))

    @cached_property
    def sharded_parameters(self) -> int:
        """Parameters divided by tp."""
        return sum(op.sharded_parameters for op in self.operators)

    @cached_property
    def expert_parameters(self) -> int:
        """Parameters of its experts, which are among the sharded ones."""
        return sum(op.sharded_parameters for op in self.gemms if op.is_expert)

    @cached_property
    def replicated_parameters(self) -> int:
        """Parameters that every tensor-parallel rank holds."""
        return sum(op.replicated_parameters for op in self.operators)

    @property
    def num_parameters(self) -> int:
        """All parameters of the layer."""
        return self.sharded_parameters + self.replicated_parameters

    @cached_property
    def logits(self) -> float:
        """Logits per sample that go into a loss here, of all tokens that have them at once."""
        return sum(op.logits / op.chunks for op in self.elementwise)

    def saved_bytes(self, *, tp: int, bytes_per_element: int) -> float:
        """Bytes per sample and rank that the forward pass keeps for the backward pass."""
        return sum((op.saved_bytes(tp, bytes_per_element) for op in self.operators), start=0.0)

    def cast_saved_bytes(self, *, tp: int, bytes_per_element: int) -> float:
        """Saved bytes that are inputs of products with weights, which may run in 8-bit floats."""
        cast = (op for op in self.gemms if op.has_weight and not op.keeps_precision)
        return sum((op.saved_bytes(tp, bytes_per_element) for op in cast), start=0.0)

    def core_saved_bytes(self, *, tp: int, bytes_per_element: int) -> float:
        """Saved bytes made within the attention core, which selective recompute does not keep."""
        inner = (op for op in self.core if op.core == "inner")
        return sum((op.saved_bytes(tp, bytes_per_element) for op in inner), start=0.0)

    def largest_saved_bytes(self, *, tp: int, bytes_per_element: int) -> float:
        """Bytes per sample and rank of the largest saved activation of an operator."""
        sizes = (op.saved_bytes(tp, bytes_per_element) for op in self.operators)
        return max(sizes, default=0.0)

    @cached_property
    def buffer_elements(self) -> float:
        """Temporary elements per sample that live only while it runs; divided by tp."""
        return sum(op.buffer_elements for op in self.elementwise)

    def all_reduce_elements(self, direction: AllReduce) -> tuple[float, ...]:
        """Elements per sample of each tensor-parallel all-reduce of one pass."""
        return tuple(op.all_reduce_elements for op in self.operators if op.all_reduce == direction)

    @property
    def forward_flops(self) -> float:
        """Operations of matrix products of one sample's forward pass."""
        return float(sum(op.flops for op in self.operators))

    @cached_property
    def exchanges(self) -> tuple[float, ...]:
        """Elements per sample of each all-to-all of one pass."""
        return tuple(op.exchange_elements for op in self.elementwise if op.exchange_elements)

    @cached_property
    def measurable(self) -> tuple[Operator, ...]:
        """Operators whose time is part of the layer's profile."""
        return tuple(op for op in self.operators if isinstance(op, Gemm) or op.is_layer)

    @cached_property
    def core(self) -> tuple[Operator, ...]:
        """Operators of its attention core, which selective recompute runs again."""
        return tuple(op for op in self.operators if op.core != "none")

    @cached_property
    def weights(self) -> tuple[Operator, ...]:
        """The operators that hold parameters."""
        return tuple(
            op for op in self.operators if op.sharded_parameters or op.replicated_parameters
        )

    @cached_property
    def added(self) -> tuple[Operator, ...]:
        """Operators that the runtime adds after the layer: a loss."""
        return tuple(op for op in self.operators if isinstance(op, Elementwise) and not op.is_layer)

    @cached_property
    def num_kernels(self) -> int:
        """Kernels that one forward pass of the layer itself launches."""
        return count_kernels(self.measurable)


def count_kernels(operators: Iterable[Operator]) -> int:
    """Count the kernels that one forward pass launches."""
    return sum(1 if isinstance(op, Gemm) else op.num_kernels for op in operators)


TRAINED: Final = ("gpt2", "llama", "transgan")  # families that our training program can run
PLANNED_ONLY: Final = ("t5", "wide_resnet", "vit", "blocks")  # families that it cannot run
FOR_PEOPLE: Final = ("not_counted", "not_read", "differs", "assumed", "name")
"""Fields of a shape that are no figures: remarks on a configuration, and a name."""

_FIRST_OPTIONAL: Final = 13  # figures of a shape that older records have in every family
LayerList = Literal["amp-2022", "runtime"]

LAYER_LISTS: Final[tuple[LayerList, ...]] = ("runtime", "amp-2022")

MOST_LAYERS: Final = 10_000  # blocks of a model; more are a typing error, and would fill the memory


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockFigures:
    """One entry of a list of blocks; all figures are of one sample."""

    name: str
    repeat: int  # equal blocks in a row
    parameters: int
    forward_flops: float  # two per multiply-add
    activation_elements: float  # kept for the backward pass
    boundary_elements: float  # handed on to the next block
    sharded: bool  # whether tensor parallelism divides parameters, work and activations


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The figures that name a model: the keys of ``model`` in an experiment file.

    A figure that a family does not have is 0, empty or false. Families fill in what a file leaves
    out, so its defaults stand in the texts.
    """

    family: str
    """Architecture. Default: needed, or `config`."""
    num_layers: int
    """Transformer blocks; of the encoder for t5; for wide_resnet the depth that names it: 50, 101
    or 152. Families: gpt2, llama, t5, wide_resnet. Default: needed."""
    hidden_size: int = 0
    """Width of a block; of the first level for transgan. Families: gpt2, llama, transgan, t5.
    Default: needed."""
    num_heads: int = 0
    """Attention heads; divides `hidden_size` (t5: or `head_size` is given). Families: gpt2, llama,
    transgan, t5. Default: needed."""
    sequence_length: int = 0
    """Tokens per sample; of the encoder for t5. Families: gpt2, llama, t5, blocks. Default: needed;
    blocks: none."""
    vocab_size: int = 0
    """Rows of the embedding; padded as the runtime does. Families: gpt2, llama, t5. Default:
    needed."""
    num_key_value_heads: int = 0
    """Heads of keys and values; divides `num_heads`. Families: llama. Default: `num_heads`."""
    feed_forward_size: int = 0
    """Inner width of the feed-forward part. Families: gpt2, llama, t5. Default: 4 x hidden; llama:
    8/3 x hidden, up to a multiple of 256."""
    tied_embedding: bool = False
    """Whether input and output embedding are one weight. Families: gpt2, llama, t5. Default: gpt2,
    t5: true, llama: false."""
    depth: tuple[int, ...] = ()
    """Blocks per level, lowest first; the last one is not 0. Families: transgan. Default:
    needed."""
    bottom_width: int = 0
    """Side of the lowest level's picture. Families: transgan. Default: needed."""
    latent_size: int = 0
    """Length of the random input. Families: transgan. Default: 512."""
    window_size: int = 0
    """Side of an attention window in pictures of at least 4 windows a side. Families: transgan.
    Default: 16."""
    num_decoder_layers: int = 0
    """Blocks of the decoder. Families: t5. Default: `num_layers`."""
    decoder_sequence_length: int = 0
    """Tokens of the decoder per sample. Families: t5. Default: `sequence_length`."""
    head_size: int = 0
    """Width of one head (`head_dim`, `d_kv`); with latent attention that of its part that is not
    rotated. Families: llama, t5. Default: hidden / heads."""
    gated_feed_forward: bool = False
    """Gated GELU, as T5 v1.1 has it, instead of ReLU. Families: t5. Default: false."""
    width_factor: int = 0
    """Inner channels of a bottleneck over those of a plain ResNet. Families: wide_resnet. Default:
    2."""
    base_channels: int = 0
    """Channels of the stem, on which all others depend. Families: wide_resnet. Default: 64."""
    image_size: int = 0
    """Side of the picture, at least 32; for vit a multiple of `patch_size`. Families: wide_resnet,
    vit. Default: 224."""
    num_classes: int = 0
    """Columns of the last layer. Families: wide_resnet, vit. Default: 1000."""
    blocks: tuple[BlockFigures, ...] = ()
    """[The model's blocks](#blocks). Families: blocks. Default: needed."""
    num_experts: int = 0
    """Routed experts of a block. Families: gpt2, llama."""
    experts_per_token: int = 0
    """Experts that a token goes through. Families: gpt2, llama. Default: needed with
    `num_experts`."""
    expert_feed_forward_size: int = 0
    """Inner width of one expert. Families: gpt2, llama. Default: `feed_forward_size`."""
    shared_feed_forward_size: int = 0
    """Inner width of the experts that all tokens go through, together. Families: gpt2, llama."""
    first_dense_layers: int = 0
    """Blocks without experts before the first one that has some. Families: gpt2, llama. Default:
    0."""
    attention_windows: tuple[int, ...] = ()
    """Tokens before it that a token attends to, by block, over and over from the first; 0 for all:
    `[128, 0]`. Only attention as one kernel is faster for it. Families: llama. Default: all
    tokens."""
    attention_bias: bool = False
    """Biases of the products for queries, keys and values. Families: llama. Default: false."""
    expert_bias: bool = False
    """A bias of each expert is added to its results. Families: llama. Default: false."""
    clamped_activation: bool = False
    """Both halves that a gated activation of experts reads are clamped before it. Families: llama.
    Default: false."""
    scaled_rotation: bool = False
    """Rotation also scales queries and keys (YaRN), which kernels that rotate in one pass do not
    offer. Families: llama. Default: false."""
    query_key_norm: bool = False
    """Queries and keys are normed head by head. Families: llama. Default: false."""
    post_norms: bool = False
    """Attention and feed-forward part are normed before they are added, too. Families: llama.
    Default: false."""
    key_value_rank: int = 0
    """Latent attention: width of the latent of keys and values; needs `rotary_head_size`,
    `value_head_size` and `head_size`.
    Families: llama."""
    query_rank: int = 0
    """Width of the latent of queries; none makes them directly. Families: llama."""
    rotary_head_size: int = 0
    """Rotated part of a head beside `head_size`. Families: llama."""
    value_head_size: int = 0
    """Width of a head's values. Families: llama."""
    mtp_layers: int = 0
    """Modules after the last block that predict one more token each, with a block, the output
    embedding and a loss (multi-token prediction). Families: llama."""
    extra_parameters: int = 0
    """Parameters of each block beside those of its products and norms, such as biases, that every
    rank of tensor parallelism holds; they take no time. Families: llama. Default: 0."""
    patch_size: int = 0
    """Side of a patch. Families: vit. Default: 16."""
    not_counted: tuple[str, ...] = ()
    """Parts of a configuration that are not counted, for people; not a key of the file."""
    not_read: tuple[str, ...] = ()
    """Keys of a configuration that are not read, for people; not a key of the file."""
    differs: tuple[str, ...] = ()
    """What sets a model apart from its family at the same cost, for exports; not a key of the
    file."""
    assumed: tuple[str, ...] = ()
    """Figures of a configuration that the file leaves open, for people; not a key of the file."""
    name: str = field(default="", compare=False)
    """Name of the model for people; empty for that of its family."""

    @property
    def is_trained(self) -> bool:
        """Whether our training program can run the model, possibly without some small parts."""
        untrained = (self.key_value_rank, self.post_norms, self.mtp_layers)
        windows = any(window and window < self.sequence_length for window in self.attention_windows)
        return self.family not in PLANNED_ONLY and not any(untrained) and not windows

    @property
    def num_tokens(self) -> int:
        """Tokens per sample, over both sequences if there are two; 0 if there are none."""
        if not self.vocab_size and self.family != "blocks":
            return 0
        return self.sequence_length + self.decoder_sequence_length

    @property
    def is_causal(self) -> bool:
        """Whether all attention is causal, so that sequences can be cut into token slices."""
        return self.vocab_size > 0 and self.is_trained

    def divides_context(self, num_ranks: int) -> bool:
        """Return whether so many ranks can divide every sequence with equal work for each.

        Each rank has as many tokens from the front as from the end, as tokens attend to earlier
        ones.
        """
        has_sequence = self.vocab_size > 0 and self.family not in PLANNED_ONLY
        return num_ranks == 1 or (has_sequence and self.divides_tokens(2 * num_ranks))

    def divides_tokens(self, tp: int) -> bool:
        """Return whether tp ranks can divide the tokens of every sequence evenly."""
        has_tokens = self.vocab_size > 0 and self.family != "blocks"
        lengths = (self.sequence_length, self.decoder_sequence_length)
        return has_tokens and not any(length % tp for length in lengths)

    def figures(self) -> dict[str, Any]:
        """Return its figures by name; those that only a few families have, only if they are set."""
        values = {name: v for name, v in asdict(self).items() if name not in FOR_PEOPLE}
        return {name: v for name, v in values.items() if v or name not in self.rare_figures()}

    def rare_figures(self) -> tuple[str, ...]:
        """Return the names of figures that only a few families have."""
        names = tuple(figure.name for figure in fields(self))[_FIRST_OPTIONAL:]
        return tuple(name for name in names if name not in FOR_PEOPLE)


@dataclass(frozen=True, kw_only=True)
class Model:
    """A named chain of layers."""

    name: str
    shape: ModelShape
    layers: tuple[Layer, ...]  # in the order of the forward pass; equal layers are equal values
    # Operations of one sample's forward pass for MFU: no padding, and only the pairs of tokens that
    # attend to each other, half of them if tokens attend to earlier ones alone, as Megatron-LM
    # counts today (Megatron-Bridge 0.3.1, training/utils/flop_utils.py). PaLM (Chowdhery et al.,
    # arXiv:2204.02311, appendix B) and others count all pairs. 0 if they were not counted.
    forward_flops: float = 0.0

    @property
    def num_layers(self) -> int:
        """Length of the chain, which ``bounds`` count in (not only blocks)."""
        return len(self.layers)

    @property
    def num_parameters(self) -> int:
        """All parameters, tied ones once."""
        tied = [layer.tied_parameters for layer in self.layers if layer.tied_parameters]
        return sum(layer.num_parameters for layer in self.layers) - sum(tied[1:])

    @property
    def block_parameters(self) -> int:
        """Parameters of its blocks."""
        return sum(layer.num_parameters for layer in self.layers if layer.kind == "block")

    @cached_property
    def distinct_layers(self) -> tuple[tuple[Layer, ...], tuple[int, ...]]:
        """Distinct layers, and for each position the index of its layer among them."""
        index: dict[Layer, int] = {}
        positions = tuple(index.setdefault(layer, len(index)) for layer in self.layers)
        return tuple(index), positions

    @cached_property
    def block_counts(self) -> tuple[int, ...]:
        """Number of blocks before each boundary, to count the blocks that recompute."""
        return tuple(accumulate((layer.kind == "block" for layer in self.layers), initial=0))

    @memoised
    def indices(self, kind: LayerKind) -> tuple[int, ...]:
        """Positions of all layers of one kind."""
        return tuple(i for i, layer in enumerate(self.layers) if layer.kind == kind)
