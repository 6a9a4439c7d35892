"""Remarks on boards and sizes, and the slower attention of boards without FlashAttention-2."""

import re
from pathlib import Path

import pytest

from amp_ray.clusters.constants import Constants
from amp_ray.clusters.device import CATALOGUE
from amp_ray.cost.columns import remarks
from amp_ray.cost.roofline import Rank, elementwise_phases
from amp_ray.models.operator import Elementwise
from support.experiments import small_experiment

NO_FLASH_ATTENTION = "T4 has no FlashAttention-2 (compute capability below 8.0)"
PUBLISHED = Path(__file__).parents[3] / "experiments/published"


@pytest.mark.parametrize(
    ("changes", "texts"),
    [
        ((("device: T4", "device: A100-40"),), []),
        (
            (("device: T4", "device: RTX4090"),),
            ["RTX4090: figures of its data sheet, which no measurement here backs"],
        ),
        (
            (),
            [f"{NO_FLASH_ATTENTION}, but PyTorch's memory-efficient kernel"],
        ),
        (
            (("device: T4", "device: A100-40"), ("hidden_size: 256", "hidden_size: 616")),
            ["test.yaml:2: model: head size 77 is no multiple of 8, which tensor cores need"],
        ),
        (
            (("device: T4", "device: A100-40"), ("sequence_length: 128", "sequence_length: 8191")),
            [
                (
                    "test.yaml:2: model.sequence_length: 8191 is no multiple of 64: the last tile "
                    "of each product is computed whole"
                )
            ],
        ),
        (
            (
                ("device: T4", "device: A100-40"),
                ("sequence_length: 128", "sequence_length: 8192"),
                ("global_batch_size: 8", "global_batch_size: 524288"),
            ),
            [
                (
                    "batch 524,288: 4.3 billion tokens a step; global_batch_size counts sequences, "
                    "not tokens"
                )
            ],
        ),
    ],
)
def test_remarks(changes: tuple[tuple[str, str], ...], texts: list[str]) -> None:
    assert list(remarks(small_experiment(*changes))) == texts


def test_the_measured_boards_are_those_of_the_published_measurements() -> None:
    files = {*PUBLISHED.glob("*.csv"), *PUBLISHED.glob("*.yaml")} - {PUBLISHED / "kernels.csv"}
    words = set(re.findall(r"[\w-]+", "".join(path.read_text("utf-8") for path in files)))
    paper = {"T4", "V100-16"}  # of the experiments of AMP (experiments/*.yaml)
    waiting = {"MI300X", "MI325X"}  # only in rows that the package cannot express yet
    measured = {name for name, device in CATALOGUE.items() if device.is_measured}
    assert measured == (words & set(CATALOGUE)) - waiting | paper


def test_attention_is_slower_on_boards_without_flash_attention() -> None:
    attention = Elementwise(
        name="attention",
        forward_elements=0,
        backward_elements=0,
        flops=1e12,
        rate_fraction=0.7,
    )

    def seconds(name: str) -> float:
        device = CATALOGUE[name]
        rank = Rank(device=device, tp=1, micro_batch_size=1, precision="fp16")
        forward_s = elementwise_phases(attention, rank, Constants()).forward_s
        return forward_s * device.gemm_fraction * device.peak_flops("fp16")

    assert seconds("V100-16") == pytest.approx(1e12 / 0.4)
    assert seconds("A30") == pytest.approx(1e12 / 0.7)
