import json
from typing import Any

import pytest

from amp_ray.errors import InputError
from amp_ray.inputs.model_shape import ModelSection, model_shape
from amp_ray.models.families import build_model
from amp_ray.models.model import ModelShape

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


MIXTRAL = MISTRAL_7B | {
    "model_type": "mixtral",
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.02,
    "sliding_window": None,
}
QWEN3_30B = {
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
DEEPSEEK_V3 = {
    "attention_bias": False,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "tie_word_embeddings": False,
    "v_head_dim": 128,
    "vocab_size": 129280,
}
DEEPSEEK_V2_LITE = DEEPSEEK_V3 | {
    "first_k_dense_replace": 1,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "model_type": "deepseek_v2",
    "moe_intermediate_size": 1408,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "num_nextn_predict_layers": None,
    "q_lora_rank": None,
    "vocab_size": 102400,
}
GPT_OSS_20B = {
    "attention_bias": True,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "sliding_window": 128,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
}
VIT_BASE = {
    "hidden_size": 768,
    "id2label": {str(label): "name" for label in range(1000)},
    "image_size": 224,
    "intermediate_size": 3072,
    "model_type": "vit",
    "num_attention_heads": 12,
    "num_channels": 3,
    "num_hidden_layers": 12,
    "patch_size": 16,
}


def read(config: dict[str, object]) -> ModelShape:
    return model_shape(ModelSection(config="config.json"), json.dumps(config))


@pytest.mark.parametrize(
    ("config", "published"),
    [
        (DEEPSEEK_V3 | {"num_nextn_predict_layers": 0}, 671.0e9),
        (DEEPSEEK_V3, 671.0e9 + 11.5e9),  # README_WEIGHTS.md of its repository
        (DEEPSEEK_V2_LITE, 15.7e9),
        (VIT_BASE, 86.57e6),
        (
            VIT_BASE
            | {
                "hidden_size": 1024,
                "intermediate_size": 4096,
                "num_attention_heads": 16,
                "num_hidden_layers": 24,
            },
            304.3e6,
        ),
    ],
    ids=[
        *("deepseek-v3", "with-mtp", "deepseek-v2-lite", "vit-base", "vit-large"),
    ],
)
def test_newer_models_have_their_published_parameters(
    config: dict[str, object], published: float
) -> None:
    model = build_model(read(config), layer_list="runtime")
    assert model.num_parameters == pytest.approx(published, rel=2e-3)


@pytest.mark.parametrize(
    ("config", "active", "embeddings"),
    [
        (MIXTRAL, 12.9e9, 2),
        (QWEN3_30B, 3.3e9, 2),
        (DEEPSEEK_V3 | {"num_nextn_predict_layers": 0}, 37e9, 2),
        (GPT_OSS_20B, 3.6e9, 1),
    ],
    ids=["mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v3", "gpt-oss-20b"],
)
def test_a_token_meets_the_published_active_parameters(
    config: dict[str, object], active: float, embeddings: int
) -> None:
    shape = model_shape(
        ModelSection(config="config.json", sequence_length=4096), json.dumps(config)
    )
    model = build_model(shape, layer_list="runtime")
    products = [gemm for layer in model.layers for gemm in layer.gemms if gemm.has_weight]
    met = sum(gemm.flops for gemm in products) / 2 / 4096
    met += (embeddings - 1) * shape.vocab_size * shape.hidden_size
    assert met == pytest.approx(active, rel=0.02)


def test_modules_for_more_tokens_are_trained_unless_the_file_says_otherwise() -> None:
    assert read(DEEPSEEK_V3).mtp_layers == 1
    assert read(DEEPSEEK_V2_LITE).mtp_layers == 0
    section = ModelSection(config="config.json", mtp_layers=0)
    assert model_shape(section, json.dumps(DEEPSEEK_V3)).mtp_layers == 0


def test_a_model_is_named_by_the_file_or_else_by_its_configuration() -> None:
    assert read(MIXTRAL).name == "mixtral"
    section = ModelSection(config="config.json", name="mine/8x7B")
    assert model_shape(section, json.dumps(MIXTRAL)) == read(MIXTRAL)
    assert model_shape(section, json.dumps(MIXTRAL)).name == "mine/8x7B"
    with pytest.raises(ValueError, match="no control character"):
        ModelSection(name="\x1b[31m")
    assert "name" not in read(MIXTRAL).figures()


def test_what_is_not_counted_is_told() -> None:
    assert read(GPT_OSS_20B).not_counted[0] == "attention sinks"
    assert read(DEEPSEEK_V3).not_counted == ()
    assert read(MIXTRAL).not_counted == ()


def test_a_sequence_length_of_the_configuration_is_stated() -> None:
    (text,) = read(MIXTRAL).assumed
    assert text.startswith(f"sequence_length {MIXTRAL['max_position_embeddings']}, the most of")
    section = ModelSection(config="config.json", sequence_length=4096)
    assert model_shape(section, json.dumps(MIXTRAL)).assumed == ()


def test_what_our_training_program_lacks_is_planned_only() -> None:
    windows = {"model_type": "phi3", "sliding_window": 2047}
    known = (LLAMA_3_8B, LLAMA_3_8B | {"model_type": "qwen2"}, MIXTRAL, QWEN3_30B)
    lacking = (DEEPSEEK_V3, GPT_OSS_20B, LLAMA_3_8B | windows, VIT_BASE)
    assert all(read(config).is_trained for config in known)
    assert not any(read(config).is_trained for config in lacking)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (QWEN3_30B | {"decoder_sparse_step": 2}, "decoder_sparse_step: found 2; expected 1"),
        (QWEN3_30B | {"mlp_only_layers": [0]}, r"mlp_only_layers: found \[0\]; expected \[\]"),
        (MIXTRAL | {"kv_lora_rank": 512}, "kv_lora_rank: found 512; model_type"),
        (GPT_OSS_20B | {"layer_types": ["linear"]}, r"layer_types: found \['linear'\]; expected a"),
        (VIT_BASE | {"num_channels": 1}, "num_channels: found 1; expected 3"),
    ],
)
def test_other_architectures_are_refused(config: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=rf"^config\.json: {message}"):
        read(config)


@pytest.mark.parametrize(
    ("figures", "message"),
    [
        (
            {"num_experts": 8},
            "num_experts 8 needs experts_per_token, expert_feed_forward_size; missing: ",
        ),
        ({"experts_per_token": 2}, "experts_per_token 2 needs num_experts, which is missing"),
        ({"query_rank": 8}, "query_rank 8 needs key_value_rank, which is missing"),
        (
            {"num_experts": 2, "experts_per_token": 3, "expert_feed_forward_size": 8},
            "experts_per_token is 3; expected at most num_experts 2",
        ),
    ],
)
def test_figures_of_decoders_fit_each_other(figures: dict[str, Any], message: str) -> None:
    section = ModelSection(
        family="llama", num_layers=1, hidden_size=8, num_heads=2, sequence_length=4, vocab_size=9,
        **figures,
    )  # fmt: skip
    with pytest.raises(ValueError, match=f"^{message}"):
        model_shape(section)


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


def test_heads_may_have_a_size_of_their_own() -> None:
    text = json.dumps(LLAMA_2_7B | {"head_dim": 256})
    wide = build_model(model_shape(ModelSection(config="config.json"), text), layer_list="runtime")
    plain = build_model(read(LLAMA_2_7B), layer_list="runtime")
    assert wide.num_parameters - plain.num_parameters == 32 * 4 * 4096 * 4096


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
