from dataclasses import replace

import numpy as np
import pytest

from amp_ray.planners.amp2022.chain import Chain
from amp_ray.planners.amp2022.planner import Network, boundary_time_s, layer_time_s, predict_bounds
from amp_ray.strategies.candidate import Candidate, StageOptions

# Three entries, of which the second is not planned.
CHAIN = Chain(
    work_entries=(0, 2),
    num_entries=3,
    num_transformer_layers=2,
    even_split_extra=(0, 0),
    boundary_elements=(10.0, 20.0),
    boundary_split_by_tp=(False, True),
    layer_parameters=(3.0, 5.0),
    embedding_layers=(),
    embedding_parameters=0.0,
)
TIED = replace(CHAIN, embedding_layers=(0, 1), embedding_parameters=100.0)
FORWARD_S = np.array([1.0, 50.0, 2.0])


def network(*node_of_rank: int) -> Network:
    """Nodes 0 and 1: one and two elements per second between them, ten and five within."""
    return Network(
        node_of_rank=node_of_rank, inter_bytes_per_s=(4.0, 8.0), intra_bytes_per_s=(40.0, 20.0)
    )


def candidate(
    *, tp: int = 1, dp: int = 1, pp: int = 1, micro_batch_size: int = 1, num_micro_batches: int = 1
) -> Candidate:
    return Candidate(
        options=StageOptions(tp=tp, dp=dp),
        pp=pp,
        micro_batch_size=micro_batch_size,
        num_micro_batches=num_micro_batches,
    )


def test_layer_takes_three_forwards_per_sample() -> None:
    times = layer_time_s(candidate(micro_batch_size=4), FORWARD_S, CHAIN)
    assert times.tolist() == [12.0, 24.0]


def test_boundary_within_a_node_uses_its_own_bandwidth() -> None:
    times = boundary_time_s(candidate(dp=2, pp=2), CHAIN, network(0, 1, 0, 1))
    # dp 0 stays on node 0 (10 elements/s), dp 1 on node 1 (5 elements/s): the mean time.
    assert times[:, 0].tolist() == [(10 / 10 + 10 / 5) / 2, (20 / 10 + 20 / 5) / 2]


def test_boundary_between_nodes_uses_the_slower_of_the_two() -> None:
    times = boundary_time_s(candidate(pp=2), CHAIN, network(1, 0))
    assert times[:, 0].tolist() == [10.0, 20.0]


def test_boundary_waits_for_the_slowest_tensor_parallel_link() -> None:
    # Rank 0 -> 2 stays on node 0, rank 1 -> 3 leaves it; only logits are divided by tp.
    times = boundary_time_s(candidate(tp=2, pp=2), CHAIN, network(0, 0, 0, 1))
    assert times[:, 0].tolist() == [10.0, 20.0 / 2]


def test_boundary_grows_with_the_micro_batch() -> None:
    times = boundary_time_s(candidate(pp=2, micro_batch_size=3), CHAIN, network(0, 1))
    assert times[:, 0].tolist() == [30.0, 60.0]


def test_each_pair_of_stages_has_its_own_boundary_time() -> None:
    chain_of_three = Chain(
        work_entries=(0, 1, 2),
        num_entries=3,
        num_transformer_layers=3,
        even_split_extra=(0, 0),
        boundary_elements=(10.0,) * 3,
        boundary_split_by_tp=(False,) * 3,
        layer_parameters=(0.0,) * 3,
        embedding_layers=(),
        embedding_parameters=0.0,
    )
    times = boundary_time_s(candidate(pp=3), chain_of_three, network(0, 0, 1))
    assert times.tolist() == [[1.0, 10.0]] * 3


def test_gradient_sync_knows_the_last_hop_of_the_ring_only() -> None:
    # Hops 0 -> 1 and 1 -> 2 leave the node, the last one, 2 -> 0, does not: 10 elements/s.
    times = predict_bounds(candidate(dp=3), (0, 3), FORWARD_S, CHAIN, network(0, 1, 0))
    assert times.gradient_sync_s == pytest.approx(2 * 2 / (3 * 10) * 8)


def test_gradient_sync_takes_the_slowest_stage() -> None:
    # Stage 0 (3 parameters) between the nodes at 1 element/s, stage 1 (5) within node 1 at 5.
    times = predict_bounds(candidate(dp=2, pp=2), (0, 1, 3), FORWARD_S, CHAIN, network(0, 1, 1, 1))
    assert times.gradient_sync_s == pytest.approx(2 * 1 / (2 * 1) * 3)


def test_gradient_sync_divides_parameters_by_tp() -> None:
    times = predict_bounds(candidate(tp=2, dp=2), (0, 3), FORWARD_S, CHAIN, network(0, 0, 0, 0))
    assert times.gradient_sync_s == pytest.approx(2 * 1 / (2 * 10) * 8 / 2)


def test_single_replica_has_no_gradient_sync() -> None:
    times = predict_bounds(candidate(pp=2), (0, 1, 3), FORWARD_S, CHAIN, network(0, 1))
    assert times.gradient_sync_s == 0.0


def test_stage_with_both_embeddings_counts_one() -> None:
    times = predict_bounds(candidate(dp=2), (0, 3), FORWARD_S, TIED, network(0, 0))
    assert times.gradient_sync_s == pytest.approx(2 * 1 / (2 * 10) * (8 + 100))


def test_every_stage_with_an_embedding_counts_it() -> None:
    times = predict_bounds(candidate(dp=2, pp=2), (0, 1, 3), FORWARD_S, TIED, network(0, 0, 0, 0))
    assert times.gradient_sync_s == pytest.approx(2 * 1 / (2 * 10) * (5 + 100))


def test_parts_add_up_to_the_iteration() -> None:
    # Stages take 3 and 6 s; four micro-batches; ten elements at one per second across the cut.
    times = predict_bounds(
        candidate(pp=2, num_micro_batches=4), (0, 1, 3), FORWARD_S, CHAIN, network(0, 1)
    )
    assert (times.fill_s, times.steady_s, times.pipeline_p2p_s) == (9.0, 18.0, 10.0)
    assert times.iteration_time_s == 37.0


def test_candidate_must_use_every_rank() -> None:
    with pytest.raises(ValueError, match=r"pp=1 \* dp=2 \* tp=1 = 2 ranks, the network has 3"):
        predict_bounds(candidate(dp=2), (0, 3), FORWARD_S, CHAIN, network(0, 1, 1))
