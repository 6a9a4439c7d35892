"""Engine of runtime ``torch``: builds a rank's part of the model and executes instructions."""

import datetime as dt
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import isfinite
from typing import Any, Final

import torch
from torch import Tensor

from amp_ray.cost.instructions import RECEIVES, Instruction, Schedule, Unit
from amp_ray.strategies.zero import SHARDED_GRADIENTS
from amp_ray.training.clock import SPAN_NAMES, Spans
from amp_ray.training.context import ContextParallel
from amp_ray.training.executor.chunks import BuiltChunk, Chunks, build_chunks
from amp_ray.training.executor.messages import Incoming, MessageKind, Messages
from amp_ray.training.executor.parameters import (
    FlatParameters,
    LossScale,
    Part,
    Replicas,
    ShardedChunk,
    TiedTable,
    make_group,
    replicas_of,
)
from amp_ray.training.experts import ExpertParallel, is_spread
from amp_ray.training.fp8 import use_fp8
from amp_ray.training.grid import (
    Coordinates,
    Grid,
    Passage,
    incoming,
    outgoing,
    rows_for_others,
    shared_rows,
)
from amp_ray.training.job import Job
from amp_ray.training.parallel import LayerSpec, TensorParallel, is_divided
from amp_ray.training.shapes import input_extent
from amp_ray.training.text import TIED_KEY
from amp_ray.training.transformer import TokenWindow
from amp_ray.training.workload import DTYPES, build_optimizer, samples, whole_model

NUM_AHEAD: Final = 2
"""Number of receives started in advance: the next activation and the next gradient arrive while a
pass runs."""

Batches = dict[int, tuple[Tensor, Tensor]]
"""Inputs (first stage) and targets (last stage) by passage."""

NORM_EPSILON = 1e-6
"""Added to the gradient norm before division, as in torch's ``clip_grad_norm_``."""


class StageModel:
    """Layers and weights of a rank, with the groups of ranks that share them.

    Attributes:
        chunks: Layers of every chunk.
        sharded: Layers of every chunk if replicas shard the weights, else empty.
        weights: Weights of every chunk, including this stage's copy of a table that two stages
            share.
    """

    def __init__(self, job: Job, place: Coordinates, spans: Spans, *, cuda: bool) -> None:
        """Build the stage; collective over all ranks of the trial."""
        grid, stage = job.grid, job.grid.stages[place.pp]
        self.dtype = DTYPES[job.precision]
        local_rank = int(os.environ["LOCAL_RANK"])
        self.device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
        self.messages = Messages(cuda=cuda)
        limit = dt.timedelta(seconds=job.communication_timeout_s)
        sharers = [grid.process(place.pp, place.dp, tp, place.cp) for tp in range(stage.tp)]
        self.parallel = TensorParallel(
            rank=place.tp,
            size=stage.tp,
            group=make_group(sharers, limit),
            order=_order(sharers),
            divides_tokens=stage.sequence_parallel,
            spans=spans,
        )
        self.replicas = _share_out(job, grid.replicas(place), limit)
        spread, same_experts = _experts(job, place, limit)
        self.window = TokenWindow(context=_context(grid, place, limit))
        specs, self.loss = whole_model(job, self.parallel, self.window, spread)
        self.chunks = _chunks(specs, grid, place.pp, self.parallel)
        if job.precision == "fp8":
            for chunk in self.chunks:
                use_fp8(chunk.modules)
        self.num_parameters = sum(
            parameter.numel() for chunk in self.chunks for parameter in chunk.modules.parameters()
        )
        self.tables = [
            _shared_table(specs, chunk, ends)
            for chunk, ends in zip(self.chunks, grid.chunks_of(place.pp), strict=True)
        ]
        self.sharded: list[ShardedChunk] = []
        self.weights = [
            self._weights(job, index, same_experts) for index in range(len(self.chunks))
        ]

    def _weights(self, job: Job, index: int, same_experts: Replicas | None) -> list[Part]:
        """Return a chunk's weights; first shard the weights that replicas divide."""
        chunk, table = self.chunks[index], self.tables[index]

        def flatten(part: list[Any]) -> FlatParameters:
            spread = same_experts if is_spread(part[0]) else None
            replicas = spread or self.replicas
            return FlatParameters(part, dtype=self.dtype, device=self.device, replicas=replicas)

        if job.zero_stage < SHARDED_GRADIENTS or self.replicas.num_shards == 1:
            return [*map(flatten, _parts(chunk, table))]
        sharded = ShardedChunk(
            job, chunk, self.replicas, dtype=self.dtype, device=self.device, table=table
        )
        self.sharded.append(sharded)
        self.chunks[index] = chunk._replace(run=(sharded,))
        return [*([] if table is None else [flatten([table])]), *sharded.parts]

    def begin_backward(self, chunk: int, *, last: bool) -> None:
        """Prepare a backward pass of a chunk; ``last`` if the chunk has no later one."""
        if self.sharded:
            self.sharded[chunk].begin_backward(last=last)


def _context(grid: Grid, place: Coordinates, limit: dt.timedelta) -> ContextParallel | None:
    """Return the context-parallel ranks of this rank; None if it has whole sequences."""
    if grid.cp == 1:
        return None
    processes = [grid.process(place.pp, place.dp, place.tp, cp) for cp in range(grid.cp)]
    return ContextParallel(
        rank=place.cp, processes=tuple(processes), group=make_group(processes, limit)
    )


def _share_out(job: Job, processes: Sequence[int], limit: dt.timedelta) -> Replicas:
    """Return the ranks with the same weights, divided into shard groups of ``shard_ranks`` ranks.

    If this number does not divide them, they form one shard group.
    """
    shard_ranks, number = job.grid.shard_ranks, len(processes)
    num_shards = number if not shard_ranks or number % shard_ranks else shard_ranks
    return replicas_of(processes, num_shards if job.zero_stage else 1, limit)


def _experts(
    job: Job, place: Coordinates, limit: dt.timedelta
) -> tuple[ExpertParallel | None, Replicas | None]:
    """Return the ranks that together hold all experts, and the ranks with the same experts."""
    grid, stage = job.grid, job.grid.stages[place.pp]
    together, same = grid.expert_processes(place)
    process = grid.process(place.pp, place.dp, place.tp, place.cp)
    if not stage.spreads_experts:
        return None, None
    spread = ExpertParallel(
        rank=together.index(process),
        etp=stage.expert_tp,
        owners=tuple(together.index(other) // stage.expert_tp for other in sorted(together)),
        group=make_group(together, limit),
    )
    return spread, _share_out(job, same, limit)


def _order(processes: Sequence[int]) -> tuple[int, ...]:
    """Return the processes' indices in their group; empty if they are in ascending order."""
    ordered = sorted(processes)
    return tuple(map(ordered.index, processes)) if ordered != list(processes) else ()


def _chunks(
    specs: Sequence[LayerSpec], grid: Grid, stage: int, parallel: TensorParallel
) -> list[BuiltChunk]:
    options, ends = grid.stages[stage], grid.chunks_of(stage)
    built = build_chunks(specs, ends, options)
    if not options.sequence_parallel:
        return built
    return [
        _with_edges(chunk, span, grid, stage, parallel)
        for chunk, span in zip(built, ends, strict=True)
    ]


def _with_edges(
    chunk: BuiltChunk, ends: tuple[int, int], grid: Grid, stage: int, parallel: TensorParallel
) -> BuiltChunk:
    """Add functions that split a chunk's input tokens, and gather its output's, where needed."""
    before, after = (stage - 1) % grid.pp, (stage + 1) % grid.pp
    splits = ends[0] > 0 and not grid.divides_tokens(stage, before)
    joins = ends[1] < grid.bounds[-1] and not grid.divides_tokens(stage, after)
    run = (
        *([parallel.split] if splits else []),
        *chunk.run,
        *([parallel.join] if joins else []),
    )
    return chunk._replace(run=run)


def _shared_table(
    specs: Sequence[LayerSpec], chunk: BuiltChunk, ends: tuple[int, int]
) -> Any | None:  # noqa: ANN401 - a torch parameter
    """Return the chunk's copy of a table that another stage also holds; None if it has none."""
    keys = [spec.tied_key for spec in specs]
    chunk_keys = keys[slice(*ends)]
    if TIED_KEY not in chunk_keys or keys.count(TIED_KEY) == chunk_keys.count(TIED_KEY):
        return None
    return chunk.modules[chunk_keys.index(TIED_KEY)].weight


def _parts(chunk: BuiltChunk, table: Any | None) -> list[list[Any]]:  # noqa: ANN401
    """Group a chunk's parameters by the set of ranks that hold them.

    The groups are: weights sharded over tp, weights copied on all tp ranks, experts, and a table
    that two stages share.
    """
    shards, copies, experts = list[Any](), list[Any](), list[Any]()
    for parameter in chunk.modules.parameters():
        if is_spread(parameter):
            experts.append(parameter)
        elif parameter is not table:
            (shards if is_divided(parameter) else copies).append(parameter)
    return [part for part in (shards, copies, experts, [] if table is None else [table]) if part]


class Update:
    """Gradient synchronisation and optimizer of a rank."""

    def __init__(self, job: Job, place: Coordinates, model: StageModel) -> None:
        self.job, self.place, self.model = job, place, model
        self.scale = LossScale(active=job.precision == "fp16")
        self.all = [part for parts in model.weights for part in parts]
        masters = [master for part in self.all for master in part.masters]
        # Fused on CPUs, too, because flat vectors do not stay in the cache between operations.
        self.optimizer = build_optimizer(job, masters, fused=True)
        self.tied = {
            chunk: self._tied_table(table)
            for chunk, table in enumerate(model.tables)
            if table is not None
        }

    def reduce(self, chunk: int) -> None:
        """Sum the gradients of a chunk over its replicas, and a shared table's over both stages.

        If tp ranks divide the tokens, the gradients of weights that all of them hold are summed
        over tp, too.
        """
        parallel = self.model.parallel
        for part in self.model.weights[chunk]:
            part.reduce()
            if parallel.divides_tokens and not part.is_divided:
                _sum_over(parallel, part.totals)
        if chunk in self.tied:
            self.tied[chunk].reduce(self.model.messages)

    def step(self) -> None:
        """Scale, clip and apply the gradients."""
        clipping = self.job.gradient_clipping
        if clipping or self.scale.active:
            norm = self._norm() / self.scale.value
            if self.scale.active or norm > clipping:
                factor = min(1.0, clipping / (norm + NORM_EPSILON)) if clipping else 1.0
                for total in (total for part in self.all for total in part.totals):
                    total.mul_(factor / self.scale.value)
            if not self.scale.accept(finite=isfinite(norm)):
                for part in self.all:
                    part.forget()
                return
        self.optimizer.step()
        for part in self.all:
            part.updated()

    def _norm(self) -> float:
        """Return the norm of the whole model's gradients; each gradient counts once."""
        square = torch.zeros((), dtype=torch.float64, device=self.model.device)
        for total in (total for part in self._counted() for total in part.totals):
            square += total.double().square().sum()
        torch.distributed.all_reduce(square)
        return float(square.sqrt())

    def _counted(self) -> Iterator[Part]:
        """Yield the parts that this rank, and no other, counts in the norm."""
        for chunk, parts in enumerate(self.model.weights):
            for part in parts:
                is_table = part.parameters[0] is self.model.tables[chunk]
                is_first = part.is_first_copy and (part.is_divided or not self.place.tp)
                if is_first and not (is_table and self.place.pp):
                    yield part

    def _tied_table(self, table: object) -> TiedTable:
        """Return the gradient exchange of a table with the other stage that holds it."""
        grid = self.job.grid
        other = grid.pp - 1 if self.place.pp == 0 else 0
        part = next(part for part in self.all if part.parameters[0] is table)
        assert isinstance(part, FlatParameters)
        num_rows = self.job.model.vocab_size
        gradient = part.gradients[: part.parameters[0].numel()].view(part.parameters[0].shape)
        return TiedTable(
            gradient,
            shared_rows(grid, self.place, other, num_rows),
            rows_for_others(grid, self.place, other, num_rows),
        )


def _sum_over(parallel: TensorParallel, totals: Sequence[Tensor]) -> None:
    """Sum gradients over the tp ranks, in one all-reduce."""
    joint = parallel.all_reduce(torch.cat([total.flatten() for total in totals]))
    sums = joint.split([total.numel() for total in totals])
    for total, part in zip(totals, sums, strict=True):
        total.copy_(part.view_as(total))


class TorchEngine:
    """Executes the instruction list of its stage."""

    def __init__(
        self, job: Job, place: Coordinates, model: StageModel, update: Update, spans: Spans
    ) -> None:
        self.job, self.place, self.spans = job, place, spans
        self.model, self.update = model, update
        self.num_parameters: int = model.num_parameters
        self.grid, self.device = job.grid, model.device
        num_slices = tuple(passage.num_slices for passage in self.grid.passages)
        self.schedule = Schedule(
            pp=self.grid.pp, num_slices=num_slices, virtual_stages=self.grid.virtual_stages
        )
        self.order = self.schedule.instructions(place.pp)
        self.last = {*{item.stage: item for item in self.order if item.kind == "B"}.values()}
        self.receives = [item for item in self.order if item.kind in RECEIVES]
        self.messages = model.messages
        self.chunks = Chunks([chunk.run for chunk in model.chunks], model.window)
        self.arriving: dict[Instruction, Incoming] = {}
        self.values: dict[tuple[str, Unit], Tensor] = {}
        self.loss = torch.zeros((), dtype=torch.float64, device=self.device)
        self.batches: Batches = {}
        self.num_begun = 0

    def load(self, step: int) -> Batches:
        """Generate the data of a step: inputs on the first stage, targets on the last."""
        if self.place.pp not in {0, self.grid.pp - 1}:
            return {}
        start = step * self.job.global_batch_size
        batches = {}
        for index, passage in enumerate(self.grid.passages):
            first, end = self.grid.samples(self.place.pp, passage)[self.place.dp]
            batch = samples(self.job, start + first, start + end)
            inputs, targets = map(self.model.window.own_tokens, batch)
            batches[index] = inputs.to(self.device), targets.to(self.device)
        return batches

    def train(self, batches: Batches) -> float:
        """Train one step and return its loss, the same on all ranks."""
        self.batches = batches
        self.loss.zero_()
        self.num_begun = 0
        self._begin_receives(NUM_AHEAD)
        for instruction in self.order:
            with self.spans.span(SPAN_NAMES[instruction.kind], str(instruction)):
                self._execute(instruction)
        self.messages.finish()
        self.chunks.forget()
        torch.distributed.all_reduce(self.loss)
        return float(self.loss)

    def _execute(self, instruction: Instruction) -> None:
        if instruction.kind == "STEP":
            self.update.step()
        elif instruction.kind == "REDUCE_GRAD":
            self.update.reduce(instruction.stage // self.grid.pp)
        else:
            passage, unit = self._passage(instruction), self._unit(instruction)
            match instruction.kind:
                case "F":
                    self._forward(instruction, unit, passage)
                case "B":
                    gradient = self.values.pop(("RECV_B", unit), None)
                    self.model.begin_backward(unit.chunk, last=instruction in self.last)
                    self._keep("SEND_B", unit, self.chunks.backward(unit, gradient, passage.tokens))
                case "SEND_F" | "SEND_B" as kind:
                    self._send(instruction, self.values.pop((kind, unit)), passage)
                case "RECV_F" | "RECV_B" as kind:
                    value = self.arriving.pop(instruction).wait()
                    self.values[kind, unit] = value.requires_grad_(kind == "RECV_F")
                    self._begin_receives(1)

    def _forward(self, instruction: Instruction, unit: Unit, passage: Passage) -> None:
        """Run a forward pass, with the loss on the model's last chunk."""
        assert instruction.micro_batch is not None
        source = self.values.pop(("RECV_F", unit), None)
        if source is None:
            source = self._tokens(self.batches[instruction.micro_batch][0], unit, passage)
        loss: Callable[[Tensor], Tensor] | None = None
        if instruction.stage == self.schedule.num_stages - 1:
            targets = self._tokens(self.batches[instruction.micro_batch][1], unit, passage)
            weight = self._weight(unit, passage)
            loss = partial(self._weighted_loss, targets, weight * self.update.scale.value)
        output = self.chunks.forward(unit, source, passage.tokens, loss)
        if loss is None:
            self.values["SEND_F", unit] = output
        elif self.place.tp == 0:
            self.loss += output.double() / self.update.scale.value

    def _weighted_loss(self, targets: Tensor, weight: float, output: Tensor) -> Tensor:
        """Return the loss of a unit, weighted so that the sum over units is the step's mean."""
        return self.model.loss(output, targets) * weight

    def _weight(self, unit: Unit, passage: Passage) -> float:
        first, end = self.grid.samples(self.place.pp, passage)[self.place.dp]
        tokens = passage.tokens
        part = tokens[unit.token_slice] / sum(tokens) if tokens else 1.0
        return (end - first) / self.job.global_batch_size * part / self.grid.cp

    def _tokens(self, value: Tensor, unit: Unit, passage: Passage) -> Tensor:
        """Return the tokens of inputs or targets that belong to a unit."""
        if not passage.tokens:
            return value
        first = sum(passage.tokens[: unit.token_slice])
        return value[:, first : first + passage.tokens[unit.token_slice]]

    def _unit(self, instruction: Instruction) -> Unit:
        assert instruction.micro_batch is not None
        chunk = instruction.stage // self.grid.pp
        return Unit(chunk, instruction.micro_batch, instruction.token_slice or 0)

    def _passage(self, instruction: Instruction) -> Passage:
        """Return the micro-batch, or the batch slice, of an instruction."""
        assert instruction.micro_batch is not None
        return self.grid.passages[instruction.micro_batch]

    # --------------------------------------------------------------------------- messages

    def _keep(self, kind: str, unit: Unit, value: Tensor | None) -> None:
        """Store an output until it is sent; ignore None, as the model's input has no gradient."""
        if value is not None:
            self.values[kind, unit] = value

    def _send(self, instruction: Instruction, value: Tensor, passage: Passage) -> None:
        assert instruction.peer is not None
        pieces = outgoing(self.grid, self.place, instruction.peer % self.grid.pp, passage)
        self.messages.send(value, pieces, _kind_of(instruction))
        self.messages.forget_delivered()

    def _begin_receives(self, number: int) -> None:
        """Start the next receives in the order of the instruction list."""
        begun = self.num_begun
        for instruction in self.receives[begun : begun + number]:
            assert instruction.peer is not None
            passage, unit = self._passage(instruction), self._unit(instruction)
            pieces = incoming(self.grid, self.place, instruction.peer % self.grid.pp, passage)
            extent = self._extent(instruction, unit, passage)
            buffer = torch.empty(extent, dtype=self.model.dtype, device=self.device)
            self.arriving[instruction] = self.messages.receive(
                buffer, pieces, _kind_of(instruction)
            )
        self.num_begun = begun + number

    def _extent(self, instruction: Instruction, unit: Unit, passage: Passage) -> tuple[int, ...]:
        """Return the shape of a received activation or gradient."""
        first, end = self.grid.samples(self.place.pp, passage)[self.place.dp]
        behind = instruction.kind == "RECV_B"
        layer = self.grid.bounds[instruction.stage + behind]
        tokens, *features = input_extent(self.job.model, layer)
        tokens //= self.grid.cp
        if passage.tokens:
            tokens = passage.tokens[unit.token_slice]
        assert instruction.peer is not None
        if self.grid.divides_tokens(self.place.pp, instruction.peer % self.grid.pp):
            tokens //= self.grid.stages[self.place.pp].tp
        return (end - first, tokens, *features)


def _kind_of(instruction: Instruction) -> MessageKind:
    return "activation" if instruction.kind.endswith("F") else "gradient"


def start_engine(
    job: Job, place: Coordinates, spans: Spans, built: Callable[[], None], *, cuda: bool
) -> TorchEngine:
    """Build this rank's part of the model; ``built`` is called once its weights exist."""
    model = StageModel(job, place, spans, cuda=cuda)
    built()
    return TorchEngine(job, place, model, Update(job, place, model), spans)
