"""Common content of jobs for our training programs: model, devices, environment variables."""

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

PROGRAM: Final = "amp_ray.training"  # module that runs on every rank
JOB_FILE: Final = "job.json"

THREADS_VARIABLE: Final = "OMP_NUM_THREADS"

ENVIRONMENT: Final[Mapping[str, str]] = {
    THREADS_VARIABLE: "1",
    # Torch's compiler creates a cache on import; in the trial's folder, it is deleted at the end.
    "TORCHINDUCTOR_CACHE_DIR": f"{FOLDER}/cache",
}
"""Variables of all ranks: one thread per CPU device, and all caches in the trial's folder."""

_TEXT_KEYS: Final = (
    *("num_layers", "hidden_size", "num_heads", "num_key_value_heads", "feed_forward_size"),
    *("sequence_length", "vocab_size", "tied_embedding"),
)
_DECODER_KEYS: Final = (
    *("head_size", "num_experts", "experts_per_token", "expert_feed_forward_size"),
    *("shared_feed_forward_size", "first_dense_layers"),
)
"""Fields of a model that are written only if they are set."""

_IMAGE_KEYS: Final = (
    *("depth", "hidden_size", "num_heads", "bottom_width", "latent_size", "window_size"),
)


def shape_to_json(shape: ModelShape) -> dict[str, Any]:
    """Return a model shape in the JSON form that the training program reads."""
    keys = _IMAGE_KEYS if shape.family == "transgan" else _TEXT_KEYS
    required = {key: getattr(shape, key) for key in keys}
    optional = {key: getattr(shape, key) for key in _DECODER_KEYS if getattr(shape, key)}
    return {"family": shape.family, **required, **optional}


def torch_device(names: Iterable[str]) -> str:
    """Return torch's device type for devices of the catalogue.

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
"""No clipping: DeepSpeed's default of 1.0 would use a norm that depends on the strategy."""


def ds_config(experiment: Experiment, strategy: Strategy) -> dict[str, Any]:
    """Return DeepSpeed's configuration for a strategy.

    The program creates the optimizer: if it were named here, DeepSpeed would compile one at the
    start. DeepSpeed's ``train_batch_size`` is micro-batch size x accumulation steps x dp.
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
    """Return each layer's number of parameters per rank, if its tp is that of the first stage."""
    tp = strategy.stages[0].options.tp
    layers = experiment.model.layers
    return [layer.sharded_parameters / tp + layer.replicated_parameters for layer in layers]


def slices_transfers(experiment: Experiment) -> bool:
    """Return whether each rank sends 1/tp of an activation or gradient between stages."""
    traits = experiment.traits
    return traits.sliced_activations and traits.sliced_gradients


def to_json(record: Mapping[str, Any]) -> bytes:
    """Encode an object as indented JSON."""
    return json.dumps(record, indent=1).encode() + b"\n"
