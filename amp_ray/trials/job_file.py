"""What every job for our training programs says: the model, the devices, the ranks' variables."""

import json
from collections.abc import Iterable, Mapping
from typing import Any, Final

from amp_ray.clusters.device import is_cpu
from amp_ray.errors import InputError
from amp_ray.inputs.experiment import Experiment
from amp_ray.models.model import ModelShape
from amp_ray.strategies.strategy import Strategy
from amp_ray.strategies.zero import deepspeed_keys, deepspeed_precision
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
    required = {key: getattr(shape, key) for key in keys}
    optional = {key: getattr(shape, key) for key in _DECODER_KEYS if getattr(shape, key)}
    return {"family": shape.family, **required, **optional}


def torch_device(names: Iterable[str]) -> str:
    """Return torch's word for devices of the catalogue.

    Example:
        >>> torch_device(["T4", "A100-40"]), torch_device(["cpu", "cpu-slow"])
        ('cuda', 'cpu')
    """
    devices = tuple(dict.fromkeys(names))
    words = {"cpu" if is_cpu(name) else "cuda" for name in devices}
    if len(words) > 1:
        raise InputError(
            f"a trial runs on CPUs or on GPUs, not on both, found devices {', '.join(devices)}; "
            "give experiments of their own to them"
        )
    return words.pop()


NO_CLIPPING: Final = 0.0
"""DeepSpeed clips gradients to 1.0 unless told not to, by a norm that the strategy changes."""


def ds_config(experiment: Experiment, strategy: Strategy) -> dict[str, Any]:
    """Return DeepSpeed's configuration of a strategy.

    The optimizer is left to the program: named here, DeepSpeed would compile one of its own when
    the program starts. Its ``train_batch_size`` is micro-batch size x accumulation steps x dp.
    """
    sliced = slices_transfers(experiment)
    return {
        "train_batch_size": strategy.global_batch_size,
        "train_micro_batch_size_per_gpu": strategy.micro_batch_size,
        "gradient_accumulation_steps": strategy.num_micro_batches,
        "gradient_clipping": NO_CLIPPING,
        "steps_per_print": 1,
        "wall_clock_breakdown": False,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": deepspeed_keys(strategy.zero, _layer_parameters(experiment, strategy)),
        "pipeline": {"pipe_partitioned": sliced, "grad_partitioned": sliced},
        **deepspeed_precision(experiment.precision, strategy.zero.stage),
    }


def _layer_parameters(experiment: Experiment, strategy: Strategy) -> list[float]:
    """Return what a rank of the first stage's tp would hold of every layer."""
    tp = strategy.stages[0].options.tp
    layers = experiment.model.layers
    return [layer.sharded_parameters / tp + layer.replicated_parameters for layer in layers]


def slices_transfers(experiment: Experiment) -> bool:
    """Tell whether a stage sends 1/tp of an activation per rank, and of a gradient."""
    traits = experiment.traits
    return traits.sliced_activations and traits.sliced_gradients


def to_json(record: Mapping[str, Any]) -> bytes:
    """Write an object for programs and people."""
    return json.dumps(record, indent=1).encode() + b"\n"
