"""Time of one kernel on one device: whole tiles, memory traffic, launch gap."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil, erfc, floor, inf, sqrt
from typing import Final, Self

from amp_ray.clusters.constants import Constants
from amp_ray.clusters.device import Device
from amp_ray.models.blocks import FLASH_ATTENTION_2_RATE, OLDER_ATTENTION_RATE
from amp_ray.models.operator import Elementwise, Gemm, Operator
from amp_ray.strategies.candidate import StageOptions
from amp_ray.units import BYTES_PER_ELEMENT, NARROW, NarrowFormat, Precision

TILES: Final = ((128, 256, 1.0), (128, 128, 0.85), (64, 64, 0.6), (32, 32, 0.3))
"""Rows, columns and rate against the largest tile of the GEMM libraries on devices with tensor
cores (cuBLAS, CUTLASS): operand reuse falls with the tile's edge."""

ALIGNED: Final = 8
"""Elements of half precision in 16 bytes, which tensor cores read at a time."""

PAIRED: Final = 2
"""The same in 4 bytes, the least that cuBLAS's kernels copy at a time without registers."""

HALVES: Final = 2
"""Numbers in half precision that a unit of single precision computes at a time."""

SPLIT: Final = (8.0, 1024.0)
"""Split-k: a long inner dimension is split over idle multiprocessors, in parts of at least this
length."""

FUSED_BACKWARD_PRODUCTS: Final = 2.5
"""Products in the backward pass of fused attention per product in its forward pass: it recomputes
the scores, so it has five products for two."""

FP8_ATTENTION_RATE: Final = 1200 / 740
"""Rate of fused attention in 8-bit floats relative to half precision, forward on an H100, where the
units' rate is twice as high (Shah et al., FlashAttention-3, arXiv:2407.08608, abstract)."""

FUSED_BACKWARD_RATE: Final = 63 / 73
"""Rate of these products in the backward pass relative to the forward pass: FlashAttention-2
reaches up to 63 and 73 % of an A100's peak (Dao, arXiv:2307.08691, section 4.1)."""

SCALE_BYTES: Final = 2
"""Traffic of finding the largest element for one scale per tensor, in bf16. Norms find that of
their results as they write them (Transformer Engine 2.12: `Float8CurrentScalingQuantizer` in
pytorch/csrc/quantizer.cpp, `FUSED_NORM_AMAX_FP8` in normalization.cpp)."""

SCALE_KERNELS: Final = 2
"""Kernels of that beside the cast: the largest element, and its scale."""

PAD_BYTES: Final = 4
"""Traffic of copying an element in bf16. Products in narrow formats want multiples of 16, 32 or 64
rows (cuBLAS; blocks of MXFP8; transforms of NVFP4), which tokens of an expert hardly ever are: all
are copied to padded rows before the first product, and back after the second, in both passes
(Transformer Engine's `Fp8Padding` and `Fp8Unpadding`, in Megatron-core's `TEGroupedMLP`)."""

ADDRESS_INSTRUCTIONS: Final = 50
"""Instructions with which a kernel of PyTorch finds, loads, processes and stores an element of a
strided or repeated tensor in half precision, one by one: negation 42, comparison 46, clamp 48,
product 52, choice 55 in two dimensions; in three 12 to 15 more. Read off the machine code of torch
2.11 for compute capability 10.0 along the path of these shapes."""

ADDRESSED_BYTES: Final = 4
"""Traffic of such an element: read and written."""

BACKWARD_KERNELS_PER_FORWARD: Final = 2
"""Gradients of the input and of the weight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """One rank's share of the work."""

    device: Device  # device of the rank
    tp: int  # tensor parallel degree, which divides sharded work
    micro_batch_size: int  # samples per micro-batch
    precision: Precision  # precision of activations and weights
    # Whether the tp ranks divide the tokens of all work that tensor parallelism leaves whole
    sequence_parallel: bool = False
    # Host seconds that starting a collective takes for each of the tp ranks, beside its launch
    collective_host_s: float = 0.0
    # Elements in half precision of which the starts of operands' rows are multiples: 8, 2 or 1
    alignment: int = ALIGNED
    # Whether its cuBLAS has kernels of tensor cores for operands that are not aligned
    has_unaligned_kernels: bool = True
    # Products of different experts that run at once, each a kernel; 0 if one kernel computes all
    expert_streams: int = 0
    # Experts of the rank whose product this is; 0 for other products; see `of_experts`
    num_experts: int = 0
    # Whether 8-bit operands are read once more for their scale, before they are cast; those of
    # NVFP4 always are
    reads_for_scales: bool = False

    @classmethod
    def of(
        cls, device: Device, options: StageOptions, micro_batch_size: int, precision: Precision
    ) -> Self:
        """Return a rank of a stage with some options."""
        return cls(
            device=device,
            tp=options.tp,
            micro_batch_size=micro_batch_size,
            precision=precision,
            sequence_parallel=options.sequence_parallel,
        )

    @property
    def bytes_per_element(self) -> int:
        """Width of an activation."""
        return BYTES_PER_ELEMENT[self.precision]

    def reading(self, *widths: float) -> Self:
        """Return this rank for a product whose operands have rows of these numbers of elements.

        Those of odd head sizes, and of vocabularies that are not padded, begin at no multiples of
        16 bytes, in which tensor cores read; see `unaligned_rate`.
        """
        fitting = (size for size in (ALIGNED, PAIRED) if not any(width % size for width in widths))
        alignment = next(fitting, 1)
        return self if alignment == self.alignment else replace(self, alignment=alignment)

    def unaligned_flops(self, alignment: int) -> float:
        """Return the rate of such kernels; 0 if board or library has none, or it is unknown."""
        return self.has_unaligned_kernels * self.device.unaligned_flops(alignment)

    def of_experts(self, num_experts: int) -> Self:
        """Return this rank for a product of its experts, to which a router sends their rows."""
        return replace(self, num_experts=num_experts)

    @property
    def gaps(self) -> int:
        """Number of kernels of a product that run one after the other."""
        return ceil(self.num_experts / self.expert_streams) if self.expert_streams else 1

    @property
    def narrow(self) -> NarrowFormat | None:
        """Format to which operands of products are cast; None if they are as all else."""
        return NARROW.get(self.precision)

    @property
    def beside_narrow(self) -> Self:
        """The rank for kernels that stay in bf16 while others run in a narrower format."""
        return replace(self, precision="bf16") if self.narrow else self


@dataclass(frozen=True, slots=True, kw_only=True)
class Phases:
    """Seconds of the two passes of one micro-batch."""

    forward_s: float  # one run of the forward pass
    backward_s: float  # one run of the backward pass
    # Part of the backward pass that can run while input gradients are summed over the
    # tensor-parallel ranks: the weights' gradients of the same products
    weight_gradient_s: float = 0.0
    # Part of the backward pass that can run while the inputs of products are gathered: the
    # gradients of those inputs
    input_gradient_s: float = 0.0
    forward_idle_s: float = 0.0  # part of the forward pass in which the device waits for the host
    backward_idle_s: float = 0.0  # the same of the backward pass

    def __add__(self, other: "Phases") -> "Phases":
        """Run one after the other."""
        return Phases(
            forward_s=self.forward_s + other.forward_s,
            backward_s=self.backward_s + other.backward_s,
            weight_gradient_s=self.weight_gradient_s + other.weight_gradient_s,
            input_gradient_s=self.input_gradient_s + other.input_gradient_s,
            forward_idle_s=self.forward_idle_s + other.forward_idle_s,
            backward_idle_s=self.backward_idle_s + other.backward_idle_s,
        )

    def corrected(self, forward: float, backward: float) -> "Phases":
        """Return these phases, each pass multiplied by its factor."""
        return Phases(
            forward_s=self.forward_s * forward,
            backward_s=self.backward_s * backward,
            weight_gradient_s=self.weight_gradient_s * backward,
            input_gradient_s=self.input_gradient_s * backward,
            forward_idle_s=self.forward_idle_s * forward,
            backward_idle_s=self.backward_idle_s * backward,
        )


def device_phases(operators: Iterable[Operator], rank: Rank, constants: Constants) -> Phases:
    """Add up kernels on the device, without communication and without the host."""
    parts = (
        gemm_phases(op, rank, constants)
        if isinstance(op, Gemm)
        else elementwise_phases(op, rank, constants)
        for op in operators
    )
    return sum(parts, start=Phases(forward_s=0.0, backward_s=0.0))


def gemm_phases(gemm: Gemm, rank: Rank, constants: Constants) -> Phases:
    """Time a matrix product and the two products of its backward pass.

    With ``C = A B`` the gradients are ``dA = dC B^T`` and ``dB = A^T dC``. If the second operand is
    a weight, the samples of a micro-batch add rows to one product; else each sample is a separate
    product of the batch.
    """
    rows, columns, inner, batch = (
        float(gemm.rows),
        float(gemm.columns),
        float(gemm.inner),
        float(gemm.batch),
    )
    if gemm.shard == "columns":
        columns /= rank.tp
    elif gemm.shard == "inner":
        inner /= rank.tp
    elif gemm.shard == "batch":
        batch /= rank.tp
    elif gemm.shard == "rows" or rank.sequence_parallel:
        rows /= rank.tp
    if gemm.has_weight:
        rows *= rank.micro_batch_size
    else:
        batch *= rank.micro_batch_size
    if gemm.keeps_precision or not gemm.has_weight:
        rank = rank.beside_narrow
    if not gemm.has_weight or (rank.narrow is None and rank.unaligned_flops(1)):
        rank = rank.reading(columns, inner)
    if gemm.is_expert:
        rank = rank.of_experts(round(batch))
    left_s = gemm_s(rows, inner, columns, batch, rank, constants)
    right_s = gemm_s(inner, columns, rows, batch, rank, constants)
    overlaps = gemm.all_reduce == "backward"
    input_s = gradient_s = padding_s = 0.0
    if rank.narrow:
        input_s, gradient_s = (
            0.0 if done else _cast_s(batch * rows * width, rank, constants, after_norm=after_norm)
            for width, after_norm, done in zip(
                (inner, columns), (overlaps, False), _cast_by_products(gemm, rank), strict=True
            )
        )
        padded = batch * rows * gemm.padded_width
        padding_s = stream_s(padded * PAD_BYTES, int(padded > 0), rank.device, constants)
    return Phases(
        forward_s=gemm_s(rows, columns, inner, batch, rank, constants) + input_s + padding_s,
        backward_s=left_s + right_s + gradient_s + padding_s,
        weight_gradient_s=right_s if overlaps else 0.0,
        input_gradient_s=left_s if overlaps else 0.0,
    )


def cast_operands(gemm: Gemm, rank: Rank) -> tuple[int, int]:
    """Return the operands that the host casts in both passes, outside of loops."""
    is_narrow = rank.narrow is not None and gemm.has_weight and not gemm.keeps_precision
    if not is_narrow or (gemm.is_expert and rank.expert_streams):
        return 0, 0
    cast_input, cast_gradient = _cast_by_products(gemm, rank)
    return int(not cast_input), int(not cast_gradient)


def _cast_by_products(gemm: Gemm, rank: Rank) -> tuple[bool, bool]:
    """Return whether the kernels of the products around it have cast input and gradient."""
    writes = rank.narrow is not None and rank.narrow.written_by_products
    return writes and gemm.has_cast_input, writes and gemm.has_cast_gradient


def looped_kernels(gemm: Gemm, rank: Rank) -> tuple[int, int]:
    """Return the kernels of both passes that the host launches expert by expert."""
    if not (gemm.is_expert and rank.expert_streams):
        return 0, 0
    experts = round(gemm.batch / (rank.tp if gemm.shard == "batch" else 1))
    casts = 1 + SCALE_KERNELS * _reads_for_scale(rank) if rank.narrow else 0
    return experts * (1 + casts), experts * (BACKWARD_KERNELS_PER_FORWARD + casts)


def _reads_for_scale(rank: Rank, *, after_norm: bool = False) -> bool:
    """Return whether an operand is read for its scale before its cast.

    A norm before it has found the scale of one in 8-bit floats.
    """
    of_format = rank.narrow is not None and rank.narrow.reads_for_scales
    return of_format or (rank.reads_for_scales and not after_norm)


def _cast_s(elements: float, rank: Rank, constants: Constants, *, after_norm: bool) -> float:
    """Time the cast of an operand."""
    assert rank.narrow is not None, "only operands of narrow formats are cast"
    scales = _reads_for_scale(rank, after_norm=after_norm)
    kernels = (1 + scales * SCALE_KERNELS) * (rank.num_experts if rank.expert_streams else 0)
    num_bytes = elements * (rank.narrow.cast_bytes + scales * SCALE_BYTES)
    return stream_s(num_bytes, kernels, rank.device, constants)


def gemm_s(
    rows: float, columns: float, inner: float, batch: float, rank: Rank, constants: Constants
) -> float:
    """Time one (batched) matrix product.

    A partial tile takes as long as a whole one. Tiles are spread evenly over the multiprocessors;
    with fewer tiles than multiprocessors the product lasts as long as one tile. Then the result is
    written. The time to read and write everything once is a lower bound.
    """
    device, width = rank.device, rank.bytes_per_element
    operand = rank.narrow.num_bytes if rank.narrow else width
    rate = product_rate(rank, rank.precision, constants)
    limit = rate if rank.alignment == ALIGNED else min(rate, unaligned_rate(rank, constants))
    busy_s = busiest_s(
        (rows, columns, inner, batch),
        device.num_multiprocessors,
        rate / device.num_multiprocessors,
        limit / device.num_multiprocessors,
        random_rows=rank.num_experts > 0,
    )
    bandwidth = device.memory_bytes_per_s * constants.memory_efficiency
    written = width * batch * rows * columns
    read = operand * batch * (rows + columns) * inner
    gaps_s = max(1, rank.gaps) * constants.kernel_gap_s
    return max(busy_s + written / bandwidth, (read + written) / bandwidth) + gaps_s


@lru_cache(maxsize=4096)
def busiest_s(
    shape: tuple[float, float, float, float],
    num_multiprocessors: int,
    rate: float,
    limit: float = inf,
    *,
    random_rows: bool = False,
) -> float:
    """Return the seconds of the busiest multiprocessor in a matrix product, at the best tile size.

    Small tiles are slower because more operands are delivered per operation. Slower units and
    kernels need fewer operands per second, so their rate limits large tiles only.

    Args:
        shape: Rows, columns, inner dimension and number of products.
        num_multiprocessors: Multiprocessors of the device.
        rate: Floating-point operations per second of a multiprocessor, in the largest tile.
        limit: The rate of the units or kernels that compute the product, if slower.
        random_rows: Whether a router decides on the rows of every product; see `expected_tiles`.
    """
    tiles = expected_tiles if random_rows else whole_tiles
    rows, columns, inner, batch = shape
    most_splits, least_inner = SPLIT
    least_s = inf
    for tile_rows, tile_columns, share in TILES:
        upright = tiles(rows, tile_rows) * ceil(columns / tile_columns)
        across = tiles(rows, tile_columns) * ceil(columns / tile_rows)
        waves = min(upright, across) * batch / num_multiprocessors
        if waves >= 1:
            steps = waves * inner
        else:
            steps = inner / min(1 / waves, most_splits, max(1.0, inner / least_inner))
        tile_s = 2.0 * tile_rows * tile_columns * steps / min(rate * share, limit)
        least_s = min(least_s, tile_s)
    return least_s


def whole_tiles(rows: float, tile_rows: int) -> float:
    """Return the tiles that hold some rows."""
    return ceil(rows / tile_rows)


def expected_tiles(rows: float, tile_rows: int) -> float:
    """Return the mean number of tiles for the tokens that random choices send to an expert.

    Many tokens choose independently, so that their number has a Poisson distribution with the mean
    ``rows``, here its normal limit. The mean number of tiles is the sum over ``i`` of the chances
    of more than ``i * tile_rows`` tokens.

    Example:
        >>> round(expected_tiles(1024, 128), 2), round(expected_tiles(60, 128), 2)
        (8.5, 1.0)
    """
    spread = max(sqrt(rows), 1.0)
    first, last = (max(0, floor((rows + side * spread) / tile_rows)) for side in (-5, 5))
    chances = (erfc((i * tile_rows - rows) / spread / sqrt(2)) / 2 for i in range(first, last + 1))
    return first + sum(chances)


def elementwise_phases(op: Elementwise, rank: Rank, constants: Constants) -> Phases:
    """Time a memory-bound kernel by the bytes that it reads and writes.

    Returns:
        Seconds of both passes; a loss reads and writes ``loss_bytes_per_logit``, half in each. If
        products run within the kernel, `fused_attention_phases` counts them. A kernel whose
        results the ranks add up (a look-up in a table that is divided by rows) processes all
        tokens, even under sequence parallelism.
    """
    divides = op.sharded or (rank.sequence_parallel and op.all_reduce == "none")
    samples = rank.micro_batch_size / (rank.tp if divides else 1)
    loss_bytes = op.loss_fraction * op.logits * constants.loss_bytes_per_logit / 2
    width = rank.bytes_per_element
    forward_s = stream_s(
        samples * (op.forward_elements * width + loss_bytes),
        op.num_kernels,
        rank.device,
        constants,
    )
    backward_s = stream_s(
        samples * (op.backward_elements * width + loss_bytes),
        BACKWARD_KERNELS_PER_FORWARD * op.num_kernels,
        rank.device,
        constants,
    )
    if any(op.addressed):
        beyond_s = samples * addressed_s(rank.device, constants)
        forward_s += op.addressed[0] * beyond_s
        backward_s += op.addressed[1] * beyond_s
    phases = Phases(forward_s=forward_s, backward_s=backward_s)
    return fused_attention_phases(phases, op, samples, rank, constants) if op.flops else phases


def fused_attention_phases(
    traffic: Phases, op: Elementwise, samples: float, rank: Rank, constants: Constants
) -> Phases:
    """Time attention as one kernel, whose products hide the traffic between them.

    Multiprocessors take blocks of unequal work in no order of their lengths: they end apart, on
    average by half of the longest block, and no pass is shorter than that block. ``traffic`` are
    the seconds of all that it reads and writes, and of its launches.
    """
    rate = attention_rate(op, rank.beside_narrow, constants)
    half_block_s = op.block_flops * rank.device.num_multiprocessors / rate / 2
    forward_s = max(samples * op.flops / rate, half_block_s) + half_block_s
    backward_s = FUSED_BACKWARD_PRODUCTS / FUSED_BACKWARD_RATE * forward_s
    first_s, second_s = (
        stream_s(samples * elements * rank.bytes_per_element, 0, rank.device, constants)
        for elements in op.outer_elements
    )
    return Phases(
        forward_s=max(traffic.forward_s, first_s + forward_s),
        backward_s=max(traffic.backward_s, second_s + backward_s),
    )


def addressed_s(device: Device, constants: Constants) -> float:
    """Return seconds of an element beyond its traffic in kernels that address elements one by one.

    A device issues a limited number of instructions per second. Where its memory is faster
    (Blackwell), they decide.
    """
    if device.instructions_per_s is None:
        return 0.0
    traffic_s = stream_s(ADDRESSED_BYTES, 0, device, constants)
    return max(0.0, ADDRESS_INSTRUCTIONS / device.instructions_per_s - traffic_s)


def attention_rate(op: Elementwise, rank: Rank, constants: Constants) -> float:
    """Return the forward rate of fused attention, in floating-point operations per second."""
    device, fraction = rank.device, op.rate_fraction
    fraction *= FP8_ATTENTION_RATE if op.in_fp8 else 1.0
    measured = device.attention_flops(op.head_size, native=op.native, compiled=op.compiled)
    if measured is not None and rank.precision != "fp32":
        return measured * fraction / FLASH_ATTENTION_2_RATE * constants.gemm_scale
    if not device.has_flash_attention:
        fraction = min(fraction, OLDER_ATTENTION_RATE)
    return fraction * product_rate(rank, rank.precision, constants)


def product_rate(rank: Rank, precision: Precision, constants: Constants) -> float:
    """Return the rate of matrix products in full tiles, in floating-point operations per second."""
    device = rank.device
    return device.product_flops(precision) * constants.gemm_scale


def unaligned_rate(rank: Rank, constants: Constants) -> float:
    """Return the rate of products whose operands' rows begin at no multiples of 16 bytes.

    Where board or library has no kernels for them, it is that of the units of single precision, two
    numbers in half precision at a time (NVIDIA, Matrix Multiplication Background, section 3.3; V100
    data sheet: 31.4 and 15.7 TFLOP/s). The rate is in floating-point operations per second, and
    infinite in single precision.
    """
    device = rank.device
    if device.fp32_flops is None or rank.precision == "fp32":
        return inf
    halves = HALVES * device.product_flops("fp32")
    return (rank.unaligned_flops(rank.alignment) or halves) * constants.gemm_scale


def stream_s(num_bytes: float, num_kernels: int, device: Device, constants: Constants) -> float:
    """Time kernels that stream ``num_bytes`` through the device memory."""
    bandwidth = device.memory_bytes_per_s * constants.memory_efficiency
    return num_bytes / bandwidth + num_kernels * constants.kernel_gap_s
