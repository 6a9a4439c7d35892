"""Configurations of published models: their parameters, counted tensor by tensor."""

import json
from typing import Any, Final

import pytest

from amp_ray.errors import InputError
from amp_ray.inputs.model_config import Types
from amp_ray.inputs.model_shape import ModelSection, model_shape
from amp_ray.models.families import build_model
from amp_ray.models.model import ModelShape


def read(config: dict[str, Any]) -> ModelShape:
    return model_shape(ModelSection(config="config.json"), json.dumps(config))


def count(config: dict[str, Any]) -> int:
    return build_model(read(config), layer_list="runtime").num_parameters


def config(
    kind: str, hidden: int, blocks: int, heads: str, inner: int, vocab: int, **others: object
) -> dict[str, Any]:
    """Return a configuration; ``heads`` is such as "32/8 x 128"."""
    queries, pairs, size = heads.replace(" x ", "/").split("/")
    return {
        "model_type": kind,
        "hidden_size": hidden,
        "num_hidden_layers": blocks,
        "num_attention_heads": int(queries),
        "num_key_value_heads": int(pairs),
        "head_dim": int(size),
        "intermediate_size": inner,
        "vocab_size": vocab,
        "max_position_embeddings": 4096,
        **others,
    }


def attention(hidden: int, heads: int, pairs: int, size: int) -> int:
    """Count q_proj, k_proj and v_proj, and o_proj."""
    return hidden * heads * size + 2 * hidden * pairs * size + heads * size * hidden


def latent(hidden: int, heads: int) -> int:
    """Count DeepSeek's q_a, its norm and q_b; kv_a with a rotated key, its norm and kv_b; and o."""
    queries = hidden * 1536 + 1536 + 1536 * heads * 192
    pairs = hidden * (512 + 64) + 512 + 512 * heads * (128 + 128)
    return queries + pairs + heads * 128 * hidden


def gated(hidden: int, inner: int) -> int:
    """Count gate_proj, up_proj and down_proj."""
    return 3 * hidden * inner


GEMMA_27B: Final = config("gemma3_text", 5376, 62, "32/16 x 128", 21504, 262208)
QWEN_VL_8B: Final = config("qwen3_vl_text", 4096, 36, "32/8 x 128", 12288, 151936)
MOE: Final = {"num_experts_per_tok": 8}
SPARSE: Final = MOE | {
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "moe_intermediate_size": 2048,
    "first_k_dense_replace": 3,
}
DEEPSEEK: Final = SPARSE | {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
INDEXER: Final = 1536 * 64 * 128 + 7168 * 128 + 2 * 128 + 7168 * 64  # wq_b, wk, k_norm, weights
GLM: Final = {"attention_bias": True}
GLM_BIAS: Final = (32 + 2 * 2) * 128

PUBLISHED: Final = (
    # Norms of a block: two, or four where both results are normed, too
    (
        config("qwen2", 3584, 28, "28/4 x 128", 18944, 152064),
        28 * (attention(3584, 28, 4, 128) + (28 + 2 * 4) * 128 + gated(3584, 18944) + 2 * 3584),
        2 * 152064 * 3584 + 3584,
        7_615_616_512,
    ),
    (
        QWEN_VL_8B,  # as Qwen3-8B
        36 * (attention(4096, 32, 8, 128) + 2 * 128 + gated(4096, 12288) + 2 * 4096),
        2 * 151936 * 4096 + 4096,
        8_190_735_360,
    ),
    (
        config("phi3", 5120, 40, "40/10 x 128", 17920, 100352),  # Phi-4
        40 * (attention(5120, 40, 10, 128) + gated(5120, 17920) + 2 * 5120),
        2 * 100352 * 5120 + 5120,
        14_659_507_200,
    ),
    (
        config("gemma2", 2304, 26, "8/4 x 256", 9216, 256000),
        26 * (attention(2304, 8, 4, 256) + gated(2304, 9216) + 4 * 2304),
        256000 * 2304 + 2304,
        2_614_341_888,
    ),
    (
        GEMMA_27B,
        62 * (attention(5376, 32, 16, 128) + 2 * 128 + gated(5376, 21504) + 4 * 5376),
        262208 * 5376 + 5376,
        27_009_346_304,
    ),
    (
        config("smollm3", 2048, 36, "16/4 x 128", 11008, 128256, no_rope_layers=[1, 1, 1, 0] * 9),
        36 * (attention(2048, 16, 4, 128) + gated(2048, 11008) + 2 * 2048),
        128256 * 2048 + 2048,
        3_075_098_624,
    ),
    (
        config("olmo2", 5120, 64, "40/8 x 128", 27648, 100352),
        64 * (attention(5120, 40, 8, 128) + (40 + 8) * 128 + gated(5120, 27648) + 2 * 5120),
        2 * 100352 * 5120 + 5120,
        32_234_279_936,
    ),
    (
        config("granite", 4096, 40, "32/8 x 128", 12800, 49159, tie_word_embeddings=True),
        40 * (attention(4096, 32, 8, 128) + gated(4096, 12800) + 2 * 4096),
        49159 * 4096 + 4096,
        8_170_864_640,
    ),
    (
        config("seed_oss", 5120, 64, "80/8 x 128", 27648, 155136, attention_out_bias=False),
        64 * (attention(5120, 80, 8, 128) + (80 + 16) * 128 + gated(5120, 27648) + 2 * 5120),
        2 * 155136 * 5120 + 5120,
        36_151_104_512,
    ),
    (
        config("exaone4", 5120, 64, "40/8 x 128", 27392, 102400, sliding_window_pattern="LLLG"),
        64 * (attention(5120, 40, 8, 128) + 2 * 128 + gated(5120, 27392) + 2 * 5120),
        2 * 102400 * 5120 + 5120,
        32_003_216_384,
    ),
    (
        config("glm4", 4096, 40, "32/2 x 128", 13696, 151552, **GLM),
        40 * (attention(4096, 32, 2, 128) + GLM_BIAS + gated(4096, 13696) + 4 * 4096),
        2 * 151552 * 4096 + 4096,
        9_400_279_040,
    ),
    (
        config("llama", 4096, 2, "32/8 x 128", 14336, 128256, attention_bias=True),  # biases of all
        2 * (attention(4096, 32, 8, 128) + 48 * 128 + 4096 + gated(4096, 14336) + 2 * 4096),
        2 * 128256 * 4096 + 4096,
        1_486_921_728,
    ),
    (
        config("mixtral", 4096, 32, "32/8 x 128", 14336, 32000, num_local_experts=8)
        | {"num_experts_per_tok": 2},
        32 * (attention(4096, 32, 8, 128) + 4096 * 8 + 8 * gated(4096, 14336) + 2 * 4096),
        2 * 32000 * 4096 + 4096,
        46_702_792_704,
    ),
    (
        config("qwen3_moe", 2048, 48, "32/4 x 128", 6144, 151936, num_experts=128, **MOE)
        | {"moe_intermediate_size": 768, "use_qk_norm": True},
        48 * (attention(2048, 32, 4, 128) + 256 + 2048 * 128 + 128 * gated(2048, 768) + 4096),
        2 * 151936 * 2048 + 2048,
        30_532_122_624,
    ),
    (
        config("minimax_m2", 3072, 62, "48/8 x 128", 1536, 200064, num_local_experts=256, **MOE),
        62 * (attention(3072, 48, 8, 128) + 56 * 128 + 3072 * 256 + 256 * gated(3072, 1536) + 6144),
        2 * 200064 * 3072 + 3072,
        228_689_748_992,
    ),
    (
        config("gpt_oss", 2880, 24, "64/8 x 64", 2880, 201088, num_local_experts=32, **MOE),
        24 * (attention(2880, 64, 8, 64) + 80 * 64 + 2880 + 64 + 2 * 2880)  # biases, sinks
        + 24 * 32 * (2880 + 1 + gated(2880, 2880) + 3 * 2880),  # router and experts, biases
        2 * 201088 * 2880 + 2880,
        20_914_757_184,
    ),
    (
        config("llama4_text", 5120, 48, "40/8 x 128", 8192, 202048, num_local_experts=16)
        | {"num_experts_per_tok": 1, "interleave_moe_layer_step": 1, "attention_chunk_size": 8192}
        | {"moe_layers": [*range(48)]},
        48 * (attention(5120, 40, 8, 128) + 5120 * 16 + 17 * gated(5120, 8192) + 2 * 5120),
        2 * 202048 * 5120 + 5120,
        107_769_861_120,
    ),
    (
        config("glm4_moe", 4096, 46, "96/8 x 128", 10944, 151552, **GLM, **SPARSE)
        | {"n_routed_experts": 128, "moe_intermediate_size": 1408, "first_k_dense_replace": 1},
        46 * (attention(4096, 96, 8, 128) + (96 + 16) * 128 + 2 * 4096)
        + gated(4096, 10944)
        + 45 * (4096 * 128 + 129 * gated(4096, 1408)),
        2 * 151552 * 4096 + 4096,
        106_852_245_504,
    ),
    (
        config("kimi_k2", 7168, 61, "64/64 x 128", 18432, 163840, **DEEPSEEK)
        | {"n_routed_experts": 384, "first_k_dense_replace": 1, "num_nextn_predict_layers": 0},
        61 * (latent(7168, 64) + 2 * 7168)
        + gated(7168, 18432)
        + 60 * (7168 * 384 + 385 * gated(7168, 2048)),
        2 * 163840 * 7168 + 7168,
        1_026_408_209_408,
    ),
    (
        config("deepseek_v32", 7168, 61, "128/128 x 64", 18432, 129280, **DEEPSEEK)
        | {"index_topk": 2048, "index_n_heads": 64, "index_head_dim": 128},
        61 * (latent(7168, 128) + INDEXER + 2 * 7168)
        + 3 * gated(7168, 18432)
        + 58 * (7168 * 256 + 257 * gated(7168, 2048)),
        2 * 129280 * 7168 + 7168,
        671_877_929_216,
    ),
)


@pytest.mark.parametrize(
    ("configuration", "blocks", "others", "published"),
    PUBLISHED,
    ids=[configuration["model_type"] for configuration, *_ in PUBLISHED],
)
def test_a_published_model_has_the_parameters_of_its_tensors(
    configuration: dict[str, Any], blocks: int, others: int, published: int
) -> None:
    assert blocks + others == published
    assert count(configuration) == published


def test_of_several_parts_the_language_model_is_read() -> None:
    tower = {"model_type": "siglip_vision_model", "hidden_size": 1152, "num_hidden_layers": 27}
    whole = {"model_type": "gemma3", "text_config": GEMMA_27B, "vision_config": tower}
    assert read(whole).figures() == read(GEMMA_27B).figures()
    assert read(whole).not_counted[-1].startswith("the encoder of vision_config")
    tied = {"tie_word_embeddings": True, "text_config": QWEN_VL_8B, "video_token_id": 1}
    assert count(tied) == count(QWEN_VL_8B) - 151936 * 4096
    # Keys that this file leaves out: google/gemma-3-4b-pt
    small = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
    assert count({"model_type": "gemma3", "text_config": small}) == 3_880_263_168


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("block_configs", [{"attention": {"no_op": True}}]),
        ("layer_types", ["linear_attention"] * 2),
        ("layer_types", ["full_attention"]),
        ("first_k_dense_replace", 1),
        ("moe_layer_freq", [0, 1]),
        ("index_topk", 2048),
        ("num_nextn_predict_layers", 1),
        ("mtp_num_hidden_layers", 1),
        ("full_attention_interval", 4),
        ("linear_num_key_heads", 16),
        ("mamba_num_heads", 64),
        ("hybrid_override_pattern", "M-M*"),
        ("interleave_moe_layer_step", 2),
        ("no_rope_layers", [1, 0]),
        ("sliding_window_pattern", 6),
        ("num_kv_shared_layers", 10),
        ("altup_num_inputs", 4),
        ("hidden_size_per_layer_input", 256),
        ("attn_output_gate", True),
        ("mlp_bias", True),
        ("use_qk_norm", True),
        ("cross_attention_layers", [3]),
    ],
)
def test_a_key_of_another_architecture_is_refused_wherever_it_stands(
    key: str, value: object
) -> None:
    plain = config("llama", 64, 2, "4/4 x 16", 128, 1000)
    for changed, place in (
        (plain | {key: value}, key),
        ({"text_config": plain | {key: value}}, f"text_config.{key}"),
        *([({"text_config": plain, key: value}, key)] if key != "layer_types" else []),
    ):
        with pytest.raises(InputError, match=rf"^config\.json: {place}: found") as refused:
            read(changed)
        assert "nearest" not in str(refused.value)


def test_no_type_takes_blocks_of_several_kinds_for_its_own() -> None:
    for kind in Types.shipped().types:
        for key in ("block_configs", "hybrid_override_pattern", "full_attention_interval"):
            with pytest.raises(InputError, match=rf"{key}: found .* '{kind}' has no such part"):
                read({"model_type": kind, key: [4]})


def test_a_list_is_expected_by_its_entries() -> None:
    minimax = config("minimax_m2", 64, 2, "4/4 x 16", 128, 1000, num_local_experts=8, **MOE)
    assert read(minimax | {"attn_type_list": [1, 1], "moe_layer_freq": [1, 1]}).not_read == ()
    with pytest.raises(InputError, match=r"attn_type_list: found \[0, 1\]; expected 1"):
        read(minimax | {"attn_type_list": [0, 1]})


def test_experts_in_some_blocks_only_are_refused() -> None:
    llama4 = config("llama4_text", 64, 2, "4/4 x 16", 128, 1000, num_local_experts=16)
    with pytest.raises(InputError, match=r"moe_layers: found \[1\]; expected all blocks, 0 to 1"):
        read({"text_config": llama4 | {"num_experts_per_tok": 1, "moe_layers": [1]}})


@pytest.mark.parametrize("kind", ["nemotron-nas", "qwen3_next", "bert", None, 7, ["llama"]])
def test_another_type_is_refused_with_its_parts(kind: object) -> None:
    with pytest.raises(InputError, match=r"model_type: found .* with linear_heads; (similar|docs)"):
        read({"model_type": kind, "linear_heads": 2, "mlp_bias": False})


def test_keys_are_read_or_without_effect_or_named() -> None:
    plain = config("llama", 64, 2, "4/4 x 16", 128, 1000)
    silent = {"rope_theta": 1e6, "torch_dtype": "bfloat16", "rope_scaling": {"factor": 8.0}}
    assert read(plain | silent | {"altup_num_inputs": 0, "quantization_config": {}}).not_read == ()
    (note,) = read(plain | silent | {"new_mixer": 3, "is_\x1b[31m": 1}).not_read
    assert note == r"not read: new_mixer, is_\x1b[31m (config.json: not modelled)"
    text = json.dumps(plain)[:-1] + ', "time_step_limit": [0.0, Infinity], "x": NaN}'
    shape = model_shape(ModelSection(config="config.json"), text)
    assert shape.not_read == ("not read: time_step_limit, x (config.json: not modelled)",)


@pytest.mark.parametrize(
    ("kind", "keys", "windows"),
    [
        ("gemma3_text", {}, (512,) * 5 + (0,)),
        ("gemma3_text", {"sliding_window_pattern": 2}, (512, 0)),
        ("exaone4", {"sliding_window_pattern": "LLLG"}, (512, 512, 512, 0)),
        ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 6}, ()),
        ("olmo3", {"layer_types": ["sliding_attention", "full_attention"] * 3}, (512, 0) * 3),
        ("cwm", {}, (0, 512, 512, 512)),
        ("qwen3", {"use_sliding_window": True, "max_window_layers": 5}, (0,) * 5 + (512,)),
        ("qwen3", {}, ()),
    ],
)
def test_windows_are_those_of_the_type_or_of_the_file(
    kind: str, keys: dict[str, Any], windows: tuple[int, ...]
) -> None:
    figures = config(kind, 64, 6, "4/4 x 16", 128, 1000, sliding_window=512)
    assert read(figures | keys).attention_windows == windows


def test_sparse_blocks_may_be_listed() -> None:
    lite = config("glm4_moe_lite", 64, 3, "4/4 x 16", 128, 1000, **DEEPSEEK)
    types = ["dense", "dense", "sparse"]
    assert read(lite | {"mlp_layer_types": types}).first_dense_layers == 2
    with pytest.raises(InputError, match=r"mlp_layer_types: found .* dense blocks first"):
        read(lite | {"mlp_layer_types": types[::-1]})
