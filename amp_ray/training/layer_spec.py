"""Specification of a layer, and initial weights that do not depend on the strategy."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from amp_ray.training.grid import shard_range


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """Class, arguments and weight sharing of a layer that is not yet built."""

    module: type[Any]  # class of the layer
    arguments: tuple[Any, ...]  # positional arguments
    keywords: Mapping[str, Any] = field(default_factory=dict)  # keyword arguments
    # Layers with the same key share their ``weight``; None if the weight is not shared
    tied_key: str | None = None
    # Function to run instead of the module, with the module as first argument
    forward_fn: Callable[..., Any] | None = None

    def build(self) -> Any:  # noqa: ANN401 - a torch module
        """Build the layer with its initial weights."""
        return self.module(*self.arguments, **self.keywords)


_SEED_BITS = 63
"""Seeds are below 2**63, which all of torch's generators accept."""


def seed_of(*parts: object) -> int:
    """Return a seed derived from the parts' texts, equal on every machine.

    Example:
        >>> seed_of(0, "a") == seed_of(0, "a") != seed_of(0, "b")
        True
    """
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> (64 - _SEED_BITS)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """Generator of one layer's initial weights; this process keeps shard ``tp_rank``."""

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
        """Return this rank's shard, along ``dim``, of the tensor that ``whole`` returns."""
        first, end = shard_range(shape[dim], self.tp_rank, self.tp)
        return self.whole(name, shape, std).narrow(dim, first, end - first).clone()
