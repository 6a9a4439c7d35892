import json

import pytest

from amp_ray.errors import InputError
from amp_ray.spec.experiment_file import ModelSection
from amp_ray.spec.families import build_model
from amp_ray.spec.shape import model_shape

# What the published configurations hold, beside keys that say nothing of the size.
GPT2_SMALL = {
    "activation_function": "gelu_new",
    "architectures": ["GPT2LMHeadModel"],
    "attn_pdrop": 0.1,
    "layer_norm_epsilon": 1e-05,
    "model_type": "gpt2",
    "n_ctx": 1024,
    "n_embd": 768,
    "n_head": 12,
    "n_inner": None,
    "n_layer": 12,
    "n_positions": 1024,
    "vocab_size": 50257,
}
LLAMA_2_7B = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "vocab_size": 32000,
}
LLAMA_3_8B = LLAMA_2_7B | {
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
MISTRAL_7B = LLAMA_3_8B | {
    "model_type": "mistral",
    "head_dim": None,
    "max_position_embeddings": 32768,
    "vocab_size": 32000,
}
LLAMA_32_1B = LLAMA_3_8B | {
    "hidden_size": 2048,
    "head_dim": 64,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "tie_word_embeddings": True,
}


@pytest.mark.parametrize(
    ("config", "num_parameters"),
    [
        (GPT2_SMALL, 124_439_808),
        (GPT2_SMALL | {"n_embd": 1600, "n_head": 25, "n_layer": 48}, 1_557_611_200),
        (LLAMA_2_7B, 6_738_415_616),
        (LLAMA_3_8B, 8_030_261_248),
        (MISTRAL_7B, 7_241_732_096),
        (LLAMA_32_1B, 1_235_814_400),
    ],
    ids=["gpt2", "gpt2-xl", "llama-2-7b", "llama-3-8b", "mistral-7b", "llama-3.2-1b"],
)
def test_a_published_configuration_has_its_published_parameters(
    config: dict[str, object], num_parameters: int
) -> None:
    shape = model_shape(ModelSection(config="config.json"), json.dumps(config))
    assert build_model(shape, layer_list="runtime").num_parameters == num_parameters


def test_keys_of_the_experiment_win_over_the_configuration() -> None:
    section = ModelSection(config="config.json", sequence_length=2048)
    shape = model_shape(section, json.dumps(LLAMA_2_7B))
    assert (shape.sequence_length, shape.hidden_size) == (2048, 4096)


@pytest.mark.parametrize(("hidden", "expected"), [(4096, 11008), (5120, 13824), (8192, 22016)])
def test_llamas_feed_forward_width_is_rounded_up_to_256(hidden: int, expected: int) -> None:
    section = ModelSection(
        family="llama", num_layers=1, hidden_size=hidden, num_heads=32, sequence_length=1,
        vocab_size=1,
    )  # fmt: skip
    assert model_shape(section).feed_forward_size == expected


def test_gpt2_ties_its_embedding_and_llama_does_not() -> None:
    for family, tied in (("gpt2", True), ("llama", False)):
        section = ModelSection(
            family=family,
            num_layers=1,
            hidden_size=8,
            num_heads=2,
            sequence_length=4,
            vocab_size=9,
        )
        assert model_shape(section).tied_embedding is tied


def test_transgan_counts_the_blocks_of_all_levels() -> None:
    section = ModelSection(
        family="transgan", hidden_size=64, num_heads=4, depth=[2, 0, 3], bottom_width=4
    )
    shape = model_shape(section)
    assert (shape.num_layers, shape.latent_size, shape.window_size) == (5, 512, 16)


@pytest.mark.parametrize("kind", ["gpt_neox", "bert", "umt5", None, 7])
def test_an_architecture_without_a_builder_is_refused(kind: object) -> None:
    with pytest.raises(InputError, match=r"^config\.json: model_type: found .* one of gpt2, llama"):
        model_shape(ModelSection(config="config.json"), json.dumps({"model_type": kind}))


def test_heads_of_their_own_size_are_refused() -> None:
    text = json.dumps(LLAMA_2_7B | {"head_dim": 256})
    with pytest.raises(
        InputError, match=r"^config\.json: head_dim: found 256; expected hidden_siz"
    ):
        model_shape(ModelSection(config="config.json"), text)


@pytest.mark.parametrize("value", ["4096", 4096.0, True, 0, [4096]])
def test_a_figure_of_a_configuration_is_a_positive_integer(value: object) -> None:
    text = json.dumps(LLAMA_2_7B | {"hidden_size": value})
    with pytest.raises(InputError, match=r"^config\.json: hidden_size: found .* an integer from 1"):
        model_shape(ModelSection(config="config.json"), text)


def test_figures_that_the_family_lacks_are_refused() -> None:
    section = ModelSection(
        family="transgan", hidden_size=64, num_heads=4, depth=[1], bottom_width=4, vocab_size=9
    )
    with pytest.raises(
        ValueError, match="family 'transgan' has no vocab_size; its figures are hid"
    ):
        model_shape(section)
