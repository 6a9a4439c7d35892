"""Job files of a trial and of a profile run.

Both are written by the same version of this package, which launches no job that this program cannot
run (see ``trials/runtime_strategy.py``). So jobs are not checked again here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from amp_ray.models.model import ModelShape
from amp_ray.training.grid import Grid, read_grid
from amp_ray.training.shapes import read_shape
from amp_ray.trials.profile.points import LayerPoint, LinkPoint


class UnfitError(ValueError):
    """A valid job that does not fit this machine or number of processes; do not retry."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Model, strategy and settings of one trial."""

    trial_id: str  # copied into every event and the result
    out_dir: str  # folder on this host for the result
    model: ModelShape
    grid: Grid
    global_batch_size: int
    steps: int  # number of measured steps
    runtime: str = "deepspeed"  # or ``torch`` for plain ``torch.distributed``
    # ``fp32``, ``bf16``, ``fp16``, or ``fp8``: 8-bit products in blocks, otherwise bf16
    precision: str = "fp32"
    optimizer: str = "adam"  # or ``adamw`` or ``sgd``
    learning_rate: float = 1e-4
    gradient_clipping: float = 0.0  # maximum norm of all gradients together; 0 turns it off
    # Shards over dp: 0 none, 1 optimizer states, 2 also gradients, 3 also weights
    zero_stage: int = 0
    warmup_steps: int = 0  # steps before the measured ones
    most_steps: int = 0  # maximum of measured steps if the first ones do not suffice
    # Seconds since the start within which additional steps should finish
    more_steps_within_s: float = 0.0
    seed: int = 0
    device: str = "auto"  # ``cpu`` or ``cuda``; ``auto`` means CUDA if there is a GPU
    # Whether each rank sends 1/tp of an activation, which the next stage gathers
    sliced_transfers: bool = False
    # CPU threads per rank; more threads than a rank's share of the cores make steps far slower
    num_threads: int = 1
    # Limit of the rendezvous; DeepSpeed's default is ten minutes
    init_timeout_s: float = 60.0
    communication_timeout_s: float = 120.0  # limit of one send, receive or collective


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileJob:
    """Settings and points of one profile run."""

    trial: Job  # model, precision, device, seed, limits; its strategy sets the ranks
    links: tuple[LinkPoint, ...]  # messages, measured first
    points: tuple[LayerPoint, ...]  # layers, measured in this order
    seconds: float  # no new measurement begins after this time
    step: bool = False  # whether to measure a step's other costs, after the messages

    @property
    def group_sizes(self) -> tuple[int, ...]:
        """Sizes of the groups of ranks that do all-reduces."""
        adding = {link.num_ranks for link in self.links if link.what == "all_reduce"}
        return tuple(sorted(adding | {point.tp for point in self.points}))


def read_job(record: Mapping[str, Any]) -> Job:
    """Read a trial's job from its JSON object.

    Raises:
        ValueError: If a key is missing or unknown.
    """
    try:
        values = dict(record)
        strategy, launch_order = values.pop("strategy"), values.pop("launch_order", None)
        values["model"] = read_shape(values["model"])
        values["grid"] = read_grid(strategy, launch_order)
        values.setdefault("zero_stage", strategy.get("zero_stage", 0))
        return Job(**values)
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"not a job of this version of amp-ray: {error!r}") from error


def read_profile_job(record: Mapping[str, Any]) -> ProfileJob:
    """Read a profile run's job from its JSON object; see `read_job`."""
    trial = read_job(record["trial"])
    try:
        links = tuple(LinkPoint(**link) for link in record["links"])
        points = tuple(LayerPoint(**point) for point in record["points"])
        return ProfileJob(**{**record, "trial": trial, "links": links, "points": points})
    except (KeyError, TypeError) as error:
        raise ValueError(f"not a job of this version of amp-ray: {error!r}") from error
