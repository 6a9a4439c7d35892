"""A model's figures: from the experiment file's keys, or from a Hugging Face ``config.json``."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

from amp_ray.inputs.config_json import config_figures
from amp_ray.inputs.experiment_file import ModelSection
from amp_ray.models.model import MOST_LAYERS, BlockFigures, ModelShape
from amp_ray.units import GIGA, counted

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
    "query_key_norm",
    "post_norms",
)
"""Figures of newer decoders."""

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
_ANY_FAMILY: Final = ("config", "family", "layer_list", "not_counted")

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

_VIT: Final = {"image_size": 224, "patch_size": 16, "num_classes": 1000}  # of ViT-B/16 on ImageNet

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
        given = config_figures(config_text, str(section.config)) | given
    family: str | None = given.get("family")
    if family is None:
        raise ValueError(
            f"model needs 'family' ({', '.join(list(_NEEDED)[:-1])} or {list(_NEEDED)[-1]}) "
            "or 'config' (a Hugging Face config.json)"
        )
    _check_figures(given, family)
    if family in _SHAPES:
        return _SHAPES[family](given)
    hidden, heads = given["hidden_size"], given["num_heads"]
    feed_forward = given.get("feed_forward_size", _feed_forward(family, hidden))
    return ModelShape(
        family=family,
        num_layers=given["num_layers"],
        hidden_size=hidden,
        num_heads=heads,
        sequence_length=given["sequence_length"],
        vocab_size=given["vocab_size"],
        num_key_value_heads=given.get("num_key_value_heads", heads),
        feed_forward_size=feed_forward,
        tied_embedding=given.get("tied_embedding", family == "gpt2"),
        **_decoder(given, feed_forward),
    )


def _decoder(given: Mapping[str, Any], feed_forward: int) -> dict[str, Any]:
    """Return the figures of newer decoders; refuse those that do not fit each other.

    Args:
        given: All figures.
        feed_forward: Inner width of experts that have none of their own.
    """
    found = {key: given[key] for key in (*_DECODER, "not_counted") if given.get(key)}
    if "num_experts" in found:
        found.setdefault("expert_feed_forward_size", feed_forward)
    for first, *others in (_EXPERTS, _LATENT):
        lacking = [key for key in others if key not in found]
        if first in found and lacking:
            raise ValueError(
                f"{first} {found[first]} needs {', '.join(others)}; missing: {', '.join(lacking)}"
            )
    alone = [
        key
        for key in found
        if (key in (*_EXPERTS, *_OF_EXPERTS) and "num_experts" not in found)
        or (key in (*_LATENT[2:], "query_rank") and "key_value_rank" not in found)
    ]
    if alone:
        needed = "num_experts" if alone[0] in (*_EXPERTS, *_OF_EXPERTS) else "key_value_rank"
        raise ValueError(f"{alone[0]} {found[alone[0]]} needs {needed}, which is missing")
    if found.get("experts_per_token", 0) > found.get("num_experts", 0):
        raise ValueError(
            f"experts_per_token is {found['experts_per_token']}; expected at most num_experts "
            f"{found['num_experts']}"
        )
    if "attention_windows" in found:
        found["attention_windows"] = tuple(found["attention_windows"])
    return found


def _vit(given: Mapping[str, Any]) -> ModelShape:
    """Return the figures of a vision transformer: patches in a row, and a token for the class."""
    figures = {**_VIT, **{key: given[key] for key in _VIT if key in given}}
    if figures["image_size"] % figures["patch_size"]:
        raise ValueError(
            f"image_size {figures['image_size']} is not a multiple of patch_size "
            f"{figures['patch_size']}"
        )
    hidden, side = given["hidden_size"], figures["image_size"] // figures["patch_size"]
    return replace(
        _NO_TEXT,
        family="vit",
        num_layers=given["num_layers"],
        hidden_size=hidden,
        num_heads=given["num_heads"],
        num_key_value_heads=given["num_heads"],
        sequence_length=side**2 + 1,
        feed_forward_size=given.get("feed_forward_size", _feed_forward("vit", hidden)),
        **figures,
    )


def _transgan(given: Mapping[str, Any]) -> ModelShape:
    """Return the figures of the TransGAN generator."""
    num_layers = sum(given["depth"])
    if num_layers > MOST_LAYERS:
        raise ValueError(f"depth adds up to {num_layers}; expected at most {MOST_LAYERS} blocks")
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
    "vit": _vit,
    "blocks": _block_list,
}


def _check_figures(given: Mapping[str, Any], family: str) -> None:
    """Refuse a family that is unknown, and figures that it lacks or has no use for."""
    if family not in _NEEDED:
        raise ValueError(f"family {family!r} is unknown; known: {', '.join(_NEEDED)}")
    needed, optional = _NEEDED[family], _OPTIONAL[family]
    missing = [key for key in needed if key not in given]
    if missing:
        message = f"family {family!r} needs {', '.join(needed)}; missing: {', '.join(missing)}"
        raise ValueError(message)
    useless = [key for key in given if key not in needed + optional + _ANY_FAMILY]
    if useless:
        raise ValueError(
            f"family {family!r} has no {', '.join(useless)}; its figures are "
            f"{', '.join(needed + optional)}"
        )


def _feed_forward(family: str, hidden: int) -> int:
    """Return the feed-forward width that the family uses when none is given."""
    if family == "llama":
        return -(-8 * hidden // 3 // _GATED_MULTIPLE) * _GATED_MULTIPLE
    return 4 * hidden
