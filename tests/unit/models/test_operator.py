import pytest

from amp_ray.models.operator import AllReduce, Elementwise, Gemm, Shard


def gemm(shard: Shard = "none", bias: int = 0, all_reduce: AllReduce = "none") -> Gemm:
    return Gemm(name="x", rows=2, columns=3, inner=5, shard=shard, bias=bias, all_reduce=all_reduce)


def test_a_multiply_add_counts_as_two_operations() -> None:
    assert Gemm(name="x", rows=2, columns=3, inner=5, batch=7).flops == 2 * 2 * 3 * 5 * 7


@pytest.mark.parametrize(
    ("shard", "sharded", "replicated"),
    [("none", 0, 18), ("columns", 18, 0), ("inner", 15, 3)],
)
def test_weight_and_bias_follow_the_sharded_dimension(
    shard: Shard, sharded: int, replicated: int
) -> None:
    product = gemm(shard, bias=3)
    assert (product.sharded_parameters, product.replicated_parameters) == (sharded, replicated)


def test_a_product_of_two_activations_has_no_parameters() -> None:
    product = Gemm(name="scores", rows=2, columns=3, inner=5, has_weight=False, shard="batch")
    assert product.sharded_parameters + product.replicated_parameters == 0


@pytest.mark.parametrize(("direction", "elements"), [("forward", 6.0), ("backward", 10.0)])
def test_the_all_reduce_is_of_the_product_or_of_the_gradient_of_its_rows(
    direction: AllReduce, elements: float
) -> None:
    assert gemm(all_reduce=direction).all_reduce_elements == elements


@pytest.mark.parametrize(("saved_sharded", "num_bytes"), [(False, 40.0), (True, 10.0)])
def test_only_sharded_inputs_are_divided_by_tp(*, saved_sharded: bool, num_bytes: float) -> None:
    product = Gemm(
        name="x", rows=1, columns=1, inner=1, saved_elements=20, saved_sharded=saved_sharded
    )
    assert product.saved_bytes(tp=4, bytes_per_element=2) == num_bytes


def test_masks_take_a_byte_whatever_the_precision() -> None:
    kernel = Elementwise(
        name="drop", forward_elements=0, backward_elements=0, saved_elements=10, saved_mask_bytes=10
    )
    assert kernel.saved_bytes(tp=1, bytes_per_element=4) == 50
