"""The job file of a trial: its format and checks."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

from amp_ray.strategies.zero import MOST_ZERO_STAGE
from amp_ray.training.fields import Fields
from amp_ray.training.grid import Grid, GridStage, read_grid
from amp_ray.training.shapes import ImageShape, TextShape, layer_kinds, read_shape

PRECISIONS: Final = ("fp32", "bf16", "fp16", "fp8")
OPTIMIZERS: Final = ("adam", "adamw", "sgd")
DEVICES: Final = ("auto", "cpu", "cuda")
RUNTIMES: Final = ("deepspeed", "torch")

PIPELINE_ZERO_STAGES: Final = {"deepspeed": (0, 1), "torch": (0, 1, MOST_ZERO_STAGE)}
"""ZeRO stages that DeepSpeed supports with a PipelineModule; it refuses 2 and 3."""

INIT_TIMEOUT_S: Final = 60.0
"""Time limit of the rendezvous; DeepSpeed's default is ten minutes."""

COMMUNICATION_TIMEOUT_S: Final = 120.0
"""Time limit of one send, receive or collective."""


class UnfitError(ValueError):
    """A valid job that does not fit this machine or number of processes; do not retry."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Model, strategy and settings of one trial."""

    runtime: str  # ``deepspeed``, or ``torch`` for plain ``torch.distributed``
    trial_id: str  # copied into every event and the result
    out_dir: str  # folder on this host for the result
    model: TextShape | ImageShape
    grid: Grid
    # ``fp32``, ``bf16``, ``fp16``, or ``fp8``: 8-bit products in blocks, otherwise bf16
    precision: str
    optimizer: str  # ``adam``, ``adamw`` or ``sgd``
    learning_rate: float
    gradient_clipping: float  # maximum norm of all gradients together; 0 turns it off
    zero_stage: int  # what is sharded over dp: 1 optimizer states, 2 gradients too, 3 weights too
    global_batch_size: int
    steps: int  # measured steps
    warmup_steps: int  # steps before the measured ones
    most_steps: int  # maximum of measured steps if the first ones do not suffice
    # Seconds since the start within which additional steps should finish
    more_steps_within_s: float
    seed: int
    device: str  # ``auto`` takes CUDA where there is a GPU
    # Whether each rank sends 1/tp of an activation, which the next stage gathers
    sliced_transfers: bool
    # CPU threads per rank; more than its share of the cores makes steps far slower
    num_threads: int
    init_timeout_s: float  # limit of the rendezvous
    communication_timeout_s: float  # limit of every send, receive and collective


def read_job(record: Mapping[str, Any]) -> Job:
    """Read a job from its JSON object; raise a ``ValueError`` that names the wrong values."""
    fields = Fields(record, "job")
    model = read_shape(fields.any("model"))
    grid = read_grid(fields.any("strategy"), fields.any("launch_order", None))
    job = Job(
        runtime=fields.choice("runtime", RUNTIMES, default=RUNTIMES[0]),
        trial_id=fields.text("trial_id"),
        out_dir=fields.text("out_dir"),
        model=model,
        grid=grid,
        precision=fields.choice("precision", PRECISIONS, default="fp32"),
        optimizer=fields.choice("optimizer", OPTIMIZERS, default="adam"),
        learning_rate=fields.number("learning_rate", default=1e-4),
        gradient_clipping=fields.number("gradient_clipping", default=0.0),
        zero_stage=fields.integer("zero_stage", minimum=0, default=grid.zero_stage or 0),
        global_batch_size=fields.integer("global_batch_size"),
        steps=fields.integer("steps"),
        warmup_steps=fields.integer("warmup_steps", minimum=0, default=0),
        most_steps=fields.integer("most_steps", default=fields.integer("steps")),
        more_steps_within_s=fields.number("more_steps_within_s", default=0.0),
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
    reason = next(_misfits(job), None)
    if reason is not None:
        raise ValueError(reason)
    return job


def _misfits(job: Job) -> Iterator[str]:
    grid = job.grid
    _check_bounds(grid, len(layer_kinds(job.model)))
    samples = grid.samples_per_micro_batch * grid.num_micro_batches
    if samples != job.global_batch_size:
        dp = grid.samples_per_micro_batch / grid.micro_batch_size
        yield (
            f"dp {dp:g} x micro_batch_size {grid.micro_batch_size} x num_micro_batches "
            f"{grid.num_micro_batches} = {samples}, not global_batch_size {job.global_batch_size}"
        )
    for name, size in job.model.split_sizes().items():
        for tp in (stage.tp for stage in grid.stages if size % stage.tp):
            yield f"tp {tp} does not divide the model's {name} {size}; choose another tp"
    if grid.zero_stage not in {None, job.zero_stage}:
        yield f"zero_stage is {job.zero_stage}, the strategy's is {grid.zero_stage}"
    yield from _zero_misfits(job)
    if job.precision == "fp8":
        yield from _fp8_misfits(job)
    if job.runtime == "torch":
        yield from _torch_misfits(job)
    elif grid.cp > 1 or any(stage.spreads_experts for stage in grid.stages):
        yield f"runtime {job.runtime} has no context or expert parallelism; use runtime torch"
    elif not grid.is_uniform:
        stages = [(stage.tp, stage.dp, grid.shares(i)) for i, stage in enumerate(grid.stages)]
        yield (
            f"runtime {job.runtime} runs one tp, dp and chunk for all stages, even shares and "
            f"whole sequences, found (tp, dp, shares) {stages}, virtual_stages "
            f"{grid.virtual_stages}, token_slices {list(grid.token_slices)}, sequence_parallel "
            f"{[stage.sequence_parallel for stage in grid.stages]}; use runtime torch"
        )


def _zero_misfits(job: Job) -> Iterator[str]:
    """Yield errors of ZeRO settings that the runtime or the stages do not support."""
    grid, stage, head = job.grid, job.zero_stage, f"runtime {job.runtime!r}"
    allowed = PIPELINE_ZERO_STAGES[job.runtime]
    if stage > MOST_ZERO_STAGE:
        yield f"{head} works with zero_stage up to {MOST_ZERO_STAGE}, found {stage}"
    if grid.pp > 1 and stage not in allowed:
        yield f"{head} pipelines with zero_stage {' or '.join(map(str, allowed))}, found {stage}"
    if grid.keeps_weights and stage != MOST_ZERO_STAGE:
        yield f"reshard_after_forward is for zero_stage {MOST_ZERO_STAGE}, found {stage}"
    if grid.pp > 1 and stage == MOST_ZERO_STAGE and not grid.keeps_weights:
        yield "in a pipeline zero_stage 3 keeps its weights: set reshard_after_forward to false"
    if stage > 1 and any(options.spreads_experts for options in grid.stages):
        yield f"experts over ranks run with zero_stage 0 or 1, found {stage}"
    if not grid.shard_ranks:
        return
    if job.runtime != "torch" or not stage:
        yield f"shard_ranks need runtime 'torch' and zero_stage 1 to 3, found {head} and {stage}"
    numbers = [options.num_replicas for options in grid.stages]
    if any(number % grid.shard_ranks for number in numbers):
        yield f"shard_ranks {grid.shard_ranks} must divide the dp of all stages, found {numbers}"


def _fp8_misfits(job: Job) -> Iterator[str]:
    """Yield errors of models and runtimes without fp8; the rank checks its device later."""
    if job.runtime != "torch":
        yield f"runtime {job.runtime} does not train in fp8; use runtime torch, or bf16"
    if isinstance(job.model, ImageShape):
        yield "precision fp8 is for language models, found pictures; use bf16"


def _torch_misfits(job: Job) -> Iterator[str]:
    grid = job.grid
    if job.sliced_transfers:
        yield "runtime torch sends what each rank needs; sliced_transfers is for deepspeed"
    if grid.virtual_stages > 1 and grid.pp == 1:
        yield f"virtual_stages {grid.virtual_stages} need several stages, found pp 1"
    if grid.cp > 1:
        yield from _context_misfits(job)
    for stage in grid.stages:
        yield from _expert_misfits(job, stage)
    yield from _undivided_tokens(job)
    if not grid.token_slices:
        return
    if isinstance(job.model, ImageShape):
        yield "token_slices need causal attention; pictures attend as a whole"
        return
    length = job.model.sequence_length
    for _, tokens in grid.token_slices:
        if sum(tokens) != length:
            yield f"token_slices {list(tokens)} must add up to sequence_length {length}"
    if len(grid.token_slices) > 1 and any(stage.shares is not None for stage in grid.stages):
        yield "several batch slices need one dp and even shares; give token_slices one entry"


def _context_misfits(job: Job) -> Iterator[str]:
    """Yield errors of context parallelism."""
    grid = job.grid
    if len({stage.cp for stage in grid.stages}) > 1 or grid.token_slices or not grid.is_even:
        stages = [(stage.tp, stage.cp, stage.dp, stage.shares) for stage in grid.stages]
        yield (
            "cp needs one tp, cp and dp for all stages, even shares and no token_slices, found "
            f"(tp, cp, dp, shares) {stages} and token_slices {list(grid.token_slices)}"
        )
    if isinstance(job.model, ImageShape):
        yield f"cp {grid.cp} needs causal sequences; pictures attend as a whole"
    elif job.model.sequence_length % (2 * grid.cp):
        yield (
            f"2 x cp {grid.cp} does not divide sequence_length {job.model.sequence_length}, so "
            "that ranks could not attend to as much each; choose another cp"
        )


def _expert_misfits(job: Job, stage: GridStage) -> Iterator[str]:
    """Yield errors of expert parallelism in a stage."""
    if not stage.spreads_experts:
        return
    words = f"ep {stage.ep}, etp {stage.expert_tp}"
    num_experts = job.model.num_experts if isinstance(job.model, TextShape) else 0
    if not num_experts or not isinstance(job.model, TextShape):
        yield f"{words} need a model with experts; this one has none"
        return
    if num_experts % stage.ep or stage.num_ranks % stage.expert_ranks or stage.tp % stage.expert_tp:
        yield (
            f"{words}: ep divides the {num_experts} experts, ep x etp the {stage.num_ranks} ranks "
            f"of the stage, and etp tp {stage.tp}"
        )
    if job.model.expert_feed_forward_size % stage.expert_tp:
        width = job.model.expert_feed_forward_size
        yield f"{words}: etp does not divide expert_feed_forward_size {width}"
    lengths = {tokens for _, slices in job.grid.token_slices for tokens in slices}
    lengths = lengths or {job.model.sequence_length // stage.cp}
    wrong = [length for length in lengths if length % stage.tp]
    if wrong:
        yield f"{words}: tp {stage.tp} ranks each send a share of {wrong[0]} tokens, so divide them"


def _undivided_tokens(job: Job) -> Iterator[str]:
    """Yield errors of numbers of tokens that sequence parallelism cannot divide evenly."""
    grid = job.grid
    tps = sorted({stage.tp for stage in grid.stages if stage.sequence_parallel})
    if isinstance(job.model, ImageShape):
        if tps:
            yield "sequence_parallel needs a model with tokens, found pictures"
        return
    for tp in tps:
        slices = {count for _, tokens in grid.token_slices for count in tokens}
        wrong = [c for c in slices or {job.model.sequence_length // grid.cp} if c % tp]
        if tp == 1 or wrong:
            undivided = f"slices of {wrong}" if wrong else "one rank alone"
            yield f"sequence_parallel divides tokens evenly over tp {tp} ranks, found {undivided}"


def _check_bounds(grid: Grid, num_layers: int) -> None:
    """Refuse bounds that do not cover the model or that leave a chunk empty."""
    bounds = grid.bounds
    rising = all(first < end for first, end in pairwise(bounds))
    num_chunks = grid.pp * grid.virtual_stages
    if len(bounds) != num_chunks + 1 or (bounds[0], bounds[-1]) != (0, num_layers) or not rising:
        raise ValueError(
            f"bounds {list(bounds)} must rise from 0 to the model's {num_layers} layers in pp = "
            f"{grid.pp} stages of {grid.virtual_stages} chunks, none of them empty"
        )
