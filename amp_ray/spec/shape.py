"""A model's figures: from the experiment file's keys, or from a Hugging Face ``config.json``."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

from amp_ray.errors import InputError, Mistakes, Where
from amp_ray.spec.experiment_file import ModelSection
from amp_ray.spec.json_text import parse_json, shown
from amp_ray.spec.model import MOST_LAYERS, BlockFigures, ModelShape
from amp_ray.units import GIGA, counted

_HUGGING_FACE_KEYS: Final[Mapping[str, tuple[str, ...]]] = {
    "num_layers": ("num_hidden_layers", "n_layer"),
    "hidden_size": ("hidden_size", "n_embd"),
    "num_heads": ("num_attention_heads", "n_head"),
    "sequence_length": ("max_position_embeddings", "n_positions", "n_ctx"),
    "vocab_size": ("vocab_size",),
    "num_key_value_heads": ("num_key_value_heads",),
    "feed_forward_size": ("intermediate_size", "n_inner"),
    "tied_embedding": ("tie_word_embeddings",),
}

_T5_KEYS: Final[Mapping[str, str]] = {
    "num_layers": "num_layers",
    "num_decoder_layers": "num_decoder_layers",
    "hidden_size": "d_model",
    "num_heads": "num_heads",
    "head_size": "d_kv",
    "feed_forward_size": "d_ff",
    "sequence_length": "n_positions",
    "vocab_size": "vocab_size",
    "tied_embedding": "tie_word_embeddings",
}

_HUGGING_FACE_FAMILIES: Final[Mapping[str, str]] = {
    "gpt2": "gpt2",
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "llama",
    "qwen3": "llama",
    "t5": "t5",
}

_NOT_COUNTED: Final = (
    "expert",
    "moe_",
    "add_cross_attention",
    "is_encoder_decoder",
    "kv_lora_rank",
    "q_lora_rank",
)
"""Parts of keys of a configuration that make it another architecture than the one it names."""

_ENCODER_DECODER: Final = ("is_encoder_decoder", "add_cross_attention")
"""Those that belong to T5."""

_LARGEST_FIGURE: Final = 10**9

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
    "blocks": ("blocks",),
}
_OPTIONAL: Final[Mapping[str, tuple[str, ...]]] = {
    "gpt2": ("feed_forward_size", "tied_embedding"),
    "llama": ("feed_forward_size", "num_key_value_heads", "tied_embedding"),
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
    "blocks": ("sequence_length",),
}
_ANY_FAMILY: Final = ("config", "family", "layer_list")

_LATENT_SIZE: Final = 512
"""Width of TransGAN's random input: times 81 x 1024, the 42.5 M weights of its first layer."""

_WINDOW_SIZE: Final = 16
"""TransGAN attends within windows of 16 x 16 tokens where the picture is large."""

_GATED_MULTIPLE: Final = 256
"""Llama rounds its 8/3 hidden feed-forward width up to a multiple of this."""

_WIDE_RESNET: Final = {
    "width_factor": 2,
    "base_channels": 64,
    "image_size": 224,
    "num_classes": 1000,
}
"""Of Wide-ResNet-50-2 on ImageNet."""

_NO_TEXT: Final = ModelShape(
    family="",
    num_layers=0,
    hidden_size=0,
    num_heads=0,
    sequence_length=0,
    vocab_size=0,
    num_key_value_heads=0,
    feed_forward_size=0,
    tied_embedding=False,
)
"""What a model without attention and vocabulary has of the figures of those with them."""


def model_shape(section: ModelSection, config_text: str | None = None) -> ModelShape:
    """Return the figures of a model; keys of the section win over those of the configuration.

    A ``ValueError`` says which figure is missing or is none of the family.
    """
    given = {key: value for key, value in section.model_dump().items() if value is not None}
    if config_text is not None:
        given = _from_config(config_text, str(section.config)) | given
    family: str | None = given.get("family")
    if family is None:
        message = (
            f"model needs 'family' ({', '.join(list(_NEEDED)[:-1])} or {list(_NEEDED)[-1]}) "
            "or 'config' (a Hugging Face config.json)"
        )
        raise ValueError(message)
    _check_figures(given, family)
    if family in _SHAPES:
        return _SHAPES[family](given)
    hidden, heads = given["hidden_size"], given["num_heads"]
    return ModelShape(
        family=family,
        num_layers=given["num_layers"],
        hidden_size=hidden,
        num_heads=heads,
        sequence_length=given["sequence_length"],
        vocab_size=given["vocab_size"],
        num_key_value_heads=given.get("num_key_value_heads", heads),
        feed_forward_size=given.get("feed_forward_size", _feed_forward(family, hidden)),
        tied_embedding=given.get("tied_embedding", family == "gpt2"),
    )


def _transgan(given: Mapping[str, Any]) -> ModelShape:
    """Return the figures of the TransGAN generator."""
    num_layers = sum(given["depth"])
    if num_layers > MOST_LAYERS:
        message = f"depth adds up to {num_layers}; expected at most {MOST_LAYERS} blocks"
        raise ValueError(message)
    return ModelShape(
        family="transgan",
        num_layers=num_layers,
        hidden_size=given["hidden_size"],
        num_heads=given["num_heads"],
        sequence_length=given["bottom_width"] ** 2,
        vocab_size=0,
        num_key_value_heads=given["num_heads"],
        feed_forward_size=4 * given["hidden_size"],
        tied_embedding=False,
        depth=tuple(given["depth"]),
        bottom_width=given["bottom_width"],
        latent_size=given.get("latent_size", _LATENT_SIZE),
        window_size=given.get("window_size", _WINDOW_SIZE),
    )


def _t5(given: Mapping[str, Any]) -> ModelShape:
    """Return the figures of an encoder and a decoder."""
    shared = {key: given[key] for key in (*_LANGUAGE_MODEL, *_OPTIONAL["t5"]) if key in given}
    standard = {
        "num_decoder_layers": given["num_layers"],
        "decoder_sequence_length": given["sequence_length"],
        "num_key_value_heads": given["num_heads"],
        "feed_forward_size": _feed_forward("t5", given["hidden_size"]),
        "tied_embedding": True,
    }
    return ModelShape(family="t5", **standard | shared)


def _wide_resnet(given: Mapping[str, Any]) -> ModelShape:
    """Return the figures of a wide residual network."""
    figures = {**_WIDE_RESNET, **{key: given[key] for key in _WIDE_RESNET if key in given}}
    return replace(_NO_TEXT, family="wide_resnet", num_layers=given["num_layers"], **figures)


def _block_list(given: Mapping[str, Any]) -> ModelShape:
    """Return the figures of a list of blocks."""
    blocks = tuple(
        BlockFigures(
            name=block["name"],
            repeat=block["repeat"],
            parameters=round(block["parameters"]),
            forward_flops=block["forward_gflops"] * GIGA,
            activation_elements=block["activation_elements"],
            boundary_elements=block["boundary_elements"],
            sharded=block["sharded"],
        )
        for block in given["blocks"]
    )
    num_layers = sum(block.repeat for block in blocks)
    if num_layers > MOST_LAYERS:
        message = f"blocks are {counted(num_layers, 'block')}; expected at most {MOST_LAYERS}"
        raise ValueError(message)
    return replace(
        _NO_TEXT,
        family="blocks",
        num_layers=num_layers,
        sequence_length=given.get("sequence_length", 0),
        blocks=blocks,
    )


_SHAPES: Final[Mapping[str, Callable[[Mapping[str, Any]], ModelShape]]] = {
    "transgan": _transgan,
    "t5": _t5,
    "wide_resnet": _wide_resnet,
    "blocks": _block_list,
}


def _check_figures(given: Mapping[str, Any], family: str) -> None:
    """Refuse a family that is unknown, and figures that it lacks or has no use for."""
    if family not in _NEEDED:
        message = f"family {family!r} is unknown; known: {', '.join(_NEEDED)}"
        raise ValueError(message)
    needed, optional = _NEEDED[family], _OPTIONAL[family]
    missing = [key for key in needed if key not in given]
    if missing:
        message = f"family {family!r} needs {', '.join(needed)}; missing: {', '.join(missing)}"
        raise ValueError(message)
    useless = [key for key in given if key not in needed + optional + _ANY_FAMILY]
    if useless:
        message = (
            f"family {family!r} has no {', '.join(useless)}; its figures are "
            f"{', '.join(needed + optional)}"
        )
        raise ValueError(message)


def _feed_forward(family: str, hidden: int) -> int:
    """Return the feed-forward width that the family uses when none is given."""
    if family == "llama":
        return -(-8 * hidden // 3 // _GATED_MULTIPLE) * _GATED_MULTIPLE
    return 4 * hidden


def _from_config(text: str, file: str) -> dict[str, Any]:
    """Read the figures of a Hugging Face configuration under our names."""
    config = parse_json(text, file=file)
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in _HUGGING_FACE_FAMILIES:
        known = ", ".join(_HUGGING_FACE_FAMILIES)
        message = f"found {shown(kind)}; expected one of {known}"
        raise InputError(message, where=Where(file=file, key="model_type"))
    family = _HUGGING_FACE_FAMILIES[kind]
    _check_parts(config, file, allowed=_ENCODER_DECODER if family == "t5" else ())
    found: dict[str, Any] = {"family": family}
    mistakes = Mistakes()
    for key in (*_LANGUAGE_MODEL, *_OPTIONAL[family]):
        names = (_T5_KEYS.get(key, ""),) if family == "t5" else _HUGGING_FACE_KEYS[key]
        name = next((name for name in names if config.get(name) is not None), None)
        if name is not None:
            with mistakes.collect():
                found[key] = _figure(config[name], key, Where(file=file, key=name))
    mistakes.check()
    if family == "t5":
        found["gated_feed_forward"] = str(config.get("feed_forward_proj")).startswith("gated-")
    _check_head_size(config, found, file)
    return found


def _check_parts(config: Mapping[str, Any], file: str, allowed: tuple[str, ...]) -> None:
    """Refuse what no family here builds: planned without it, the model would be another one."""
    mistakes = Mistakes()
    for key, value in config.items():
        is_off = value in (None, False, 0, [], {}) or (value == 1 and key.endswith("_experts"))
        if not is_off and key not in allowed and any(part in key for part in _NOT_COUNTED):
            with mistakes.collect():
                message = (
                    f"found {shown(value)}; only dense decoders are planned: no experts, no cross "
                    "attention, no latent attention"
                )
                raise InputError(message, where=Where(file=file, key=key))
    mistakes.check()


def _figure(value: object, key: str, where: Where) -> object:
    """Return a figure of a configuration if it is of the right type."""
    if key == "tied_embedding":
        fits, expected = isinstance(value, bool), "true or false"
    else:
        most = MOST_LAYERS if key in {"num_layers", "num_decoder_layers"} else _LARGEST_FIGURE
        fits = isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= most
        expected = f"an integer from 1 to {most:,}"
    if not fits:
        message = f"found {shown(value)}; expected {expected}"
        raise InputError(message, where=where)
    return value


def _check_head_size(config: Mapping[str, Any], found: Mapping[str, Any], file: str) -> None:
    """Refuse heads whose sizes do not add up to the hidden size, which no family here builds."""
    hidden, heads = found.get("hidden_size"), found.get("num_heads")
    size = config.get("head_dim")
    fits = isinstance(size, int) and hidden and heads and size * heads == hidden
    if size is not None and hidden and heads and not fits:
        message = f"found {shown(size)}; expected hidden_size {hidden} / num_heads {heads}"
        raise InputError(message, where=Where(file=file, key="head_dim"))
