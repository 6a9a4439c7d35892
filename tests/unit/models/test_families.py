import json
from dataclasses import replace
from typing import Any

import pytest

from amp_ray.inputs.model_shape import BlockSection, ModelSection, model_shape
from amp_ray.models.blocks import Kernels, gated
from amp_ray.models.families import build_model
from amp_ray.models.model import Layer, LayerList, Model, ModelShape
from amp_ray.models.operator import Gemm
from support.published import GPT2, TRANSGAN


def built(
    shape: ModelShape, layer_list: LayerList = "runtime", kernels: Kernels | None = None
) -> Model:
    return build_model(shape, layer_list=layer_list, kernels=kernels or Kernels())


def listed(**figures: object) -> Model:
    """Build a model from the keys of an experiment file."""
    return built(model_shape(ModelSection.model_validate(figures)))


def gemm(layer: Layer, name: str) -> Gemm:
    return next(product for product in layer.gemms if product.name == name)


@pytest.mark.parametrize(
    ("shape", "layer_list", "kinds"),
    [
        (GPT2, "runtime", ["embedding", *["block"] * 24, "norm", "head"]),
        (GPT2, "amp-2022", ["embedding", "noop", *["block"] * 24, "noop", "norm", "head", "loss"]),
        (TRANSGAN, "runtime", ["other", *["block"] * 24, "head"]),
        (
            TRANSGAN,
            "amp-2022",
            [
                *("other", "noop", "noop"),
                *["block"] * 12,
                *["noop"] * 26,
                *["block"] * 12,
                *["noop"] * 3,
            ],
        ),
    ],
)
def test_a_list_has_its_layers(shape: ModelShape, layer_list: LayerList, kinds: list[str]) -> None:
    assert [layer.kind for layer in built(shape, layer_list).layers] == kinds


@pytest.mark.parametrize(
    ("shape", "layer_list", "message"),
    [
        (
            replace(GPT2, family="bert"),
            "runtime",
            "model family 'bert' is unknown; known: gpt2, llama, transgan",
        ),
        (
            replace(GPT2, num_heads=5),
            "runtime",
            "hidden_size 64 is not a multiple of num_heads 5",
        ),
        (
            replace(GPT2, num_key_value_heads=3),
            "runtime",
            "num_heads 4 is not a multiple of num_key_value_heads 3",
        ),
        *(
            (
                replace(GPT2, family=family),
                "amp-2022",
                f"layer list 'amp-2022' exists for gpt2 and transgan only, not for {family}",
            )
            for family in ("llama", "wide_resnet", "blocks")
        ),
        (
            replace(TRANSGAN, depth=(6, 6)),
            "amp-2022",
            r"known for depth \[12, 0, 0, 0, 0, 12\], found \[6, 6\]",
        ),
        (
            replace(TRANSGAN, depth=(6, 0)),
            "runtime",
            r"depth \[6, 0\] must end with a level that has blocks",
        ),
        (
            replace(TRANSGAN, hidden_size=1026, num_heads=3, num_key_value_heads=3),
            "runtime",
            "width 256 of level 3 is not a multiple of num_heads 3",
        ),
        (
            replace(TRANSGAN, window_size=7),
            "runtime",
            "side 288 of level 5 is not a multiple of window_size 7",
        ),
        (
            replace(GPT2, family="wide_resnet", num_heads=0, num_layers=34),
            "runtime",
            "num_layers 34 is no wide_resnet of bottlenecks; known: 50, 101, 152",
        ),
        (
            replace(GPT2, family="wide_resnet", num_heads=0, num_layers=50, image_size=31),
            "runtime",
            "image_size 31 is too small; expected at least 32",
        ),
    ],
)
def test_figures_that_do_not_fit_are_refused(
    shape: ModelShape, layer_list: LayerList, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        built(shape, layer_list)


# ----------------------------------------------------------------------------- gpt2, llama


def test_both_lists_hold_the_same_parameters() -> None:
    assert built(GPT2).num_parameters == built(GPT2, "amp-2022").num_parameters


def test_the_vocabulary_is_padded_up() -> None:
    padded = build_model(GPT2, layer_list="runtime", vocabulary_multiple=128)
    assert padded.num_parameters - built(GPT2).num_parameters == 28 * 64
    assert padded.shape.vocab_size == 100


def test_an_embedding_that_is_not_tied_counts_twice() -> None:
    untied = built(replace(GPT2, tied_embedding=False))
    assert untied.num_parameters - built(GPT2).num_parameters == 100 * 64
    assert not any(layer.tied_parameters for layer in untied.layers)


def test_the_ends_of_the_list_have_table_norm_and_loss() -> None:
    embedding, *_, norm, head = built(GPT2).layers
    assert (embedding.sharded_parameters, embedding.replicated_parameters) == (6400, 1024)
    assert embedding.tied_parameters == head.tied_parameters == 6400
    assert norm.num_parameters == 2 * 64
    assert (head.logits, head.output_sharded) == (1600, True)
    *_, head, loss = built(GPT2, "amp-2022").layers
    assert (head.logits, loss.logits) == (0, 1600)
    assert [op.name for op in loss.measurable] == ["cast"]  # the loss itself is in no profile


def test_llama_has_no_positions_and_no_biases() -> None:
    model = built(replace(GPT2, family="llama", num_layers=1, tied_embedding=False))
    assert model.num_parameters == 2 * 100 * 64 + 4 * 64**2 + 3 * 64 * 256 + 3 * 64


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_program_may_fuse_attention_and_leave_dropout_out(family: str) -> None:
    shape = replace(GPT2, family=family)
    fused = built(shape, kernels=Kernels(fused_attention=True, dropout=False))
    assert fused.num_parameters == built(shape).num_parameters
    block = fused.layers[1]
    assert [op.name for op in block.elementwise if op.flops] == ["attention"]
    masks = [op.saved_mask_bytes for op in block.elementwise if op.name != "attention"]
    assert sum(masks) == 0


def test_records_of_older_families_keep_their_figures() -> None:
    assert list(GPT2.figures()) == [
        *("family", "num_layers", "hidden_size", "num_heads", "sequence_length", "vocab_size"),
        *("num_key_value_heads", "feed_forward_size", "tied_embedding"),
        *("depth", "bottom_width", "latent_size", "window_size"),
    ]


# -------------------------------------------------------------------------------- transgan


def test_pictures_double_and_widths_shrink_from_level_to_level() -> None:
    first, small, *_, large, _ = built(TRANSGAN).layers
    stream = 81 * 1024
    assert first.num_parameters == 512 * stream + stream
    assert small.num_parameters == 12 * 1024**2 + 13 * 1024
    assert large.num_parameters == 12 * 16**2 + 13 * 16
    assert (small.output_elements, large.output_elements) == (stream, (9 * 2**5) ** 2 * 16)
    scores = gemm(large, "scores")  # within windows
    assert (scores.rows, scores.batch) == (18**2, 4 * 288**2 // 18**2)


def test_the_runtimes_program_may_fuse_attention_the_published_one_did_not() -> None:
    kernels = Kernels(fused_attention=True)
    last = built(TRANSGAN, kernels=kernels).layers[-2]
    (attention,) = [op for op in last.elementwise if op.flops]
    assert attention.flops == 4 * 288**2 * 18**2 * 16
    assert built(TRANSGAN, "amp-2022", kernels).layers == built(TRANSGAN, "amp-2022").layers


# -------------------------------------------------------------------------------------- t5

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
T5_V11_BASE = T5_SMALL | {
    "d_model": 768,
    "feed_forward_proj": "gated-gelu",
    "num_decoder_layers": 12,
    "num_heads": 12,
    "num_layers": 12,
    "tie_word_embeddings": False,
}
LAYERS, HIDDEN, HEADS, TOKENS, DECODER_TOKENS, VOCABULARY = 3, 64, 4, 48, 20, 100
T5: dict[str, Any] = {
    "family": "t5",
    "num_layers": LAYERS,
    "hidden_size": HIDDEN,
    "num_heads": HEADS,
    "sequence_length": TOKENS,
    "decoder_sequence_length": DECODER_TOKENS,
    "vocab_size": VOCABULARY,
}


# Sums over the weights of the checkpoints t5-small, t5-3b, google/t5-v1_1-base and -xl.
@pytest.mark.parametrize(
    ("config", "num_parameters"),
    [
        (T5_SMALL, 60_506_624),
        (
            T5_SMALL
            | {"d_ff": 16384, "d_kv": 128, "d_model": 1024, "num_heads": 32, "num_layers": 24},
            2_851_598_336,
        ),
        (T5_V11_BASE, 247_577_856),
        (
            T5_V11_BASE
            | {"d_ff": 5120, "d_model": 2048, "num_heads": 32}
            | {"num_layers": 24, "num_decoder_layers": 24},
            2_849_757_184,
        ),
    ],
    ids=["small", "3b", "v1.1-base", "v1.1-xl"],
)
def test_a_published_t5_has_its_published_parameters(
    config: dict[str, object], num_parameters: int
) -> None:
    shape = model_shape(ModelSection(config="config.json"), json.dumps(config))
    assert built(shape).num_parameters == num_parameters


def test_the_encoders_result_passes_all_boundaries_up_to_the_decoders_last_block() -> None:
    elements = [layer.output_elements for layer in listed(**T5).layers]
    encoder, decoder = TOKENS * HIDDEN, DECODER_TOKENS * HIDDEN
    both = [encoder + decoder] * LAYERS
    logits = DECODER_TOKENS * VOCABULARY
    assert elements == [*[encoder] * (LAYERS + 2), *both, decoder, decoder, logits]


def test_cross_attention_reads_keys_and_values_of_the_encoder() -> None:
    block = listed(**T5).layers[-4]
    assert gemm(block, "cross-key-value").rows == TOKENS
    assert gemm(block, "cross-query").rows == DECODER_TOKENS
    scores = gemm(block, "cross-scores")
    assert (scores.rows, scores.columns, scores.batch) == (DECODER_TOKENS, TOKENS, HEADS)
    assert gemm(block, "scores").columns == DECODER_TOKENS


def test_a_t5_without_decoder_figures_is_symmetric() -> None:
    figures = T5 | {"decoder_sequence_length": None}
    shape = model_shape(ModelSection.model_validate(figures))
    assert (shape.num_decoder_layers, shape.decoder_sequence_length) == (LAYERS, TOKENS)
    assert (shape.num_tokens, shape.tied_embedding, shape.is_causal) == (2 * TOKENS, True, False)


def test_heads_of_t5_may_have_another_size() -> None:
    wide, plain = (listed(**T5, head_size=size * HIDDEN // HEADS) for size in (2, 1))
    assert plain.layers == listed(**T5).layers
    assert wide.num_parameters - plain.num_parameters == 3 * LAYERS * 4 * HIDDEN**2


# ----------------------------------------------------------------------------- wide_resnet


# torchvision's wide_resnet50_2, wide_resnet101_2 and resnet50: parameters and multiply-adds.
@pytest.mark.parametrize(
    ("num_layers", "width_factor", "num_parameters", "giga_products"),
    [(50, 2, 68_883_240, 11.40), (101, 2, 126_886_696, 22.75), (50, 1, 25_557_032, 4.09)],
)
def test_a_published_resnet_has_its_published_parameters_and_operations(
    num_layers: int, width_factor: int, num_parameters: int, giga_products: float
) -> None:
    model = listed(family="wide_resnet", num_layers=num_layers, width_factor=width_factor)
    assert model.num_parameters == num_parameters
    products = sum(product.flops for layer in model.layers for product in layer.gemms) / 2
    assert products / 1e9 == pytest.approx(giga_products, rel=2e-3)


def test_pictures_shrink_and_channels_grow_from_group_to_group() -> None:
    model = listed(family="wide_resnet", num_layers=50)
    assert [layer.kind for layer in model.layers] == ["other", *["block"] * 16, "head"]
    sizes = [model.layers[last].output_elements for last in (0, 1, 3, 7, 13, 16)]
    sides_and_channels = [(56, 64), (56, 256), (56, 256), (28, 512), (14, 1024), (7, 2048)]
    assert sizes == [side**2 * channels for side, channels in sides_and_channels]


def test_tensor_parallelism_divides_most_weights_of_a_bottleneck() -> None:
    block = listed(family="wide_resnet", num_layers=50).layers[2]
    inner, out = 128, 256
    assert block.sharded_parameters == out * inner + 9 * inner**2 + 2 * inner
    assert block.all_reduce_elements("forward") == (56**2 * inner,)
    assert block.all_reduce_elements("backward") == (56**2 * out,)


# ---------------------------------------------------------------------------------- blocks

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


def test_listed_blocks_have_the_figures_of_their_list() -> None:
    model = listed(family="blocks", blocks=[STEM, BODY])
    assert [layer.name for layer in model.layers] == ["stem", "body", "body", "body"]
    assert (model.num_parameters, model.shape.num_layers) == (100 + 3 * 7000, 4)
    assert model.shape.num_tokens == 0
    stem, body = model.layers[:2]
    assert (stem.replicated_parameters, body.sharded_parameters) == (100, 7000)
    assert [stem.saved_bytes(tp=2, bytes_per_element=2), stem.output_elements] == [60, 20]
    assert [body.saved_bytes(tp=2, bytes_per_element=2), body.output_elements] == [50, 10]
    assert not stem.gemms
    assert sum(product.flops for product in body.gemms) == pytest.approx(1.5e9, rel=1e-3)
    assert body.all_reduce_elements("forward") == body.all_reduce_elements("backward") == (10,)


def test_more_blocks_than_a_model_has_are_refused() -> None:
    many = BODY.model_copy(update={"repeat": 10_000})
    with pytest.raises(ValueError, match="blocks are 10001 blocks; expected at most 10000"):
        listed(family="blocks", blocks=[STEM, many])


def test_activations_of_experts_are_kept_twice_where_a_kernel_weighs_them() -> None:
    shape = replace(GPT2, num_experts=2, experts_per_token=1, expert_feed_forward_size=32)
    once, twice = (
        built(shape, kernels=Kernels(weighs_activations=weighs))
        .layers[1]
        .saved_bytes(tp=1, bytes_per_element=2)
        for weighs in (False, True)
    )
    assert twice - once == 2 * GPT2.sequence_length * 32


def test_a_fused_activation_of_experts_is_read_once_more_for_the_gradient_of_its_weight() -> None:
    plain, weighed = (
        gated("activation", 32, fused=True, is_weighed=weighs) for weighs in (False, True)
    )
    assert weighed.backward_elements - plain.backward_elements == 3 * 32
    assert weighed.forward_elements == plain.forward_elements
    assert weighed.saved_elements == plain.saved_elements
