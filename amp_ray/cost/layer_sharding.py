"""Collectives of sharded weights and gradients beside the passes of a micro-batch, by layer."""

import numpy as np

from amp_ray.cost.topology import FloatArray


def exposed_s(
    passes_s: FloatArray, gathers_s: FloatArray, again_s: FloatArray, scatters_s: FloatArray
) -> float:
    """Return what gathers and reduce-scatters add to the passes of a micro-batch on all layers.

    While a layer runs forward, the weights of the next one are gathered; while it runs backward,
    those of the one before it, and the gradients of the one behind it are reduced, over the same
    links. A layer waits for what is gathered for it. The first gather and the last reduce-scatter
    have nothing beside them.

    Args:
        passes_s: Shape ``(2, num_layers)``. Forward and backward computation.
        gathers_s: Shape ``(num_layers,)``. Gathers before the forward pass.
        again_s: Likewise before the backward pass, 0 where weights stayed.
        scatters_s: Reduce-scatters after it.

    References:
        Zhao et al., PyTorch FSDP, arXiv:2304.11277, section 3.3: prefetching in both passes.

    Example:
        >>> passes = np.array([[1.0, 1.0], [2.0, 2.0]])
        >>> exposed_s(passes, np.array([0.5, 1.5]), np.array([3.0, 0.0]), np.array([0.5, 0.5]))
        2.5
    """
    forward_s, backward_s = passes_s
    first_s = gathers_s[0] + np.maximum(gathers_s[1:] - forward_s[:-1], 0.0).sum()
    beside_s = np.zeros_like(backward_s)
    beside_s[1:] += again_s[:-1]
    beside_s[:-1] += scatters_s[1:]
    later_s = np.maximum(beside_s - backward_s, 0.0).sum() + again_s[-1] + scatters_s[0]
    return float(first_s + later_s)
