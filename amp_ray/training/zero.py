"""ZeRO 2 and 3 by DeepSpeed: its plain engine, which shares gradients and weights out.

A layer is gathered as a whole before it runs, beside the layer before it, and its gradients are
reduced beside the backward pass of the next. DeepSpeed refuses this in its pipeline engine.

References:
    Rajbhandari et al., ZeRO, arXiv:1910.02054.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import deepspeed
import torch
from deepspeed.utils import set_z3_leaf_module
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from amp_ray.cost.instructions import Instruction, Kind
from amp_ray.strategies.zero import MOST_ZERO_STAGE
from amp_ray.training.clock import Spans
from amp_ray.training.data import MicroBatch, step_batches
from amp_ray.training.executor.chunks import build_chunks
from amp_ray.training.grid import Coordinates
from amp_ray.training.job import Job
from amp_ray.training.layer_spec import LayerSpec


class ShardedModel(nn.Module):
    """The whole model as DeepSpeed's plain engine takes it: from inputs and targets to the loss.

    Attributes:
        layer_parameters: Of this rank, by layer; a weight of two layers counts once.
    """

    def __init__(
        self,
        job: Job,
        layers: Sequence[LayerSpec],
        loss: Callable[[Tensor, Tensor], Tensor],
    ) -> None:
        """Build all layers; each is gathered as a whole."""
        super().__init__()
        chunk = build_chunks(layers, [(0, len(layers))], job.grid.stages[0])[0]
        self.layers, self.run, self.loss = chunk.modules, chunk.run, loss
        self.layer_parameters = [
            sum(parameter.numel() for parameter in layer.parameters()) for layer in self.layers
        ]
        self.drops_weights = job.zero_stage == MOST_ZERO_STAGE
        if not self.drops_weights:
            return
        # The first layer's input has no gradient, which DeepSpeed needs to gather it as a whole.
        for layer in self.layers[1:]:
            set_z3_leaf_module(layer, flag=True)
        for layer in chunk.lent:
            # The head runs with the embedding's weights: they stay for the whole pass.
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
    """A view of a weight; the backward pass takes its values from the gathered weight."""

    weight: Tensor
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


def _save(value: Tensor) -> Tensor | _View:
    """Keep the weight in place of a view of it, which would keep all of the gathered memory."""
    weight = value._base  # noqa: SLF001 - torch has no other way to ask for it
    if not isinstance(weight, nn.Parameter):
        return value
    offset = value.storage_offset() - weight.storage_offset()
    return _View(weight, value.size(), value.stride(), offset)


def _restore(kept: Tensor | _View) -> Tensor:
    """Return the saved tensor; DeepSpeed has gathered the layer's weights before."""
    if not isinstance(kept, _View):
        return kept
    weight = kept.weight.detach()
    return weight.as_strided(kept.size, kept.stride, weight.storage_offset() + kept.offset)


class ShardedEngine:
    """One rank of runtime ``deepspeed`` with ZeRO 2 or 3.

    Args:
        place: Of this rank.
        engine: DeepSpeed's own.
        num_parameters: Weights of this rank, were they not shared out.
    """

    def __init__(
        self,
        job: Job,
        place: Coordinates,
        engine: Any,  # noqa: ANN401
        num_parameters: int,
        spans: Spans,
    ) -> None:
        """Keep the parts."""
        self.job, self.place, self.engine, self.spans = job, place, engine, spans
        self.num_parameters = num_parameters

    def load(self, step: int) -> list[MicroBatch]:
        """Make the data of a step."""
        return list(step_batches(self.job, step, self.place))

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
