from dataclasses import replace

import numpy as np
import pytest

from amp_ray.clusters.constants import Constants
from amp_ray.clusters.device import Device, find_device
from amp_ray.cost.roofline import (
    ADDRESS_INSTRUCTIONS,
    ADDRESSED_BYTES,
    Phases,
    Rank,
    addressed_s,
    device_phases,
    elementwise_phases,
    expected_tiles,
    gemm_phases,
    gemm_s,
    stream_s,
)
from amp_ray.models.operator import Elementwise, Gemm
from amp_ray.units import Precision

TILE_FLOPS = 2.0 * 128 * 256 * 1000
"""One full tile over an inner dimension of 1000: 1 s on the fast device below."""


@pytest.fixture
def multiplier(device: Device) -> Device:
    """One tile per second; memory is free."""
    return replace(device, fp16_flops=TILE_FLOPS, memory_bytes_per_s=1e30)


@pytest.fixture
def fast(rank: Rank, multiplier: Device) -> Rank:
    return replace(rank, device=multiplier)


@pytest.mark.parametrize(
    ("sizes", "num_multiprocessors", "expected_s"),
    [
        ((128, 256, 1000, 1), 1, 1.0),  # a full tile takes its operations over the rate
        ((256, 128, 1000, 1), 1, 1.0),  # and may lie on its side
        ((129, 256, 1000, 1), 1, 2.0),  # a started tile counts whole
        ((128, 256, 1000, 3), 1, 3.0),  # products of a batch add up
        # a small product takes a small tile, 1/32 of a full one, at 0.3 of the rate
        ((32, 32, 1000, 1), 1, 1 / 32 / 0.3),
        ((32, 32, 1000, 1), 4, 4 / 32 / 0.3),  # on one of four multiprocessors
        ((128, 256, 1000, 1), 4, 1 / 0.6),  # eight tiles of 64 x 64 keep all busy
        ((128, 256, 4096, 1), 4, 4.096),  # a long inner dimension is split over idle ones
    ],
)
def test_products_take_whole_tiles(
    sizes: tuple[int, int, int, int],
    num_multiprocessors: int,
    expected_s: float,
    fast: Rank,
    constants: Constants,
) -> None:
    device = replace(fast.device, num_multiprocessors=num_multiprocessors)
    assert gemm_s(*sizes, replace(fast, device=device), constants) == pytest.approx(expected_s)
    gap = replace(constants, kernel_gap_s=0.25)
    assert gemm_s(*sizes, replace(fast, device=device), gap) == pytest.approx(expected_s + 0.25)


def test_product_waits_for_its_bytes_where_memory_is_slow(rank: Rank, constants: Constants) -> None:
    # (3 x 5) x (5 x 7): 15 + 35 read, 21 written, 2 bytes each, at 1000 bytes/s
    assert gemm_s(3, 7, 5, 1, rank, constants) == pytest.approx(0.142)


def test_result_is_written_after_the_last_multiplication(
    fast: Rank, multiplier: Device, constants: Constants
) -> None:
    writing = replace(fast, device=replace(multiplier, memory_bytes_per_s=2.0 * 128 * 256))
    # 1 s to multiply and 1 s to write; reading (128 + 256) x 1000 elements takes 11.7 s more
    read_s = 384 * 1000 / (128 * 256)
    assert gemm_s(128, 256, 1000, 1, writing, constants) == pytest.approx(read_s + 1.0)
    narrow = gemm_s(128, 256, 10, 1, writing, constants)
    assert narrow == pytest.approx(0.01 + 1.0 + max(0.0, 384 * 10 / (128 * 256) - 0.01))


def gemm(**given: object) -> Gemm:
    sizes: dict[str, object] = {"name": "g", "rows": 128, "columns": 256, "inner": 1024}
    return Gemm(**(sizes | given))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "rank_changes", "sizes"),
    [
        # samples join the rows of a product with a weight, and else the batch
        ({}, {"micro_batch_size": 2}, (256, 256, 1024, 1)),
        ({"has_weight": False, "rows": 129}, {"micro_batch_size": 2}, (129, 256, 1024, 2)),
        # tensor parallelism divides the sharded dimension
        ({"shard": "none", "batch": 4}, {"tp": 2}, (128, 256, 1024, 4)),
        ({"shard": "rows", "batch": 4}, {"tp": 2}, (64, 256, 1024, 4)),
        ({"shard": "columns", "batch": 4}, {"tp": 2}, (128, 128, 1024, 4)),
        ({"shard": "inner", "batch": 4}, {"tp": 2}, (128, 256, 512, 4)),
        ({"shard": "batch", "batch": 4}, {"tp": 2}, (128, 256, 1024, 2)),
    ],
)
def test_a_product_has_the_sizes_of_its_rank(
    changes: dict[str, object],
    rank_changes: dict[str, int],
    sizes: tuple[int, int, int, int],
    fast: Rank,
    constants: Constants,
) -> None:
    phases = gemm_phases(gemm(**changes), replace(fast, **rank_changes), constants)  # type: ignore[arg-type]
    assert phases.forward_s == pytest.approx(gemm_s(*sizes, fast, constants))
    assert phases.weight_gradient_s == 0.0


def test_backward_pass_is_the_products_of_both_gradients(fast: Rank, constants: Constants) -> None:
    phases = gemm_phases(gemm(all_reduce="backward"), fast, constants)
    left_s = gemm_s(128, 1024, 256, 1, fast, constants)
    right_s = gemm_s(1024, 256, 128, 1, fast, constants)
    assert phases.backward_s == pytest.approx(left_s + right_s)
    assert phases.weight_gradient_s == pytest.approx(right_s)
    assert phases.input_gradient_s == pytest.approx(left_s)


def test_elementwise_kernel_takes_the_bytes_that_it_reads_and_writes(
    rank: Rank, constants: Constants
) -> None:
    op = Elementwise(name="e", forward_elements=500, backward_elements=1000)
    assert elementwise_phases(op, rank, constants) == Phases(forward_s=1.0, backward_s=2.0)
    single = replace(rank, precision="fp32", micro_batch_size=3)
    assert elementwise_phases(op, single, constants) == Phases(forward_s=6.0, backward_s=12.0)


def test_tensor_parallelism_divides_a_sharded_kernel_only(rank: Rank, constants: Constants) -> None:
    op = Elementwise(name="e", forward_elements=500, backward_elements=500)
    two = replace(rank, tp=2)
    assert elementwise_phases(op, two, constants).forward_s == 1.0
    assert elementwise_phases(replace(op, sharded=True), two, constants).forward_s == 0.5


def test_loss_moves_its_bytes_per_logit_half_in_each_pass(rank: Rank, constants: Constants) -> None:
    op = Elementwise(name="loss", forward_elements=0, backward_elements=0, logits=100)
    lossy = replace(constants, loss_bytes_per_logit=60.0)
    assert elementwise_phases(op, rank, lossy) == Phases(forward_s=3.0, backward_s=3.0)


def test_backward_pass_launches_two_kernels_per_kernel(rank: Rank, constants: Constants) -> None:
    op = Elementwise(name="e", forward_elements=0, backward_elements=0, num_kernels=3)
    phases = elementwise_phases(op, rank, replace(constants, kernel_gap_s=1.0))
    assert phases == Phases(forward_s=3.0, backward_s=6.0)


def test_streaming_takes_bytes_and_gaps(device: Device, constants: Constants) -> None:
    half = replace(constants, memory_efficiency=0.5, kernel_gap_s=1.0)
    assert stream_s(1000, 2, device, half) == 4.0


def test_operators_run_one_after_the_other(rank: Rank, constants: Constants) -> None:
    op = Elementwise(name="e", forward_elements=500, backward_elements=1000)
    assert device_phases((op, op), rank, constants) == Phases(forward_s=2.0, backward_s=4.0)
    assert device_phases((), rank, constants) == Phases(forward_s=0.0, backward_s=0.0)


def test_products_within_a_kernel_count_where_they_take_longer_than_its_traffic(
    rank: Rank, constants: Constants
) -> None:
    light = Elementwise(
        name="attention", forward_elements=1, backward_elements=2, flops=1e-9, rate_fraction=0.7
    )
    traffic = elementwise_phases(replace(light, flops=0.0), rank, constants)
    assert elementwise_phases(light, rank, constants) == traffic
    heavy = elementwise_phases(replace(light, flops=1e30), rank, constants)
    rate = rank.device.peak_flops(rank.precision) * rank.device.gemm_fraction * 0.7
    assert heavy.forward_s == pytest.approx(1e30 * rank.micro_batch_size / rate)
    assert heavy.backward_s == pytest.approx(2.5 * 73 / 63 * heavy.forward_s)


def test_blocks_of_attention_end_apart_by_half_of_the_longest(
    rank: Rank, constants: Constants
) -> None:
    rate = rank.device.peak_flops(rank.precision) * rank.device.gemm_fraction
    longest_s = 1e25 * rank.device.num_multiprocessors / rate

    def forward_s(flops: float) -> float:
        op = Elementwise(
            name="attention", forward_elements=0, backward_elements=0, flops=flops, block_flops=1e25
        )
        phases = elementwise_phases(op, rank, constants)
        assert phases.backward_s == pytest.approx(2.5 * 73 / 63 * phases.forward_s)
        return phases.forward_s

    work_s = 1e30 * rank.micro_batch_size / rate
    assert forward_s(1e30) == pytest.approx(work_s + longest_s / 2)
    assert forward_s(1e20) == pytest.approx(longest_s)  # fewer blocks than multiprocessors


def test_traffic_around_the_products_of_attention_is_not_hidden(
    rank: Rank, constants: Constants
) -> None:
    ten_s = 10 * rank.device.peak_flops(rank.precision) * rank.device.gemm_fraction
    op = Elementwise(
        name="attention",
        forward_elements=500,
        backward_elements=1000,
        flops=ten_s / rank.micro_batch_size,
        outer_elements=(250, 750),
    )
    traffic = elementwise_phases(replace(op, flops=0.0), rank, constants)
    assert traffic == Phases(forward_s=1.0, backward_s=2.0)
    both = elementwise_phases(op, rank, constants)
    assert both.forward_s == pytest.approx(10 + 0.5)
    assert both.backward_s == pytest.approx(2.5 * 73 / 63 * 10 + 1.5)
    assert elementwise_phases(replace(op, flops=1e-9), rank, constants) == traffic


@pytest.mark.parametrize(
    ("board", "head_size", "kernel", "rate_fraction", "tflops"),
    [
        ("A100-80", 128, "flash", 0.7, 180.0),
        ("A100-80", 128, "native", 0.7, 180.0),  # FlashAttention-2 has the board's own instructions
        ("A100-80", 128, "flash", 0.35, 90.0),  # an older kernel, half as fast
        ("H100", 128, "native", 0.7, 659.0),
        ("H100", 192, "native", 0.7, 659.0),
        ("H100", 64, "native", 0.7, 522.0),
        ("H100", 128, "flash", 0.7, 0.35 * 989.4),
        ("B200", 128, "flash", 0.7, 0.35 * 989.4 * 148 / 132),
        ("A100-80", 128, "triton", 0.7, 0.9 * 180),
        ("H100", 64, "triton", 0.7, 522 * 1.3 / 2.7),
        ("B200", 128, "triton", 0.7, 1175 * 1.3 / 2.7),
        ("A30", 128, "native", 0.7, 0.7 * 0.75 * 165),  # not measured: relative to products
        ("V100-16", 128, "flash", 0.7, 0.4 * 0.65 * 125),
    ],
)
def test_attention_has_the_measured_rate_of_its_generation(
    board: str, head_size: int, kernel: str, rate_fraction: float, tflops: float
) -> None:
    op = Elementwise(
        name="attention",
        forward_elements=1,
        backward_elements=2,
        flops=1e12,
        rate_fraction=rate_fraction,
        head_size=head_size,
        native=kernel == "native",
        compiled=kernel == "triton",
    )
    rank = Rank(device=find_device(board), tp=1, micro_batch_size=1, precision="fp16")
    forward_s = elementwise_phases(op, rank, Constants()).forward_s
    assert forward_s == pytest.approx(1 / tflops)
    twice = elementwise_phases(op, rank, replace(Constants(), gemm_scale=2.0)).forward_s
    assert twice == pytest.approx(0.5 / tflops)


def test_a_sharded_kernel_shares_its_products(rank: Rank, constants: Constants) -> None:
    op = Elementwise(
        name="attention", forward_elements=1, backward_elements=2, flops=1e30, sharded=True
    )
    alone, shared = (
        elementwise_phases(op, replace(rank, tp=tp), constants).forward_s for tp in (1, 2)
    )
    assert shared == pytest.approx(alone / 2)


@pytest.mark.parametrize("head_size", [64, 80, 60, 68])
def test_heads_that_are_no_multiple_of_8_run_in_slower_kernels(head_size: int) -> None:
    device = find_device("A100-80")
    scores = Gemm(
        name="scores", rows=2048, columns=2048, inner=head_size, batch=32, has_weight=False
    )
    weight = Gemm(name="query", rows=2048, columns=head_size * 32, inner=head_size * 32)
    half, single = (
        Rank(device=device, tp=1, micro_batch_size=1, precision=precision)
        for precision in ("fp16", "fp32")
    )
    constants = Constants()
    forward_s = gemm_phases(scores, half, constants).forward_s
    single_s = gemm_phases(scores, single, constants).forward_s
    if head_size % 8:
        assert forward_s < 0.5 * single_s
        assert forward_s > scores.flops / device.unaligned_flops(2)
    else:
        assert forward_s < 0.2 * single_s
    assert gemm_phases(weight, half, constants).forward_s < 1e-3


def test_unaligned_products_run_at_twice_the_rate_of_single_precision_where_none_was_measured(
    rank: Rank, multiplier: Device, constants: Constants
) -> None:
    device = replace(multiplier, fp32_flops=TILE_FLOPS / 8)
    own = replace(rank, device=device)
    scores = Gemm(name="scores", rows=128, columns=256, inner=1000, has_weight=False)
    odd = replace(scores, inner=1004)
    assert gemm_phases(scores, own, constants).forward_s == pytest.approx(1.0)
    assert gemm_phases(odd, own, constants).forward_s == pytest.approx(4 * 1.004)
    narrow = replace(own, device=replace(device, fp32_flops=TILE_FLOPS))
    assert gemm_phases(odd, narrow, constants).forward_s == pytest.approx(1.004)


@pytest.mark.parametrize(
    ("board", "cublas", "odd", "even"),
    [
        ("H200", "13", 122, 251),  # as measured there
        ("A100-80", "13", 71, 146),  # 2/3 of the instructions a second on each of fewer units
        ("T4", "13", 29.25, 29.25),  # hardly fewer operands than its tensor cores need
        ("A100-80", "11", 31.2, 31.2),  # 2 x 19.5 x .8: off the tensor cores
        ("V100-16", "13", 20.4, 20.4),  # lacks the instructions of Turing
        ("V100-16", "11", 20.4, 20.4),
    ],
)
def test_products_of_unaligned_heads_depend_on_the_generation_and_the_library(
    board: str, cublas: str, odd: float, even: float
) -> None:
    rank = Rank(
        device=find_device(board),
        tp=1,
        micro_batch_size=1,
        precision="fp16",
        has_unaligned_kernels=cublas == "13",
    )
    for width, tflops in ((16385, odd), (16388, even), (16386, even)):
        scores = Gemm(name="scores", rows=65536, columns=65536, inner=width, has_weight=False)
        rate = scores.flops / gemm_phases(scores, rank, Constants()).forward_s
        assert rate == pytest.approx(tflops * 1e12, rel=0.02)


@pytest.mark.parametrize("board", ["A100-80", "V100-16"])
def test_weights_that_are_no_multiple_of_8_slow_products_only_by_measured_kernels(
    board: str,
) -> None:
    aligned, odd = (
        Gemm(name="logits", rows=4096, columns=columns, inner=1024) for columns in (51200, 51199)
    )
    newer = Rank(device=find_device(board), tp=1, micro_batch_size=1, precision="fp16")
    older = replace(newer, has_unaligned_kernels=False)
    usual_s = gemm_phases(aligned, older, Constants()).forward_s
    assert gemm_phases(odd, older, Constants()).forward_s == pytest.approx(usual_s, rel=1e-3)
    slower = gemm_phases(odd, newer, Constants()).forward_s > 2 * usual_s
    assert slower == (board == "A100-80")


def test_a_vocabulary_that_is_no_multiple_of_8_slows_the_head_as_measured() -> None:
    """GPT-2's head on an H200: 64.5 ms with 50,257 columns, 31.5 with 50,258 and 50,260."""
    h200 = find_device("H200")
    rank = Rank(device=h200, tp=1, micro_batch_size=16, precision="bf16")
    head = Gemm(name="logits", rows=1024, columns=50257, inner=1600)
    times = {
        columns: gemm_phases(replace(head, columns=columns), rank, Constants())
        for columns in (50257, 50258, 50260, 50304)
    }
    both_s = {columns: phases.forward_s + phases.backward_s for columns, phases in times.items()}
    assert both_s[50257] == pytest.approx(64.5e-3, rel=0.05)
    assert both_s[50258] == pytest.approx(31.5e-3, rel=0.05)
    assert both_s[50260] == pytest.approx(31.5e-3, rel=0.05)
    assert both_s[50304] < 0.5 * both_s[50260]


def test_small_tiles_of_unaligned_products_are_bound_by_their_operands_alone(
    rank: Rank, multiplier: Device, constants: Constants
) -> None:
    device = replace(multiplier, fp32_flops=TILE_FLOPS / 6)
    slow = replace(rank, device=device)
    narrow = Gemm(name="context", rows=32, columns=4, inner=1000, has_weight=False)
    assert gemm_phases(narrow, slow, constants).forward_s == pytest.approx(1 / 32 / 0.3)


def test_random_rows_fill_half_of_their_last_tile_on_average() -> None:
    draws = np.random.default_rng(0).poisson([[60], [700], [1024], [5000]], (4, 20_000))
    for counts, mean in zip(draws, (60, 700, 1024, 5000), strict=True):
        assert expected_tiles(mean, 128) == pytest.approx(np.ceil(counts / 128).mean(), rel=0.01)
    assert expected_tiles(1e6, 128) == pytest.approx(1e6 / 128 + 0.5, rel=1e-6)


@pytest.mark.parametrize(("precision", "casts"), [("bf16", 0), ("fp8", 8)])
def test_products_of_experts_run_in_streams_a_kernel_for_each(
    precision: Precision, casts: int
) -> None:
    """Eight experts in four streams: two kernels after each other; casts of all in one stream."""
    expert = Gemm(name="experts-in", rows=128, columns=256, inner=64, batch=8, is_expert=True)
    constants = Constants(kernel_gap_s=1.0)
    alone = Rank(device=find_device("H100"), tp=1, micro_batch_size=1, precision=precision)
    grouped, streams = (
        gemm_phases(expert, replace(alone, expert_streams=number), constants) for number in (0, 4)
    )
    assert streams.forward_s - grouped.forward_s == pytest.approx(1 + casts)
    assert streams.backward_s - grouped.backward_s == pytest.approx(2 + casts)


def test_elements_that_are_addressed_one_by_one_wait_for_instructions_where_memory_is_faster(
    rank: Rank,
) -> None:
    """A multiprocessor issues an instruction for 128 threads a cycle: 148 of a B200 at 1.98 GHz."""
    op = Elementwise(name="x", forward_elements=2e6, backward_elements=3e6, addressed=(1e6, 0.0))
    plain = replace(op, addressed=(0.0, 0.0))
    b200, h100, a100, cpu = map(find_device, ("B200", "H100", "A100-40", "cpu"))
    assert b200.instructions_per_s == pytest.approx(148 * 128 * 1.98e9, rel=0.01)
    assert a100.instructions_per_s == pytest.approx(108 * 128 * 1.41e9, rel=0.01)
    constants = Constants()
    longer, shorter = (
        elementwise_phases(each, replace(rank, device=b200), constants) for each in (op, plain)
    )
    assert b200.instructions_per_s is not None
    issued_s = ADDRESS_INSTRUCTIONS / b200.instructions_per_s
    beyond_s = 1e6 * (issued_s - ADDRESSED_BYTES / (0.75 * 8e12))
    assert longer.forward_s - shorter.forward_s == pytest.approx(beyond_s)
    assert longer.backward_s == shorter.backward_s
    assert [addressed_s(each, constants) for each in (h100, a100)] == [0.0, 0.0]
    assert addressed_s(replace(cpu, fp32_flops=None), constants) == 0.0
