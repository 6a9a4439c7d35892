from dataclasses import replace

import pytest

from amp_ray.models.blocks import Width, gpt_block, llama_block
from amp_ray.models.model import Layer

TOKENS, HIDDEN, HEADS = 8, 32, 4
WIDTH = Width(tokens=TOKENS, hidden=HIDDEN, heads=HEADS, key_value_heads=HEADS, feed_forward=128)
GROUPED = Width(tokens=TOKENS, hidden=HIDDEN, heads=HEADS, key_value_heads=2, feed_forward=96)


def flops(layer: Layer) -> float:
    return sum(product.flops for product in layer.gemms)


def test_parameters_of_a_gpt_block_follow_the_formula() -> None:
    assert gpt_block(WIDTH, name="block").num_parameters == 12 * HIDDEN**2 + 13 * HIDDEN


def test_work_of_a_gpt_block_follows_the_formula() -> None:
    expected = 24 * TOKENS * HIDDEN**2 + 4 * TOKENS**2 * HIDDEN
    assert flops(gpt_block(WIDTH, name="block")) == expected


def test_activations_of_a_gpt_block_follow_korthikanti() -> None:
    found = gpt_block(WIDTH, name="block").saved_bytes(tp=1, bytes_per_element=2)
    assert found == 34 * TOKENS * HIDDEN + 5 * HEADS * TOKENS**2


def test_sharded_activations_of_a_gpt_block_follow_korthikanti() -> None:
    found = gpt_block(WIDTH, name="block").saved_bytes(tp=4, bytes_per_element=2)
    assert found == TOKENS * HIDDEN * (10 + 24 / 4) + 5 * HEADS * TOKENS**2 / 4


@pytest.mark.parametrize("layer", [gpt_block(WIDTH, name="b"), llama_block(WIDTH, name="b")])
def test_each_pass_of_a_block_has_two_all_reduces_of_the_stream(layer: Layer) -> None:
    for direction in ("forward", "backward"):
        assert layer.all_reduce_elements(direction) == (TOKENS * HIDDEN,) * 2


def test_parameters_of_a_llama_block_follow_the_formula() -> None:
    attention = 2 * HIDDEN**2 + 2 * HIDDEN * (2 * HIDDEN // HEADS)
    expected = attention + 3 * HIDDEN * 96 + 2 * HIDDEN
    assert llama_block(GROUPED, name="block").num_parameters == expected


def test_grouped_queries_keep_the_attention_work() -> None:
    found = {product.name: product for product in llama_block(GROUPED, name="block").gemms}
    assert found["scores"].flops == 2 * TOKENS**2 * HIDDEN
    assert found["qkv"].columns == HIDDEN + 2 * (2 * HIDDEN // HEADS)


def test_without_dropout_no_mask_is_kept() -> None:
    block = gpt_block(WIDTH, name="block", dropout=False)
    assert sum(kernel.saved_mask_bytes for kernel in block.elementwise) == 0


def test_a_window_limits_the_attention_matrix() -> None:
    windowed = Width(tokens=64, hidden=32, heads=4, key_value_heads=4, feed_forward=128, window=16)
    found = {product.name: product for product in gpt_block(windowed, name="block").gemms}
    assert found["scores"].flops == 2 * 64 * 16 * 32


def test_unfused_kernels_launch_and_keep_more() -> None:
    unfused = Width(
        tokens=TOKENS, hidden=HIDDEN, heads=HEADS, key_value_heads=HEADS, feed_forward=128,
        fused=False,
    )  # fmt: skip
    plain, fused = gpt_block(unfused, name="block"), gpt_block(WIDTH, name="block")
    assert plain.num_kernels > fused.num_kernels
    assert plain.saved_bytes(tp=1, bytes_per_element=2) > fused.saved_bytes(
        tp=1, bytes_per_element=2
    )


def test_heads_that_stay_whole_are_on_every_rank() -> None:
    whole = Width(
        tokens=TOKENS, hidden=HIDDEN, heads=HEADS, key_value_heads=HEADS, feed_forward=128,
        shards_heads=False,
    )  # fmt: skip
    found = {product.name: product for product in gpt_block(whole, name="block").gemms}
    assert (found["scores"].shard, found["qkv"].shard) == ("none", "columns")


def test_fused_attention_keeps_no_scores() -> None:
    plain = gpt_block(WIDTH, name="block", dropout=False)
    fused = gpt_block(replace(WIDTH, fused_attention=True), name="block", dropout=False)
    gone = plain.saved_bytes(tp=1, bytes_per_element=2) - fused.saved_bytes(
        tp=1, bytes_per_element=2
    )
    # Scores of two bytes each, but four bytes per token and head for the softmax's sum.
    assert gone == 2 * HEADS * TOKENS**2 - 4 * HEADS * TOKENS
    assert fused.num_parameters == plain.num_parameters


@pytest.mark.parametrize(("causal", "share"), [(True, 0.5), (False, 1.0)])
def test_fused_attention_leaves_out_what_no_token_sees(*, causal: bool, share: float) -> None:
    width = replace(WIDTH, fused_attention=True, causal=causal)
    (attention,) = [op for op in gpt_block(width, name="b").elementwise if op.flops]
    assert attention.flops == share * 4 * TOKENS**2 * HIDDEN


def test_fused_attention_of_grouped_queries_reads_fewer_keys() -> None:
    (attention,) = [
        op
        for op in llama_block(replace(GROUPED, fused_attention=True), name="b").elementwise
        if op.flops
    ]
    assert attention.forward_elements == 2 * TOKENS * (HIDDEN + HIDDEN // 2)


def test_slices_of_causal_attention_compute_what_the_whole_does() -> None:
    def flops(tokens: int, context: int) -> float:
        width = Width(
            tokens=tokens,
            hidden=64,
            heads=4,
            key_value_heads=4,
            feed_forward=256,
            fused_attention=True,
            context=context,
        )
        block = gpt_block(width, name="block")
        return sum(op.flops for op in block.elementwise)

    assert flops(24, 0) + flops(8, 24) + flops(32, 32) == flops(64, 0)


def test_a_slice_attends_to_its_context_kernel_by_kernel() -> None:
    width = Width(tokens=8, hidden=64, heads=4, key_value_heads=4, feed_forward=256, context=24)
    products = {op.name: op for op in gpt_block(width, name="block").gemms}
    scores = products["scores"]
    assert (scores.rows, scores.columns, scores.batch) == (8, 32, 4)
    assert products["context"].inner == 32
    assert products["qkv"].rows == 8


def test_fused_kernels_pass_less_through_memory_and_keep_less() -> None:
    plain = llama_block(GROUPED, name="block")
    fused = llama_block(replace(GROUPED, fused_pointwise=True), name="block")
    assert fused.num_parameters == plain.num_parameters
    assert flops(fused) == flops(plain)
    kept = plain.saved_bytes(tp=1, bytes_per_element=2) - fused.saved_bytes(
        tp=1, bytes_per_element=2
    )
    assert kept == 2 * TOKENS * 96  # the activation of the gate, which is made anew
    for one, other in zip(fused.elementwise, plain.elementwise, strict=True):
        assert one.forward_elements <= other.forward_elements
        assert one.backward_elements <= other.backward_elements
        assert one.num_kernels <= other.num_kernels


def test_packed_heads_are_copied_more_often_than_laid_out() -> None:
    plain = llama_block(GROUPED, name="block")
    packed = llama_block(replace(GROUPED, packs_heads=True), name="block")
    assert packed.num_parameters == plain.num_parameters
    assert packed.num_kernels == plain.num_kernels + 2
    (heads,) = (op for op in packed.elementwise if op.name == "heads")
    width = GROUPED.hidden + 2 * GROUPED.key_value_size
    pair, result = 4 * GROUPED.key_value_size, GROUPED.hidden
    assert heads.forward_elements == 2 * TOKENS * (width + pair + result)
    assert heads.backward_elements == 2 * TOKENS * (2 * width + pair + result)
