from dataclasses import replace

import pytest

from amp_ray.clusters.device import ALIASES, CATALOGUE, Device, find_device
from amp_ray.units import Precision


def device(**figures: float) -> Device:
    plain = {"memory_bytes": 2**30, "memory_bytes_per_s": 1e9, "num_multiprocessors": 1}
    return Device(name="X", source="test", **(plain | figures))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "figure", ["memory_bytes", "memory_bytes_per_s", "fp16_flops", "context_bytes"]
)
@pytest.mark.parametrize("value", [0, -1, float("nan")])
def test_a_figure_that_is_not_positive_is_refused(figure: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"'X': every figure must be positive, found {{'{figure}'"):
        device(**{figure: value})


@pytest.mark.parametrize(("precision", "rate"), [("fp32", 1.0), ("fp16", 2.0), ("bf16", 3.0)])
def test_each_precision_has_its_rate(precision: Precision, rate: float) -> None:
    able = device(fp32_flops=1.0, fp16_flops=2.0, bf16_flops=3.0, memory_bytes=3 * 2**30)
    assert (able.peak_flops(precision), able.memory_gib) == (rate, 3.0)


def test_a_precision_without_a_rate_is_refused() -> None:
    with pytest.raises(ValueError, match="'X' does not compute in bf16; it can do fp32, fp16"):
        device(fp32_flops=1.0, fp16_flops=1.0).peak_flops("bf16")


# ------------------------------------------------------------------------------- catalogue

NOMINAL_GIB = {
    "T4": 15,
    "P100-16": 16,
    "V100-16": 16,
    "V100-32": 32,
    "A100-40": 40,
    "A100-80": 80,
    "H100": 80,
    "H800": 80,
    "H200": 141,
    "GH200": 96,
    "A10": 24,
    "A30": 24,
    "A40": 48,
    "L4": 24,
    "L40S": 48,
    "B200": 180,
    "B300": 288,
    "GB200": 186,
    "GB300": 288,
    "MI300X": 192,
    "MI325X": 256,
    "MI350X": 288,
    "MI355X": 288,
    "RTX3090": 24,
    "RTX4090": 24,
    "RTX5090": 32,
    "cpu": 4,
}


def test_every_board_names_its_source_and_leaves_memory_to_the_driver() -> None:
    assert set(CATALOGUE) == set(NOMINAL_GIB)
    for name, board in CATALOGUE.items():
        assert (find_device(name.lower()), bool(board.source)) == (board, True)
        assert 0.9 * NOMINAL_GIB[name] <= board.memory_gib <= NOMINAL_GIB[name], name
        assert (board.context_bytes is not None) is (name == "cpu")
        if board.fp16_flops is not None and board.fp32_flops is not None:
            assert board.fp16_flops >= 1.9 * board.fp32_flops, name


@pytest.mark.parametrize("alias", ALIASES)
def test_a_name_without_memory_means_the_smaller_board(alias: str) -> None:
    sizes = [board.memory_bytes for name, board in CATALOGUE.items() if name.startswith(alias)]
    assert find_device(alias).memory_bytes == min(sizes)


def test_an_unknown_board_is_refused_with_all_that_are_known() -> None:
    with pytest.raises(ValueError, match="device 'B9000' is not in the catalogue; known: T4, P100"):
        find_device("B9000")


def test_links_that_meet_in_a_switch_reach_more_of_their_rate() -> None:
    reached = {name: find_device(name).link_fraction for name in ("A100-80", "H100", "B200")}
    assert set(reached.values()) == {0.79}
    assert find_device("A100-80").reached_link_bytes_per_s == pytest.approx(237e9)
    assert find_device("T4").reached_link_bytes_per_s == 0.5 * 15.75e9


def test_more_power_does_more_products_on_one_process() -> None:
    def sustained(name: str) -> float:
        board = find_device(name)
        return board.peak_flops("bf16") * board.gemm_fraction

    boards = ("H100", "B200", "B300", "GB200", "GB300")
    assert sorted(boards, key=sustained) == list(boards)


def test_every_board_but_the_superchip_has_the_power_of_its_data_sheet() -> None:
    unknown = {name for name, board in CATALOGUE.items() if board.board_power_w is None}
    assert unknown == {"GH200", "cpu"}
    watts = [find_device(name).board_power_w for name in ("T4", "A100-80", "H100", "GB300")]
    assert watts == [70, 400, 700, 1400]


@pytest.mark.parametrize(
    ("board", "limit_w", "clock"),
    [
        ("H100", 700, 1.0),
        ("H100", 500, 0.865),  # of the 567 W above the static part 367 are left
        ("H100", 350, 0.726),
        ("GB200", 1000, 0.926),
        ("A100-80", 300, 0.884),
    ],
)
def test_a_power_limit_lowers_the_clock_by_the_cube_root_of_what_switches(
    board: str, limit_w: float, clock: float
) -> None:
    plain = find_device(board)
    limited = replace(plain, power_limit_w=limit_w)
    assert limited.clock_fraction == pytest.approx(clock, abs=1e-3)
    rates = [
        (
            device.product_flops("bf16"),
            device.attention_flops(128, native=True),
            device.attention_flops(128, native=False),
            device.unaligned_flops(1),
        )
        for device in (limited, plain)
    ]
    for slow, fast in zip(*rates, strict=True):
        assert slow is not None
        assert fast is not None
        assert slow == pytest.approx(clock * fast, rel=1e-3)
    assert limited.memory_bytes_per_s == plain.memory_bytes_per_s
    assert limited.peak_flops("fp16") == plain.peak_flops("fp16")


def test_boards_reach_the_hosts_memory_by_pcie_or_a_link_of_their_own() -> None:
    boards = ("V100-32", "A100-80", "H100", "GB200", "GH200")
    rates = [find_device(name).host_bytes_per_s / 1e9 for name in boards]
    assert rates == [15.75, 31.5, 63.0, 225.0, 450.0]
