"""Weights and gradients of a rank: as flat vectors, or sharded over replicas (ZeRO 2 and 3).

A flat vector needs only one message and one optimizer operation.

Gradients are accumulated in single precision. If the layers compute in half precision, they use
rounded copies of the single-precision weights that the optimizer updates.
"""

import datetime as dt
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from amp_ray.strategies.zero import SHARDED_GRADIENTS
from amp_ray.training.executor.chunks import BuiltChunk
from amp_ray.training.executor.messages import Messages
from amp_ray.training.grid import RowRange
from amp_ray.training.job import Job, UnfitError
from amp_ray.training.parallel import is_divided


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicas:
    """The ranks that hold the same layers of a stage, as seen by one of these ranks."""

    # Processes of each shard group; a group holds one full copy, and is one process if not sharded
    rows: tuple[tuple[int, ...], ...]
    group: Any  # group of all these ranks; None for a single rank
    shards: Any  # this rank's shard group; None for a single rank
    copies: Any  # ranks of other shard groups with the same shard; None for a single rank
    is_first_copy: bool  # whether this rank belongs to the first shard group

    @property
    def num_shards(self) -> int:
        """Number of ranks that together hold one full copy."""
        return len(self.rows[0])

    @property
    def shard(self) -> int:
        """Index of this rank's shard."""
        return 0 if self.shards is None else int(torch.distributed.get_rank(self.shards))


def replicas_of(processes: Sequence[int], num_shards: int, limit: dt.timedelta) -> Replicas:
    """Create the groups of this process; collective over ``processes``.

    ``processes`` hold the same layers, by replica index; ``num_shards`` consecutive ones form a
    shard group.
    """
    rows = tuple(
        tuple(sorted(processes[first : first + num_shards]))
        for first in range(0, len(processes), num_shards)
    )
    process = torch.distributed.get_rank()
    row = next(row for row in rows if process in row)
    group = make_group(processes, limit)
    if num_shards in {1, len(processes)}:
        shards, copies = (None, group) if num_shards == 1 else (group, None)
    else:
        shards = make_group(row, limit)
        copies = make_group([other[row.index(process)] for other in rows], limit)
    return Replicas(
        rows=rows, group=group, shards=shards, copies=copies, is_first_copy=row == rows[0]
    )


def make_group(processes: Sequence[int], limit: dt.timedelta) -> Any:  # noqa: ANN401 - torch's
    """Create a group of processes; return None for a single process."""
    if len(processes) == 1:
        return None
    return torch.distributed.new_group(
        sorted(processes), timeout=limit, use_local_synchronization=True
    )


FIRST_SCALE: Final = 2.0**16
GROWTH_STEPS: Final = 1000
"""Loss scaling in fp16: DeepSpeed's initial scale, and the steps after which it doubles."""


class Part:
    """Parameters of a rank that are reduced and updated together.

    Args:
        masters: Tensors that this rank's optimizer updates; their gradients are set by `reduce`.
        is_divided: Whether the tp ranks have different shards, not copies.
        is_first_copy: Whether no earlier replica updates the same parameters.
    """

    def __init__(
        self, *, masters: list[nn.Parameter], is_divided: bool, is_first_copy: bool
    ) -> None:
        self.masters, self.is_divided, self.is_first_copy = masters, is_divided, is_first_copy
        self.parameters: Sequence[Any] = ()

    @property
    def totals(self) -> list[Tensor]:
        """Gradients of the masters."""
        return [master.grad for master in self.masters if master.grad is not None]

    def reduce(self) -> None:
        """Sum the gradients over the replicas; each of them has counted its own samples."""

    def updated(self) -> None:
        """Hand the step's weights to the layers, and forget the gradients."""
        self.forget()

    def forget(self) -> None:
        """Set the gradients to zero."""


class FlatParameters(Part):
    """Parameters that every replica holds in full.

    Args:
        parameters: Their data becomes part of a flat vector.
        dtype: Data type of the layers' weights.
        replicas: Ranks with the same parameters. The ranks of a shard group divide the update and
            the optimizer state (ZeRO-1).
    """

    def __init__(
        self,
        parameters: Sequence[Any],
        *,
        dtype: torch.dtype,
        device: torch.device,
        replicas: Replicas,
    ) -> None:
        num_shards = replicas.num_shards
        size = sum(parameter.numel() for parameter in parameters)
        self.size = -(-size // num_shards) * num_shards
        self.weights = torch.zeros(self.size, dtype=dtype, device=device)
        self.gradients = torch.zeros(self.size, dtype=torch.float32, device=device)
        begin = 0
        for parameter in parameters:
            end = begin + parameter.numel()
            self.weights[begin:end].copy_(parameter.detach().flatten())
            parameter.data = self.weights[begin:end].view(parameter.shape)
            total = self.gradients[begin:end].view(parameter.shape)
            if dtype == torch.float32:
                parameter.grad = total
            else:
                parameter.total = total
                parameter.register_post_accumulate_grad_hook(_add_up)
            begin = end
        part = self.size // num_shards
        first = replicas.shard * part
        self.shard = slice(first, first + part)
        shard = self.weights[self.shard]
        self.master = nn.Parameter(shard if dtype == torch.float32 else shard.float())
        self.master.grad = self.gradients[self.shard]
        super().__init__(
            masters=[self.master],
            is_divided=is_divided(parameters[0]),
            is_first_copy=replicas.is_first_copy,
        )
        self.parameters, self.replicas = parameters, replicas

    def reduce(self) -> None:
        """Sum the gradients over the replicas; each of them has counted its own samples."""
        if self.replicas.group is not None:
            torch.distributed.all_reduce(self.gradients, group=self.replicas.group)

    def updated(self) -> None:
        """Hand the step's weights to the layers, and forget the gradients."""
        shard = self.weights[self.shard]
        if self.master.dtype != shard.dtype:
            shard.copy_(self.master.detach())
        if shard.numel() < self.size:
            shards = self.replicas.shards
            torch.distributed.all_gather_into_tensor(self.weights, shard.clone(), group=shards)
        self.forget()

    def forget(self) -> None:
        """Set the gradients to zero."""
        self.gradients.zero_()


def _add_up(parameter: Any) -> None:  # noqa: ANN401 - a torch parameter
    """Add a micro-batch's half-precision gradient to the single-precision sum."""
    parameter.total.add_(parameter.grad)
    parameter.grad = None


class TiedTable:
    """A table that the first and the last stage both hold; its gradients are summed over both.

    ``gradient`` is that of this rank's rows, summed over its stage's replicas.
    """

    def __init__(
        self, gradient: Tensor, receives: Sequence[RowRange], sends: Sequence[RowRange]
    ) -> None:
        self.gradient, self.receives, self.sends = gradient, receives, sends

    def reduce(self, messages: Messages) -> None:
        """Add the other stage's gradient; both stages get the same sum, so tables stay equal."""
        gradient = self.gradient.clone()
        arriving = [
            (rows, messages.receive_rows(gradient[rows.first : rows.end], rows.process))
            for rows in self.receives
        ]
        for rows in self.sends:
            messages.send_rows(gradient[rows.first : rows.end], rows.process)
        for rows, incoming in arriving:
            self.gradient[rows.first : rows.end] += incoming.wait()


class LossScale:
    """Keeps fp16 gradients in range: halves after an overflow, doubles after many good steps."""

    def __init__(self, *, active: bool) -> None:
        """Begin with DeepSpeed's initial scale, or 1 if not ``active``."""
        self.active = active
        self.value = FIRST_SCALE if active else 1.0
        self.num_good = 0

    def accept(self, *, finite: bool) -> bool:
        """Update the scale after a step's gradients; return whether to apply them."""
        if not self.active:
            return True
        self.num_good = self.num_good + 1 if finite else 0
        if not finite:
            self.value = max(1.0, self.value / 2)
        elif self.num_good % GROWTH_STEPS == 0:
            self.value *= 2
        return finite


class ShardedChunk(nn.Module):
    """The layers of one chunk with sharded weights.

    With ZeRO 2 and 3, torch's ``fully_shard`` shards weights and gradients over replicas:

    ================  =====================================  =====================================
                      weights are gathered                   gradients are reduced
    ================  =====================================  =====================================
    2, one stage      in the first forward pass of a step    in every backward pass
    3, one stage      in every pass; where weights are       in every backward pass
                      kept, only in every forward pass
    3, a pipeline     in the first forward pass of a step    in the last backward pass of a chunk
    ================  =====================================  =====================================

    Reduced gradients are accumulated in shards; gradients that wait for the reduction, as full
    tensors.

    Args:
        job: Has the ZeRO stage.
        chunk: Layers with full weights in single precision, on the CPU.
        replicas: Ranks over which the weights are sharded.
        table: A weight that is not sharded, because another stage also holds it.

    References:
        Rajbhandari et al., ZeRO, arXiv:1910.02054; Zhao et al., PyTorch FSDP, arXiv:2304.11277.
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
        """Shard the weights layer by layer; weights that two layers use, with the whole chunk."""
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
            # Sum gradients instead of averaging them: losses are already weighted by samples.
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
        """Prepare the communication of the next backward pass; ``last`` if it ends the step."""
        self.set_is_last_backward(last)
        self.set_requires_gradient_sync(last or not self.reduces_once)
        self.set_reshard_after_backward(last or not self.gathers_once)

    def _shared_out(self, table: object) -> Iterator[tuple[str, Any]]:
        """Yield names and values of the sharded parameters."""
        return (pair for pair in self.named_parameters() if pair[1] is not table)


class ShardedParameters(Part):
    """This rank's shards of parameters, with their gradients."""

    def __init__(self, parameters: list[Any], replicas: Replicas, is_divided: bool) -> None:  # noqa: FBT001
        """Give the local shards to the optimizer; a small tensor's shard may be empty."""
        super().__init__(
            masters=[nn.Parameter(_local(parameter)) for parameter in parameters],
            is_divided=is_divided,
            is_first_copy=replicas.is_first_copy,
        )
        self.parameters = parameters

    def reduce(self) -> None:
        """Use the gradients that the backward passes have already reduced."""
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
    local: Tensor = value.detach().to_local()
    return local


def _mesh(replicas: Replicas, device: torch.device) -> DeviceMesh:
    """Return the replicas as a mesh for ``fully_shard``, of shape (shards) or (copies, shards)."""
    if replicas.copies is None:
        return DeviceMesh.from_group(replicas.shards, device.type)
    return DeviceMesh.from_group(
        [replicas.copies, replicas.shards],
        device.type,
        mesh=torch.tensor(replicas.rows),
        mesh_dim_names=("replicate", "shard"),
    )
