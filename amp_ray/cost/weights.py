"""How many parameters each rank holds; a weight that two layers share counts once per stage."""

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from amp_ray.arrays import FloatArray
from amp_ray.models.model import Model


@dataclass(frozen=True, slots=True, kw_only=True)
class TiedWeight:
    """A weight that two layers of the chain hold."""

    first: int  # position of the first of them
    last: int  # position of the last
    parameters: float  # its parameters on one rank

    def stages(self, bounds: tuple[int, ...], pp: int | None = None) -> tuple[int, int]:
        """Return the stages that hold it; arguments as of `by_stage`."""
        size = pp or len(bounds) - 1
        first, last = (bisect_right(bounds, layer) - 1 for layer in (self.first, self.last))
        return first % size, last % size


@dataclass(frozen=True, kw_only=True, eq=False)
class Weights:
    """Parameters per rank."""

    model: Model  # the chain of layers
    tp: int  # tensor parallel degree, which divides sharded parameters
    expert_ranks: int = 0  # ranks that hold the experts of a layer together; by default tp

    @cached_property
    def prefix(self) -> FloatArray:
        """Shape ``(num_layers + 1,)``. Prefix sums over the layers, tied weights twice."""
        held = [
            (layer.sharded_parameters - layer.expert_parameters) / self.tp
            + layer.replicated_parameters
            for layer in self.model.layers
        ]
        return np.concatenate(([0.0], np.cumsum(held))) + self.expert_prefix

    @cached_property
    def by_layer(self) -> FloatArray:
        """Shape ``(num_layers,)``. Parameters of each layer."""
        return np.diff(self.prefix)

    @cached_property
    def expert_prefix(self) -> FloatArray:
        """Shape ``(num_layers + 1,)``. Prefix sums of the experts alone."""
        held = [layer.expert_parameters for layer in self.model.layers]
        return np.concatenate(([0.0], np.cumsum(held))) / (self.expert_ranks or self.tp)

    @cached_property
    def replicated_prefix(self) -> FloatArray:
        """Shape ``(num_layers + 1,)``. Prefix sums of parameters that every tp rank holds."""
        held = [layer.replicated_parameters for layer in self.model.layers]
        return np.concatenate(([0.0], np.cumsum(held)))

    @cached_property
    def tensor_prefix(self) -> FloatArray:
        """Shape ``(num_layers + 1,)``. Prefix sums of the number of weights."""
        return np.cumsum([0.0, *(len(layer.weights) for layer in self.model.layers)])

    @cached_property
    def tied(self) -> TiedWeight | None:
        """The weight that two layers hold, if there is one.

        If more layers hold it (T5: both embeddings and the head), those between the first and the
        last count as having separate weights.
        """
        layers = self.model.layers
        where = [position for position, layer in enumerate(layers) if layer.tied_parameters]
        if len(where) < 2:  # noqa: PLR2004 - a weight is shared by two layers or by none
            return None
        parameters = layers[where[0]].tied_parameters / self.tp
        return TiedWeight(first=where[0], last=where[-1], parameters=parameters)

    def of_stages(self, bounds: tuple[int, ...], pp: int | None = None) -> FloatArray:
        """Return the parameters of one rank of each stage; arguments as of `by_stage`."""
        held = by_stage(self.prefix, bounds, pp)
        if self.tied is not None:
            first, last = self.tied.stages(bounds, pp)
            if first == last:
                held[first] -= self.tied.parameters
        return held


def by_stage(prefix: FloatArray, bounds: tuple[int, ...], pp: int | None) -> FloatArray:
    """Return the sums of stages, shape ``(pp,)``, from prefix sums over the layers.

    Without ``pp`` each stage is one chunk.
    """
    ends = prefix[list(bounds)]
    held: FloatArray = ends[1:] - ends[:-1]
    if pp is not None and len(held) > pp:
        held = held.reshape(-1, pp).sum(axis=0)
    return held
