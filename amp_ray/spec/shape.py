"""A model's figures: from the experiment file's keys, or from a Hugging Face ``config.json``."""

import json
from collections.abc import Mapping
from typing import Any

from amp_ray.spec.experiment_file import ModelSection
from amp_ray.spec.model import ModelShape

_HUGGING_FACE_KEYS: Mapping[str, tuple[str, ...]] = {
    "num_layers": ("num_hidden_layers", "n_layer"),
    "hidden_size": ("hidden_size", "n_embd"),
    "num_heads": ("num_attention_heads", "n_head"),
    "sequence_length": ("max_position_embeddings", "n_positions", "n_ctx"),
    "vocab_size": ("vocab_size",),
    "num_key_value_heads": ("num_key_value_heads",),
    "feed_forward_size": ("intermediate_size", "n_inner"),
    "tied_embedding": ("tie_word_embeddings",),
}

_HUGGING_FACE_FAMILIES: Mapping[str, str] = {
    "gpt2": "gpt2",
    "gpt_neox": "gpt2",
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "llama",
    "qwen3": "llama",
}

_LANGUAGE_MODEL = ("num_layers", "hidden_size", "num_heads", "sequence_length", "vocab_size")
_TRANSGAN = ("hidden_size", "num_heads", "depth", "bottom_width")
_LATENT_SIZE = 512
"""Width of TransGAN's random input: times 81 x 1024, the 42.5 M weights of its first layer."""

_WINDOW_SIZE = 16
"""TransGAN attends within windows of 16 x 16 tokens where the picture is large."""

_GATED_MULTIPLE = 256
"""Llama rounds its 8/3 hidden feed-forward width up to a multiple of this."""


def model_shape(section: ModelSection, config_text: str | None = None) -> ModelShape:
    """Return the figures of a model.

    Args:
        section: The ``model`` mapping; its keys win over the configuration's.
        config_text: Text of a Hugging Face ``config.json``, where ``config`` names one.

    Raises:
        ValueError: If a figure is missing, or the configuration's architecture is not supported.
    """
    given = {key: value for key, value in section.model_dump().items() if value is not None}
    if config_text is not None:
        given = _from_config(config_text) | given
    family = given.get("family")
    if family is None:
        message = (
            "model needs 'family' (gpt2, llama or transgan) "
            "or 'config' (a Hugging Face config.json)"
        )
        raise ValueError(message)
    if family == "transgan":
        return _transgan(given)
    _require(given, _LANGUAGE_MODEL, family)
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
    _require(given, _TRANSGAN, "transgan")
    return ModelShape(
        family="transgan",
        num_layers=sum(given["depth"]),
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


def _require(given: Mapping[str, Any], keys: tuple[str, ...], family: str) -> None:
    """Refuse a model whose figures are incomplete."""
    missing = [key for key in keys if key not in given]
    if missing:
        message = f"family {family!r} needs {', '.join(keys)}; missing: {', '.join(missing)}"
        raise ValueError(message)


def _feed_forward(family: str, hidden: int) -> int:
    """Return the feed-forward width that the family uses when none is given."""
    if family == "llama":
        return -(-8 * hidden // 3 // _GATED_MULTIPLE) * _GATED_MULTIPLE
    return 4 * hidden


def _from_config(text: str) -> dict[str, Any]:
    """Read the figures of a Hugging Face configuration under their own names."""
    try:
        config = json.loads(text)
    except json.JSONDecodeError as error:
        message = f"the model configuration is not JSON: line {error.lineno}: {error.msg}"
        raise ValueError(message) from None
    if not isinstance(config, dict):
        message = f"the model configuration must be a JSON object, found {type(config).__name__}"
        raise ValueError(message)  # noqa: TRY004 - the file's content is wrong, not a caller's type
    kind = str(config.get("model_type"))
    if kind not in _HUGGING_FACE_FAMILIES:
        known = ", ".join(_HUGGING_FACE_FAMILIES)
        message = f"model_type {kind!r} of the model configuration is not supported; known: {known}"
        raise ValueError(message)
    found: dict[str, Any] = {"family": _HUGGING_FACE_FAMILIES[kind]}
    for key, names in _HUGGING_FACE_KEYS.items():
        value = next((config[name] for name in names if config.get(name) is not None), None)
        if value is not None:
            found[key] = value
    return found
