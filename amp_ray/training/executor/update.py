"""The end of a step: gradients are summed over replicas and stages, then the optimizer steps."""

from collections.abc import Iterator, Sequence
from math import isfinite

import torch
from torch import Tensor

from amp_ray.training.executor.layout import rows_for_others, shared_rows
from amp_ray.training.executor.model import StageModel
from amp_ray.training.executor.parameters import FlatParameters, LossScale, Part, TiedTable
from amp_ray.training.grid import Coordinates
from amp_ray.training.job import Job
from amp_ray.training.parallel import TensorParallel
from amp_ray.training.shapes import TextShape
from amp_ray.training.whole_model import build_optimizer

NORM_EPSILON = 1e-6
"""Added to the norm before dividing by it, as torch's ``clip_grad_norm_`` does."""


class Update:
    """Gradient sync and optimizer of a rank.

    Args:
        place: Of this rank.
        model: Whose weights change.
    """

    def __init__(self, job: Job, place: Coordinates, model: StageModel) -> None:
        """Make the optimizer over the rank's shards."""
        self.job, self.place, self.model = job, place, model
        self.scale = LossScale(active=job.precision == "fp16")
        self.all = [part for parts in model.weights for part in parts]
        masters = [master for part in self.all for master in part.masters]
        # On a CPU, too: flat vectors do not stay in its cache from one operation to the next.
        self.optimizer = build_optimizer(job, masters, fused=True)
        self.tied = {
            chunk: self._tied_table(table)
            for chunk, table in enumerate(model.tables)
            if table is not None
        }

    def reduce(self, chunk: int) -> None:
        """Sum the gradients of a chunk over its replicas, and a shared table's over both stages.

        Where tp ranks divide the tokens, what all of them hold is summed over them, too.
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
        """Return the norm of all gradients of the model, each counted once."""
        square = torch.zeros((), dtype=torch.float64, device=self.model.device)
        for total in (total for part in self._counted() for total in part.totals):
            square += total.double().square().sum()
        torch.distributed.all_reduce(square)
        return float(square.sqrt())

    def _counted(self) -> Iterator[Part]:
        """Yield the parts that no other rank counts."""
        for chunk, parts in enumerate(self.model.weights):
            for part in parts:
                is_table = part.parameters[0] is self.model.tables[chunk]
                is_first = part.is_first_copy and (part.is_divided or not self.place.tp)
                if is_first and not (is_table and self.place.pp):
                    yield part

    def _tied_table(self, table: object) -> TiedTable:
        """Return the exchange of a table with the stage that has its other end."""
        assert isinstance(self.job.model, TextShape)
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
    """Sum gradients over the tp ranks, all of them in one message."""
    joint = parallel.all_reduce(torch.cat([total.flatten() for total in totals]))
    sums = joint.split([total.numel() for total in totals])
    for total, part in zip(totals, sums, strict=True):
        total.copy_(part.view_as(total))
