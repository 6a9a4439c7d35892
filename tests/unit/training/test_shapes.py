from typing import Any

import pytest

from amp_ray.training.shapes import ImageShape, TextShape, layer_kinds, read_shape

GPT2 = {
    "family": "gpt2",
    "num_layers": 24,
    "hidden_size": 1024,
    "num_heads": 16,
    "sequence_length": 1024,
    "vocab_size": 52256,
}
LLAMA = {**GPT2, "family": "llama", "num_key_value_heads": 4}
TRANSGAN = {
    "family": "transgan",
    "depth": [12, 0, 0, 0, 0, 12],
    "hidden_size": 1024,
    "num_heads": 4,
    "bottom_width": 9,
}


def text(model: dict[str, Any]) -> TextShape:
    shape = read_shape(model)
    assert isinstance(shape, TextShape)
    return shape


def image(**changes: object) -> ImageShape:
    shape = read_shape({**TRANSGAN, **changes})
    assert isinstance(shape, ImageShape)
    return shape


@pytest.mark.parametrize("model", [GPT2, LLAMA])
def test_text_models_train_embedding_blocks_norm_and_head(model: dict[str, Any]) -> None:
    assert layer_kinds(read_shape(model)) == ("embedding", *["block"] * 24, "norm", "head")


def test_transgan_trains_input_blocks_and_head() -> None:
    assert layer_kinds(image()) == ("input", *["block"] * 24, "head")


def test_gpt2_has_four_times_the_width_inside_and_ties_its_head() -> None:
    shape = text(GPT2)
    assert (shape.feed_forward_size, shape.num_key_value_heads, shape.tied_embedding) == (
        4096,
        16,
        True,
    )


def test_llama_rounds_its_feed_forward_width_up_and_unties_its_head() -> None:
    shape = text(LLAMA)
    assert (shape.feed_forward_size, shape.tied_embedding) == (2816, False)


def test_paper_transgan_ends_at_a_64th_of_the_width_and_32_times_the_side() -> None:
    shape = image()
    assert [shape.width(level) for level in range(6)] == [1024, 1024, 1024, 256, 64, 16]
    assert [shape.side(level) for level in range(6)] == [9, 18, 36, 72, 144, 288]


def test_large_pictures_attend_in_windows_and_small_ones_as_a_whole() -> None:
    shape = image()
    assert [shape.window(level) for level in range(6)] == [9, 18, 36, 16, 16, 16]


def test_blocks_belong_to_the_levels_that_have_any() -> None:
    shape = image(depth=[2, 0, 0, 1], hidden_size=256, bottom_width=8)
    assert [shape.level_of_block(block) for block in range(3)] == [0, 0, 3]


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({**GPT2, "num_heads": 15}, "multiple of num_heads 15"),
        ({**LLAMA, "num_key_value_heads": 3}, "num_key_value_heads 3"),
        ({**LLAMA, "hidden_size": 48, "num_heads": 16}, "even head size"),
        ({**GPT2, "num_blocks": 4}, "unknown keys ['num_blocks']"),
        ({**GPT2, "family": "bert"}, "one of gpt2, llama, transgan; found 'bert'"),
        ({**GPT2, "tied_embedding": 1}, "true or false, found 1"),
        ({**GPT2, "vocab_size": "many"}, "vocab_size must be a whole number >= 2"),
        ({**TRANSGAN, "depth": [2, 0]}, "must end with a level that has blocks"),
        ({**TRANSGAN, "depth": 12}, "list of whole numbers"),
        ({**TRANSGAN, "hidden_size": 1000}, "divisible by 4 for each of the last 3"),
        ({**TRANSGAN, "num_heads": 32}, "level 5 has width 16"),
        ({**TRANSGAN, "window_size": 10}, "and the window 10"),
        ({"family": "gpt2"}, "model.hidden_size is missing"),
    ],
)
def test_wrong_models_are_refused_by_name(model: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=r".*") as refused:
        read_shape(model)
    assert words in str(refused.value)


def test_transgan_names_what_tp_must_divide() -> None:
    assert image().split_sizes() == {"num_heads": 4}


def test_text_models_name_what_tp_must_divide() -> None:
    assert text(GPT2).split_sizes() == {"num_heads": 16, "feed_forward_size": 4096}
    assert text(LLAMA).split_sizes() == {"num_key_value_heads": 4, "feed_forward_size": 2816}
