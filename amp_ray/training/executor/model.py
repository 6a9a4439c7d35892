"""The part of the model that a rank has: its groups, layers and flat weights."""

import datetime as dt
import os
from collections.abc import Sequence
from typing import Any, Final

import torch

from amp_ray.strategies.zero import SHARDED_GRADIENTS
from amp_ray.training.clock import Spans
from amp_ray.training.context import ContextParallel
from amp_ray.training.executor.chunks import BuiltChunk, build_chunks
from amp_ray.training.executor.messages import Messages
from amp_ray.training.executor.parameters import (
    FlatParameters,
    Part,
    Replicas,
    make_group,
    replicas_of,
)
from amp_ray.training.executor.sharded import ShardedChunk
from amp_ray.training.experts import ExpertParallel, is_spread
from amp_ray.training.fp8 import use_fp8
from amp_ray.training.grid import Coordinates, Grid
from amp_ray.training.job import Job
from amp_ray.training.layer_spec import LayerSpec
from amp_ray.training.parallel import TensorParallel, is_divided
from amp_ray.training.text import TIED_KEY
from amp_ray.training.token_window import TokenWindow
from amp_ray.training.whole_model import whole_model

DTYPES: Final = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.bfloat16,
}
"""Of weights and activations; in fp8 only the products of blocks are narrower."""


class StageModel:
    """Layers and weights of a rank, with the groups that share them.

    Attributes:
        chunks: Layers of every chunk.
        sharded: The same where replicas share out weights, else none.
        weights: Of every chunk: those that belong to this stage alone, and its end of a table
            that two stages share.
    """

    def __init__(self, job: Job, place: Coordinates, spans: Spans, *, cuda: bool) -> None:
        """Build the stage; every rank of the trial does so at the same time."""
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
        """Return a chunk's weights; those that replicas share out are no longer whole then."""
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
        """Prepare a backward pass of a chunk, the last one of the step or not."""
        if self.sharded:
            self.sharded[chunk].begin_backward(last=last)


def _context(grid: Grid, place: Coordinates, limit: dt.timedelta) -> ContextParallel | None:
    """Return the ranks that divide the sequences of this one; None where it has them whole."""
    if grid.cp == 1:
        return None
    processes = [grid.process(place.pp, place.dp, place.tp, cp) for cp in range(grid.cp)]
    return ContextParallel(
        rank=place.cp, processes=tuple(processes), group=make_group(processes, limit)
    )


def _share_out(job: Job, processes: Sequence[int], limit: dt.timedelta) -> Replicas:
    """Return the ranks with the same weights; groups that do not divide them are all of them."""
    wished, number = job.grid.shard_ranks, len(processes)
    num_shards = number if not wished or number % wished else wished
    return replicas_of(processes, num_shards if job.zero_stage else 1, limit)


def _experts(
    job: Job, place: Coordinates, limit: dt.timedelta
) -> tuple[ExpertParallel | None, Replicas | None]:
    """Return the ranks that hold all experts with this one, and those with the same of them."""
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
    """Return where processes stand in their group, or nothing where that is their own order."""
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
    """Divide the tokens of a chunk's input and gather those of its output where they are whole."""
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
    """Return the chunk's end of a table whose other end another stage has."""
    keys = [spec.tied_key for spec in specs]
    chunk_keys = keys[slice(*ends)]
    if TIED_KEY not in chunk_keys or keys.count(TIED_KEY) == chunk_keys.count(TIED_KEY):
        return None
    return chunk.modules[chunk_keys.index(TIED_KEY)].weight


def _parts(chunk: BuiltChunk, table: Any | None) -> list[list[Any]]:  # noqa: ANN401
    """Divide a chunk's parameters by who else has them.

    Shards of their own, copies of all tp ranks, experts of a few ranks, a shared table.
    """
    shards, copies, experts = list[Any](), list[Any](), list[Any]()
    for parameter in chunk.modules.parameters():
        if is_spread(parameter):
            experts.append(parameter)
        elif parameter is not table:
            (shards if is_divided(parameter) else copies).append(parameter)
    return [part for part in (shards, copies, experts, [] if table is None else [table]) if part]
