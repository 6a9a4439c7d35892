from amp_ray.models.model import Layer, Model, ModelShape
from amp_ray.models.operator import Elementwise, Gemm

SHAPE = ModelShape(
    family="gpt2",
    num_layers=1,
    hidden_size=4,
    num_heads=1,
    sequence_length=2,
    vocab_size=10,
    num_key_value_heads=1,
    feed_forward_size=16,
    tied_embedding=True,
)
TABLE = Layer(
    name="embedding",
    kind="embedding",
    operators=(
        Elementwise(
            name="look-up",
            forward_elements=1,
            backward_elements=1,
            num_kernels=2,
            sharded_parameters=40,
            replicated_parameters=8,
        ),
    ),
    output_elements=8,
    tied_parameters=40,
)
HEAD = Layer(
    name="head",
    kind="head",
    operators=(
        Gemm(name="logits", rows=2, columns=10, inner=4, shard="columns", saved_elements=8),
        Elementwise(
            name="loss", forward_elements=0, backward_elements=0, logits=20, is_layer=False
        ),
    ),
    output_elements=20,
    tied_parameters=40,
)
NOOP = Layer(name="noop", kind="noop", operators=(), output_elements=8)
MODEL = Model(name="x", shape=SHAPE, layers=(TABLE, NOOP, NOOP, HEAD))


def test_tied_parameters_count_once() -> None:
    assert MODEL.num_parameters == 40 + 8


def test_bounds_count_all_layers() -> None:
    assert MODEL.num_layers == 4


def test_equal_layers_are_one_distinct_layer() -> None:
    assert MODEL.distinct_layers == ((TABLE, NOOP, HEAD), (0, 1, 1, 2))


def test_positions_are_found_by_kind() -> None:
    assert (MODEL.indices("noop"), MODEL.indices("block")) == ((1, 2), ())


def test_a_loss_that_the_runtime_adds_is_in_no_profile() -> None:
    assert [op.name for op in HEAD.measurable] == ["logits"]
    assert [op.name for op in HEAD.added] == ["loss"]
    assert (HEAD.num_kernels, HEAD.logits) == (1, 20)


def test_kernels_of_memory_bound_operators_are_counted() -> None:
    assert TABLE.num_kernels == 2


def test_a_layer_that_passes_data_on_costs_nothing() -> None:
    assert NOOP.num_parameters == NOOP.num_kernels == 0
    assert NOOP.largest_saved_bytes(tp=1, bytes_per_element=2) == 0


def test_the_largest_activation_is_that_of_one_operator() -> None:
    assert HEAD.largest_saved_bytes(tp=1, bytes_per_element=2) == 16
