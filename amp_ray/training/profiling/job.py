"""The job file of a profile run: a trial's job with points to measure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from amp_ray.training.fields import Fields
from amp_ray.training.job import Job, read_job
from amp_ray.training.shapes import TextShape, layer_kinds
from amp_ray.trials.profile.points import LayerPoint, LinkPoint


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


def read_profile_job(record: Mapping[str, Any]) -> ProfileJob:
    """Read a job from its JSON object; raise a ``ValueError`` that names the wrong values."""
    fields = Fields(record, "profile")
    job = ProfileJob(
        trial=read_job(fields.any("trial")),
        links=tuple(_read_link(entry) for entry in fields.any("links")),
        points=tuple(_read_point(entry) for entry in fields.any("points")),
        seconds=fields.number("seconds"),
        step=fields.flag("step", default=False),
    )
    fields.finish()
    if job.trial.precision == "fp8":
        raise ValueError("layers are not measured in fp8; use bf16")
    for size in job.group_sizes:
        if job.trial.grid.num_ranks % size:
            message = f"{job.trial.grid.num_ranks} ranks cannot be divided into groups of {size}"
            raise ValueError(message)
    for point in job.points:
        _check_point(point, job.trial)
    return job


def _read_point(record: Mapping[str, Any]) -> LayerPoint:
    fields = Fields(record, "profile.points")
    point = LayerPoint(
        tp=fields.integer("tp"),
        micro_batch_size=fields.integer("micro_batch_size"),
        layer=fields.integer("layer", minimum=0),
        tokens=fields.integer("tokens", default=0, minimum=0),
        context=fields.integer("context", default=0, minimum=0),
    )
    fields.finish()
    return point


def _read_link(record: Mapping[str, Any]) -> LinkPoint:
    fields = Fields(record, "profile.links")
    link = LinkPoint(
        what="p2p" if fields.choice("what", ("p2p", "all_reduce")) == "p2p" else "all_reduce",
        num_ranks=fields.integer("num_ranks", minimum=2),
        num_bytes=fields.integer("bytes", minimum=4),
    )
    fields.finish()
    return link


def _check_point(point: LayerPoint, trial: Job) -> None:
    """Refuse a layer that the model does not have, or a tp that does not divide the model."""
    num_layers = len(layer_kinds(trial.model))
    last = num_layers if isinstance(trial.model, TextShape) else num_layers - 1
    if point.layer > last:
        raise ValueError(
            f"profile.points has layer {point.layer}; the model has {num_layers} layers, and "
            f"{last} is the last index"
        )
    if point.tokens or point.context:
        _check_slice(point, trial)
    for name, size in trial.model.split_sizes().items():
        if size % point.tp:
            message = f"tp {point.tp} does not divide the model's {name} {size}; choose another tp"
            raise ValueError(message)


def _check_slice(point: LayerPoint, trial: Job) -> None:
    """Refuse a slice of a layer that is no block, or one longer than the sequence."""
    if layer_kinds(trial.model)[point.layer : point.layer + 1] != ("block",):
        raise ValueError(f"profile.points has a slice of layer {point.layer}, which is no block")
    length = trial.model.sequence_length if isinstance(trial.model, TextShape) else 0
    if not 0 < point.tokens <= length - point.context:
        raise ValueError(
            f"profile.points has {point.tokens} tokens behind {point.context}; a sequence has "
            f"{length}"
        )
