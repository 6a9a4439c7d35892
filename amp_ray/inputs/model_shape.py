"""A model's figures: from its keys in an experiment file, or a Hugging Face ``config.json``."""

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Any, Final

from pydantic import Field, create_model

from amp_ray.errors import InputError, Mistakes, Where, shown
from amp_ray.inputs.section import Count, Flag, Index, Name, Positive, Section, Text, Title
from amp_ray.inputs.strict_text import parse_json
from amp_ray.models.model import FOR_PEOPLE, MOST_LAYERS, BlockFigures, LayerList, ModelShape
from amp_ray.units import GIGA, counted

_Amount = Annotated[float, Field(ge=0, le=1e15, allow_inf_nan=False, strict=True)]
Layers = Annotated[int, Field(ge=1, le=MOST_LAYERS, strict=True)]


class BlockSection(Section):
    """One entry of ``model.blocks``: ``repeat`` equal blocks; figures are per sample."""

    name: Name
    """Name in tables and messages."""
    repeat: Layers = 1
    """Number of equal blocks in a row."""
    parameters: _Amount
    """Number of parameters of one block."""
    forward_gflops: _Amount
    """10^9 floating-point operations of the forward pass, two per multiply-add; the backward pass
    has twice as many."""
    activation_elements: _Amount
    """Elements kept for the backward pass; 2 bytes each at fp16 and bf16, 4 at fp32."""
    boundary_elements: Positive
    """Elements sent to the next block."""
    sharded: Flag = False
    """Whether tensor parallelism divides parameters, work and activations, with an all-reduce of
    `boundary_elements` in each pass; otherwise every rank does all the work."""


class ModelKeys(Section):
    """``model``: a family with its figures, or a Hugging Face ``config.json``."""

    name: Title | None = None
    """Name in tables and reports, such as `Qwen/Qwen3-8B`. Default: `model_type` of `config`, else
    the family."""
    config: Text | None = None
    """A Hugging Face `config.json`. Families: gpt2, llama, t5, vit."""
    layer_list: LayerList | None = None
    """List of layers in which `bounds` count. Families: gpt2, transgan; others
    `runtime` only.
    Default: the runtime's."""


_FIGURES: Final[Mapping[str, Any]] = {
    "family": Text,
    "num_layers": Layers,
    "depth": Annotated[list[Index], Field(min_length=1, max_length=16)],
    "num_decoder_layers": Layers,
    "blocks": Annotated[list[BlockSection], Field(min_length=1, max_length=MOST_LAYERS)],
    "first_dense_layers": Index,
    "mtp_layers": Index,
    "attention_windows": Annotated[list[Index], Field(min_length=1)],
}
"""Types of the figures that are neither a count of at least 1 nor a flag."""

if TYPE_CHECKING:

    class ModelSection(ModelKeys):
        """The keys of `ModelKeys`, and the figures of `ModelShape`."""

        def __init__(self, **figures: object) -> None: ...

else:
    ModelSection = create_model(
        "ModelSection",
        __base__=ModelKeys,
        **{
            figure.name: (
                _FIGURES.get(figure.name, Flag if figure.type is bool else Count) | None,
                None,
            )
            for figure in fields(ModelShape)
            if figure.name not in FOR_PEOPLE
        },
    )


_LANGUAGE_MODEL: Final = (
    "num_layers",
    "hidden_size",
    "num_heads",
    "sequence_length",
    "vocab_size",
)
_NEEDED: Final[Mapping[str, tuple[str, ...]]] = {
    "gpt2": _LANGUAGE_MODEL,
    "llama": _LANGUAGE_MODEL,
    "transgan": ("hidden_size", "num_heads", "depth", "bottom_width"),
    "t5": _LANGUAGE_MODEL,
    "wide_resnet": ("num_layers",),
    "vit": ("num_layers", "hidden_size", "num_heads"),
    "blocks": ("blocks",),
}
_EXPERTS: Final = ("num_experts", "experts_per_token", "expert_feed_forward_size")
_LATENT: Final = ("key_value_rank", "head_size", "rotary_head_size", "value_head_size")
_OF_EXPERTS: Final = ("shared_feed_forward_size", "first_dense_layers")
_DECODER: Final = (
    *_EXPERTS,
    *_OF_EXPERTS,
    *_LATENT,
    "query_rank",
    "attention_windows",
    "attention_bias",
    "expert_bias",
    "clamped_activation",
    "scaled_rotation",
    "query_key_norm",
    "post_norms",
    "mtp_layers",
)
"""Figures of newer decoder families."""

_OPTIONAL: Final[Mapping[str, tuple[str, ...]]] = {
    "gpt2": ("feed_forward_size", "tied_embedding", *_EXPERTS, *_OF_EXPERTS),
    "llama": ("feed_forward_size", "num_key_value_heads", "tied_embedding", *_DECODER),
    "transgan": ("latent_size", "window_size"),
    "t5": (
        "num_decoder_layers",
        "decoder_sequence_length",
        "head_size",
        "feed_forward_size",
        "gated_feed_forward",
        "tied_embedding",
    ),
    "wide_resnet": ("width_factor", "base_channels", "image_size", "num_classes"),
    "vit": ("feed_forward_size", "image_size", "patch_size", "num_classes"),
    "blocks": ("sequence_length",),
}
_ANY_FAMILY: Final = ("config", "family", "layer_list", *FOR_PEOPLE)

_GATED_MULTIPLE: Final = 256
"""Llama rounds its feed-forward width, 8/3 of the hidden size, up to a multiple of this."""

_DEFAULTS: Final[Mapping[str, Mapping[str, Any]]] = {
    "gpt2": {"tied_embedding": True},
    "t5": {"tied_embedding": True},
    # Length of the random input: times 81 x 1024, it gives the 42.5 M weights of the first layer.
    # Large pictures use windows of 16 x 16 tokens.
    "transgan": {"latent_size": 512, "window_size": 16},
    # Wide-ResNet-50-2, ViT-B/16, both on ImageNet
    "wide_resnet": {
        "width_factor": 2,
        "base_channels": 64,
        "image_size": 224,
        "num_classes": 1000,
    },
    "vit": {"image_size": 224, "patch_size": 16, "num_classes": 1000},
}
"""Figures of a family that a file may leave out, besides those that follow from others."""


def model_shape(section: ModelSection, config_text: str | None = None) -> ModelShape:
    """Return the figures of a model; keys of the section have priority over the configuration.

    A ``ValueError`` names a missing figure or one that the family does not have.
    """
    figures = {key: value for key, value in section.model_dump().items() if value is not None}
    if config_text is not None:
        file = str(section.config)
        stated, of_config = figures, config_figures(config_text, file)
        figures = of_config | stated
        _check_complete(of_config["name"], file, figures)
        length = figures.get("sequence_length")
        if length and "sequence_length" not in stated:
            most = f"sequence_length {length}, the most of the model's configuration"
            figures["assumed"] = (f"{most}: set model.sequence_length to that of your training",)
    family: str | None = figures.get("family")
    if family is None:
        raise ValueError(
            f"model needs 'family' ({', '.join(list(_NEEDED)[:-1])} or {list(_NEEDED)[-1]}) "
            "or 'config' (a Hugging Face config.json)"
        )
    _check_figures(figures, family)
    named = {key: value for key, value in figures.items() if key not in {"config", "layer_list"}}
    figures = {**_DEFAULTS.get(family, {}), **named}
    if "num_heads" in figures:
        figures.setdefault("num_key_value_heads", figures["num_heads"])
        figures.setdefault("feed_forward_size", _feed_forward(family, figures["hidden_size"]))
    if family in {"gpt2", "llama"}:
        _complete_experts(figures)
    elif family in _COMPLETE:
        _COMPLETE[family](figures)
    lists = {key: tuple(value) for key, value in figures.items() if isinstance(value, list)}
    return ModelShape(**figures | lists)


def _check_complete(kind: str, file: str, figures: Mapping[str, Any]) -> None:
    """Refuse a configuration that lacks a figure which the file of the experiment does not set."""
    keys = _KEYS.get(kind, _LLAMA_KEYS)
    mistakes = Mistakes()
    for figure in _NEEDED[figures["family"]]:
        if figure not in figures and figure in keys:
            with mistakes.collect():
                where = Where(file=file, key=" or ".join(keys[figure]))
                raise InputError(f"key is missing; add it, or set model.{figure}", where=where)
    mistakes.check()


def _complete_experts(figures: dict[str, Any]) -> None:
    """Add the default width of experts; refuse figures that do not fit."""
    present = [key for key in _DECODER if figures.get(key)]
    if "num_experts" in present and "expert_feed_forward_size" not in present:
        figures["expert_feed_forward_size"] = figures["feed_forward_size"]
        present.append("expert_feed_forward_size")
    for first, *needed in (_EXPERTS, _LATENT):
        lacking = [key for key in needed if key not in present]
        if first in present and lacking:
            raise ValueError(
                f"{first} {figures[first]} needs {', '.join(needed)}; missing: {', '.join(lacking)}"
            )
    of_experts = (*_EXPERTS, *_OF_EXPERTS)
    alone = [
        key
        for key in present
        if (key in of_experts and "num_experts" not in present)
        or (key in (*_LATENT[2:], "query_rank") and "key_value_rank" not in present)
    ]
    if alone:
        needed_key = "num_experts" if alone[0] in of_experts else "key_value_rank"
        raise ValueError(f"{alone[0]} {figures[alone[0]]} needs {needed_key}, which is missing")
    if figures.get("experts_per_token", 0) > figures.get("num_experts", 0):
        raise ValueError(
            f"experts_per_token is {figures['experts_per_token']}; expected at most num_experts "
            f"{figures['num_experts']}"
        )


def _complete_vit(figures: dict[str, Any]) -> None:
    """Add the tokens of a sample: one per patch, and one for the class."""
    image, patch = figures["image_size"], figures["patch_size"]
    if image % patch:
        raise ValueError(f"image_size {image} is not a multiple of patch_size {patch}")
    figures["sequence_length"] = (image // patch) ** 2 + 1


def _complete_transgan(figures: dict[str, Any]) -> None:
    """Add the total number of blocks of a generator, and the tokens of its lowest level."""
    num_layers = sum(figures["depth"])
    if num_layers > MOST_LAYERS:
        raise ValueError(f"depth adds up to {num_layers}; expected at most {MOST_LAYERS} blocks")
    figures["num_layers"], figures["sequence_length"] = num_layers, figures["bottom_width"] ** 2


def _complete_t5(figures: dict[str, Any]) -> None:
    """Set the decoder's length to the encoder's, unless the file sets it."""
    figures.setdefault("num_decoder_layers", figures["num_layers"])
    figures.setdefault("decoder_sequence_length", figures["sequence_length"])


def _complete_blocks(figures: dict[str, Any]) -> None:
    """Convert the entries of a list of blocks, and count the blocks."""
    figures["blocks"] = [_block(**block) for block in figures["blocks"]]
    figures["num_layers"] = sum(block.repeat for block in figures["blocks"])
    if figures["num_layers"] > MOST_LAYERS:
        number = counted(figures["num_layers"], "block")
        raise ValueError(f"blocks are {number}; expected at most {MOST_LAYERS}")


def _block(*, forward_gflops: float, parameters: float, **figures: Any) -> BlockFigures:  # noqa: ANN401 - by field
    return BlockFigures(
        forward_flops=forward_gflops * GIGA, parameters=round(parameters), **figures
    )


_COMPLETE: Final[Mapping[str, Callable[[dict[str, Any]], None]]] = {
    "transgan": _complete_transgan,
    "t5": _complete_t5,
    "vit": _complete_vit,
    "blocks": _complete_blocks,
}
"""How to complete the figures of a file, by family."""


def _check_figures(figures: Mapping[str, Any], family: str) -> None:
    """Refuse an unknown family, and figures that it lacks or does not have."""
    if family not in _NEEDED:
        raise ValueError(f"family {family!r} is unknown; known: {', '.join(_NEEDED)}")
    needed, optional = _NEEDED[family], _OPTIONAL[family]
    missing = [key for key in needed if key not in figures]
    if missing:
        message = f"family {family!r} needs {', '.join(needed)}; missing: {', '.join(missing)}"
        raise ValueError(message)
    useless = [key for key in figures if key not in needed + optional + _ANY_FAMILY]
    if useless:
        raise ValueError(
            f"family {family!r} has no {', '.join(useless)}; its figures are "
            f"{', '.join(needed + optional)}"
        )


def _feed_forward(family: str, hidden: int) -> int:
    """Return the family's feed-forward width for files that do not set it."""
    if family == "llama":
        return -(-8 * hidden // 3 // _GATED_MULTIPLE) * _GATED_MULTIPLE
    return 4 * hidden


# ------------------------------------------------------------- Hugging Face's config.json

_FAMILIES: Final[Mapping[str, str]] = {
    "gpt2": "gpt2",
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "llama",
    "qwen3": "llama",
    "phi3": "llama",
    "gemma2": "llama",
    "mixtral": "llama",
    "qwen3_moe": "llama",
    "deepseek_v2": "llama",
    "deepseek_v3": "llama",
    "gpt_oss": "llama",
    "t5": "t5",
    "vit": "vit",
}

_DECODER_KEYS: Final[Mapping[str, tuple[str, ...]]] = {
    "num_layers": ("num_hidden_layers", "n_layer"),
    "hidden_size": ("hidden_size", "n_embd"),
    "num_heads": ("num_attention_heads", "n_head"),
    "sequence_length": ("max_position_embeddings", "n_positions", "n_ctx"),
    "vocab_size": ("vocab_size",),
    "num_key_value_heads": ("num_key_value_heads",),
    "feed_forward_size": ("intermediate_size", "n_inner"),
    "tied_embedding": ("tie_word_embeddings",),
}

_LLAMA_KEYS: Final = {**_DECODER_KEYS, "attention_bias": ("attention_bias",)}
_EXPERT_KEYS: Final[Mapping[str, tuple[str, ...]]] = {
    "num_experts": ("num_local_experts", "num_experts", "n_routed_experts"),
    "experts_per_token": ("num_experts_per_tok", "experts_per_token"),
    "expert_feed_forward_size": ("moe_intermediate_size", "intermediate_size"),
}
_LATENT_KEYS: Final[Mapping[str, tuple[str, ...]]] = {
    "key_value_rank": ("kv_lora_rank",),
    "query_rank": ("q_lora_rank",),
    "head_size": ("qk_nope_head_dim",),
    "rotary_head_size": ("qk_rope_head_dim",),
    "value_head_size": ("v_head_dim",),
}
_DEEPSEEK_KEYS: Final = {
    **_LLAMA_KEYS,
    **_EXPERT_KEYS,
    **_LATENT_KEYS,
    "first_dense_layers": ("first_k_dense_replace",),
}

_KEYS: Final[Mapping[str, Mapping[str, tuple[str, ...]]]] = {
    "gpt2": {key: names for key, names in _DECODER_KEYS.items() if key != "num_key_value_heads"},
    "mixtral": {**_LLAMA_KEYS, **_EXPERT_KEYS},
    "qwen3_moe": {**_LLAMA_KEYS, **_EXPERT_KEYS},
    "gpt_oss": {**_LLAMA_KEYS, **_EXPERT_KEYS},
    "deepseek_v2": _DEEPSEEK_KEYS,
    "deepseek_v3": {**_DEEPSEEK_KEYS, "mtp_layers": ("num_nextn_predict_layers",)},
    "t5": {
        "num_layers": ("num_layers",),
        "num_decoder_layers": ("num_decoder_layers",),
        "hidden_size": ("d_model",),
        "num_heads": ("num_heads",),
        "head_size": ("d_kv",),
        "feed_forward_size": ("d_ff",),
        "sequence_length": ("n_positions",),
        "vocab_size": ("vocab_size",),
        "tied_embedding": ("tie_word_embeddings",),
    },
    "vit": {
        "num_layers": ("num_hidden_layers",),
        "hidden_size": ("hidden_size",),
        "num_heads": ("num_attention_heads",),
        "feed_forward_size": ("intermediate_size",),
        "image_size": ("image_size",),
        "patch_size": ("patch_size",),
        "num_classes": ("num_labels",),
    },
}
"""Keys of a configuration for each of our figures, by ``model_type``; the first one that exists
counts. Types without an entry use llama's."""

_FIXED: Final[Mapping[str, Mapping[str, Any]]] = {
    "qwen2": {"attention_bias": True},
    "qwen3": {"query_key_norm": True},
    "qwen3_moe": {"query_key_norm": True},
    "gemma2": {"post_norms": True, "tied_embedding": True},
    "gpt_oss": dict.fromkeys(
        ("attention_bias", "expert_bias", "clamped_activation", "scaled_rotation"), True
    ),
}
"""Figures that are fixed for an architecture, unless its configuration sets them."""

_NOT_COUNTED: Final[Mapping[str, tuple[str, ...]]] = {
    "gemma2": ("soft-capping of scores and logits",),
    "gpt_oss": ("attention sinks", "biases of the output projection and the router"),
}

_OTHER_PARTS: Final = (
    "expert",
    "moe_",
    "add_cross_attention",
    "is_encoder_decoder",
    "kv_lora_rank",
    "q_lora_rank",
)
"""Parts of keys that turn a configuration into another architecture than its ``model_type``."""

_WITH_PARTS: Final = ("mixtral", "qwen3_moe", "deepseek_v2", "deepseek_v3", "gpt_oss")
"""Architectures that have experts."""

_READ: Final[Mapping[str, tuple[str, ...]]] = {
    "t5": ("is_encoder_decoder", "add_cross_attention"),
    "deepseek_v2": ("n_shared_experts", "moe_layer_freq"),
    "deepseek_v3": ("n_shared_experts", "moe_layer_freq"),
}
"""Keys with such parts that are allowed for an architecture, besides its figures."""

_PERIODS: Final[Mapping[str, tuple[bool, ...]]] = {
    "mistral": (True,),
    "mixtral": (True,),
    "phi3": (True,),
    "gemma2": (True, False),
    "gpt_oss": (True, False),
}
"""Which blocks attend within ``sliding_window``: a pattern that repeats from the first block on."""

_FLAGS: Final = ("tied_embedding", "attention_bias")
_LARGEST_FIGURE: Final = 10**9
_RGB: Final = 3


def config_figures(text: str, file: str) -> dict[str, Any]:
    """Read the figures of a configuration, under our names; the model's is its ``model_type``.

    Raises:
        InputError: If the architecture is unknown, a figure has the wrong type, or a key turns the
            model into another architecture.
    """
    config = parse_json(text, file=file)
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in _FAMILIES:
        message = (
            f"found {shown(kind)}; expected one of {', '.join(_FAMILIES)}. Set it to the nearest "
            "(llama, or qwen3_moe with experts), or describe the blocks by model.blocks"
        )
        raise InputError(message, where=Where(file=file, key="model_type"))
    keys = _KEYS.get(kind, _LLAMA_KEYS)
    _check_parts(config, file, allowed=(*_READ.get(kind, ()), *sum(keys.values(), ())))
    figures: dict[str, Any] = {}
    mistakes = Mistakes()
    for key, names in keys.items():
        name = next((name for name in names if config.get(name) is not None), None)
        if name is not None and (config[name] or key in _DECODER_KEYS):
            with mistakes.collect():
                figures[key] = _figure(config[name], key, Where(file=file, key=name))
    mistakes.check()
    figures = {"name": kind, "family": _FAMILIES[kind], **_FIXED.get(kind, {}), **figures}
    if kind == "t5":
        figures["gated_feed_forward"] = str(config.get("feed_forward_proj")).startswith("gated-")
    elif kind == "vit":
        _read_vit(config, figures, file)
    elif figures["family"] == "llama":
        _read_decoder(config, kind, figures, file)
    return figures


def _read_vit(config: Mapping[str, Any], figures: dict[str, Any], file: str) -> None:
    """Add the number of classes; refuse pictures without exactly three colour channels."""
    names = config.get("id2label")
    if isinstance(names, dict) and names:
        figures.setdefault("num_classes", len(names))
    if config.get("num_channels", _RGB) != _RGB:
        message = f"found {shown(config['num_channels'])}; expected {_RGB}"
        raise InputError(message, where=Where(file=file, key="num_channels"))


def _read_decoder(config: Mapping[str, Any], kind: str, figures: dict[str, Any], file: str) -> None:
    """Add the figures that follow from several keys of a llama-like decoder."""
    if "key_value_rank" not in figures:
        figures |= _head_size(config, figures, file)
    windows = _windows(config, kind, figures.get("num_layers", 0), file)
    if any(windows):
        figures["attention_windows"] = list(windows)
    shared = config.get("n_shared_experts")
    if shared and "expert_feed_forward_size" in figures:
        where = Where(file=file, key="n_shared_experts")
        count = _figure(shared, "n_shared_experts", where)
        figures["shared_feed_forward_size"] = count * figures["expert_feed_forward_size"]
    if "num_experts" in figures:
        _check_all_have_experts(config, file)
    if kind in _NOT_COUNTED:
        figures["not_counted"] = _NOT_COUNTED[kind]


def _head_size(config: Mapping[str, Any], figures: Mapping[str, Any], file: str) -> dict[str, int]:
    """Return the width of a head if it does not follow from the hidden size."""
    size = config.get("head_dim")
    if size is None:
        return {}
    checked = _figure(size, "head_dim", Where(file=file, key="head_dim"))
    hidden, heads = figures.get("hidden_size", 0), figures.get("num_heads", 0)
    return {} if checked * heads == hidden else {"head_size": checked}


def _windows(config: Mapping[str, Any], kind: str, num_layers: int, file: str) -> tuple[int, ...]:
    """Return the window of each block, or of a period of blocks; 0 for all tokens."""
    window, types = config.get("sliding_window"), config.get("layer_types")
    if window is None or config.get("use_sliding_window") is False:
        return ()
    size = _figure(window, "sliding_window", Where(file=file, key="sliding_window"))
    if types is not None:
        sizes = {"sliding_attention": size, "full_attention": 0}
        if not isinstance(types, list) or any(kind not in sizes for kind in types):
            message = f"found {shown(types)}; expected a list of {' or '.join(sizes)}"
            raise InputError(message, where=Where(file=file, key="layer_types"))
        windows = tuple(sizes[kind] for kind in types)
        return windows[:1] if len(set(windows)) == 1 else windows
    if kind.startswith("qwen"):
        first = config.get("max_window_layers")
        full = first if isinstance(first, int) else num_layers
        return tuple(size if index >= full else 0 for index in range(num_layers))
    return tuple(size if slides else 0 for slides in _PERIODS.get(kind, ()))


def _check_all_have_experts(config: Mapping[str, Any], file: str) -> None:
    """Refuse a mix of dense blocks and blocks with experts."""
    expected: dict[str, object] = {
        "moe_layer_freq": 1,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    for key, value in expected.items():
        if config.get(key, value) not in (value, None):
            message = (
                f"found {shown(config[key])}; expected {value}: all blocks have experts, but for "
                "the first ones (first_k_dense_replace)"
            )
            raise InputError(message, where=Where(file=file, key=key))


def _check_parts(config: Mapping[str, Any], file: str, allowed: tuple[str, ...]) -> None:
    """Refuse keys of unsupported parts, since the plan would be for another model."""
    mistakes = Mistakes()
    for key, value in config.items():
        is_off = value in (None, False, 0, [], {}) or (value == 1 and key.endswith("_experts"))
        if not is_off and key not in allowed and any(part in key for part in _OTHER_PARTS):
            with mistakes.collect():
                message = (
                    f"found {shown(value)}; model_type {config['model_type']!r} has no such part "
                    f"here: experts and latent attention are planned for {', '.join(_WITH_PARTS)}. "
                    "Set model_type to the nearest, or describe the blocks by model.blocks"
                )
                raise InputError(message, where=Where(file=file, key=key))
    mistakes.check()


def _figure(value: object, key: str, where: Where) -> Any:  # noqa: ANN401 - a flag or a count
    """Return a figure of a configuration; refuse a wrong type."""
    if key in _FLAGS:
        fits, expected = isinstance(value, bool), "true or false"
    else:
        most = MOST_LAYERS if key in {"num_layers", "num_decoder_layers"} else _LARGEST_FIGURE
        fits = isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= most
        expected = f"an integer from 1 to {most:,}"
    if not fits:
        raise InputError(f"found {shown(value)}; expected {expected}", where=where)
    return value
