from dataclasses import replace

import pytest

from amp_ray.models.blocks import Width, llama_block
from amp_ray.models.model import Layer
from amp_ray.models.operator import Experts
from amp_ray.models.per_operator import per_operator

TOKENS, HIDDEN, HEADS, FEED_FORWARD = 8, 32, 4, 96
KEY_VALUES = HIDDEN // 2
WIDTH = Width(
    tokens=TOKENS,
    hidden=HIDDEN,
    heads=HEADS,
    key_value_heads=HEADS // 2,
    feed_forward=FEED_FORWARD,
    fused_attention=True,
)
BLOCK = llama_block(WIDTH, name="block")
SUMS = 4 * TOKENS * HEADS  # of attention's softmax


def kept(block: Layer, tp: int = 1, *, sequence_parallel: bool = False) -> float:
    return per_operator(block).kept_bytes(tp, 2, sequence_parallel=sequence_parallel)


def test_every_second_product_and_attention_are_kept() -> None:
    """Queries, values, one half of the gated product, the last product: 1, 3, 5 and 7."""
    per_token = HIDDEN + KEY_VALUES + FEED_FORWARD + HIDDEN + HIDDEN
    assert kept(BLOCK) == 2 * TOKENS * per_token + SUMS


def test_results_of_row_parallel_products_are_kept_whole() -> None:
    """Tensor parallelism divides all but the last product; reduce-scatters are kept beside it."""
    divided = HIDDEN + KEY_VALUES + FEED_FORWARD + HIDDEN
    whole = 2 * TOKENS * (divided / 4 + HIDDEN) + SUMS / 4
    assert kept(BLOCK, 4) == whole
    assert kept(BLOCK, 4, sequence_parallel=True) == whole + 2 * TOKENS * 2 * HIDDEN / 4


def test_all_else_runs_again_until_the_last_saved_tensor_exists() -> None:
    again = {op.name: op for op in per_operator(BLOCK).again}
    columns = {gemm.name: gemm.columns for gemm in BLOCK.gemms if gemm.name in again}
    left = {name: again[name].columns for name in columns}  # type: ignore[union-attr]
    assert left == {"qkv": KEY_VALUES, "projection": HIDDEN, "feed-forward-in": FEED_FORWARD}
    names = {op.name for op in BLOCK.operators}
    assert names - {*again} == {"attention", "feed-forward-out", "residual-2"}


@pytest.mark.parametrize("num_shared", [0, 64])
def test_products_of_experts_and_routers_are_not_counted(num_shared: int) -> None:
    """A shared expert goes on after the projection, which is the fourth product."""
    experts = Experts(
        tokens=TOKENS,
        hidden=HIDDEN,
        feed_forward=16,
        num_experts=4,
        per_token=2,
        activations=(),
    )
    width = replace(WIDTH, feed_forward=num_shared)
    shared = llama_block(width, name="b").operators[-4:-1] if num_shared else ()
    block = llama_block(WIDTH, name="b", feed_forward=(*shared, *experts.operators()))
    again = {op.name for op in per_operator(block).again}
    assert {"router", "experts-in"} <= again
    per_token = HIDDEN + KEY_VALUES + HIDDEN + (num_shared + HIDDEN if num_shared else 0)
    assert kept(block) == 2 * TOKENS * per_token + SUMS
