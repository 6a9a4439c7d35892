"""T5, Wide-ResNet and lists of blocks."""

import json

import pytest

from amp_ray.inputs.model_shape import BlockSection, ModelSection, model_shape
from amp_ray.models.families import build_model
from amp_ray.models.model import Layer, Model
from amp_ray.models.operator import Gemm

T5_SMALL = {
    "model_type": "t5",
    "architectures": ["T5ForConditionalGeneration"],
    "is_encoder_decoder": True,
    "d_ff": 2048,
    "d_kv": 64,
    "d_model": 512,
    "n_positions": 512,
    "num_heads": 8,
    "num_layers": 6,
    "relative_attention_num_buckets": 32,
    "vocab_size": 32128,
}
T5_3B = T5_SMALL | {
    "d_ff": 16384, "d_kv": 128, "d_model": 1024, "num_heads": 32, "num_layers": 24
}  # fmt: skip
V11 = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
T5_V11_BASE = T5_SMALL | V11 | {
    "d_model": 768, "num_heads": 12, "num_layers": 12, "num_decoder_layers": 12
}  # fmt: skip
T5_V11_XL = T5_V11_BASE | {"d_ff": 5120, "d_model": 2048, "num_heads": 32, "num_layers": 24,
                           "num_decoder_layers": 24}  # fmt: skip

LAYERS, HIDDEN, HEADS, TOKENS, DECODER_TOKENS, VOCABULARY = 3, 64, 4, 48, 20, 100
STEM = BlockSection(
    name="stem", parameters=100, forward_gflops=0, activation_elements=30, boundary_elements=20
)
BODY = BlockSection(
    name="body",
    repeat=3,
    parameters=7000,
    forward_gflops=1.5,
    activation_elements=50,
    boundary_elements=10,
    sharded=True,
)


def built(**figures: object) -> Model:
    section = ModelSection.model_validate(figures)
    return build_model(model_shape(section), layer_list="runtime")


def t5(**figures: object) -> Model:
    standard = {
        "family": "t5",
        "num_layers": LAYERS,
        "hidden_size": HIDDEN,
        "num_heads": HEADS,
        "sequence_length": TOKENS,
        "decoder_sequence_length": DECODER_TOKENS,
        "vocab_size": VOCABULARY,
    }
    return built(**standard | figures)


def gemm(layer: Layer, name: str) -> Gemm:
    return next(product for product in layer.gemms if product.name == name)


# Sums over the weights of the checkpoints t5-small, t5-3b, google/t5-v1_1-base and -xl.
@pytest.mark.parametrize(
    ("config", "num_parameters"),
    [
        (T5_SMALL, 60_506_624),
        (T5_3B, 2_851_598_336),
        (T5_V11_BASE, 247_577_856),
        (T5_V11_XL, 2_849_757_184),
    ],
    ids=["small", "3b", "v1.1-base", "v1.1-xl"],
)
def test_a_published_t5_has_its_published_parameters(
    config: dict[str, object], num_parameters: int
) -> None:
    shape = model_shape(ModelSection(config="config.json"), json.dumps(config))
    assert build_model(shape, layer_list="runtime").num_parameters == num_parameters


def test_the_encoders_result_passes_all_boundaries_up_to_the_decoders_last_block() -> None:
    elements = [layer.output_elements for layer in t5().layers]
    encoder, decoder = TOKENS * HIDDEN, DECODER_TOKENS * HIDDEN
    both = [encoder + decoder] * LAYERS
    logits = DECODER_TOKENS * VOCABULARY
    assert elements == [*[encoder] * (LAYERS + 2), *both, decoder, decoder, logits]


def test_cross_attention_reads_keys_and_values_of_the_encoder() -> None:
    block = t5().layers[-4]
    assert gemm(block, "cross-key-value").rows == TOKENS
    assert gemm(block, "cross-query").rows == DECODER_TOKENS
    scores = gemm(block, "cross-scores")
    assert (scores.rows, scores.columns, scores.batch) == (DECODER_TOKENS, TOKENS, HEADS)
    assert gemm(block, "scores").columns == DECODER_TOKENS


def test_a_t5_without_own_lengths_is_symmetric() -> None:
    shape = model_shape(
        ModelSection(
            family="t5", num_layers=2, hidden_size=8, num_heads=2, sequence_length=4, vocab_size=9
        )
    )
    assert (shape.num_decoder_layers, shape.decoder_sequence_length) == (2, 4)
    assert (shape.num_tokens, shape.tied_embedding, shape.is_causal) == (8, True, False)


def test_heads_of_t5_may_have_their_own_size() -> None:
    wide, plain = t5(head_size=2 * HIDDEN // HEADS), t5(head_size=HIDDEN // HEADS)
    assert plain.layers == t5().layers
    attentions = 3 * LAYERS
    assert wide.num_parameters - plain.num_parameters == attentions * 4 * HIDDEN**2
    with pytest.raises(ValueError, match="hidden_size 64 is not a multiple of num_heads 7"):
        t5(num_heads=7)


# torchvision's wide_resnet50_2, wide_resnet101_2 and resnet50: parameters and multiply-adds.
@pytest.mark.parametrize(
    ("num_layers", "width_factor", "num_parameters", "giga_products"),
    [
        (50, 2, 68_883_240, 11.40),
        (101, 2, 126_886_696, 22.75),
        (50, 1, 25_557_032, 4.09),
    ],
)
def test_a_published_resnet_has_its_published_parameters_and_operations(
    num_layers: int, width_factor: int, num_parameters: int, giga_products: float
) -> None:
    model = built(family="wide_resnet", num_layers=num_layers, width_factor=width_factor)
    assert model.num_parameters == num_parameters
    products = sum(product.flops for layer in model.layers for product in layer.gemms) / 2
    assert products / 1e9 == pytest.approx(giga_products, rel=2e-3)


def test_pictures_shrink_and_channels_grow_from_group_to_group() -> None:
    model = built(family="wide_resnet", num_layers=50)
    assert [layer.kind for layer in model.layers] == ["other", *["block"] * 16, "head"]
    sizes = [layer.output_elements for layer in model.layers]
    assert sizes[:2] == [56**2 * 64, 56**2 * 256]
    assert [sizes[last] for last in (3, 7, 13, 16)] == [
        56**2 * 256, 28**2 * 512, 14**2 * 1024, 7**2 * 2048
    ]  # fmt: skip


def test_tensor_parallelism_divides_most_weights_of_a_bottleneck() -> None:
    block = built(family="wide_resnet", num_layers=50).layers[2]
    inner, out = 128, 256
    assert block.sharded_parameters == out * inner + 9 * inner**2 + 2 * inner
    assert block.all_reduce_elements("forward") == (56**2 * inner,)
    assert block.all_reduce_elements("backward") == (56**2 * out,)


@pytest.mark.parametrize(
    ("figures", "message"),
    [
        ({"num_layers": 34}, "num_layers 34 is no wide_resnet of bottlenecks; known: 50, 101, 152"),
        ({"num_layers": 50, "image_size": 31}, "image_size 31 is too small; expected at least 32"),
    ],
)
def test_a_wide_resnet_that_is_none_is_refused(figures: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        built(family="wide_resnet", **figures)


def test_listed_blocks_have_the_figures_of_their_list() -> None:
    shape = model_shape(ModelSection(family="blocks", blocks=[STEM, BODY]))
    model = build_model(shape, layer_list="runtime")
    assert [layer.name for layer in model.layers] == ["stem", "body", "body", "body"]
    assert (model.num_parameters, shape.num_layers, shape.num_tokens) == (100 + 3 * 7000, 4, 0)
    stem, body = model.layers[:2]
    assert (stem.replicated_parameters, body.sharded_parameters) == (100, 7000)
    assert [stem.saved_bytes(tp=2, bytes_per_element=2), stem.output_elements] == [60, 20]
    assert [body.saved_bytes(tp=2, bytes_per_element=2), body.output_elements] == [50, 10]
    assert not stem.gemms
    assert sum(product.flops for product in body.gemms) == pytest.approx(1.5e9, rel=1e-3)
    assert body.all_reduce_elements("forward") == body.all_reduce_elements("backward") == (10,)


def test_more_blocks_than_a_model_has_are_refused() -> None:
    many = BODY.model_copy(update={"repeat": 10_000})
    section = ModelSection(family="blocks", blocks=[STEM, many])
    with pytest.raises(ValueError, match="blocks are 10001 blocks; expected at most 10000"):
        model_shape(section)


@pytest.mark.parametrize(
    "figures", [{"family": "wide_resnet", "num_layers": 50}, {"family": "blocks", "blocks": [STEM]}]
)
def test_new_families_have_no_published_list(figures: dict[str, object]) -> None:
    section = ModelSection.model_validate(figures)
    with pytest.raises(ValueError, match="exists for gpt2 and transgan only, not for"):
        build_model(model_shape(section), layer_list="amp-2022")


def test_records_of_older_families_keep_their_figures() -> None:
    shape = model_shape(
        ModelSection(
            family="gpt2", num_layers=2, hidden_size=8, num_heads=2, sequence_length=4, vocab_size=9
        )
    )
    assert list(shape.figures()) == [
        *("family", "num_layers", "hidden_size", "num_heads", "sequence_length", "vocab_size"),
        *("num_key_value_heads", "feed_forward_size", "tied_embedding"),
        *("depth", "bottom_width", "latent_size", "window_size"),
    ]
