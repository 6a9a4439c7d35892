import numpy as np
import pytest

from amp_ray.baselines.amp2022 import (
    NoPartition,
    mean_forward_s,
    plan,
    predict,
    published_candidates,
)
from amp_ray.baselines.amp2022_chain import gpt2_chain, transgan_chain
from amp_ray.baselines.amp2022_cost import Network, Prediction
from amp_ray.spec.strategy import Candidate

GPT2 = gpt2_chain(num_layers=4, hidden_size=8, sequence_length=4, vocab_size=16)
# The embedding is so slow that only the rule for one micro-batch leaves it company.
FORWARD_S = np.array([9.0, 0.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 1.0, 0.0])
NETWORK = Network(
    node_of_rank=(0, 0, 1, 1), inter_bytes_per_s=(1e9, 1e9), intra_bytes_per_s=(4e9, 4e9)
)


def degrees(candidate: Candidate) -> tuple[int, int, int, int]:
    return candidate.micro_batch_size, candidate.tp, candidate.dp, candidate.pp


def pipeline(micro_batch_size: int, num_micro_batches: int) -> Candidate:
    """Four stages of one device."""
    return Candidate(
        tp=1, dp=1, pp=4, micro_batch_size=micro_batch_size, num_micro_batches=num_micro_batches
    )


@pytest.mark.parametrize(("global_batch_size", "num_candidates"), [(32, 53), (64, 65)])
def test_the_paper_has_53_and_65_candidates(global_batch_size: int, num_candidates: int) -> None:
    assert len(published_candidates(4, 4, global_batch_size)) == num_candidates


def test_candidates_ascend_in_micro_batch_size_then_tp_then_dp() -> None:
    found = [degrees(candidate) for candidate in published_candidates(2, 2, 4)]
    assert found == sorted(found)


def test_candidates_use_every_device_and_every_sample() -> None:
    for candidate in published_candidates(3, 4, 96):
        assert candidate.num_devices == 12
        assert candidate.global_batch_size == 96


def test_candidates_keep_tp_within_a_node() -> None:
    assert {candidate.tp for candidate in published_candidates(3, 4, 96)} == {1, 2, 4}


def test_replicas_must_divide_the_batch() -> None:
    assert {candidate.dp for candidate in published_candidates(1, 4, 2)} == {1, 2}


def test_mean_weighs_device_types_by_their_number() -> None:
    mean = mean_forward_s([np.array([4.0, 8.0]), np.array([8.0, 0.0])], [3, 1])
    assert mean.tolist() == [5.0, 6.0]


@pytest.mark.parametrize("num_devices", [[1], [0, 0]])
def test_mean_needs_a_number_per_type(num_devices: list[int]) -> None:
    with pytest.raises(ValueError, match="2 device types with num_devices="):
        mean_forward_s([np.ones(2), np.ones(2)], num_devices)


def test_one_micro_batch_is_split_evenly_whatever_the_times() -> None:
    found = predict(pipeline(8, 1), FORWARD_S, GPT2, NETWORK)
    assert isinstance(found, Prediction)
    assert found.bounds == (0, 3, 4, 5, 10)


def test_several_micro_batches_are_split_by_time() -> None:
    found = predict(pipeline(1, 8), FORWARD_S, GPT2, NETWORK)
    assert isinstance(found, Prediction)
    assert found.bounds[1] < 3


def test_bounds_count_in_the_published_list() -> None:
    chain = transgan_chain(depth=(2, 0, 0, 0, 0, 2), hidden_size=64, bottom_width=2)
    found = predict(pipeline(8, 1), np.ones(chain.num_entries), chain, NETWORK)
    assert isinstance(found, Prediction)
    # Work entries 0, 3, 4, 31, 32 of 36; one layer each, and the last stage takes the rest.
    assert found.bounds == (0, 1, 4, 5, 36)


def test_more_stages_than_layers_is_a_result() -> None:
    small = gpt2_chain(num_layers=3, hidden_size=8, sequence_length=4, vocab_size=16)
    found = predict(pipeline(8, 1), np.ones(9), small, NETWORK)
    assert found == NoPartition(candidate=pipeline(8, 1), reason="4 stages for 3 layers")


def test_several_micro_batches_may_cut_between_all_layers() -> None:
    small = gpt2_chain(num_layers=3, hidden_size=8, sequence_length=4, vocab_size=16)
    assert isinstance(predict(pipeline(1, 8), np.ones(9), small, NETWORK), Prediction)


def test_ranking_ascends_in_time() -> None:
    ranking, _ = plan(published_candidates(2, 2, 8), {1: FORWARD_S, 2: FORWARD_S}, GPT2, NETWORK)
    times = [prediction.iteration_time_s for prediction in ranking]
    assert times == pytest.approx(sorted(times))
    assert len(times) == len(published_candidates(2, 2, 8))


def test_equal_times_keep_the_order_of_candidates() -> None:
    # Without a pipeline the micro-batch size cancels out; in floating point it does so nearly.
    forward_s = np.sqrt(np.arange(1.0, 1.0 + GPT2.num_layers))
    only_replicas = [c for c in published_candidates(2, 2, 96) if c.dp == 4]
    ranking, _ = plan(only_replicas, {1: forward_s}, GPT2, NETWORK)
    assert len({prediction.iteration_time_s for prediction in ranking}) > 1
    assert [prediction.candidate for prediction in ranking] == only_replicas


def test_ranking_does_not_depend_on_the_order_of_candidates() -> None:
    found = published_candidates(2, 2, 8)
    forward_s = {1: FORWARD_S, 2: FORWARD_S}
    assert plan(found, forward_s, GPT2, NETWORK) == plan(found[::-1], forward_s, GPT2, NETWORK)


def test_candidates_without_a_partition_are_listed_apart() -> None:
    small = gpt2_chain(num_layers=3, hidden_size=8, sequence_length=4, vocab_size=16)
    ranking, refused = plan([pipeline(8, 1), pipeline(1, 8)], {1: np.ones(9)}, small, NETWORK)
    assert [prediction.candidate for prediction in ranking] == [pipeline(1, 8)]
    assert [result.candidate for result in refused] == [pipeline(8, 1)]


def test_missing_tensor_parallel_degree_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no layer times for tp=2, only for tp in \[1\]"):
        plan(published_candidates(2, 2, 8), {1: FORWARD_S}, GPT2, NETWORK)
