"""Collectives of sharded weights and gradients beside the passes of a micro-batch, by layer."""

from typing import Final

import numpy as np

from amp_ray.arrays import FloatArray
from amp_ray.clusters.device import Device

COLLECTIVE_CHANNELS: Final = 24
"""Multiprocessors that a ring of NCCL occupies within a node of eight A100: one per channel, two
channels on each of twelve NVLinks."""

MOST_TAKEN: Final = 0.5
"""Of a device with few multiprocessors, or a core that computes and copies."""


def taken_share(device: Device) -> float:
    """Return the share of a device's computation that a collective takes while it runs."""
    return min(COLLECTIVE_CHANNELS / device.num_multiprocessors, MOST_TAKEN)


def exposed_s(
    passes_s: FloatArray,
    gathers_s: FloatArray,
    again_s: FloatArray,
    scatters_s: FloatArray,
    taken: float = 0.0,
) -> float:
    """Return what gathers and reduce-scatters add to the passes of a micro-batch on all layers.

    While a layer runs forward, the weights of the next one are gathered; while it runs backward,
    those of the one before it, and the gradients of the one behind it are reduced, over the same
    links. A layer waits for what is gathered for it, and computes at a lower rate beside
    collectives. The first gather and the last reduce-scatter have nothing beside them.

    Args:
        passes_s: Shape ``(2, num_layers)``. Forward and backward computation.
        gathers_s: Shape ``(num_layers,)``. Gathers before the forward pass.
        again_s: Likewise before the backward pass, 0 where weights stayed.
        scatters_s: Reduce-scatters after it.
        taken: Share of the computation that a collective takes while it runs.

    References:
        Zhao et al., PyTorch FSDP, arXiv:2304.11277, section 3.3: prefetching in both passes.

    Example:
        >>> passes = np.array([[1.0, 1.0], [2.0, 2.0]])
        >>> exposed_s(passes, np.array([0.5, 1.5]), np.array([3.0, 0.0]), np.array([0.5, 0.5]))
        2.5
    """
    forward_s, backward_s = passes_s
    first_s = gathers_s[0] + left_s(gathers_s[1:], forward_s[:-1], taken).sum()
    beside_s = np.zeros_like(backward_s)
    beside_s[1:] += again_s[:-1]
    beside_s[:-1] += scatters_s[1:]
    later_s = left_s(beside_s, backward_s, taken).sum() + again_s[-1] + scatters_s[0]
    return float(first_s + later_s)


def left_s(collective_s: FloatArray, compute_s: FloatArray, taken: float) -> FloatArray:
    """Return what collectives add to the computation beside them.

    Either the computation is over first, or it has lost what they took while they ran.
    """
    left: FloatArray = np.maximum(collective_s - compute_s, taken * collective_s)
    return left
