"""The physical constants of the cost model: value, unit, source, and prior sigma.

A constant is a property of hardware and libraries in general. Properties of a device are in the
catalogue, those of a program in its traits, those of a cluster's links in the experiment file.
Calibration changes constants only as far as trials require.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final, Self

PROGRAM_SCALE: Final = "program_scale"
"""Name of the constant that is a common factor of all times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """Constants of time and memory, in SI units."""

    # GEMM rate against the device's sustained rate (catalogue ``gemm_fraction``)
    gemm_scale: float = 1.0
    # Share of the data-sheet bandwidth that streaming kernels reach; STREAM-like kernels reach
    # 0.75-0.85 of it
    memory_efficiency: float = 0.75
    kernel_gap_s: float = 4e-6  # start and tail of a kernel on an otherwise busy stream; 3-5 us
    profile_scale: float = 1.0  # device time in training against the same kernels in a profile run
    backward_scale: float = 1.0  # backward pass against its counted work
    # Host time of launching one eager operator of the forward pass, Python and autograd included;
    # 40-70 us on servers of 2018-2022. Where layers were measured, the cheapest launch among them
    # counts instead.
    host_s_per_kernel: float = 57e-6
    host_scale: float = 1.0  # host time in training against either of them
    # Host time of a layer's backward pass against its forward pass
    host_backward_ratio: float = 2.0
    host_s_per_micro_batch: float = 1e-3  # other host work of every stage per micro-batch
    host_s_per_iteration: float = 15e-3  # other host work per optimizer step
    intra_efficiency: float = 1.0  # collective rate within a node against the stated link rate
    # Collective rate of a network interface against its line rate; NCCL over TCP and InfiniBand
    # reaches 0.75-0.9
    nic_efficiency: float = 0.85
    latency_scale: float = 1.0  # ring step latency against the link's stated one
    # Start of one collective or message: 8.4 us for NCCL's own kernel (``baseLat`` in its
    # ``src/graph/tuning.cc``), and twice the gap between two kernels, since it runs on a stream
    # of its own that waits for the computation, which then waits for it
    collective_start_s: float = 16e-6
    message_scale: float = 1.0  # start and synchronisation of messages against the stated ones
    # Memory traffic of the loss per logit, forward and backward, in fp32
    loss_bytes_per_logit: float = 60.0
    # Ratio of every time to the model's time, for a program that differs from its traits. `moved`
    # applies it to all constants of time; this field itself is the factor of measured layer
    # times.
    program_scale: float = 1.0
    # Memory of context, communicators and workspaces, relative to the runtime's value
    context_scale: float = 1.0
    allocator_scale: float = 1.0  # reserved memory of temporary tensors, relative to the runtime's
    # Tokens of the busiest rank divided by the average, if experts are on several ranks;
    # 1 if routing is forced to be even. Auxiliary losses keep it near 1.1 once a router has
    # settled (Fedus et al., arXiv:2101.03961, section 2.2, drop less than 1 % of the tokens at a
    # capacity of 1.25).
    expert_imbalance: float = 1.1
    memory_error: float = 0.08  # lognormal sigma of the memory estimate
    time_error: float = 0.06  # lognormal sigma of the time estimate

    def moved(self, ratios: Mapping[str, float]) -> Self:
        """Return the constants multiplied by factors, by name.

        ``program_scale`` moves all constants of time, so that every time is multiplied by it.
        """
        scale = ratios.get(PROGRAM_SCALE, 1.0)
        factors = dict.fromkeys(_RATES, 1.0 / scale) | dict.fromkeys(_DURATIONS, scale)
        for name, ratio in ratios.items():
            if name != PROGRAM_SCALE:
                factors[name] = factors.get(name, 1.0) * ratio
        changed = {name: getattr(self, name) * factor for name, factor in factors.items()}
        return replace(self, **changed)


_RATES: Final = ("gemm_scale", "memory_efficiency", "intra_efficiency", "nic_efficiency")
_DURATIONS: Final = (
    *("kernel_gap_s", "host_s_per_kernel", "host_s_per_micro_batch", "host_s_per_iteration"),
    *("latency_scale", "message_scale", PROGRAM_SCALE),
)
"""Constants that divide or add to time; the other constants are factors of these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Uncertainty:
    """Uncertainty of the constants of time."""

    names: tuple[str, ...]  # names of the constants
    covariance: tuple[tuple[float, ...], ...]  # covariance matrix of their logarithms, by rows


PRIOR_SIGMA: Final[Mapping[str, float]] = MappingProxyType(
    {
        "gemm_scale": 0.08,
        "memory_efficiency": 0.15,
        "profile_scale": 0.10,
        "backward_scale": 0.10,
        "host_scale": 0.30,
        "host_backward_ratio": 0.30,
        "host_s_per_micro_batch": 0.50,
        "host_s_per_iteration": 0.50,
        "intra_efficiency": 0.50,
        "nic_efficiency": 0.20,
        "latency_scale": 0.45,
        "message_scale": 0.50,
        "loss_bytes_per_logit": 0.20,
        PROGRAM_SCALE: 0.70,
        "context_scale": 0.50,
        "allocator_scale": 0.10,
        "expert_imbalance": 0.25,
    }
)
"""Prior uncertainty of each constant: sigma of the logarithm of its ratio to the assumed value.

A protocol's latency holds within a factor of two either way, which is 1.5 sigma: vTrain's
InfiniBand took 10 us where 5 are assumed, EFA 54 to 70 (60), and NCCL's model is 25 % below the
smallest collectives that were measured within nodes. The sigma of the experts' load also covers
unmodelled effects of experts, up to a quarter of their time."""
