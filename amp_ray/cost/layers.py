"""Time of every layer on one kind of rank: counted work, anchored at measurements.

Work is counted kernel by kernel (`roofline`), bounded by the host's time to launch it, and
corrected by the measured times of equal layers.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import NormalDist
from typing import Final

import numpy as np

from amp_ray.arrays import FloatArray, IntArray
from amp_ray.clusters.constants import Constants
from amp_ray.cost.collective import (
    BUFFER_CHANNELS,
    COLLECTIVE_CHANNELS,
    NO_RING,
    Path,
    all_gather_s,
    all_reduce_s,
    exchange_s,
    start_s,
    taken_share,
)
from amp_ray.cost.host_work import CAPTURED, host_launches, modules, waiting_launches
from amp_ray.cost.roofline import (
    BACKWARD_KERNELS_PER_FORWARD,
    Phases,
    Rank,
    device_phases,
    gemm_phases,
    looped_kernels,
    stream_s,
)
from amp_ray.inputs.profile import Anchor, Profile
from amp_ray.models.model import Layer, Model, count_kernels
from amp_ray.models.operator import AllReduce
from amp_ray.models.per_operator import per_operator
from amp_ray.runtimes.traits import GRAPH_GAP_S, RuntimeTraits
from amp_ray.strategies.recompute import RecomputeKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Seconds of one layer at one (tp, micro-batch size)."""

    forward_s: float  # one run of the forward pass
    backward_s: float | None  # one run of the backward pass; None where it was not measured


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerAnchors:
    """Measured times of one layer on one device."""

    # By micro-batch size, at the rank's own tp
    at_tp: Mapping[int, Measured] = field(default_factory=dict)
    # By micro-batch size, without all-reduces: the times at tp 1 if those in ``at_tp`` include
    # all-reduces, else the same as ``at_tp``
    alone: Mapping[int, Measured] = field(default_factory=dict)
    alone_tp: int = 1  # the tp of ``alone``
    # Host seconds of the cheapest kernel launch of all layers; 0 if none was measured
    launch_s: float = 0.0
    # Share of the runs in a measured time that began on an idle device
    idle_share: float = 0.0
    extrapolated: bool = False  # whether the rank's micro-batch size is outside the measured ones


def layer_anchors(
    profile: Profile, model: Model, rank: Rank, traits: RuntimeTraits, scale: float = 1.0
) -> tuple[LayerAnchors, ...]:
    """Return measured times of every distinct layer; empty anchors for an analytic profile.

    Equal layers have equal times: their later half is pooled by the median, because a device
    warms up while a profile runs through a model. Measured times are multiplied by ``scale``.

    Raises:
        ValueError: If the profile is measured, but not for this device and tp.
    """
    layers, positions = model.distinct_layers
    at_tp = profile.anchors(rank.device, rank.tp)
    if not at_tp:
        return (LayerAnchors(),) * len(layers)
    alone_tp = 1 if profile.includes_all_reduces else rank.tp
    alone = profile.anchors(rank.device, alone_tp)
    extrapolated = not min(at_tp) <= rank.micro_batch_size <= max(at_tp)
    where = np.array(positions)
    result = []
    for index, layer in enumerate(layers):
        runs = profile.forward_runs if layer.kind == "block" else 1
        warm = np.flatnonzero(where == index)
        warm = warm[len(warm) // 2 :]
        talks = profile.includes_all_reduces and bool(layer.all_reduce_elements("forward"))
        result.append(
            LayerAnchors(
                at_tp=_pooled(at_tp, warm, runs, scale),
                alone=_pooled(alone if talks else at_tp, warm, runs, scale),
                alone_tp=alone_tp if talks else rank.tp,
                idle_share=profile.starts_idle / runs,
                extrapolated=extrapolated,
            )
        )
    launch_s = _cheapest_launch_s(layers, result, traits)
    return tuple(replace(anchors, launch_s=launch_s) for anchors in result)


def _cheapest_launch_s(
    layers: Sequence[Layer], anchors: Sequence[LayerAnchors], traits: RuntimeTraits
) -> float:
    """Return host seconds per launch: no layer can be faster than the host launches its kernels."""
    prices = [
        measured.forward_s / (layer.num_kernels * traits.launches_per_kernel)
        for layer, anchor in zip(layers, anchors, strict=True)
        if layer.num_kernels
        for measured in anchor.alone.values()
    ]
    return min(prices, default=0.0)


def interpolate(ratios: Mapping[int, float], micro_batch_size: int) -> float:
    """Interpolate a ratio between measured micro-batch sizes, linearly in their logarithm.

    Outside the measured range, return the value of the nearest size.

    Example:
        >>> interpolate({1: 1.0, 4: 2.0}, 2)
        1.5
    """
    sizes = sorted(ratios)
    logs = [math.log(size) for size in sizes]
    return float(np.interp(math.log(micro_batch_size), logs, [ratios[size] for size in sizes]))


def _pooled(
    anchors: Mapping[int, Anchor], positions: IntArray, runs: int, scale: float
) -> dict[int, Measured]:
    """Pool equal layers, divide by the runs in a measured time, and scale."""
    return {
        size: Measured(
            forward_s=scale * float(np.median(anchor.forward_s[positions])) / runs,
            backward_s=None
            if anchor.backward_s is None
            else scale * float(np.median(anchor.backward_s[positions])),
        )
        for size, anchor in anchors.items()
    }


def slowest_wait_s(num_ranks: int, num_collectives: int, host_s: float, launch_s: float) -> float:
    """Return the seconds that ranks wait for the slowest host if it cannot run ahead of its device.

    Launches of independent hosts end at random, as a Poisson process of the same mean: their sum
    between two collectives has a standard deviation of the square root of their number. The slowest
    of ``n`` sums is later than the mean by the largest of ``n`` normal deviates (Blom, Statistical
    Estimates and Transformed Beta-Variables, 1958). With torch 2.13 on two cores shared with other
    work, the slowest of 8 (4) times of eight operators took 1.51 (1.23) times the mean; by this
    formula 1.51 (1.37). ``host_s`` are the seconds of all launches of a pass, ``launch_s`` those of
    one.

    Example:
        >>> slowest_wait_s(1, 2, 1.0, 0.01)
        0.0
        >>> round(slowest_wait_s(8, 2, 1.0, 0.01), 2)  # 100 launches, 50 before each collective
        0.2
    """
    deviate = NormalDist().inv_cdf((num_ranks - 0.375) / (num_ranks + 0.25))
    return deviate * math.sqrt(num_collectives * host_s * launch_s)


def rank_model(model: Model, constants: Constants, *, tp: int, ep: int, expert_tp: int) -> Model:
    """Return a model whose layers, divided by tp, are the layers of one rank.

    If there is no expert parallelism and tp divides experts like other weights, this is ``model``.
    """
    if ep == 1 and expert_tp == tp:
        return model
    load = max(constants.expert_imbalance if ep > 1 else 1.0, 1.0)
    distinct, positions = model.distinct_layers
    layers = [_spread(layer, tp, ep, expert_tp, load) for layer in distinct]
    return replace(model, layers=tuple(layers[position] for position in positions))


def _spread(layer: Layer, tp: int, ep: int, expert_tp: int, load: float) -> Layer:
    if layer.experts is None:
        return layer
    here = layer.experts.operators()
    first = layer.operators.index(here[0])
    spread = layer.experts.spread(tp=tp, ep=ep, etp=expert_tp, load=load)
    operators = (*layer.operators[:first], *spread, *layer.operators[first + len(here) :])
    return replace(layer, operators=operators)


COLLECTIVE_RATIO_LIMIT = 3.0
"""A measured all-reduce may be this much faster or slower than the link's stated rate says."""


TALK_AGAIN: Final = {"full": 1.0, "per-operator": 0.5}
"""Share of a forward pass's communication that a kind of recompute repeats. By operator,
reduce-scatters are kept, or recompute stops before the block's last exchange; the gathers, or
all-reduces and all-to-alls of the first half, run again."""

PASSES: Final[tuple[AllReduce, AllReduce]] = ("forward", "backward")


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerWork:
    """Times one layer, anchored at its measurements."""

    layer: Layer
    anchors: LayerAnchors  # its measured times; may be empty
    traits: RuntimeTraits  # traits of the runtime
    constants: Constants  # efficiencies

    @cached_property
    def launch_s(self) -> float:
        """Host seconds of one kernel launch: the cheapest that was measured, else the constant."""
        price = self.anchors.launch_s or self.constants.host_s_per_kernel
        return price * self.constants.host_scale

    @cached_property
    def host_s(self) -> float:
        """Host seconds of launching one forward pass, by the count of kernels."""
        return self.layer.num_kernels * self.traits.launches_per_kernel * self.launch_s

    def compute(self, rank: Rank) -> Phases:
        """Return the seconds of both passes of one micro-batch without communication.

        Each pass takes as long as the slower of device and host. If the layer was measured, the
        smallest measured micro-batch shows which of the two is slower, and so whether the time
        grows with the micro-batch; other measured sizes correct the remaining error.
        """
        added = device_phases(self.layer.added, rank, self.constants)
        if not self.anchors.alone:
            return self._bounded(rank, device=1.0, host=1.0) + added
        device, host = self._device_and_host(rank)
        forward, backward = self._residuals(rank, device, host)
        phases = self._bounded(rank, device=device * self.constants.profile_scale, host=host)
        return phases.corrected(forward, backward) + added

    def again_s(self, rank: Rank, kind: RecomputeKind, forward_s: float) -> float:
        """Return the seconds of a block's forward pass that a kind of recompute runs again.

        Operators have the same share of the layer's time, without communication, as of its counted
        work.
        """
        if kind in {"none", "full"}:
            return forward_s if kind == "full" else 0.0
        again = self.layer.core if kind == "selective" else per_operator(self.layer).again
        if not again:
            return 0.0
        whole, part = (
            max(
                device_phases(operators, rank, self.constants).forward_s,
                count_kernels(operators) * self.traits.launches_per_kernel * self.launch_s,
            )
            for operators in (self.layer.measurable, again)
        )
        return part / whole * forward_s

    def modules_s(self, rank: Rank) -> float:
        """Return the seconds of the operators that the runtime recomputes in backward passes."""
        names, _ = self.traits.recomputed_operators
        if not names:
            return 0.0
        operators = [op for op in self.layer.operators if op.name in names]
        return device_phases(operators, rank, self.constants).forward_s

    def talk_s(self, rank: Rank, ring: Path, compute: Phases) -> tuple[float, float]:
        """Time the tensor-parallel communication of both passes, without the overlapped part.

        Under sequence parallelism an all-reduce becomes a scatter after the product that computes
        the tensor and a gather before the product that reads it; the backward pass reverses both.
        The input of a product whose weight is divided by columns is kept divided, so the backward
        pass gathers it once more, for the weight's gradient (Korthikanti et al., arXiv:2205.05198,
        section 4.2.2). Runtimes that overlap gather it while they compute the input's gradient, and
        sum that gradient while they compute the weight's; the product then lacks the
        multiprocessors that the collective uses. Runtimes that keep gathered inputs do not gather
        them again. The result is the seconds of the forward and of the backward pass.
        """
        ratio = self.collective_ratio(rank, ring)
        overlaps = self.traits.overlaps_backward_all_reduce
        channels = BUFFER_CHANNELS if self.traits.overlaps_gathers else COLLECTIVE_CHANNELS
        taken = taken_share(rank.device, channels)
        beside_weights_s = compute.weight_gradient_s if overlaps else 0.0
        if not rank.sequence_parallel:
            forward_s, backward_s = (
                ratio * self.collectives_s(all_reduce_s, direction, rank, ring)
                for direction in PASSES
            )
            return forward_s, max(taken * backward_s, backward_s - beside_weights_s)
        beside_inputs_s = compute.input_gradient_s if overlaps else 0.0
        # A reduce-scatter has as many steps of as many bytes in a ring as a gather.
        sums_s, inputs_s = (
            ratio * self.collectives_s(all_gather_s, direction, rank, ring) for direction in PASSES
        )
        again_s = max(taken * inputs_s, inputs_s - beside_inputs_s)
        if self.traits.keeps_gathered_inputs:
            again_s = 0.0
        forward_inputs_s = inputs_s
        if self.traits.overlaps_gathers:
            sums_s = self._beside_product_s(sums_s, "forward", rank)
            forward_inputs_s = self._beside_product_s(inputs_s, "backward", rank)
        scattered_s = max(taken * inputs_s, inputs_s - beside_weights_s)
        return sums_s + forward_inputs_s, sums_s + again_s + scattered_s

    def _beside_product_s(self, seconds: float, direction: AllReduce, rank: Rank) -> float:
        """Return the visible time of gathers or scatters that overlap with their products.

        Each is cut into as many pieces as there are ranks; one piece overlaps with no product (Wang
        et al., Overlap communication with dependent computation via decomposition, ASPLOS 2023).
        """
        products = (op for op in self.layer.gemms if op.all_reduce == direction)
        product_s = sum(gemm_phases(op, rank, self.constants).forward_s for op in products)
        return max(seconds / rank.tp, seconds - product_s)

    def collectives_s(
        self,
        collective: Callable[[float, int, Path, float], float],
        direction: AllReduce,
        rank: Rank,
        ring: Path,
    ) -> float:
        """Time one collective for every tensor that the ranks sum in a pass, links only."""
        width = rank.micro_batch_size * rank.bytes_per_element
        start = start_s(self.constants, self.traits)
        return sum(
            collective(elements * width, rank.tp, ring, start)
            for elements in self.layer.all_reduce_elements(direction)
        )

    def shared_s(self, rank: Rank) -> tuple[float, float]:
        """Return the seconds of both passes of the experts that all tokens go through."""
        shared = [op for op in self.layer.operators if op.name.startswith("shared-")]
        phases = device_phases(shared, rank, self.constants)
        return phases.forward_s, phases.backward_s

    def exchanges_s(self, rank: Rank, path: Path) -> float:
        """Time the all-to-alls of one pass, which send tokens to their experts and back."""
        width = rank.micro_batch_size * rank.bytes_per_element / rank.tp
        start = start_s(self.constants, self.traits)
        return sum(exchange_s(elements * width, path, start) for elements in self.layer.exchanges)

    def restarts_s(self, direction: AllReduce, rank: Rank) -> float:
        """Return the device's idle time after blocking all-reduces."""
        if rank.tp == 1:
            return 0.0
        num_restarts = len(self.layer.all_reduce_elements(direction))
        return num_restarts * self.traits.restart_launches * self.launch_s

    def collective_ratio(self, rank: Rank, ring: Path) -> float:
        """Return measured over counted time of all-reduces, if measured times include them.

        The time of a measured forward pass beyond its computation is the time of its all-reduces. A
        profile is measured within a node, so it holds no information about rings between nodes.
        """
        inside = ring.num_nodes == 1
        if not inside or rank.tp == self.anchors.alone_tp or not self.anchors.at_tp:
            return 1.0
        size = min(self.anchors.at_tp)
        at_size = replace(rank, micro_batch_size=size, sequence_parallel=False)
        counted_s = self.collectives_s(all_reduce_s, "forward", at_size, ring)
        if counted_s == 0:
            return 1.0
        device, host = self._device_and_host(rank)
        computed_s = self._bounded(at_size, device=device, host=host).forward_s
        computed_s *= self._from_idle(at_size)
        ratio = (self.anchors.at_tp[size].forward_s - computed_s) / counted_s
        return min(max(ratio, 1 / COLLECTIVE_RATIO_LIMIT), COLLECTIVE_RATIO_LIMIT)

    def _bounded(self, rank: Rank, *, device: float, host: float) -> Phases:
        """Return the slower of device and host in each pass, or their sum if they take turns."""
        phases = device_phases(self.layer.measurable, rank, self.constants)
        forward_s = device * phases.forward_s
        backward_s = device * self.constants.backward_scale * phases.backward_s
        forward_launches, backward_launches = self._launches(rank)
        host_s = (host - 1.0) * self.host_s
        host_backward_s = self.constants.host_backward_ratio * host_s
        forward_starts_s, backward_starts_s = self._starts_s(rank)
        forward_loops_s, backward_loops_s = self._loops_s(rank)
        host_s += forward_launches * self.launch_s + forward_starts_s + forward_loops_s
        host_backward_s += backward_launches * self.launch_s + backward_starts_s + backward_loops_s
        if self.traits.blocking_launches:
            waits_s, backward_waits_s = (
                slowest_wait_s(rank.tp, collectives, seconds, self.launch_s)
                for collectives, seconds in zip(
                    self._collectives(rank), (host_s, host_backward_s), strict=True
                )
            )
            return Phases(
                forward_s=forward_s + host_s + waits_s,
                backward_s=backward_s + host_backward_s + backward_waits_s,
                weight_gradient_s=device * phases.weight_gradient_s,
            )
        sooner_s = self._captured_kernels * (self.constants.kernel_gap_s - GRAPH_GAP_S)
        forward_s -= sooner_s
        backward_s -= BACKWARD_KERNELS_PER_FORWARD * sooner_s
        if self.traits.cuda_graphs == "step":
            host_s = host_backward_s = 0.0
        elif self.layer.exchanges:
            forward_s += waiting_launches(self.traits, rank) * self.launch_s
        return Phases(
            forward_s=max(forward_s, host_s),
            backward_s=max(backward_s, host_backward_s),
            weight_gradient_s=device * phases.weight_gradient_s,
            forward_idle_s=max(0.0, host_s - forward_s),
            backward_idle_s=max(0.0, host_backward_s - backward_s),
        )

    @cached_property
    def _captured_kernels(self) -> int:
        """Kernels of a forward pass that one CUDA graph starts, all before a block's experts."""
        if self.traits.cuda_graphs != "attention" or self.layer.experts is None:
            return 0
        parts = modules(self.layer)
        return sum(count_kernels(parts[name]) for name in CAPTURED) - 1

    def _launches(self, rank: Rank) -> tuple[float, float]:
        """Return the launches of both passes, without those of compiled loops.

        Beside the modules' these are gathers and scatters, and additions to gradients that are
        wider than the products' results; a program launches each of them separately.
        """
        forward, backward = host_launches(
            self.layer,
            self.traits,
            rank,
            self.constants.host_backward_ratio,
            is_measured=bool(self.anchors.alone),
        )
        if self.traits.accumulates_alone(rank.precision):
            backward += len(self.layer.weights)
        if not rank.sequence_parallel:
            return forward, backward
        collectives = self._collectives(rank)
        return forward + collectives[0], backward + collectives[1]

    def _loops_s(self, rank: Rank) -> tuple[float, float]:
        """Return host seconds of both passes for kernels that a compiled loop launches.

        There is a kernel for each expert. The host takes at least as long for each of them as a
        device that always finds the next one in its queue.
        """
        if self.layer.experts is None:
            return 0.0, 0.0
        loops = [looped_kernels(op, rank) for op in self.layer.gemms]
        price = self.constants.kernel_gap_s * self.constants.host_scale
        return price * sum(each[0] for each in loops), price * sum(each[1] for each in loops)

    def _collectives(self, rank: Rank) -> tuple[int, int]:
        """Return how many all-reduces, or gathers and scatters, both passes have."""
        sums, inputs = (len(self.layer.all_reduce_elements(direction)) for direction in PASSES)
        if not rank.sequence_parallel:
            return sums, inputs
        again = 0 if self.traits.keeps_gathered_inputs else inputs
        return sums + inputs, sums + inputs + again

    def _starts_s(self, rank: Rank) -> tuple[float, float]:
        """Return host seconds of both passes for collectives that cost more than a launch.

        See `RuntimeTraits.piped_collective_s`.
        """
        each_s = rank.collective_host_s * rank.tp * self.constants.host_scale
        if rank.tp == 1 or each_s == 0:
            return 0.0, 0.0
        forward, backward = self._collectives(rank)
        return forward * each_s, backward * each_s

    def _device_and_host(self, rank: Rank) -> tuple[float, float]:
        """Return the corrections of device and host time that reproduce the smallest anchor.

        The longer of the two counted times is taken to be the measured time.
        """
        size = min(self.anchors.alone)
        measured_s = self.anchors.alone[size].forward_s
        at_size = self._measured_rank(rank, size)
        device_s = device_phases(self.layer.measurable, at_size, self.constants).forward_s
        if device_s > self.host_s:
            return measured_s / device_s / self._from_idle(at_size), 1.0
        return 1.0, measured_s / self.host_s

    def _from_idle(self, rank: Rank) -> float:
        """Return the time of measured forward passes over that of a device that never waits.

        A kernel starts when the host has launched it. So a pass that begins on an idle device takes
        as long as the host up to some kernel, and the device from there on, whichever is longest.
        """
        device_s = device_phases(self.layer.measurable, rank, self.constants).forward_s
        if not self.anchors.idle_share or device_s <= self.host_s:
            return 1.0
        launch_s = self.traits.launches_per_kernel * self.launch_s
        launched_s = finished_s = 0.0
        for op in self.layer.measurable:
            kernels = max(1, count_kernels([op]))
            kernel_s = device_phases([op], rank, self.constants).forward_s / kernels
            for _ in range(kernels):
                launched_s += launch_s
                finished_s = max(finished_s, launched_s) + kernel_s
        return 1.0 + self.anchors.idle_share * (finished_s / device_s - 1.0)

    def _measured_rank(self, rank: Rank, size: int) -> Rank:
        return replace(
            rank, tp=self.anchors.alone_tp, micro_batch_size=size, sequence_parallel=False
        )

    def _residuals(self, rank: Rank, device: float, host: float) -> tuple[float, float]:
        forward: dict[int, float] = {}
        backward: dict[int, float] = {}
        for size, measured in self.anchors.alone.items():
            at_size = self._measured_rank(rank, size)
            counted = self._bounded(at_size, device=device, host=host)
            forward[size] = measured.forward_s / counted.forward_s / self._from_idle(at_size)
            if measured.backward_s is not None:
                backward[size] = measured.backward_s / counted.backward_s
        size = rank.micro_batch_size
        ratio = interpolate(forward, size)
        return ratio, interpolate(backward, size) if backward else ratio


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerCosts:
    """Times of the layers of one model under one runtime."""

    model: Model  # the chain of layers
    profile: Profile  # measurements to anchor at, or none
    traits: RuntimeTraits  # traits of the runtime
    constants: Constants  # efficiencies
    # Both passes of a distinct layer on a rank, whatever its links and recompute
    _computed: dict[tuple[int, Rank], Phases] = field(init=False, default_factory=dict)

    def table(
        self, rank: Rank, ring: Path, recompute: RecomputeKind, exchange: Path = NO_RING
    ) -> tuple[FloatArray, bool]:
        """Return the seconds of every layer for one micro-batch on one kind of rank.

        ``ring`` carries the tensor-parallel all-reduces, ``exchange`` the experts' all-to-alls.

        Returns:
            Forward pass, backward pass with recompute, and the all-reduces within both, shape ``(3,
            num_layers)``; and whether the micro-batch size is outside the measured ones.

        Raises:
            ValueError: If the profile is measured, but not for this device and tp.
        """
        layers, positions = self.model.distinct_layers
        rank = replace(
            rank,
            collective_host_s=ring.host_s,
            expert_streams=0 if self.traits.fused_experts else self.traits.expert_streams,
            reads_for_scales=self.traits.reads_for_scales,
            has_unaligned_kernels=self.traits.has_unaligned_kernels,
        )
        scale = self.constants.program_scale
        anchors = layer_anchors(self.profile, self.model, rank, self.traits, scale)
        rows = np.array(
            [
                self._layer(index, anchors[index], rank, (ring, exchange), recompute)
                for index in range(len(layers))
            ]
        )
        return rows[list(positions)].T, any(anchor.extrapolated for anchor in anchors)

    def _layer(
        self,
        index: int,
        anchors: LayerAnchors,
        rank: Rank,
        paths: tuple[Path, Path],
        recompute: RecomputeKind,
    ) -> tuple[float, float, float]:
        layer = self.model.distinct_layers[0][index]
        if not layer.operators:
            return self._passing(anchors, rank)
        if layer.kind != "block":
            rank = rank.beside_narrow
        work = LayerWork(layer=layer, anchors=anchors, traits=self.traits, constants=self.constants)
        if (index, rank) not in self._computed:
            self._computed[index, rank] = work.compute(rank)
        compute = self._computed[index, rank]
        forward_talk_s, backward_talk_s = self._visible_talk_s(work, compute, rank, paths)
        runs, again_s, share = 1, 0.0, 0.0
        if layer.kind == "block":
            runs, share = self.traits.forward_runs, TALK_AGAIN.get(recompute, 0.0)
            again_s = work.again_s(rank, recompute, compute.forward_s) + share * forward_talk_s
            again_s += work.modules_s(rank) if recompute in {"none", "selective"} else 0.0
        forward_s = compute.forward_s + forward_talk_s
        backward_s = compute.backward_s + backward_talk_s + self._accumulation_s(layer, rank)
        if layer.kind == "block" and self.traits.offloaded_blocks:
            offload_s = self._offload_s(layer, rank)
            forward_s, backward_s = max(forward_s, offload_s), max(backward_s, offload_s)
        talk_s = (runs + share) * forward_talk_s + backward_talk_s
        return runs * forward_s, again_s + backward_s, talk_s

    def _visible_talk_s(
        self, work: LayerWork, compute: Phases, rank: Rank, paths: tuple[Path, Path]
    ) -> tuple[float, float]:
        """Return the time that all-reduces and all-to-alls add to each pass.

        If the runtime does not wait for all-reduces, they first use the time in which the device
        waits for the host. So do all-to-alls, if the host's part in them is known, except for those
        of the forward pass that the host waits for: half of the bytes. If they run beside another
        micro-batch, both passes of a layer together hide as much as they compute, on the
        multiprocessors that the all-to-alls leave.
        """
        ring, exchange = paths
        exchange_s = work.exchanges_s(rank, exchange)
        taken = taken_share(rank.device, self.traits.taken_multiprocessors)
        if self.traits.overlaps_exchanges:
            beyond_s = exchange_s - (compute.forward_s + compute.backward_s) / 2
            exchange_s = max(taken * exchange_s, beyond_s)
        exchanges_s = [exchange_s, exchange_s]
        if self.traits.overlaps_shared_experts:
            exchanges_s = [
                max(taken * exchange_s, exchange_s - shared_s) for shared_s in work.shared_s(rank)
            ]
        forward_s, backward_s = (
            talk_s + work.restarts_s(direction, rank)
            for direction, talk_s in zip(PASSES, work.talk_s(rank, ring, compute), strict=True)
        )
        if not self.traits.waits_for_all_reduces:
            forward_s -= compute.forward_idle_s
            backward_s -= compute.backward_idle_s
            if self.traits.dispatch.kernels and not self.traits.overlaps_exchanges:
                waited_s = exchange_s / 2 if self.traits.dispatch.waits_for_tokens else 0.0
                return (
                    max(waited_s, forward_s + exchanges_s[0]),
                    max(0.0, backward_s + exchanges_s[1]),
                )
        return max(0.0, forward_s) + exchanges_s[0], max(0.0, backward_s) + exchanges_s[1]

    def _offload_s(self, layer: Layer, rank: Rank) -> float:
        """Return the time in which a block's share of activations goes to the host, or comes back.

        Transfers are spread over all blocks (Transformer Engine, `get_cpu_offload_context`).
        """
        kept = layer.saved_bytes(tp=rank.tp, bytes_per_element=rank.bytes_per_element)
        share = min(1.0, self.traits.offloaded_blocks / self.model.block_counts[-1])
        return share * rank.micro_batch_size * kept / rank.device.host_bytes_per_s

    def _passing(self, anchors: LayerAnchors, rank: Rank) -> tuple[float, float, float]:
        """Time a layer without counted work by its measurements alone.

        Where only the forward pass was measured, the backward pass takes as long.
        """
        if not anchors.at_tp:
            return 0.0, 0.0, 0.0
        forward = {size: measured.forward_s for size, measured in anchors.at_tp.items()}
        backward = {
            size: measured.backward_s
            for size, measured in anchors.at_tp.items()
            if measured.backward_s is not None
        }
        size = rank.micro_batch_size
        return interpolate(forward, size), interpolate(backward or forward, size), 0.0

    def _accumulation_s(self, layer: Layer, rank: Rank) -> float:
        parameters = layer.sharded_parameters / rank.tp + layer.replicated_parameters
        per = self.traits.bytes_per_parameter(rank.precision)
        return stream_s(
            parameters * per.accumulation, len(layer.weights), rank.device, self.constants
        )
