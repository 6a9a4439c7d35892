import pytest

from amp_ray.models.blocks import Kernels
from amp_ray.models.families import build_model
from amp_ray.models.model import ModelShape

GPT2 = ModelShape(
    family="gpt2",
    num_layers=24,
    hidden_size=64,
    num_heads=4,
    sequence_length=16,
    vocab_size=100,
    num_key_value_heads=4,
    feed_forward_size=256,
    tied_embedding=True,
)


def changed(**figures: object) -> ModelShape:
    known = {name: getattr(GPT2, name) for name in ModelShape.__dataclass_fields__}
    return ModelShape(**(known | figures))


def test_a_runtimes_list_is_embedding_blocks_norm_and_head() -> None:
    kinds = [layer.kind for layer in build_model(GPT2, layer_list="runtime").layers]
    assert kinds == ["embedding", *["block"] * 24, "norm", "head"]


def test_the_published_list_of_gpt2_has_30_entries() -> None:
    kinds = [layer.kind for layer in build_model(GPT2, layer_list="amp-2022").layers]
    assert kinds == ["embedding", "noop", *["block"] * 24, "noop", "norm", "head", "loss"]


def test_both_lists_hold_the_same_parameters() -> None:
    lists = [build_model(GPT2, layer_list=name) for name in ("runtime", "amp-2022")]
    assert lists[0].num_parameters == lists[1].num_parameters


def test_the_vocabulary_is_padded_up() -> None:
    plain = build_model(GPT2, layer_list="runtime")
    padded = build_model(GPT2, layer_list="runtime", vocabulary_multiple=128)
    assert padded.num_parameters - plain.num_parameters == 28 * 64
    assert padded.shape.vocab_size == 100


def test_an_embedding_that_is_not_tied_counts_twice() -> None:
    tied = build_model(GPT2, layer_list="runtime")
    own = build_model(changed(tied_embedding=False), layer_list="runtime")
    assert own.num_parameters - tied.num_parameters == 100 * 64
    assert not any(layer.tied_parameters for layer in own.layers)


def test_llama_has_no_positions_and_no_biases() -> None:
    shape = changed(family="llama", num_layers=1, tied_embedding=False)
    found = build_model(shape, layer_list="runtime").num_parameters
    assert found == 2 * 100 * 64 + 4 * 64**2 + 3 * 64 * 256 + 3 * 64


def test_llama_has_no_published_list() -> None:
    with pytest.raises(ValueError, match="layer list 'amp-2022' exists for gpt2 and transgan only"):
        build_model(changed(family="llama"), layer_list="amp-2022")


@pytest.mark.parametrize(
    ("figures", "message"),
    [
        ({"family": "bert"}, "model family 'bert' is unknown; known: gpt2, llama, transgan"),
        ({"num_heads": 5}, "hidden_size 64 is not a multiple of num_heads 5"),
        ({"num_key_value_heads": 3}, "num_heads 4 is not a multiple of num_key_value_heads 3"),
    ],
)
def test_figures_that_do_not_fit_are_refused(figures: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_model(changed(**figures), layer_list="runtime")


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_program_may_fuse_attention_and_leave_dropout_out(family: str) -> None:
    kernels = Kernels(fused_attention=True, dropout=False)
    fused = build_model(changed(family=family), layer_list="runtime", kernels=kernels)
    plain = build_model(changed(family=family), layer_list="runtime")
    assert fused.num_parameters == plain.num_parameters
    block = fused.layers[1]
    assert [op.name for op in block.elementwise if op.flops] == ["attention"]
    masks = [op.saved_mask_bytes for op in block.elementwise if op.name != "attention"]
    assert sum(masks) == 0
