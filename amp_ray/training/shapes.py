"""Shapes of trainable models, described without torch: sizes and lists of layers."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final, Literal

from amp_ray.training.fields import Fields

LayerKind = Literal["embedding", "input", "block", "norm", "head"]

FEED_FORWARD_FACTOR: Final = 4
"""Width of a GPT-2 or TransGAN feed-forward layer over the hidden size (both papers)."""

SWIGLU_MULTIPLE: Final = 256
"""Llama's feed-forward width, 8/3 of the hidden size, is rounded up to a multiple of this."""

LATENT_SIZE: Final = 512
"""TransGAN's latent size: its first layer has 512 * 1024 * 9 * 9 = 42.5 M weights."""

WINDOW_SIZE: Final = 16
"""Side of TransGAN's attention windows in large pictures, in tokens."""

FULL_ATTENTION_WINDOWS: Final = 4
"""Pictures narrower than this many windows use full attention (below 64 in the paper's model)."""

NUM_SHRINKING_LEVELS: Final = 3
"""TransGAN's last up-samplings that are pixel shuffles, which divide the width by 4."""

WEIGHT_STD: Final = 0.02
"""Standard deviation of initial weights of language models, as in GPT-2."""

_OPTIONAL_FIGURES: Final = (
    *("head_size", "num_experts", "experts_per_token", "expert_feed_forward_size"),
    *("shared_feed_forward_size", "first_dense_layers"),
)
"""Optional sizes of experts in a language model; 0 if it has none."""

SHRINK_FACTOR: Final = 4
RGB_CHANNELS: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockShape:
    """Sizes of the transformer blocks of a model, or of one level of it."""

    # ``gpt2`` (LayerNorm, GELU, biases) or ``llama`` (RMSNorm, SwiGLU, rotary positions, no biases)
    family: Literal["gpt2", "llama"]
    num_layers: int  # blocks of the model; scales initial weights that write to the stream
    hidden_size: int
    num_heads: int
    num_key_value_heads: int  # key and value heads; fewer than ``num_heads`` means grouped queries
    feed_forward_size: int
    head_size: int = 0  # width of one head; 0 means ``hidden_size / num_heads``
    std: float = WEIGHT_STD  # of the initial weights
    causal: bool = True  # whether a token attends only to earlier tokens

    @property
    def head_width(self) -> int:
        """Width of one head."""
        return self.head_size or self.hidden_size // self.num_heads

    @property
    def residual_std(self) -> float:
        """Standard deviation of initial weights that write to the residual stream."""
        return float(self.std / (2 * self.num_layers) ** 0.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextShape(BlockShape):
    """A causal language model; the positions of ``gpt2`` are learned."""

    sequence_length: int
    vocab_size: int
    tied_embedding: bool  # whether the head uses the token embedding's weights
    num_experts: int = 0  # routed experts of a block; 0 if no block has any
    experts_per_token: int = 0  # experts that a token goes through
    expert_feed_forward_size: int = 0  # inner width of one expert
    shared_feed_forward_size: int = 0  # inner width of all shared experts together
    first_dense_layers: int = 0  # blocks before the first one with experts

    def __post_init__(self) -> None:
        """Refuse numbers of heads that do not divide evenly, and inconsistent experts."""
        undivided = 0 if self.head_size else self.hidden_size % self.num_heads
        if undivided or self.num_heads % self.num_key_value_heads:
            raise ValueError(
                f"hidden_size {self.hidden_size} must be a multiple of num_heads {self.num_heads}, "
                f"and that of num_key_value_heads {self.num_key_value_heads}"
            )
        if self.family == "llama" and self.head_width % 2:
            raise ValueError(
                f"rotary positions need an even head size, found {self.head_width}; change "
                "head_size, or hidden_size or num_heads"
            )
        figures: tuple[int, ...] = (self.experts_per_token, self.expert_feed_forward_size)
        if self.num_experts and not (
            0 < self.experts_per_token <= self.num_experts and self.expert_feed_forward_size
        ):
            raise ValueError(
                f"num_experts {self.num_experts} needs experts_per_token of 1 to as many and "
                f"expert_feed_forward_size, found {figures[0]} and {figures[1]}"
            )
        figures += (self.shared_feed_forward_size, self.first_dense_layers)
        if not self.num_experts and any(figures):
            raise ValueError(
                "experts_per_token, expert_feed_forward_size, shared_feed_forward_size and "
                f"first_dense_layers need num_experts, found {[*figures]} without"
            )

    def split_sizes(self) -> dict[str, int]:
        """Return the sizes that tp has to divide, by name."""
        grouped = self.num_key_value_heads < self.num_heads
        heads = "num_key_value_heads" if grouped else "num_heads"
        sizes = {heads: self.num_key_value_heads, "feed_forward_size": self.feed_forward_size}
        if self.shared_feed_forward_size:
            sizes["shared_feed_forward_size"] = self.shared_feed_forward_size
        return sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageShape:
    """TransGAN's generator: levels of transformer blocks, up-sampling between them.

    Every level doubles the side of the picture. The last three up-samplings are
    pixel shuffles, which divide the width by 4; earlier ones keep it.

    References:
        Jiang et al., TransGAN, arXiv:2102.07074.
    """

    depth: tuple[int, ...]  # blocks of every level, lowest first; levels of depth 0 only up-sample
    hidden_size: int  # width of the lowest level
    num_heads: int
    bottom_width: int  # side of the lowest level, in tokens
    latent_size: int  # length of the random input vector
    window_size: int  # side of an attention window where pictures are large

    def __post_init__(self) -> None:
        """Refuse an empty last level, and widths and pictures that do not divide evenly."""
        if not self.depth or not self.depth[-1]:
            raise ValueError(f"depth {list(self.depth)} must end with a level that has blocks")
        if self.hidden_size % SHRINK_FACTOR ** self.num_shrinkings(len(self.depth) - 1):
            raise ValueError(
                f"hidden_size {self.hidden_size} must be divisible by {SHRINK_FACTOR} for each of "
                f"the last {NUM_SHRINKING_LEVELS} up-samplings of depth {list(self.depth)}"
            )
        for level, num_blocks in enumerate(self.depth):
            window = self.window(level)
            if num_blocks and (self.width(level) % self.num_heads or self.side(level) % window):
                raise ValueError(
                    f"level {level} has width {self.width(level)} and side {self.side(level)}: "
                    f"they must be multiples of num_heads {self.num_heads} and the window {window}"
                )

    def num_shrinkings(self, level: int) -> int:
        """Return how many pixel shuffles come before a level."""
        first = max(0, len(self.depth) - 1 - NUM_SHRINKING_LEVELS)
        return max(0, level - first)

    def width(self, level: int) -> int:
        """Return the hidden size of a level."""
        return int(self.hidden_size // SHRINK_FACTOR ** self.num_shrinkings(level))

    def side(self, level: int) -> int:
        """Return the side of a level's picture in tokens."""
        return int(self.bottom_width * 2**level)

    def window(self, level: int) -> int:
        """Return the side of a level's attention windows; the picture's side if it is small."""
        side = self.side(level)
        return self.window_size if side >= FULL_ATTENTION_WINDOWS * self.window_size else side

    def block(self, level: int) -> BlockShape:
        """Return the shape of the blocks of a level."""
        width = self.width(level)
        return BlockShape(
            family="gpt2",
            num_layers=sum(self.depth),
            hidden_size=width,
            num_heads=self.num_heads,
            num_key_value_heads=self.num_heads,
            feed_forward_size=FEED_FORWARD_FACTOR * width,
            std=width**-0.5,  # Glorot and Bengio's rule for a square weight, as in TransGAN
            causal=False,
        )

    def level_of_block(self, block: int) -> int:
        """Return the level of a block, both counted from 0."""
        return next(level for level, end in enumerate(accumulate(self.depth)) if block < end)

    def split_sizes(self) -> dict[str, int]:
        """Return the sizes that tp has to divide, by name."""
        return {"num_heads": self.num_heads}


def layer_kinds(shape: TextShape | ImageShape) -> tuple[LayerKind, ...]:
    """Return the kinds of the trained layers; ``bounds`` index this list.

    Example:
        >>> layer_kinds(
        ...     read_shape(
        ...         {
        ...             "family": "transgan",
        ...             "depth": [1, 1],
        ...             "hidden_size": 16,
        ...             "num_heads": 2,
        ...             "bottom_width": 2,
        ...         }
        ...     )
        ... )
        ('input', 'block', 'block', 'head')
    """
    block: tuple[LayerKind, ...] = ("block",)
    if isinstance(shape, ImageShape):
        return ("input", *block * sum(shape.depth), "head")
    return ("embedding", *block * shape.num_layers, "norm", "head")


def input_extent(shape: TextShape | ImageShape, layer: int) -> tuple[int, ...]:
    """Return the sizes of one sample of a layer's input.

    Example:
        >>> llama = {"family": "llama", "num_layers": 2, "hidden_size": 8, "num_heads": 2}
        >>> input_extent(read_shape({**llama, "sequence_length": 4, "vocab_size": 9}), 1)
        (4, 8)
    """
    if isinstance(shape, TextShape):
        tokens = (shape.sequence_length,)
        return tokens if layer == 0 else (*tokens, shape.hidden_size)
    if layer == 0:
        return (shape.latent_size,)
    # Output of the previous block; the first block and the input belong to the lowest level.
    before = layer - 2
    level = shape.level_of_block(before) if before >= 0 else 0
    return shape.side(level) ** 2, shape.width(level)


def read_shape(model: Mapping[str, Any]) -> TextShape | ImageShape:
    """Read the ``model`` mapping of an experiment file; raise a ``ValueError`` for a wrong key.

    Args:
        model: ``{family: gpt2 | llama, num_layers, hidden_size, num_heads, sequence_length,
            vocab_size, [tied_embedding], [feed_forward_size], [num_key_value_heads], [head_size],
            [num_experts, experts_per_token, expert_feed_forward_size],
            [shared_feed_forward_size], [first_dense_layers]}`` or
            ``{family: transgan, depth, hidden_size, num_heads, bottom_width, [latent_size],
            [window_size]}``.
    """
    fields = Fields(model, "model")
    family = fields.choice("family", ("gpt2", "llama", "transgan"))
    shape = _read_image(fields) if family == "transgan" else _read_text(fields, family)
    fields.finish()
    return shape


def _read_text(fields: Fields, family: str) -> TextShape:
    hidden_size = fields.integer("hidden_size")
    num_heads = fields.integer("num_heads")
    llama = family == "llama"
    options: dict[str, Any] = {
        key: fields.integer(key, minimum=0, default=0) for key in _OPTIONAL_FIGURES
    }
    swiglu = -(-8 * hidden_size // (3 * SWIGLU_MULTIPLE)) * SWIGLU_MULTIPLE
    return TextShape(
        family="llama" if llama else "gpt2",
        num_layers=fields.integer("num_layers"),
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_key_value_heads=fields.integer("num_key_value_heads", default=num_heads),
        feed_forward_size=fields.integer(
            "feed_forward_size", default=swiglu if llama else FEED_FORWARD_FACTOR * hidden_size
        ),
        sequence_length=fields.integer("sequence_length"),
        vocab_size=fields.integer("vocab_size", minimum=2),
        tied_embedding=fields.flag("tied_embedding", default=not llama),
        **options,
    )


def _read_image(fields: Fields) -> ImageShape:
    return ImageShape(
        depth=fields.integers("depth"),
        hidden_size=fields.integer("hidden_size"),
        num_heads=fields.integer("num_heads"),
        bottom_width=fields.integer("bottom_width"),
        latent_size=fields.integer("latent_size", default=LATENT_SIZE),
        window_size=fields.integer("window_size", default=WINDOW_SIZE),
    )
