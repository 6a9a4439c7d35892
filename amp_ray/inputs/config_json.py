"""The figures of a Hugging Face ``config.json`` under our names."""

from collections.abc import Mapping
from typing import Any, Final

from amp_ray.errors import InputError, Mistakes, Where, shown
from amp_ray.inputs.json_text import parse_json
from amp_ray.models.model import MOST_LAYERS
from amp_ray.units import counted

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
    "deepseek_v3": _DEEPSEEK_KEYS,
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
"""Names of our figures by ``model_type``, the first of them that is there; others as llama."""

_FIXED: Final[Mapping[str, Mapping[str, Any]]] = {
    "qwen2": {"attention_bias": True},
    "qwen3": {"query_key_norm": True},
    "qwen3_moe": {"query_key_norm": True},
    "gemma2": {"post_norms": True, "tied_embedding": True},
    "gpt_oss": {"attention_bias": True},
}
"""What the architecture has whatever its configuration, unless that says so itself."""

_NOT_COUNTED: Final[Mapping[str, tuple[str, ...]]] = {
    "gemma2": ("soft-capping of scores and logits",),
    "gpt_oss": ("attention sinks", "biases of the output projection, the router and the experts"),
}

_OTHERS: Final = (
    "expert",
    "moe_",
    "add_cross_attention",
    "is_encoder_decoder",
    "kv_lora_rank",
    "q_lora_rank",
)
"""Parts of keys of a configuration that make it another architecture than the one it names."""

_WITH_PARTS: Final = ("mixtral", "qwen3_moe", "deepseek_v2", "deepseek_v3", "gpt_oss")
"""Architectures that have experts."""

_READ: Final[Mapping[str, tuple[str, ...]]] = {
    "t5": ("is_encoder_decoder", "add_cross_attention"),
    "deepseek_v2": ("n_shared_experts", "moe_layer_freq"),
    "deepseek_v3": ("n_shared_experts", "moe_layer_freq"),
}
"""Of those, what an architecture has beside its figures."""

_PERIODS: Final[Mapping[str, tuple[bool, ...]]] = {
    "mistral": (True,),
    "mixtral": (True,),
    "phi3": (True,),
    "gemma2": (True, False),
    "gpt_oss": (True, False),
}
"""Which blocks attend within ``sliding_window``, over and over from the first."""

_FLAGS: Final = ("tied_embedding", "attention_bias")
_LARGEST_FIGURE: Final = 10**9
_RGB: Final = 3


def config_figures(text: str, file: str) -> dict[str, Any]:
    """Read the figures of a configuration under our names.

    Raises:
        InputError: If the architecture is unknown, a figure has the wrong type, or a key makes
            another architecture of it.
    """
    config = parse_json(text, file=file)
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in _FAMILIES:
        message = f"found {shown(kind)}; expected one of {', '.join(_FAMILIES)}"
        raise InputError(message, where=Where(file=file, key="model_type"))
    keys = _KEYS.get(kind, _LLAMA_KEYS)
    _check_parts(config, file, allowed=(*_READ.get(kind, ()), *sum(keys.values(), ())))
    found: dict[str, Any] = {}
    mistakes = Mistakes()
    for key, names in keys.items():
        name = next((name for name in names if config.get(name) is not None), None)
        if name is not None and (config[name] or key in _DECODER_KEYS):
            with mistakes.collect():
                found[key] = _figure(config[name], key, Where(file=file, key=name))
    mistakes.check()
    found = {"family": _FAMILIES[kind], **_FIXED.get(kind, {}), **found}
    if kind == "t5":
        found["gated_feed_forward"] = str(config.get("feed_forward_proj")).startswith("gated-")
    elif kind == "vit":
        _read_vit(config, found, file)
    elif found["family"] == "llama":
        _read_decoder(config, kind, found, file)
    return found


def _read_vit(config: Mapping[str, Any], found: dict[str, Any], file: str) -> None:
    """Add the number of classes; refuse pictures that are not of three colours."""
    names = config.get("id2label")
    if isinstance(names, dict) and names:
        found.setdefault("num_classes", len(names))
    if config.get("num_channels", _RGB) != _RGB:
        message = f"found {shown(config['num_channels'])}; expected {_RGB}"
        raise InputError(message, where=Where(file=file, key="num_channels"))


def _read_decoder(config: Mapping[str, Any], kind: str, found: dict[str, Any], file: str) -> None:
    """Add what follows from several keys of a llama-like decoder."""
    if "key_value_rank" not in found:
        found |= _own_head_size(config, found, file)
    windows = _windows(config, kind, found.get("num_layers", 0), file)
    if any(windows):
        found["attention_windows"] = list(windows)
    shared = config.get("n_shared_experts")
    if shared and "expert_feed_forward_size" in found:
        where = Where(file=file, key="n_shared_experts")
        count = _figure(shared, "n_shared_experts", where)
        found["shared_feed_forward_size"] = count * found["expert_feed_forward_size"]
    if "num_experts" in found:
        _check_all_have_experts(config, file)
    notes = list(_NOT_COUNTED.get(kind, ()))
    predicted = config.get("num_nextn_predict_layers")
    if kind == "deepseek_v3" and predicted:
        notes.append(f"{counted(predicted, 'layer')} of multi-token prediction")
    if notes:
        found["not_counted"] = tuple(notes)


def _own_head_size(
    config: Mapping[str, Any], found: Mapping[str, Any], file: str
) -> dict[str, int]:
    """Return the width of a head where it does not follow from the hidden size."""
    size = config.get("head_dim")
    if size is None:
        return {}
    checked = _figure(size, "head_dim", Where(file=file, key="head_dim"))
    hidden, heads = found.get("hidden_size", 0), found.get("num_heads", 0)
    return {} if checked * heads == hidden else {"head_size": checked}


def _windows(config: Mapping[str, Any], kind: str, num_layers: int, file: str) -> tuple[int, ...]:
    """Return the window of each block, or of a period of blocks; 0 for all tokens."""
    window, types = config.get("sliding_window"), config.get("layer_types")
    if window is None or config.get("use_sliding_window") is False:
        return ()
    size = _figure(window, "sliding_window", Where(file=file, key="sliding_window"))
    if types is not None:
        known = {"sliding_attention": size, "full_attention": 0}
        if not isinstance(types, list) or any(each not in known for each in types):
            message = f"found {shown(types)}; expected a list of {' or '.join(known)}"
            raise InputError(message, where=Where(file=file, key="layer_types"))
        windows = tuple(known[each] for each in types)
        return windows[:1] if len(set(windows)) == 1 else windows
    if kind.startswith("qwen"):
        first = config.get("max_window_layers")
        full = first if isinstance(first, int) else num_layers
        return tuple(size if index >= full else 0 for index in range(num_layers))
    return tuple(size if slides else 0 for slides in _PERIODS.get(kind, ()))


def _check_all_have_experts(config: Mapping[str, Any], file: str) -> None:
    """Refuse dense blocks between those with experts."""
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
    """Refuse what is not built here: planned without it, the model would be another one."""
    mistakes = Mistakes()
    for key, value in config.items():
        is_off = value in (None, False, 0, [], {}) or (value == 1 and key.endswith("_experts"))
        if not is_off and key not in allowed and any(part in key for part in _OTHERS):
            with mistakes.collect():
                message = (
                    f"found {shown(value)}; only dense decoders are planned, and as they are known "
                    f"{', '.join(_WITH_PARTS)}: model_type {config['model_type']!r} has no such "
                    "part, no experts, cross attention or latent attention of others"
                )
                raise InputError(message, where=Where(file=file, key=key))
    mistakes.check()


def _figure(value: object, key: str, where: Where) -> Any:  # noqa: ANN401 - a flag or a count
    """Return a figure of a configuration if it is of the right type."""
    if key in _FLAGS:
        fits, expected = isinstance(value, bool), "true or false"
    else:
        most = MOST_LAYERS if key in {"num_layers", "num_decoder_layers"} else _LARGEST_FIGURE
        fits = isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= most
        expected = f"an integer from 1 to {most:,}"
    if not fits:
        raise InputError(f"found {shown(value)}; expected {expected}", where=where)
    return value
