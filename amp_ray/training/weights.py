"""Starting weights that do not depend on the strategy: made whole, then sliced."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from amp_ray.training.ranks import shard_range

_SEED_BITS = 63
"""torch takes seeds up to 2**63 - 1 everywhere."""


def seed_of(*parts: object) -> int:
    """Return a seed for anything that has a name, equal on every machine.

    Example:
        >>> seed_of(0, "a") == seed_of(0, "a") != seed_of(0, "b")
        True
    """
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> (64 - _SEED_BITS)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """Makes the weights of one layer, of which this process keeps the shard ``tp_rank``."""

    seed: int
    layer: int
    tp_rank: int
    tp: int

    def whole(self, name: str, shape: Sequence[int], std: float) -> Tensor:
        """Return normally distributed values of mean 0, equal on every rank."""
        generator = torch.Generator()
        generator.manual_seed(seed_of(self.seed, self.layer, name))
        return torch.empty(tuple(shape)).normal_(std=std, generator=generator)

    def shard(self, name: str, shape: Sequence[int], std: float, dim: int) -> Tensor:
        """Return this rank's shard, along ``dim``, of what ``whole`` returns."""
        first, end = shard_range(shape[dim], self.tp_rank, self.tp)
        return self.whole(name, shape, std).narrow(dim, first, end - first).clone()
