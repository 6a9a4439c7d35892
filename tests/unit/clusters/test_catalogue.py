import pytest

from amp_ray.clusters.device import ALIASES, CATALOGUE, Device, find_device

NAMED = ["T4", "V100-16", "V100-32", "A100-40", "A100-80", "H100", "GH200", "RTX3090", "cpu"]


@pytest.mark.parametrize("name", NAMED)
def test_the_catalogue_has_the_usual_boards(name: str) -> None:
    assert find_device(name).name == name


def test_upper_and_lower_case_are_the_same() -> None:
    assert find_device("a100-80") is CATALOGUE["A100-80"]


@pytest.mark.parametrize("alias", ALIASES)
def test_a_name_without_memory_means_the_smaller_board(alias: str) -> None:
    sizes = [board.memory_bytes for name, board in CATALOGUE.items() if name.startswith(alias)]
    assert find_device(alias).memory_bytes == min(sizes)


def test_an_unknown_board_is_refused_with_all_that_are_known() -> None:
    with pytest.raises(ValueError, match="device 'B9000' is not in the catalogue; known: T4, P100"):
        find_device("B9000")


@pytest.mark.parametrize("device", CATALOGUE.values(), ids=CATALOGUE)
def test_every_board_names_its_source_and_leaves_memory_to_the_driver(device: Device) -> None:
    assert device.source
    nominal_gib = {
        "T4": 15,
        "P100-16": 16,
        "V100-16": 16,
        "V100-32": 32,
        "A100-40": 40,
        "A100-80": 80,
        "H100": 80,
        "H200": 141,
        "GH200": 96,
        "A30": 24,
        "A40": 48,
        "L40S": 48,
        "B200": 180,
        "B300": 288,
        "GB200": 186,
        "GB300": 288,
        "MI300X": 192,
        "MI325X": 256,
        "MI350X": 288,
        "MI355X": 288,
        "RTX5090": 32,
        "cpu": 4,
    }.get(device.name, 24)
    assert 0.9 * nominal_gib <= device.memory_gib <= nominal_gib


def test_tensor_cores_outrun_single_precision() -> None:
    for device in CATALOGUE.values():
        if device.fp16_flops is not None and device.fp32_flops is not None:
            assert device.fp16_flops >= 1.9 * device.fp32_flops


def test_only_a_cpu_has_a_context_of_its_own() -> None:
    known = {name for name, device in CATALOGUE.items() if device.context_bytes is not None}
    assert known == {"cpu"}


def test_links_that_meet_in_a_switch_reach_more_of_their_rate() -> None:
    reached = {name: find_device(name).link_fraction for name in ("A100-80", "H100", "B200")}
    assert set(reached.values()) == {0.79}
    assert find_device("A100-80").reached_link_bytes_per_s == pytest.approx(237e9)
    assert find_device("T4").reached_link_bytes_per_s == 0.5 * 15.75e9


def test_more_power_does_more_products_on_one_process() -> None:
    def sustained(name: str) -> float:
        device = find_device(name)
        return device.peak_flops("bf16") * device.gemm_fraction

    boards = ("H100", "B200", "B300", "GB200", "GB300")
    assert sorted(boards, key=sustained) == list(boards)
