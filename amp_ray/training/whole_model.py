"""All layers of the model of a job, and its loss."""

from collections.abc import Callable

from torch import Tensor

from amp_ray.training.experts import ExpertParallel
from amp_ray.training.image import image_layers, picture_loss
from amp_ray.training.job import Job
from amp_ray.training.layer_spec import LayerSpec
from amp_ray.training.parallel import TensorParallel
from amp_ray.training.shapes import ImageShape
from amp_ray.training.text import text_layers
from amp_ray.training.token_window import TokenWindow
from amp_ray.training.vocabulary import CrossEntropy


def whole_model(
    job: Job,
    parallel: TensorParallel,
    window: TokenWindow | None = None,
    spread: ExpertParallel | None = None,
) -> tuple[list[LayerSpec], Callable[[Tensor, Tensor], Tensor]]:
    """Return the layers and the loss, of outputs and targets.

    Args:
        job: Its model and seed.
        parallel: This rank's tensor-parallel group.
        window: Tokens that a pass sees; None where sequences are whole.
        spread: Ranks that hold the experts together; None where tp divides them.
    """
    if isinstance(job.model, ImageShape):
        return image_layers(job.model, parallel, job.seed), picture_loss
    layers = text_layers(job.model, parallel, job.seed, window, spread)
    return layers, CrossEntropy(job.model, parallel)
