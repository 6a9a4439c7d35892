import pytest

from amp_ray.planners.amp2022.chain import gpt2_chain, list_bounds, transgan_chain, work_bounds

GPT2 = gpt2_chain(num_layers=2, hidden_size=4, sequence_length=3, vocab_size=10)
TRANSGAN = transgan_chain(depth=(12, 0, 0, 0, 0, 12), hidden_size=128, bottom_width=9)


def test_gpt2_has_six_layers_beside_the_transformer() -> None:
    assert (GPT2.num_layers, GPT2.num_entries) == (8, 8)


def test_gpt2_sends_hidden_states_up_to_the_output_embedding_and_logits_after() -> None:
    assert GPT2.boundary_elements == (12.0,) * 6 + (30.0, 30.0)
    assert GPT2.boundary_split_by_tp == (False,) * 6 + (True, True)


def test_gpt2_counts_weights_of_transformer_layers_and_of_one_embedding() -> None:
    assert GPT2.layer_parameters == (0.0, 0.0, 192.0, 192.0, 0.0, 0.0, 0.0, 0.0)
    assert GPT2.embedding_layers == (0, 6)
    assert GPT2.embedding_parameters == 40.0


def test_gpt2_bounds_count_in_its_own_layers() -> None:
    assert list_bounds(GPT2, (0, 3, 8)) == (0, 3, 8)


def test_transgan_plans_25_of_56_entries() -> None:
    assert TRANSGAN.num_entries == 56
    assert TRANSGAN.work_entries == (0, *range(3, 15), *range(41, 53))


def test_transgan_sends_the_first_feature_map_everywhere() -> None:
    assert TRANSGAN.boundary_elements == (128.0 * 81,) * 25


def test_transgan_counts_no_weights_of_its_linear_layer() -> None:
    assert TRANSGAN.layer_parameters == (0.0, *(12.0 * 128**2,) * 12, *(12.0 * 2**2,) * 12)


def test_transgan_stage_ends_after_its_last_work_layer() -> None:
    # Work layers 0 | 1..12 | 13 | 14..24 are entries 0 | 3..14 | 41 | 42..52 of 0..55.
    assert list_bounds(TRANSGAN, (0, 1, 13, 14, 25)) == (0, 1, 15, 42, 56)


@pytest.mark.parametrize("bounds", [(0, 1, 13, 14, 25), (0, 25), tuple(range(26))])
def test_bounds_come_back_from_the_published_list(bounds: tuple[int, ...]) -> None:
    assert work_bounds(TRANSGAN, list_bounds(TRANSGAN, bounds)) == bounds


@pytest.mark.parametrize("bounds", [(1, 56), (0, 55), ()])
def test_bounds_must_cover_the_list(bounds: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="must run from 0 to 56"):
        work_bounds(TRANSGAN, bounds)


def test_stage_without_work_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\(0, 20, 30, 56\) leave a stage without a work layer"):
        work_bounds(TRANSGAN, (0, 20, 30, 56))


@pytest.mark.parametrize("depth", [(12, 12), (4, 4, 0, 0, 0, 4)])
def test_transgan_of_another_depth_has_no_published_list(depth: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"depth=.*first and the last only"):
        transgan_chain(depth=depth, hidden_size=128, bottom_width=9)
