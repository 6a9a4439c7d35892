import pytest

from amp_ray.models.blocks import Kernels
from amp_ray.models.families import transgan_layers
from amp_ray.models.model import LayerList, ModelShape

PUBLISHED = ModelShape(
    family="transgan",
    num_layers=24,
    hidden_size=1024,
    num_heads=4,
    sequence_length=81,
    vocab_size=0,
    num_key_value_heads=4,
    feed_forward_size=4096,
    tied_embedding=False,
    depth=(12, 0, 0, 0, 0, 12),
    bottom_width=9,
    latent_size=512,
    window_size=18,
)


def changed(**figures: object) -> ModelShape:
    known = {name: getattr(PUBLISHED, name) for name in ModelShape.__dataclass_fields__}
    return ModelShape(**(known | figures))


def test_the_published_list_has_56_entries() -> None:
    kinds = [layer.kind for layer in transgan_layers(PUBLISHED, "amp-2022")]
    assert len(kinds) == 56
    assert [kinds.index("block"), kinds.count("block"), kinds[3:15].count("block")] == [3, 24, 12]
    assert kinds[41:53] == ["block"] * 12


def test_a_runtimes_list_is_input_blocks_and_head() -> None:
    kinds = [layer.kind for layer in transgan_layers(PUBLISHED, "runtime")]
    assert kinds == ["other", *["block"] * 24, "head"]


def test_the_first_layer_has_the_published_weights() -> None:
    stream = 81 * 1024
    assert transgan_layers(PUBLISHED, "runtime")[0].num_parameters == 512 * stream + stream


def test_the_last_three_levels_each_divide_the_width_by_four() -> None:
    layers = transgan_layers(PUBLISHED, "runtime")
    small, large = layers[1], layers[-2]
    assert small.num_parameters == 12 * 1024**2 + 13 * 1024
    assert large.num_parameters == 12 * 16**2 + 13 * 16


def test_pictures_double_and_widths_shrink_across_a_cut() -> None:
    layers = transgan_layers(PUBLISHED, "runtime")
    assert layers[1].output_elements == 81 * 1024
    assert layers[-2].output_elements == (9 * 2**5) ** 2 * 16


def test_large_pictures_attend_within_windows() -> None:
    last = transgan_layers(PUBLISHED, "runtime")[-2]
    scores = next(product for product in last.gemms if product.name == "scores")
    assert (scores.rows, scores.batch) == (18**2, 4 * 288**2 // 18**2)


@pytest.mark.parametrize(
    ("figures", "layer_list", "message"),
    [
        ({"depth": (6, 6)}, "amp-2022", r"known for depth \[12, 0, 0, 0, 0, 12\], found \[6, 6\]"),
        ({"depth": (6, 0)}, "runtime", r"depth \[6, 0\] must end with a level that has blocks"),
        ({"num_heads": 3}, "runtime", "width 1024 of level 0 is not a multiple of num_heads 3"),
        ({"window_size": 7}, "runtime", "side 288 of level 5 is not a multiple of window_size 7"),
    ],
)
def test_figures_that_do_not_fit_are_refused(
    figures: dict[str, object], layer_list: LayerList, message: str
) -> None:
    shape = changed(**figures)
    with pytest.raises(ValueError, match=message):
        transgan_layers(shape, layer_list)


def test_the_runtimes_program_may_fuse_attention_the_published_one_did_not() -> None:
    kernels = Kernels(fused_attention=True)
    last = transgan_layers(PUBLISHED, "runtime", kernels)[-2]
    (attention,) = [op for op in last.elementwise if op.flops]
    assert attention.flops == 4 * 288**2 * 18**2 * 16
    assert transgan_layers(PUBLISHED, "amp-2022", kernels) == transgan_layers(PUBLISHED, "amp-2022")
