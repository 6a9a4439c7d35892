"""What a cut costs at least, as far as the stage on one side of it tells."""

from collections import Counter
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from amp_ray.cost.collective import start_s
from amp_ray.cost.messages import MessageModel
from amp_ray.cost.topology import FloatArray
from amp_ray.search.stage_groups.device_group import DeviceGroup
from amp_ray.search.stage_groups.shares import Shares

CutBound = tuple[int, float]
"""tp of a stage, and seconds per byte of what its ranks send or get of a sample."""


@dataclass(frozen=True, kw_only=True, eq=False)
class CutBounds:
    """Bounds the messages of a stage to or from any other one.

    What a rank has must leave it, and the gradient of all that must come back; or the other way
    round.

    Args:
        model: Times messages.
    """

    model: MessageModel

    def bound(self, group: DeviceGroup, shares: Shares, *, crossing: bool) -> CutBound:
        """Return what the price of a stage's cut depends on.

        Args:
            group: Of the stage.
            shares: Samples per dp index.
            crossing: Whether the other stage is on other nodes for sure.
        """
        rates, _ = self.model.links
        grid = self.model.topology.node_of_device[group.devices]
        nodes, tp = grid[:, 0].tolist(), grid.shape[1]
        least = max(
            samples / float(rates[node, node]) for node, samples in zip(nodes, shares, strict=True)
        )
        if crossing and (grid == grid[:, :1]).all():
            held: Counter[int] = Counter()
            for node, samples in zip(nodes, shares, strict=True):
                held[node] += tp * samples
            least = max(least, *(held[node] / self._best_rates[node] for node in held))
        return tp, least

    def seconds(self, bound: CutBound, *, behind: bool) -> FloatArray:
        """Return the least time of both messages at every boundary, shape ``(num_layers + 1,)``.

        Args:
            bound: Of a stage.
            behind: Whether the cut is behind the stage in the pipeline; else it is before it.
        """
        tp, s_per_sample = bound
        model, traits = self.model, self.model.traits
        sliced = traits.sliced_gradients if behind else traits.sliced_activations
        own = model.sample_bytes(1) / tp
        other = model.sample_bytes(tp) / (tp if sliced else 1)
        start = start_s(model.constants, traits) + float(model.links[1].min())
        both = start + s_per_sample * np.array([own, other])
        least: FloatArray = both.max(axis=0) if traits.duplex_transfers else both.sum(axis=0)
        return least

    @cached_property
    def _best_rates(self) -> list[float]:
        """Rate of each node to the node that is nearest; infinite where there is no other one."""
        rates, _ = self.model.links
        if len(rates) == 1:
            return [float("inf")]
        others = np.where(np.eye(len(rates), dtype=np.bool_), 0.0, rates)
        best: list[float] = others.max(axis=1).tolist()
        return best
