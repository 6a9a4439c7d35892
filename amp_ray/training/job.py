"""The job file: everything that one trial needs to know, checked before anything starts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, NamedTuple

from amp_ray.training.fields import Fields
from amp_ray.training.ranks import Place, rank_map, read_places
from amp_ray.training.shapes import ImageShape, TextShape, layer_kinds, read_shape

PRECISIONS: Final = ("fp32", "bf16", "fp16")
OPTIMIZERS: Final = ("adam", "adamw", "sgd")
DEVICES: Final = ("auto", "cpu", "cuda")
RECOMPUTE: Final = ("none", "selective", "full")

MAX_ZERO_STAGE: Final = 1
"""DeepSpeed refuses ZeRO-2 and ZeRO-3 with a PipelineModule."""

INIT_TIMEOUT_S: Final = 60.0
"""How long a rank waits for the others to arrive; DeepSpeed's own limit is ten minutes."""

COMMUNICATION_TIMEOUT_S: Final = 120.0
"""How long one send, receive or collective may take."""


class UnfitError(ValueError):
    """The job is in order, but not for this machine or this number of processes; do not retry."""


class Recompute(NamedTuple):
    """What a stage computes again in the backward pass.

    Attributes:
        kind: ``none``, ``selective`` (the attention core) or ``full``.
        layers: In how many of its blocks, from the first on; None means all.
    """

    kind: str
    layers: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """A strategy that this program can run: the same tp and dp in every stage.

    Args:
        bounds: ``(0, ..., num_layers)``, in the list of ``layer_kinds``.
        recompute: Per stage.
        rank_map: For every rank in the contract's order, the process that plays it.
    """

    tp: int
    pp: int
    dp: int
    micro_batch_size: int
    num_micro_batches: int
    bounds: tuple[int, ...]
    recompute: tuple[Recompute, ...]
    rank_map: tuple[int, ...]

    @property
    def num_ranks(self) -> int:
        """Processes that the strategy occupies."""
        return self.tp * self.pp * self.dp


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One trial.

    Args:
        trial_id: Copied into every event and the result.
        out_dir: Folder on this host that the result is written to.
        precision: ``fp32``, ``bf16`` or ``fp16``.
        optimizer: ``adam``, ``adamw`` or ``sgd``.
        gradient_clipping: Largest norm of all gradients together; 0 turns it off.
        zero_stage: 0, or 1 to shard the optimizer state over dp.
        steps: Measured steps.
        warmup_steps: Steps before them.
        device: ``auto`` takes CUDA where there is a GPU.
        sliced_transfers: Whether a stage sends 1/tp of an activation per rank and gathers it after.
        num_threads: CPU threads per rank; more than its share of the cores makes steps far slower.
        init_timeout_s: Limit of the rendezvous.
        communication_timeout_s: Limit of every send, receive and collective.
    """

    trial_id: str
    out_dir: str
    model: TextShape | ImageShape
    grid: Grid
    precision: str
    optimizer: str
    learning_rate: float
    gradient_clipping: float
    zero_stage: int
    global_batch_size: int
    steps: int
    warmup_steps: int
    seed: int
    device: str
    sliced_transfers: bool
    num_threads: int
    init_timeout_s: float
    communication_timeout_s: float


def read_job(record: Mapping[str, Any]) -> Job:
    """Read a job from its JSON object; a ``ValueError`` names the values that are wrong."""
    fields = Fields(record, "job")
    model = read_shape(fields.any("model"))
    grid = _read_grid(fields.any("strategy"), fields.any("launch_order", None))
    job = Job(
        trial_id=fields.text("trial_id"),
        out_dir=fields.text("out_dir"),
        model=model,
        grid=grid,
        precision=fields.choice("precision", PRECISIONS, default="fp32"),
        optimizer=fields.choice("optimizer", OPTIMIZERS, default="adam"),
        learning_rate=fields.number("learning_rate", default=1e-4),
        gradient_clipping=fields.number("gradient_clipping", default=0.0),
        zero_stage=fields.integer("zero_stage", minimum=0, default=0),
        global_batch_size=fields.integer("global_batch_size"),
        steps=fields.integer("steps"),
        warmup_steps=fields.integer("warmup_steps", minimum=0, default=0),
        seed=fields.integer("seed", minimum=0, default=0),
        device=fields.choice("device", DEVICES, default="auto"),
        sliced_transfers=fields.flag("sliced_transfers", default=False),
        num_threads=fields.integer("num_threads", default=1),
        init_timeout_s=fields.number("init_timeout_s", default=INIT_TIMEOUT_S),
        communication_timeout_s=fields.number(
            "communication_timeout_s", default=COMMUNICATION_TIMEOUT_S
        ),
    )
    fields.finish()
    _check_fit(job)
    return job


def _read_grid(strategy: Mapping[str, Any], launch_order: Any) -> Grid:  # noqa: ANN401 - JSON
    """Read a STRATEGY object of the contract."""
    fields = Fields(strategy, "job.strategy")
    tp, dp = fields.any("tp"), fields.any("dp")
    stages = fields.any("stages", None)
    if tp is None or dp is None:
        message = (
            "job.strategy has stages with different tp or dp, which this program cannot launch: "
            f"tp {tp!r}, dp {dp!r}, stages {stages!r}"
        )
        raise ValueError(message)
    tp, dp, pp = fields.integer("tp"), fields.integer("dp"), fields.integer("pp")
    bounds = fields.integers("bounds")
    _check_stages(stages, tp=tp, dp=dp, bounds=bounds)
    placement = fields.any("placement", None)
    places = (
        tuple(("", slot) for slot in range(tp * dp * pp))
        if placement is None
        else read_places(placement, "job.strategy.placement", tp * dp * pp)
    )
    grid = Grid(
        tp=tp,
        pp=pp,
        dp=dp,
        micro_batch_size=fields.integer("micro_batch_size"),
        num_micro_batches=fields.integer("num_micro_batches"),
        bounds=bounds,
        recompute=_read_recompute(fields.any("recompute", "none"), pp),
        rank_map=_read_rank_map(places, launch_order),
    )
    fields.finish()
    return grid


def _read_rank_map(places: tuple[Place, ...], launch_order: Any) -> tuple[int, ...]:  # noqa: ANN401
    """Return the rank map; without ``launch_order`` the launcher follows the placement."""
    if launch_order is None:
        return rank_map(places, places)
    return rank_map(places, read_places(launch_order, "job.launch_order", len(places)))


def _read_recompute(value: Any, pp: int) -> tuple[Recompute, ...]:  # noqa: ANN401 - JSON is untyped
    """Read one value for all stages or a list with one per stage."""
    per_stage = tuple(value) if isinstance(value, list | tuple) else (value,) * pp
    if len(per_stage) != pp:
        message = (
            f"job.strategy.recompute must be one value or a list with one for each of the {pp} "
            f"stages, found {value!r}"
        )
        raise ValueError(message)
    return tuple(map(_read_stage_recompute, per_stage))


def _read_stage_recompute(value: Any) -> Recompute:  # noqa: ANN401 - JSON is untyped
    """Read a word, or a mapping where part of the blocks is computed again."""
    name = "job.strategy.recompute"
    fields = Fields(value if isinstance(value, Mapping) else {"kind": value}, name)
    kind = fields.choice("kind", RECOMPUTE)
    layers = fields.integer("layers") if isinstance(value, Mapping) else None
    fields.finish()
    return Recompute(kind, layers)


def _check_stages(
    stages: Sequence[Mapping[str, Any]] | None, *, tp: int, dp: int, bounds: tuple[int, ...]
) -> None:
    """Refuse stages that say something else than tp, dp and bounds do."""
    if stages is not None and len(stages) != len(bounds) - 1:
        message = f"job.strategy has {len(stages)} stages, but bounds {list(bounds)}"
        raise ValueError(message)
    for stage, ends in zip(stages or (), pairwise(bounds), strict=False):
        even = len(set(stage.get("shares") or (0,))) == 1
        found = (stage.get("tp"), stage.get("dp"), tuple(stage.get("layers", ())))
        if found != (tp, dp, ends) or not even:
            message = (
                f"job.strategy.stages has {dict(stage)!r}, which this program cannot launch: every "
                f"stage needs tp {tp}, dp {dp}, even shares and the layers of bounds {list(bounds)}"
            )
            raise ValueError(message)


def _check_fit(job: Job) -> None:
    """Refuse a strategy that does not fit the model, the batch or the runtime."""
    grid = job.grid
    _check_bounds(grid, len(layer_kinds(job.model)))
    samples = grid.dp * grid.micro_batch_size * grid.num_micro_batches
    if samples != job.global_batch_size:
        message = (
            f"dp {grid.dp} x micro_batch_size {grid.micro_batch_size} x num_micro_batches "
            f"{grid.num_micro_batches} = {samples}, not global_batch_size {job.global_batch_size}"
        )
        raise ValueError(message)
    for name, size in job.model.split_sizes().items():
        if size % grid.tp:
            message = f"tp {grid.tp} does not divide the model's {name} {size}; choose another tp"
            raise ValueError(message)
    if job.zero_stage > MAX_ZERO_STAGE:
        message = f"zero_stage {job.zero_stage} does not work with a pipeline; use 0 or 1"
        raise ValueError(message)


def _check_bounds(grid: Grid, num_layers: int) -> None:
    """Refuse bounds that do not cover the model, or leave a stage empty."""
    bounds = grid.bounds
    rising = all(first < end for first, end in pairwise(bounds))
    if len(bounds) != grid.pp + 1 or (bounds[0], bounds[-1]) != (0, num_layers) or not rising:
        message = (
            f"bounds {list(bounds)} must rise from 0 to the model's {num_layers} layers in pp = "
            f"{grid.pp} stages, none of them empty"
        )
        raise ValueError(message)
