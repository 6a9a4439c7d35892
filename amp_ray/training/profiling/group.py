"""All ranks of a profile run, and their agreements."""

import gc
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch

from amp_ray.training.events import cause_of

_T = TypeVar("_T")


class Ranks:
    """The ranks, which do the same things in the same order."""

    def __init__(self, device: Any, sizes: Iterable[int]) -> None:  # noqa: ANN401 - torch's
        """Make groups of consecutive ranks, whose sizes divide their number; all ranks call it."""
        self.device = device
        self.rank = int(torch.distributed.get_rank())
        self.size = int(torch.distributed.get_world_size())
        self._groups: dict[int, Any] = {}
        for size in sorted(set(sizes)):
            for first in range(0, self.size, size):
                group = torch.distributed.new_group(list(range(first, first + size)))
                if first <= self.rank < first + size:
                    self._groups[size] = group

    def group(self, size: int) -> Any:  # noqa: ANN401 - torch's
        """Return this rank's group of a size."""
        return self._groups[size]

    def largest(self, value: int) -> int:
        """Return the largest of all ranks' values."""
        shared = torch.tensor([value], device=self.device)
        torch.distributed.all_reduce(shared, op=torch.distributed.ReduceOp.MAX)
        return int(shared.item())

    def gather(self, value: float) -> list[float]:
        """Return all ranks' values, on every rank."""
        parts = [torch.zeros(1, dtype=torch.float64, device=self.device) for _ in range(self.size)]
        mine = torch.tensor([value], dtype=torch.float64, device=self.device)
        torch.distributed.all_gather(parts, mine)
        return [float(part.item()) for part in parts]

    def barrier(self) -> None:
        """Wait for the others."""
        self.largest(0)

    def wait(self) -> None:
        """Wait until the own device has done everything."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def attempt(self, work: Callable[[], _T]) -> _T | None:
        """Do work that needs no other rank; None on all ranks if one had too little memory."""
        result: _T | None = None
        failed = False
        try:
            result = work()
            self.wait()
        except (MemoryError, RuntimeError) as error:
            if cause_of(error) != "out_of_memory":
                raise
            failed = True
        if self.largest(int(failed)):
            result = None
            gc.collect()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
            return None
        return result
