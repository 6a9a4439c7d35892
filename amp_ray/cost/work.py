"""One layer's work on one rank: counted, bounded by the host, corrected by measurements."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

from amp_ray.clusters.constants import Constants
from amp_ray.cost.anchors import LayerAnchors, interpolate
from amp_ray.cost.collective import Path, all_gather_s, all_reduce_s, exchange_s, start_s
from amp_ray.cost.roofline import Phases, Rank, device_phases, gemm_phases
from amp_ray.models.model import Layer, count_kernels
from amp_ray.models.operator import AllReduce
from amp_ray.runtimes.traits import RuntimeTraits

COLLECTIVE_RATIO_LIMIT = 3.0
"""A measured all-reduce may be this much faster or slower than the link's stated rate says."""


PASSES: Final[tuple[AllReduce, AllReduce]] = ("forward", "backward")


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerWork:
    """Times one layer as the measurements have it."""

    layer: Layer
    anchors: LayerAnchors  # what was measured of it; may be empty
    traits: RuntimeTraits  # what the runtime does
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
        """Return both passes of one micro-batch without communication.

        Each pass takes what the slower of device and host takes. Where the layer was measured,
        the smallest measured micro-batch tells which of the two it was, and so whether the time
        grows with the micro-batch; other measured sizes correct what is left.

        Args:
            rank: Device, tp, micro-batch size, precision.
        """
        added = device_phases(self.layer.added, rank, self.constants)
        if not self.anchors.alone:
            return self._bounded(rank, device=1.0, host=1.0) + added
        device, host = self._device_and_host(rank)
        forward, backward = self._residuals(rank, device, host)
        phases = self._bounded(rank, device=device * self.constants.profile_scale, host=host)
        return phases.corrected(forward, backward) + added

    def core_s(self, rank: Rank, forward_s: float) -> float:
        """Return the time of the attention core out of that of the forward pass.

        Args:
            rank: Device, tp, micro-batch size, precision.
            forward_s: Of the whole layer without communication, as measurements have it; the core
                has the share of it that the counted work says.
        """
        if not self.layer.core:
            return 0.0
        whole, core = (
            max(
                device_phases(operators, rank, self.constants).forward_s,
                count_kernels(operators) * self.traits.launches_per_kernel * self.launch_s,
            )
            for operators in (self.layer.measurable, self.layer.core)
        )
        return core / whole * forward_s

    def all_reduces_s(self, direction: AllReduce, rank: Rank, ring: Path) -> float:
        """Time the tensor-parallel all-reduces of one pass by the links alone."""
        return self._collectives_s(all_reduce_s, direction, rank, ring)

    def gathers_s(self, direction: AllReduce, rank: Rank, ring: Path) -> float:
        """Time one gather, or scatter, of each tensor that an all-reduce of one pass would have.

        A ring scatters (and adds up) in as many steps of as many bytes as it gathers.
        """
        return self._collectives_s(all_gather_s, direction, rank, ring)

    def talk_s(self, rank: Rank, ring: Path, compute: Phases) -> tuple[float, float]:
        """Time what the tensor-parallel ranks exchange in both passes, beyond what it overlaps.

        Under sequence parallelism an all-reduce is a scatter where its product is made and a gather
        where it is read, each the other way round in the other pass. The input of a product whose
        weight is divided by columns is kept divided, so the backward pass gathers it once more,
        for the weight's gradient (Korthikanti et al., arXiv:2205.05198, section 4.2.2). Runtimes
        that overlap do that beside the input's gradient, and add the latter up beside the weight's.
        Runtimes that keep what was gathered do not gather it again.

        Returns:
            Seconds of the forward and of the backward pass.
        """
        ratio = self.collective_ratio(rank, ring)
        overlaps = self.traits.overlaps_backward_all_reduce
        beside_weights_s = compute.weight_gradient_s if overlaps else 0.0
        if not rank.sequence_parallel:
            forward_s, backward_s = (
                ratio * self.all_reduces_s(direction, rank, ring) for direction in PASSES
            )
            return forward_s, max(0.0, backward_s - beside_weights_s)
        beside_inputs_s = compute.input_gradient_s if overlaps else 0.0
        sums_s, inputs_s = (ratio * self.gathers_s(direction, rank, ring) for direction in PASSES)
        again_s = max(0.0, inputs_s - beside_inputs_s)
        if self.traits.keeps_gathered_inputs:
            again_s = 0.0
        forward_inputs_s = inputs_s
        if self.traits.overlaps_gathers:
            sums_s = self._beside_product_s(sums_s, "forward", rank)
            forward_inputs_s = self._beside_product_s(inputs_s, "backward", rank)
        return sums_s + forward_inputs_s, sums_s + again_s + max(0.0, inputs_s - beside_weights_s)

    def _beside_product_s(self, seconds: float, direction: AllReduce, rank: Rank) -> float:
        """Return what is seen of gathers or scatters that run beside the products they belong to.

        Each is cut into as many pieces as there are ranks; one piece has no product beside it (Wang
        et al., Overlap communication with dependent computation via decomposition, ASPLOS 2023).
        """
        products = (op for op in self.layer.gemms if op.all_reduce == direction)
        product_s = sum(gemm_phases(op, rank, self.constants).forward_s for op in products)
        return max(seconds / rank.tp, seconds - product_s)

    def _collectives_s(
        self,
        collective: Callable[[float, int, Path, float], float],
        direction: AllReduce,
        rank: Rank,
        ring: Path,
    ) -> float:
        """Time a collective of every tensor that the ranks add up in one pass."""
        width = rank.micro_batch_size * rank.bytes_per_element
        start = start_s(self.constants, self.traits)
        return sum(
            collective(elements * width, rank.tp, ring, start)
            for elements in self.layer.all_reduce_elements(direction)
        )

    def exchanges_s(self, rank: Rank, path: Path) -> float:
        """Time the all-to-alls of one pass, by which tokens come to their experts and back."""
        width = rank.micro_batch_size * rank.bytes_per_element / rank.tp
        start = start_s(self.constants, self.traits)
        return sum(exchange_s(elements * width, path, start) for elements in self.layer.exchanges)

    def restarts_s(self, direction: AllReduce, rank: Rank) -> float:
        """Time that the device idles after blocking all-reduces until its queue is filled again."""
        if rank.tp == 1:
            return 0.0
        num_restarts = len(self.layer.all_reduce_elements(direction))
        return num_restarts * self.traits.restart_launches * self.launch_s

    def collective_ratio(self, rank: Rank, ring: Path) -> float:
        """Return measured over counted time of the all-reduces, where measured times hold them.

        What a measured forward pass takes longer than the computation is its all-reduces. A
        profile is measured within a node, so it says nothing about a ring that leaves it.
        """
        inside = ring.num_nodes == 1
        if not inside or rank.tp == self.anchors.alone_tp or not self.anchors.at_tp:
            return 1.0
        size = min(self.anchors.at_tp)
        at_size = replace(rank, micro_batch_size=size, sequence_parallel=False)
        counted_s = self.all_reduces_s("forward", at_size, ring)
        if counted_s == 0:
            return 1.0
        device, host = self._device_and_host(rank)
        computed_s = self._bounded(at_size, device=device, host=host).forward_s
        ratio = (self.anchors.at_tp[size].forward_s - computed_s) / counted_s
        return min(max(ratio, 1 / COLLECTIVE_RATIO_LIMIT), COLLECTIVE_RATIO_LIMIT)

    def _bounded(self, rank: Rank, *, device: float, host: float) -> Phases:
        """Return the slower of device and host in each pass, or both where they take turns."""
        phases = device_phases(self.layer.measurable, rank, self.constants)
        forward_s = device * phases.forward_s
        backward_s = device * self.constants.backward_scale * phases.backward_s
        forward_launches, backward_launches = self._added_launches(rank)
        host_s = host * self.host_s
        host_backward_s = self.constants.host_backward_ratio * host_s
        forward_starts_s, backward_starts_s = self._starts_s(rank)
        host_s += forward_launches * self.launch_s + forward_starts_s
        host_backward_s += backward_launches * self.launch_s + backward_starts_s
        if self.traits.blocking_launches:
            return Phases(
                forward_s=forward_s + host_s,
                backward_s=backward_s + host_backward_s,
                weight_gradient_s=device * phases.weight_gradient_s,
            )
        return Phases(
            forward_s=max(forward_s, host_s),
            backward_s=max(backward_s, host_backward_s),
            weight_gradient_s=device * phases.weight_gradient_s,
            forward_idle_s=max(0.0, host_s - forward_s),
            backward_idle_s=max(0.0, host_backward_s - backward_s),
        )

    def _added_launches(self, rank: Rank) -> tuple[int, int]:
        """Return what the host starts in both passes beside the layer's own kernels.

        Those are gathers and scatters, and additions to gradients that are wider than what
        products make; a program starts each of these by itself.
        """
        widens = self.traits.accumulates_alone(rank.precision)
        held = len(self.layer.weights) if widens else 0
        if not rank.sequence_parallel:
            return 0, held
        forward, backward = self._collectives(rank)
        return forward, backward + held

    def _collectives(self, rank: Rank) -> tuple[int, int]:
        """Return how many all-reduces, or gathers and scatters, both passes have."""
        sums, inputs = (len(self.layer.all_reduce_elements(direction)) for direction in PASSES)
        if not rank.sequence_parallel:
            return sums, inputs
        again = 0 if self.traits.keeps_gathered_inputs else inputs
        return sums + inputs, sums + inputs + again

    def _starts_s(self, rank: Rank) -> tuple[float, float]:
        """Return the host's time of both passes for collectives that take it longer than a launch.

        See `RuntimeTraits.piped_collective_s`.
        """
        each_s = rank.collective_host_s * rank.tp * self.constants.host_scale
        if rank.tp == 1 or each_s == 0:
            return 0.0, 0.0
        forward, backward = self._collectives(rank)
        return forward * each_s, backward * each_s

    def _device_and_host(self, rank: Rank) -> tuple[float, float]:
        """Return the corrections of device and host time that meet the smallest anchor.

        The longer of the counted times is what was measured.
        """
        size = min(self.anchors.alone)
        measured_s = self.anchors.alone[size].forward_s
        at_size = self._measured_rank(rank, size)
        device_s = device_phases(self.layer.measurable, at_size, self.constants).forward_s
        if device_s > self.host_s:
            return measured_s / device_s, 1.0
        return 1.0, measured_s / self.host_s

    def _measured_rank(self, rank: Rank, size: int) -> Rank:
        """Return the rank of which one micro-batch size was measured."""
        return replace(
            rank, tp=self.anchors.alone_tp, micro_batch_size=size, sequence_parallel=False
        )

    def _residuals(self, rank: Rank, device: float, host: float) -> tuple[float, float]:
        """Return what measurements still differ by, forward and backward, at the rank's size."""
        forward: dict[int, float] = {}
        backward: dict[int, float] = {}
        for size, measured in self.anchors.alone.items():
            at_size = self._measured_rank(rank, size)
            counted = self._bounded(at_size, device=device, host=host)
            forward[size] = measured.forward_s / counted.forward_s
            if measured.backward_s is not None:
                backward[size] = measured.backward_s / counted.backward_s
        size = rank.micro_batch_size
        ratio = interpolate(forward, size)
        return ratio, interpolate(backward, size) if backward else ratio
