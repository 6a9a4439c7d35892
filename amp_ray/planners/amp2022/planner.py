"""The planner published as AMP (2022): its candidates, their plans and their order.

Kept to reproduce its published figures and to compare with them. It reads plain
numbers and arrays: what a model and a cluster are to it stands in
`amp2022_chain` and `amp2022_cost`, where it cuts in `amp2022_partition`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from amp_ray.arrays import FloatArray
from amp_ray.cost.estimate import Breakdown, Estimate, Infeasible, Reason, Result
from amp_ray.errors import InputError
from amp_ray.inputs.experiment import Experiment
from amp_ray.planners.amp2022.chain import Chain, gpt2_chain, list_bounds, transgan_chain
from amp_ray.planners.amp2022.cost import (
    AmpEstimate,
    Network,
    boundary_time_s,
    layer_time_s,
    predict_bounds,
)
from amp_ray.planners.amp2022.partition import even_bounds, published_bounds
from amp_ray.planners.published import PublishedPlanner
from amp_ray.search.planner import Candidates
from amp_ray.search.space import uniform_candidates
from amp_ray.strategies.candidate import AnyCandidate, Candidate
from amp_ray.strategies.recompute import FULL, NO_RECOMPUTE
from amp_ray.strategies.strategy import Strategy, candidate_of


def mean_forward_s(forward_s: Sequence[FloatArray], num_devices: Sequence[int]) -> FloatArray:
    """Average the layers' times over the device types of a cluster, as the paper does.

    Args:
        forward_s: Per device type, shape ``(num_entries,)``.
        num_devices: Devices (or nodes, when of equal size) of each type.

    Returns:
        Shape ``(num_entries,)``. The mean, weighted by the numbers of devices.

    Raises:
        ValueError: If the two sequences differ in length or there is no device.

    References:
        Li et al., AMP, arXiv:2210.07297, and its public artifact: 0.75 V100 + 0.25 T4.

    Example:
        >>> mean_forward_s([np.array([1.0, 2.0]), np.array([5.0, 2.0])], [3, 1])
        array([2., 2.])
    """
    total = sum(num_devices)
    if len(forward_s) != len(num_devices) or total <= 0:
        msg = (
            f"{len(forward_s)} device types with num_devices={tuple(num_devices)}: "
            "give each type its number of devices, at least one in all"
        )
        raise ValueError(msg)
    mean = np.zeros_like(forward_s[0], dtype=np.float64)
    for times, count in zip(forward_s, num_devices, strict=True):
        mean += count / total * times
    return mean


def predict(
    candidate: Candidate, forward_s: FloatArray, chain: Chain, network: Network
) -> AmpEstimate:
    """Partition one candidate by the published rule and predict its time.

    Args:
        candidate: What to plan; its degrees multiply to the number of ranks, and it has no more
            stages than the chain has layers to give to them.
        forward_s: Shape ``(num_entries,)``. One sample's forward at the candidate's ``tp``.
        chain: The model.
        network: The cluster.

    Returns:
        The prediction.

    Raises:
        ValueError: If the candidate does not fit the network or ``forward_s`` the chain.

    References:
        Li et al., AMP, arXiv:2210.07297, and its public artifact.
    """
    if candidate.num_micro_batches == 1:
        cuts = even_bounds(chain.num_transformer_layers, candidate.pp, *chain.even_split_extra)
    else:
        cuts = published_bounds(
            layer_time_s(candidate, forward_s, chain),
            boundary_time_s(candidate, chain, network),
            candidate.num_micro_batches,
        )
    return predict_bounds(candidate, list_bounds(chain, cuts), forward_s, chain, network)


@dataclass(frozen=True, kw_only=True, eq=False)
class Amp2022Planner(PublishedPlanner):
    """The published planner on an experiment of ours.

    It knows neither memory nor failures, and averages the layer times of all devices.

    Raises:
        InputError: If the experiment is not one that the published planner can take.
    """

    experiment: Experiment  # what is given; a measured profile, nodes with equal slots

    def __post_init__(self) -> None:
        """Refuse what the published formulas do not cover."""
        slots = {node.num_slots for node in self.experiment.cluster.nodes}
        wrong = (
            "a measured profile (profile: {source: table, ...})"
            if not self.experiment.profile.is_measured
            else "the same number of slots on every node"
            if len(slots) > 1
            else "recompute none or full"
            if self.experiment.recompute not in {NO_RECOMPUTE, FULL}
            else "model.layer_list: amp-2022"
            if self.experiment.model.num_layers != self._chain.num_entries
            else None
        )
        if wrong:
            raise InputError(
                f"cost model amp-2022 needs {wrong}; experiment {self.experiment.name!r} differs"
            )

    def candidates(self, _num_rows: int | None = None) -> Candidates:
        """Return the uniform space: the published planner places in the order of the nodes."""
        return Candidates(required=uniform_candidates(self.experiment))

    def plan(self, candidate: AnyCandidate) -> Result:
        """Partition by the published rule and predict."""
        assert isinstance(candidate, Candidate)
        chain = self._chain
        single = candidate.num_micro_batches == 1
        available = chain.num_transformer_layers if single else chain.num_layers
        if candidate.pp > available:
            detail = f"pp {candidate.pp}, {available} layers with work"
            return Infeasible(
                candidate=candidate, reason=Reason(kind="more stages than layers", detail=detail)
            )
        prediction = predict(candidate, self._forward_s(candidate.options.tp), chain, self._network)
        return _estimate(prediction, Strategy.uniform(candidate, prediction.bounds))

    def score(self, strategy: Strategy) -> Result:
        """Predict a strategy with given cuts.

        Raises:
            InputError: If its stages differ.
        """
        try:
            candidate = candidate_of(strategy)
        except ValueError as error:
            raise InputError(str(error)) from None
        forward_s = self._forward_s(candidate.options.tp)
        prediction = predict_bounds(
            candidate, strategy.bounds, forward_s, self._chain, self._network
        )
        return _estimate(prediction, strategy)

    @cached_property
    def _chain(self) -> Chain:
        try:
            return self._published_chain()
        except ValueError as error:
            raise InputError(str(error)) from None

    def _published_chain(self) -> Chain:
        """Return the chain of the families that the published planner knows."""
        shape = self.experiment.model.shape
        if shape.family == "gpt2":
            return gpt2_chain(
                num_layers=shape.num_layers,
                hidden_size=shape.hidden_size,
                sequence_length=shape.sequence_length,
                vocab_size=shape.vocab_size,
            )
        if shape.family == "transgan":
            return transgan_chain(
                depth=shape.depth, hidden_size=shape.hidden_size, bottom_width=shape.bottom_width
            )
        raise InputError(f"cost model amp-2022 knows gpt2 and transgan, not {shape.family!r}")

    @cached_property
    def _network(self) -> Network:
        cluster = self.experiment.cluster
        return Network(
            node_of_rank=cluster.node_of_device,
            inter_bytes_per_s=tuple(node.inter.bandwidth_bytes_per_s for node in cluster.nodes),
            intra_bytes_per_s=tuple(node.intra.bandwidth_bytes_per_s for node in cluster.nodes),
        )

    def _forward_s(self, tp: int) -> FloatArray:
        """Average one sample's forward times over the devices of the cluster."""
        cluster = self.experiment.cluster
        times = []
        for device in cluster.device_types:
            anchors = self.experiment.profile.anchors(device, tp)
            if 1 not in anchors:
                message = f"cost model amp-2022 needs micro_batch_size 1, found {sorted(anchors)}"
                raise InputError(message)
            times.append(anchors[1].forward_s)
        counts = [cluster.type_of_device.count(index) for index in range(len(times))]
        return mean_forward_s(times, counts)


def _estimate(prediction: AmpEstimate, strategy: Strategy) -> Estimate:
    busy_s = prediction.fill_s * strategy.num_micro_batches / strategy.pp
    return Estimate(
        strategy=strategy,
        iteration_time_s=prediction.iteration_time_s,
        breakdown=Breakdown(
            compute_s=busy_s,
            bubble_s=prediction.fill_s + prediction.steady_s - busy_s,
            pipeline_p2p_s=prediction.pipeline_p2p_s,
            gradient_sync_s=prediction.gradient_sync_s,
        ),
    )
