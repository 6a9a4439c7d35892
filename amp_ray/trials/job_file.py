"""What every job for our training programs says: the model, the devices, the ranks' variables."""

from collections.abc import Iterable, Mapping
from typing import Any, Final

from amp_ray.errors import InputError
from amp_ray.spec.device import is_cpu
from amp_ray.spec.model import ModelShape
from amp_ray.trials.launch import FOLDER

JOB_FILE: Final = "job.json"

THREADS_VARIABLE: Final = "OMP_NUM_THREADS"

ENVIRONMENT: Final[Mapping[str, str]] = {
    THREADS_VARIABLE: "1",
    # Torch's compiler makes its cache where it is imported; there, it goes with the folder.
    "TORCHINDUCTOR_CACHE_DIR": f"{FOLDER}/cache",
}
"""Of all ranks: a CPU device is one core, and nothing is written outside of the trial's folder."""

_TEXT_KEYS: Final = (
    *("num_layers", "hidden_size", "num_heads", "num_key_value_heads", "feed_forward_size"),
    *("sequence_length", "vocab_size", "tied_embedding"),
)
_DECODER_KEYS: Final = (
    *("head_size", "num_experts", "experts_per_token", "expert_feed_forward_size"),
    *("shared_feed_forward_size", "first_dense_layers"),
)
"""Told where a model has them."""

_IMAGE_KEYS: Final = (
    *("depth", "hidden_size", "num_heads", "bottom_width", "latent_size", "window_size"),
)


def shape_to_json(shape: ModelShape) -> dict[str, Any]:
    """Return a model as the training program reads it."""
    keys = _IMAGE_KEYS if shape.family == "transgan" else _TEXT_KEYS
    told = {key: getattr(shape, key) for key in keys}
    others = {key: getattr(shape, key) for key in _DECODER_KEYS if getattr(shape, key)}
    return {"family": shape.family, **told, **others}


def torch_device(names: Iterable[str]) -> str:
    """Return torch's word for devices of the catalogue.

    Example:
        >>> torch_device(["T4", "A100-40"]), torch_device(["cpu", "cpu-slow"])
        ('cuda', 'cpu')
    """
    found = tuple(dict.fromkeys(names))
    words = {"cpu" if is_cpu(name) else "cuda" for name in found}
    if len(words) > 1:
        raise InputError(
            f"a trial runs on CPUs or on GPUs, not on both, found devices {', '.join(found)}; "
            "give experiments of their own to them"
        )
    return words.pop()
