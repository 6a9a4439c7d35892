"""A strategy as DeepSpeed's configuration: what it would default silently is spelled out."""

from typing import Any, Final

from amp_ray.spec.experiment import Experiment
from amp_ray.spec.strategy import Strategy

NO_CLIPPING: Final = 0.0
"""DeepSpeed clips gradients to 1.0 unless told not to, by a norm that the strategy changes."""


def ds_config(experiment: Experiment, strategy: Strategy) -> dict[str, Any]:
    """Return DeepSpeed's configuration of a strategy.

    The optimizer is left to the program: named here, DeepSpeed would compile one of its own when
    the program starts. Its ``train_batch_size`` is micro-batch size x accumulation steps x dp.
    """
    sliced = slices_transfers(experiment)
    config: dict[str, Any] = {
        "train_batch_size": strategy.global_batch_size,
        "train_micro_batch_size_per_gpu": strategy.micro_batch_size,
        "gradient_accumulation_steps": strategy.num_micro_batches,
        "gradient_clipping": NO_CLIPPING,
        "steps_per_print": 1,
        "wall_clock_breakdown": False,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": strategy.zero.stage},
        "pipeline": {"pipe_partitioned": sliced, "grad_partitioned": sliced},
    }
    if experiment.precision != "fp32":
        config[experiment.precision] = {"enabled": True}
    return config


def slices_transfers(experiment: Experiment) -> bool:
    """Tell whether a stage sends 1/tp of an activation per rank, and of a gradient."""
    traits = experiment.traits
    return traits.sliced_activations and traits.sliced_gradients
