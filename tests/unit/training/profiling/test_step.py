import pytest

from amp_ray.training.profiling.run import tiny_shape
from amp_ray.training.shapes import ImageShape, layer_kinds, read_shape

TEXT = {"num_layers": 3, "hidden_size": 96, "num_heads": 6, "sequence_length": 64}
LANGUAGE = [
    {**TEXT, "family": "gpt2", "vocab_size": 1000},
    {**TEXT, "family": "llama", "vocab_size": 1000, "num_key_value_heads": 2},
]
PICTURES = {
    "family": "transgan",
    "depth": [1, 2, 0, 0, 0, 0, 0, 3],
    "hidden_size": 1024,
    "num_heads": 4,
    "bottom_width": 9,
    "window_size": 18,
}


@pytest.mark.parametrize("model", [*LANGUAGE, PICTURES], ids=lambda model: model["family"])
def test_a_tiny_model_has_the_layers_of_the_large_one(model: dict[str, object]) -> None:
    large = read_shape(model)
    tiny = tiny_shape(large)
    assert layer_kinds(tiny) == layer_kinds(large)
    assert tiny.num_heads == large.num_heads
    assert tiny.hidden_size < large.hidden_size


def test_pictures_of_a_tiny_generator_start_with_one_token() -> None:
    tiny = tiny_shape(read_shape(PICTURES))
    assert isinstance(tiny, ImageShape)
    assert tiny.side(0) == 1
    assert tiny.width(len(tiny.depth) - 1) == tiny.num_heads
