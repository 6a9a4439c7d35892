"""Remarks on boards and sizes, and the slower attention of boards without FlashAttention-2."""

import re
from pathlib import Path

import pytest

from amp_ray.clusters.constants import Constants
from amp_ray.clusters.device import CATALOGUE
from amp_ray.cost.columns import head_remarks, remarks
from amp_ray.cost.estimate import Estimate
from amp_ray.cost.roofline import Rank, elementwise_phases
from amp_ray.models.operator import Elementwise
from amp_ray.runtime.planning import plan_experiment
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


H100 = ("device: T4", "device: H100")
ODD = ("vocab_size: 1024", "vocab_size: 50257")
EIGHTS = ("vocab_size: 1024", "vocab_size: 50272")
WIDE = ("hidden_size: 256", "hidden_size: 2048")
TWO_BOARDS = (
    "{count: 2, device: T4, slots: 2, intra_gbit_per_s: 50, inter_gbit_per_s: 10}",
    """{count: 1, device: T4, slots: 2, inter_gbit_per_s: 10}
    - {count: 1, device: H100, slots: 2, inter_gbit_per_s: 10}""",
)
PADDED = ("global_batch_size", "runtime: megatron-core\nglobal_batch_size")
OF_2022 = ("global_batch_size", "runtime: amp-2022\nglobal_batch_size")
FP32 = ("global_batch_size", "precision: fp32\nglobal_batch_size")


@pytest.mark.parametrize(
    ("tp", "changes", "text"),
    [
        (1, (H100, ODD), "50257 is no multiple of 8: on H100 ... with 50304"),
        (2, (H100, ODD), "50257 is no multiple of 8: on H100 ... with 50304"),
        (8, (H100, EIGHTS), "50272 / tp 8 is no multiple of 8: on H100 ... with 50688"),
        (4, (H100, EIGHTS), None),  # ranks of 12,568 = 8 * 1,571
        (1, (H100, ODD, PADDED), None),
        (1, (H100, ODD, FP32), None),
        (1, (H100, ODD, OF_2022), None),  # nothing was measured with its libraries
        (1, (ODD,), None),  # kernels of unaligned products are no slower on a T4
        (1, (("device: T4", "device: MI300X"), ODD), None),
        (1, (H100,), None),
    ],
)
def test_vocabularies_that_slow_the_head(
    tp: int, changes: tuple[tuple[str, str], ...], text: str | None
) -> None:
    remark = next(head_remarks(small_experiment(WIDE, *changes), tp), None)
    if text is None:
        assert remark is None
    else:
        start, end = f"test.yaml:3: model.vocab_size: {text}".split("...")
        assert remark is not None
        assert re.fullmatch(rf"{re.escape(start)}.* [1-9]\.\d times .*{re.escape(end)}", remark)


def test_the_slowdown_of_a_head_is_that_of_the_board_with_the_largest() -> None:
    (remark,) = head_remarks(small_experiment(WIDE, ODD, TWO_BOARDS), 1)
    assert "on H100 the head's products" in remark


def test_only_rows_whose_degree_divides_the_vocabulary_badly_say_so() -> None:
    vocabulary, slots = ("vocab_size: 1024", "vocab_size: 50264"), ("slots: 2", "slots: 4")
    experiment = small_experiment(H100, WIDE, vocabulary, slots)  # 50,264 = 8 * 6,283
    planned = plan_experiment(experiment, progress=lambda _done, _all: None)
    warned = {
        estimate.strategy.tp: any("is no multiple of 8" in text for text in estimate.warnings)
        for estimate in planned.ranking.results
        if isinstance(estimate, Estimate)
    }
    assert warned == {1: False, 2: True, 4: True}


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
