from dataclasses import replace

import pytest

from amp_ray.models.model import ModelShape
from amp_ray.training.shapes import (
    is_image,
    layer_kinds,
    level_of_block,
    level_side,
    level_width,
    level_window,
)

TEXT = ModelShape(family="gpt2", num_layers=24, hidden_size=1024, num_heads=16)
TRANSGAN = ModelShape(
    family="transgan",
    num_layers=24,
    depth=(12, 0, 0, 0, 0, 12),
    hidden_size=1024,
    num_heads=4,
    bottom_width=9,
    latent_size=512,
    window_size=16,
)
LARGE = replace(
    TRANSGAN, num_layers=6, depth=(1, 2, 0, 0, 0, 0, 0, 3), bottom_width=9, window_size=18
)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_text_models_train_embedding_blocks_norm_and_head(family: str) -> None:
    kinds = layer_kinds(replace(TEXT, family=family))
    assert kinds == ("embedding", *["block"] * 24, "norm", "head")


def test_transgan_trains_input_blocks_and_head() -> None:
    assert layer_kinds(TRANSGAN) == ("input", *["block"] * 24, "head")


def test_paper_transgan_ends_at_a_64th_of_the_width_and_32_times_the_side() -> None:
    widths = [level_width(TRANSGAN, level) for level in range(6)]
    assert widths == [1024, 1024, 1024, 256, 64, 16]
    assert [level_side(TRANSGAN, level) for level in range(6)] == [9, 18, 36, 72, 144, 288]


def test_large_pictures_attend_in_windows_and_small_ones_as_a_whole() -> None:
    assert [level_window(TRANSGAN, level) for level in range(6)] == [9, 18, 36, 16, 16, 16]


def test_blocks_belong_to_the_levels_that_have_any() -> None:
    shape = replace(TRANSGAN, depth=(2, 0, 0, 1))
    assert [level_of_block(shape, block) for block in range(3)] == [0, 0, 3]


@pytest.mark.parametrize(
    "large",
    [TEXT, replace(TEXT, family="llama", num_key_value_heads=2), LARGE],
    ids=lambda shape: shape.family,
)
def test_a_tiny_model_has_the_layers_of_the_large_one(large: ModelShape) -> None:
    pytest.importorskip("deepspeed")
    from amp_ray.training.profiling.run import tiny_shape  # noqa: PLC0415 - imports DeepSpeed

    tiny = tiny_shape(large)
    assert layer_kinds(tiny) == layer_kinds(large)
    assert tiny.num_heads == large.num_heads
    assert tiny.hidden_size < large.hidden_size
    if is_image(large):
        assert level_side(tiny, 0) == 1
        assert level_width(tiny, len(tiny.depth) - 1) == tiny.num_heads
