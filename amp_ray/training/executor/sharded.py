"""ZeRO 2 and 3: replicas share out weights and gradients too, by torch's ``fully_shard``.

================  =====================================  =====================================
                  weights are gathered                   gradients are reduced
================  =====================================  =====================================
2, one stage      in the first forward pass of a step    in every backward pass
3, one stage      in every pass; where weights are       in every backward pass
                  kept, in every forward pass
3, a pipeline     in the first forward pass of a step    in the last backward pass of a chunk
================  =====================================  =====================================

What is reduced is added up in shards, what is not yet in whole gradients.

References:
    Rajbhandari et al., ZeRO, arXiv:1910.02054; Zhao et al., PyTorch FSDP, arXiv:2304.11277.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from amp_ray.strategies.zero import SHARDED_GRADIENTS
from amp_ray.training.executor.chunks import BuiltChunk
from amp_ray.training.executor.parameters import Part, Replicas
from amp_ray.training.job import Job, UnfitError
from amp_ray.training.parallel import is_divided


class ShardedChunk(nn.Module):
    """The layers of one chunk, of whose weights this rank has a part.

    Args:
        job: Which ZeRO stage it runs.
        chunk: Layers whose weights are whole yet, single precision, on the CPU.
        replicas: Among which they are shared out.
        table: A weight that stays whole: another stage has the other end of it.
    """

    def __init__(
        self,
        job: Job,
        chunk: BuiltChunk,
        replicas: Replicas,
        *,
        dtype: torch.dtype,
        device: torch.device,
        table: Any | None,  # noqa: ANN401 - a torch parameter
    ) -> None:
        """Share the weights out layer by layer; those of a layer that runs twice with the chunk."""
        super().__init__()
        _check_torch()
        self.layers, self.run = chunk.modules, chunk.run
        in_pipeline = job.grid.pp > 1
        self.reduces_once = in_pipeline
        self.gathers_once = in_pipeline or job.zero_stage == SHARDED_GRADIENTS
        divided = {name: is_divided(weight) for name, weight in self._shared_out(table)}
        whole = None if dtype == torch.float32 else dtype
        for module in (*(layer for layer in self.layers if layer not in chunk.lent), self):
            fully_shard(
                module,
                mesh=_mesh(replicas, device),
                reshard_after_forward=not (self.gathers_once or job.grid.keeps_weights),
                mp_policy=MixedPrecisionPolicy(
                    param_dtype=whole,
                    reduce_dtype=whole and torch.float32,
                    cast_forward_inputs=False,
                ),
                ignored_params=set() if table is None else {table},
            )
            # Every replica has counted its own samples: gradients are added up, not averaged.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
        self.parts = [
            ShardedParameters(
                [weight for name, weight in self._shared_out(table) if divided[name] is kind],
                replicas,
                kind,
            )
            for kind in sorted(set(divided.values()))
        ]

    def forward(self, value: Tensor) -> Tensor:
        """Run the layers one after the other."""
        for layer in self.run:
            value = layer(value)
        return value

    def begin_backward(self, *, last: bool) -> None:
        """Prepare the exchanges of the next backward pass; ``last`` of the step or not."""
        self.set_is_last_backward(last)
        self.set_requires_gradient_sync(last or not self.reduces_once)
        self.set_reshard_after_backward(last or not self.gathers_once)

    def _shared_out(self, table: object) -> Iterator[tuple[str, Any]]:
        """Yield the parameters that are shared out, by name."""
        return (pair for pair in self.named_parameters() if pair[1] is not table)


class ShardedParameters(Part):
    """This rank's shards of parameters, with gradients and optimizer states.

    Args:
        parameters: As ``fully_shard`` has made them.
    """

    def __init__(self, parameters: list[Any], replicas: Replicas, is_divided: bool) -> None:  # noqa: FBT001
        """Let the optimizer work on the local parts; small tensors have none on some ranks."""
        super().__init__(
            masters=[nn.Parameter(_local(parameter)) for parameter in parameters],
            is_divided=is_divided,
            is_first_copy=replicas.is_first_copy,
        )
        self.parameters = parameters

    def reduce(self) -> None:
        """Take the gradients that the backward passes have reduced."""
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            master.data, master.grad = _local(parameter), _local(parameter.grad)

    def forget(self) -> None:
        """Drop the gradients."""
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            parameter.grad = master.grad = None


def _check_torch() -> None:
    """Refuse a torch whose ``fully_shard`` cannot sum gradients."""
    if not hasattr(FSDPModule, "set_force_sum_reduction_for_comms"):
        raise UnfitError(f"zero_stage 2 and 3 need torch 2.9 or later, found {torch.__version__}")


def _local(value: Any) -> Tensor:  # noqa: ANN401 - a DTensor
    """Return this rank's part of a tensor."""
    local: Tensor = value.detach().to_local()
    return local


def _mesh(replicas: Replicas, device: torch.device) -> DeviceMesh:
    """Return the ranks as ``fully_shard`` takes them: shards, or copies of shards."""
    if replicas.copies is None:
        return DeviceMesh.from_group(replicas.shards, device.type)
    return DeviceMesh.from_group(
        [replicas.copies, replicas.shards],
        device.type,
        mesh=torch.tensor(replicas.rows),
        mesh_dim_names=("replicate", "shard"),
    )
