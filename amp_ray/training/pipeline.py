"""Runtime ``deepspeed``: topology, pipeline module, configuration and engines of a strategy."""

import datetime as dt
import logging
import sys
from collections.abc import Callable, Iterable, Sequence
from itertools import cycle
from typing import Any, NamedTuple

import deepspeed
import torch
from deepspeed.pipe import LayerSpec as DeepSpeedLayer
from deepspeed.pipe import PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipelineParallelGrid, PipeModelDataParallelTopology
from deepspeed.utils import set_z3_leaf_module
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from amp_ray.cost.instructions import Instruction, Kind
from amp_ray.strategies.zero import (
    MOST_ZERO_STAGE,
    SHARDED_GRADIENTS,
    Zero,
    deepspeed_keys,
    deepspeed_precision,
)
from amp_ray.training.clock import SPAN_NAMES, Spans
from amp_ray.training.executor.chunks import build_chunks
from amp_ray.training.grid import Coordinates, Grid
from amp_ray.training.image import ImageBlock
from amp_ray.training.job import Job
from amp_ray.training.parallel import LayerSpec, TensorParallel, is_divided
from amp_ray.training.transformer import Block, recomputed
from amp_ray.training.workload import MicroBatch, build_optimizer, step_batches, whole_model

KINDS: dict[str, Kind] = {
    "ForwardPass": "F",
    "BackwardPass": "B",
    "SendActivation": "SEND_F",
    "RecvActivation": "RECV_F",
    "SendGrad": "SEND_B",
    "RecvGrad": "RECV_B",
    "ReduceGrads": "REDUCE_GRAD",
    "OptimizerStep": "STEP",
}
"""Our kind of instruction for each instruction of DeepSpeed's schedule."""

OTHER_SPANS = {"LoadMicroBatch": "load", "ReduceTiedGrads": "gradient_sync"}
"""Span names of DeepSpeed's other instructions."""

MAX_BUCKET_ELEMENTS = 500_000_000
"""Number of gradient elements per all-reduce; DeepSpeed's default."""


SHARED_MEMORY_OP = "deepspeed_shm_comm"


def join(job: Job, *, cuda: bool) -> None:
    """Make DeepSpeed use the process group of the trial."""
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    # DeepSpeed runs a compiler to find compatible operators, and on a CPU compiles one for half a
    # minute or more. It does neither if the operator is declared incompatible.
    deepspeed.ops.__compatible_ops__ = dict.fromkeys((SHARED_MEMORY_OP,), False)
    deepspeed.init_distributed(
        dist_backend="nccl" if cuda else "gloo",
        auto_mpi_discovery=False,
        verbose=False,
        timeout=dt.timedelta(seconds=job.communication_timeout_s),
    )


class PlacedTopology(PipeModelDataParallelTopology):
    """Topology with the job's rank map; DeepSpeed derives all groups from its ``mapping``."""

    def __init__(self, grid: Grid) -> None:
        """Replace each rank in DeepSpeed's mapping by the process that has it in the rank map."""
        super().__init__(num_pp=grid.pp, num_mp=grid.tp, num_dp=grid.dp)
        for place, rank in self.mapping.items():
            self.mapping[place] = grid.rank_map[rank]


class TrialModule(PipelineModule):
    """A pipeline module with the strategy's bounds."""

    def __init__(
        self,
        layers: Sequence[Any],
        loss: Callable[[Tensor, Tensor], Tensor],
        grid: Grid,
        stage: int,
    ) -> None:
        self._wanted = grid.bounds
        self._again = grid.stages[stage].recompute
        super().__init__(
            layers,
            topology=PlacedTopology(grid),
            loss_fn=loss,
            activation_checkpoint_interval=1 if self._again.kind == "full" else 0,
            activation_checkpoint_func=recomputed,
        )
        if self._again.kind == "selective":
            for block in self._blocks_again():
                block.attention_layer.recompute_core = True

    def _partition_layers(self, method: str = "") -> None:  # noqa: ARG002 - DeepSpeed's signature
        """Use the strategy's bounds and ignore DeepSpeed's partition method."""
        self.parts = list(self._wanted)
        self._set_bounds(self.parts[self.stage_id], self.parts[self.stage_id + 1])

    def _is_checkpointable(self, funcs: Sequence[Any]) -> bool:
        return all(any(function is block for block in self._blocks_again()) for function in funcs)

    def _blocks_again(self) -> list[Any]:
        """Return the blocks of this stage that recompute."""
        blocks = [layer for layer in self.forward_funcs if isinstance(layer, Block | ImageBlock)]
        return blocks[: self._again.layers]


def _recipe(spec: LayerSpec) -> DeepSpeedLayer:
    """Convert a layer to DeepSpeed's spec; DeepSpeed sums gradients of tied weights."""
    if spec.tied_key is None:
        return DeepSpeedLayer(spec.module, *spec.arguments, **spec.keywords)
    return TiedLayerSpec(
        spec.tied_key,
        spec.module,
        *spec.arguments,
        forward_fn=spec.forward_fn,
        tied_weight_attr="weight",
        **spec.keywords,
    )


def build_module(job: Job, parallel: TensorParallel, stage: int) -> TrialModule:
    """Build this rank's stage with initial weights, and set rank and group of ``parallel``."""
    layers, loss = whole_model(job, parallel)
    module = TrialModule([_recipe(layer) for layer in layers], loss, job.grid, stage)
    parallel.group = module.mpu().get_slice_parallel_group()
    if job.precision == "fp32" and job.zero_stage == 0:
        _flag_owners(module)
    return module


def _flag_owners(module: TrialModule) -> None:
    """Make DeepSpeed's fp32 gradient norm count every weight once.

    DeepSpeed counts flagged weights on every rank, and on the model's first rank all weights. So a
    weight on several ranks is flagged only on the lowest of these ranks. DeepSpeed's optimizers
    for other precisions handle replicas correctly.
    """
    process = module.global_rank
    peers = module.mpu().slice_group
    for parameter in module.parameters():
        divided = is_divided(parameter) or len(peers) == 1
        parameter.model_parallel = divided or process == min(peers)
    for tied in module.tied_comms.values():
        for name in tied["weight_attr"]:
            weight = getattr(tied["module"], name)
            weight.model_parallel = weight.model_parallel and process == min(tied["ranks"])


def deepspeed_config(job: Job, layer_parameters: Sequence[int]) -> dict[str, Any]:
    """Return DeepSpeed's configuration, with its implicit defaults written out.

    ``layer_parameters`` has the number of parameters of each layer of this rank. They limit the
    bucket size, because ZeRO-1 in a pipeline always allocates a full bucket.
    """
    grid = job.grid
    zero = Zero(stage=job.zero_stage, keeps_weights=grid.keeps_weights)
    return {
        "train_batch_size": job.global_batch_size,
        "train_micro_batch_size_per_gpu": grid.micro_batch_size,
        "gradient_accumulation_steps": grid.num_micro_batches,
        "gradient_clipping": job.gradient_clipping,
        "steps_per_print": sys.maxsize,
        "wall_clock_breakdown": False,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "reduce_bucket_size": min(MAX_BUCKET_ELEMENTS, sum(layer_parameters)),
            **deepspeed_keys(zero, layer_parameters),
        },
        "pipeline": {
            "pipe_partitioned": job.sliced_transfers,
            "grad_partitioned": job.sliced_transfers,
        },
        **deepspeed_precision(job.precision, job.zero_stage),
    }


def build_engine(job: Job, module: TrialModule, parallel: TensorParallel, *, cuda: bool) -> Any:  # noqa: ANN401
    """Return DeepSpeed's engine with a time span around every instruction of its schedule."""
    engine, *_ = deepspeed.initialize(
        model=module,
        optimizer=build_optimizer(job, module.parameters(), fused=cuda),
        config=deepspeed_config(job, [sum(weight.numel() for weight in module.parameters())]),
        dist_init_required=False,
    )
    stage, number = module.stage_id, job.grid.num_micro_batches
    engine._INSTRUCTION_MAP = {  # noqa: SLF001 - DeepSpeed has no public hook
        instruction: _timed(parallel.spans, method, instruction.__name__, stage, number)
        for instruction, method in engine._INSTRUCTION_MAP.items()  # noqa: SLF001
    }
    return engine


def _timed(
    spans: Spans, method: Callable[..., Any], instruction: str, stage: int, number: int
) -> Callable[..., Any]:
    """Return a method with a span around each call; calls are named by micro-batch, in order."""
    kind = KINDS.get(instruction)
    if kind is None:
        return spans.timed(OTHER_SPANS[instruction], method, lambda: None)
    micro_batches: Iterable[int | None] = range(number)
    if kind in {"REDUCE_GRAD", "STEP"}:
        micro_batches = [None]
    calls = cycle(micro_batches)

    def label() -> str:
        return str(Instruction(kind=kind, stage=stage, micro_batch=next(calls)))

    return spans.timed(SPAN_NAMES[kind], method, label)


class DeepSpeedEngine:
    """One rank of runtime ``deepspeed``.

    ``num_parameters`` are those of this rank, before ZeRO shards them.
    """

    def __init__(
        self,
        job: Job,
        place: Coordinates,
        engine: Any,  # noqa: ANN401
        num_parameters: int,
        spans: Spans,
    ) -> None:
        self.job, self.place, self.engine, self.spans = job, place, engine, spans
        self.num_parameters = num_parameters

    def load(self, step: int) -> list[MicroBatch]:
        """Make the data of a step."""
        return list(step_batches(self.job, step, self.place))

    def train(self, batches: list[MicroBatch]) -> float:
        """Train one step and return its loss, the same on all ranks."""
        return float(self.engine.train_batch(iter(batches)))


class ShardedModel(nn.Module):
    """The whole model for DeepSpeed's plain engine: from inputs and targets to the loss.

    It is used for ZeRO 2 and 3, which DeepSpeed's pipeline engine refuses. The weights of a layer
    are gathered while the previous layer runs; its gradients are reduced during the next layer's
    backward pass.

    Attributes:
        layer_parameters: This rank's parameters by layer; a weight of two layers counts once.

    References:
        Rajbhandari et al., ZeRO, arXiv:1910.02054.
    """

    def __init__(
        self,
        job: Job,
        layers: Sequence[LayerSpec],
        loss: Callable[[Tensor, Tensor], Tensor],
    ) -> None:
        """Build all layers; DeepSpeed gathers the weights of each together."""
        super().__init__()
        chunk = build_chunks(layers, [(0, len(layers))], job.grid.stages[0])[0]
        self.layers, self.run, self.loss = chunk.modules, chunk.run, loss
        self.layer_parameters = [
            sum(parameter.numel() for parameter in layer.parameters()) for layer in self.layers
        ]
        self.drops_weights = job.zero_stage == MOST_ZERO_STAGE
        if not self.drops_weights:
            return
        # Not the first layer: DeepSpeed gathers whole layers only if the input has a gradient.
        for layer in self.layers[1:]:
            set_z3_leaf_module(layer, flag=True)
        for layer in chunk.lent:
            # The head uses the embedding's weights, too: keep them for the whole pass.
            for parameter in layer.parameters():
                deepspeed.zero.register_external_parameter(self, parameter)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of a micro-batch."""
        if not self.drops_weights:
            return self._run(inputs, targets)
        with saved_tensors_hooks(_save, _restore):
            return self._run(inputs, targets)

    def _run(self, value: Tensor, targets: Tensor) -> Tensor:
        for layer in self.run:
            value = layer(value)
        return self.loss(value, targets)


class _View(NamedTuple):
    """Description of a view of a weight; the backward pass restores it from the gathered weight."""

    weight: Tensor
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


def _save(value: Tensor) -> Tensor | _View:
    """Replace a view of a weight by a description: a view would keep the gathered weight alive."""
    weight = value._base  # noqa: SLF001 - torch has no public accessor
    if not isinstance(weight, nn.Parameter):
        return value
    offset = value.storage_offset() - weight.storage_offset()
    return _View(weight, value.size(), value.stride(), offset)


def _restore(kept: Tensor | _View) -> Tensor:
    """Restore a saved tensor; DeepSpeed has already gathered the layer's weights."""
    if not isinstance(kept, _View):
        return kept
    weight = kept.weight.detach()
    return weight.as_strided(kept.size, kept.stride, weight.storage_offset() + kept.offset)


class ShardedEngine(DeepSpeedEngine):
    """One rank of runtime ``deepspeed`` with ZeRO 2 or 3."""

    def train(self, batches: list[MicroBatch]) -> float:
        """Train one step and return its loss, the same on all ranks."""
        total = torch.zeros((), dtype=torch.float64, device=self.engine.device)
        for index, batch in enumerate(batches):
            with self.spans.span("load"):
                inputs, targets = (value.to(self.engine.device) for value in batch)
            with self.spans.span("forward", _label("F", index)):
                loss = self.engine(inputs, targets)
            with self.spans.span("backward", _label("B", index)):
                self.engine.backward(loss)
            is_last = index == len(batches) - 1
            with self.spans.span("optimizer", _label("STEP") if is_last else None):
                self.engine.step()
            total += loss.detach()
        torch.distributed.all_reduce(total)
        return float(total) / (len(batches) * self.job.grid.num_ranks)


def _label(kind: Kind, micro_batch: int | None = None) -> str:
    return str(Instruction(kind=kind, stage=0, micro_batch=micro_batch))


def start_engine(
    job: Job, place: Coordinates, spans: Spans, built: Callable[[], None], *, cuda: bool
) -> DeepSpeedEngine:
    """Build this rank's stage and DeepSpeed's engine; call ``built`` when weights exist."""
    join(job, cuda=cuda)
    parallel = TensorParallel(rank=place.tp, size=job.grid.tp, spans=spans)
    if job.zero_stage >= SHARDED_GRADIENTS:
        return _start_sharded(job, place, parallel, built)
    module = build_module(job, parallel, place.pp)
    built()
    engine = build_engine(job, module, parallel, cuda=cuda)
    size = sum(parameter.numel() for parameter in module.parameters())
    return DeepSpeedEngine(job, place, engine, size, spans)


def _start_sharded(
    job: Job, place: Coordinates, parallel: TensorParallel, built: Callable[[], None]
) -> ShardedEngine:
    """Build the engine for ZeRO 2 and 3, and its only stage: they do not support pipelines."""
    mpu = PipelineParallelGrid(topology=PlacedTopology(job.grid))
    parallel.group = mpu.get_slice_parallel_group()
    layers, loss = whole_model(job, parallel)
    model = ShardedModel(job, layers, loss)
    built()
    sizes = model.layer_parameters
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=build_optimizer(job, model.parameters(), fused=True),
        config=deepspeed_config(job, sizes),
        mpu=mpu,
        dist_init_required=False,
    )
    return ShardedEngine(job, place, engine, sum(sizes), parallel.spans)
