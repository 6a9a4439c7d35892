import pytest

from amp_ray.models.families import build_model
from amp_ray.models.model import ModelShape
from amp_ray.trials.profile.points import (
    LARGEST_MESSAGE_BYTES,
    LayerPoint,
    first_positions,
    fitting_tps,
    layer_points,
    link_points,
    loss_position,
    thinned,
)
from support.experiments import small_experiment

MODEL = small_experiment().model
TRANSGAN = build_model(
    ModelShape(
        family="transgan",
        num_layers=4,
        hidden_size=64,
        num_heads=4,
        sequence_length=4,
        vocab_size=0,
        num_key_value_heads=4,
        feed_forward_size=256,
        tied_embedding=False,
        depth=(2, 0, 2),
        bottom_width=2,
        latent_size=8,
        window_size=2,
    ),
    layer_list="runtime",
)


def test_equal_layers_are_measured_once() -> None:
    assert first_positions(MODEL) == (0, 1, 7, 8)


def test_a_block_behind_an_up_sampling_is_another_layer() -> None:
    assert first_positions(TRANSGAN) == (0, 1, 3, 4, 5)


def test_the_loss_stands_behind_the_last_layer_of_a_language_model_only() -> None:
    assert loss_position(MODEL) == 9
    assert loss_position(TRANSGAN) is None


def test_tp_must_divide_slots_and_model() -> None:
    assert fitting_tps(MODEL, (1, 2, 3, 4, 8), 4) == (1, 2, 4)
    assert fitting_tps(MODEL, (1, 2, 3, 4, 8), 3) == (1,)
    assert fitting_tps(TRANSGAN, (1, 2, 4, 8), 8) == (1, 2, 4)


@pytest.mark.parametrize(
    ("sizes", "kept"),
    [
        ((), ()),
        ((3,), (3,)),
        ((8, 1, 2, 4, 2), (1, 2, 4, 8)),
        ((1, 10, 11), (1, 11)),
        ((5, 6), (5, 6)),
    ],
)
def test_sizes_close_to_another_are_left_out(sizes: tuple[int, ...], kept: tuple[int, ...]) -> None:
    assert thinned(sizes) == kept


def test_largest_sizes_come_last_and_every_pair_has_all_layers() -> None:
    points = layer_points(MODEL, [(2, 4), (1, 4), (1, 1), (1, 1)])
    assert [point.micro_batch_size for point in points] == [1] * 5 + [4] * 10
    assert [point.layer for point in points[:5]] == [0, 1, 7, 8, 9]
    assert points[5] == LayerPoint(micro_batch_size=4, tp=1, layer=0)


def test_messages_grow_from_one_kibibyte_to_the_largest() -> None:
    points = link_points(4)
    sizes = [point.num_bytes for point in points]
    assert sizes == sorted(sizes)
    assert (sizes[0], sizes[-1]) == (1024, LARGEST_MESSAGE_BYTES)
    assert len(points) == 9 * 3


def test_a_single_rank_has_nobody_to_talk_to() -> None:
    assert link_points(1) == ()


def test_three_ranks_exchange_in_pairs_and_add_up_as_a_whole() -> None:
    assert {(point.what, point.num_ranks) for point in link_points(3)} == {
        ("p2p", 2),
        ("all_reduce", 3),
    }


SLICE = {"tp": 1, "micro_batch_size": 1, "layer": 1, "tokens": 4, "context": 4}


@pytest.mark.parametrize(
    "place", [{"micro_batch_size": 2}, {"tokens": 5, "context": 6}, {"tokens": 0, "context": 4}]
)
def test_what_is_larger_in_every_respect_has_no_room_either(place: dict[str, int]) -> None:
    assert LayerPoint(**{**SLICE, **place}).is_as_large_as(LayerPoint(**SLICE))


@pytest.mark.parametrize(
    "place", [{"tp": 2, "micro_batch_size": 4}, {"tokens": 3, "context": 9}, {"context": 0}]
)
def test_what_is_smaller_in_any_respect_may_have(place: dict[str, int]) -> None:
    assert not LayerPoint(**{**SLICE, **place}).is_as_large_as(LayerPoint(**SLICE))
