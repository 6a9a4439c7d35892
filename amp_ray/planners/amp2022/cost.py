"""The time that the planner published as AMP (2022) predicts for a partition.

    T = sum(e) + (B - 1) * max(stage) + sum(boundary at the cuts) + max(gradient sync)

with ``e`` three times the forward time of a micro-batch and ``B`` the number of
micro-batches. The oddities are the artifact's: a boundary counts once, forward
only, and the all-reduce runs at the bandwidth of its ring's last hop.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from amp_ray.arrays import FloatArray
from amp_ray.planners.amp2022.chain import Chain, work_bounds
from amp_ray.strategies.candidate import Candidate
from amp_ray.units import BYTES_PER_FP32

IntArray = npt.NDArray[np.intp]

FORWARD_AND_BACKWARD = 3
"""The artifact takes the backward pass as twice the forward pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """What the published planner knows of a cluster."""

    node_of_rank: tuple[int, ...]  # shape ``(num_ranks,)``. Index of the node of each rank.
    inter_bytes_per_s: tuple[float, ...]  # shape ``(num_nodes,)``. Between this node and others.
    # Shape ``(num_nodes,)``. Between two devices of this node.
    intra_bytes_per_s: tuple[float, ...]

    def __post_init__(self) -> None:
        """Refuse bandwidths that do not belong to the nodes."""
        num_nodes = max(self.node_of_rank, default=-1) + 1
        if not num_nodes <= len(self.inter_bytes_per_s) == len(self.intra_bytes_per_s):
            msg = (
                f"node_of_rank names {num_nodes} nodes, inter_bytes_per_s has "
                f"{len(self.inter_bytes_per_s)} and intra_bytes_per_s "
                f"{len(self.intra_bytes_per_s)} values: give one of each per node"
            )
            raise ValueError(msg)

    def elements_per_s(self, source_node: IntArray, target_node: IntArray) -> FloatArray:
        """Look up the links between nodes; whatever is sent counts as fp32 elements."""
        inter = np.array(self.inter_bytes_per_s)
        intra = np.array(self.intra_bytes_per_s)
        between = np.minimum(inter[source_node], inter[target_node])
        bytes_per_s = np.where(source_node == target_node, intra[source_node], between)
        return np.asarray(bytes_per_s / BYTES_PER_FP32, dtype=np.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class AmpEstimate:
    """What the published planner says of one candidate."""

    candidate: Candidate  # what was planned
    bounds: tuple[int, ...]  # half-open, in entries of the published list
    fill_s: float  # the first micro-batch through all stages, ``sum(e)``
    steady_s: float  # the others behind the slowest stage, ``(B - 1) * max(stage)``
    pipeline_p2p_s: float  # time across the cuts, once
    gradient_sync_s: float  # data-parallel cost

    @property
    def iteration_time_s(self) -> float:
        """Seconds of one global batch."""
        return self.fill_s + self.steady_s + self.pipeline_p2p_s + self.gradient_sync_s


def predict_bounds(
    candidate: Candidate,
    bounds: tuple[int, ...],
    forward_s: FloatArray,
    chain: Chain,
    network: Network,
) -> AmpEstimate:
    """Predict the time of a candidate with given bounds.

    Args:
        candidate: Its degrees multiply to the number of ranks.
        bounds: Half-open, in entries of the published list, ``pp + 1`` of them.
        forward_s: Shape ``(num_entries,)``. One sample's forward at the candidate's ``tp``.
        chain: The model.
        network: The cluster.

    Returns:
        The prediction with its parts.

    Raises:
        ValueError: If the bounds do not fit the candidate or the chain, the candidate not
            the network, or ``forward_s`` not the chain.

    References:
        Li et al., AMP, arXiv:2210.07297, and its public artifact.
    """
    if len(bounds) != candidate.pp + 1:
        msg = f"bounds={bounds} make {len(bounds) - 1} stages, the candidate has pp={candidate.pp}"
        raise ValueError(msg)
    cuts = work_bounds(chain, bounds)
    layer_s = layer_time_s(candidate, forward_s, chain)
    boundary_s = boundary_time_s(candidate, chain, network)
    stage_s = np.add.reduceat(layer_s, cuts[:-1])
    crossed = [boundary_s[cut - 1, stage] for stage, cut in enumerate(cuts[1:-1])]
    return AmpEstimate(
        candidate=candidate,
        bounds=bounds,
        fill_s=float(layer_s.sum()),
        steady_s=float((candidate.num_micro_batches - 1) * stage_s.max()),
        pipeline_p2p_s=float(sum(crossed)),
        gradient_sync_s=_gradient_sync_s(candidate, cuts, chain, network),
    )


def layer_time_s(candidate: Candidate, forward_s: FloatArray, chain: Chain) -> FloatArray:
    """Time the forward and backward pass of one micro-batch through each work layer.

    Args:
        candidate: Its micro-batch size counts.
        forward_s: Shape ``(num_entries,)``. One sample's forward at the candidate's ``tp``.
        chain: The model.

    Returns:
        Shape ``(num_layers,)``.

    Raises:
        ValueError: If ``forward_s`` does not have one time per entry of the published list.

    References:
        Li et al., AMP, arXiv:2210.07297, and its public artifact.
    """
    if forward_s.shape != (chain.num_entries,):
        msg = (
            f"forward_s has shape {forward_s.shape}, the model's list {chain.num_entries} entries: "
            "give one time per entry"
        )
        raise ValueError(msg)
    work_s = forward_s[np.array(chain.work_entries)]
    return np.asarray(candidate.micro_batch_size * FORWARD_AND_BACKWARD * work_s)


def boundary_time_s(candidate: Candidate, chain: Chain, network: Network) -> FloatArray:
    """Time a cut after each layer, for each pair of neighbouring stages.

    Args:
        candidate: Its degrees multiply to the number of ranks.
        chain: The model.
        network: The cluster.

    Returns:
        Shape ``(num_layers, pp - 1)``. Over the slowest link of the tp ranks, the mean over
        the dp indices.

    Raises:
        ValueError: If the candidate does not fit the network.

    References:
        Li et al., AMP, arXiv:2210.07297, and its public artifact.
    """
    node = _node_of_rank(candidate, network)
    slowest = network.elements_per_s(node[:-1], node[1:]).min(axis=2)
    shrink = np.where(chain.boundary_split_by_tp, candidate.options.tp, 1)
    elements = candidate.micro_batch_size * np.array(chain.boundary_elements) / shrink
    return np.asarray((elements[:, None, None] / slowest).mean(axis=2))


def _node_of_rank(candidate: Candidate, network: Network) -> IntArray:
    """Shape ``(pp, dp, tp)``: the node of each rank."""
    shape = (candidate.pp, candidate.options.dp, candidate.options.tp)
    if np.prod(shape) != len(network.node_of_rank):
        msg = (
            f"pp={shape[0]} * dp={shape[1]} * tp={shape[2]} = {np.prod(shape)} ranks, the network "
            f"has {len(network.node_of_rank)}: every rank needs one device"
        )
        raise ValueError(msg)
    return np.array(network.node_of_rank, dtype=np.intp).reshape(shape)


def _gradient_sync_s(
    candidate: Candidate, cuts: tuple[int, ...], chain: Chain, network: Network
) -> float:
    """Ring all-reduce of the largest stage, at the bandwidth of the ring's last hop alone."""
    node = _node_of_rank(candidate, network)
    last_hop = network.elements_per_s(node[:, -1], node[:, 0])
    parameters = np.add.reduceat(np.array(chain.layer_parameters), cuts[:-1])
    for stage, (first, end) in enumerate(pairwise(cuts)):
        if any(first <= layer < end for layer in chain.embedding_layers):
            parameters[stage] += chain.embedding_parameters
    share = parameters[:, None] / candidate.options.tp
    ring = 2 * (candidate.options.dp - 1) / (candidate.options.dp * last_hop)
    return float((ring * share).max())
