from amp_ray.models.families import build_model
from amp_ray.models.model import Layer, LayerList, ModelShape

SHAPE = ModelShape(
    family="gpt2",
    num_layers=1,
    hidden_size=64,
    num_heads=4,
    sequence_length=16,
    vocab_size=100,
    num_key_value_heads=4,
    feed_forward_size=256,
    tied_embedding=True,
)


def layer(kind: str, layer_list: LayerList = "runtime") -> Layer:
    model = build_model(SHAPE, layer_list=layer_list)
    return next(found for found in model.layers if found.kind == kind)


def test_the_embedding_table_is_divided_and_positions_are_not() -> None:
    embedding = layer("embedding")
    assert (embedding.sharded_parameters, embedding.replicated_parameters) == (6400, 1024)


def test_the_ends_name_what_they_share() -> None:
    assert layer("embedding").tied_parameters == layer("head").tied_parameters == 6400


def test_the_head_of_a_runtime_computes_the_loss() -> None:
    assert (layer("head").logits, layer("head").output_sharded) == (1600, True)


def test_the_published_list_has_a_loss_of_its_own() -> None:
    assert layer("head", "amp-2022").logits == 0
    assert layer("loss", "amp-2022").logits == 1600


def test_the_loss_itself_is_in_no_profile() -> None:
    assert [op.name for op in layer("loss", "amp-2022").measurable] == ["cast"]


def test_the_final_norm_has_scale_and_shift() -> None:
    assert layer("norm").num_parameters == 2 * 64
