from dataclasses import replace

import numpy as np
import pytest

from amp_ray.cost.cuts import CutModel, CutTimes, boundary_bytes
from amp_ray.cost.roofline import Rank
from amp_ray.cost.topology import Topology
from amp_ray.spec.cluster import Cluster, Link
from amp_ray.spec.constants import Constants
from amp_ray.spec.model import Layer, Model
from amp_ray.spec.traits import RuntimeTraits

CUT_IN_THE_MIDDLE = (0, 2, 4)


@pytest.fixture
def cut_model(
    model: Model, cluster: Cluster, traits: RuntimeTraits, constants: Constants
) -> CutModel:
    """100 bytes per sample cross a boundary: 0.1 s within a node, 1 s between nodes."""
    topology = Topology(cluster=cluster, constants=constants)
    return CutModel(model=model, topology=topology, traits=traits, constants=constants)


def cuts(cut_model: CutModel, rank: Rank, *devices: int, pp: int = 2, dp: int = 1) -> CutTimes:
    grid = np.array(devices).reshape(pp, dp, rank.tp)
    rings = cut_model.topology.rings(grid.reshape(-1, rank.tp))
    return cut_model.cuts(grid, rank, rings)


def test_nothing_enters_or_leaves_the_chain(model: Model, rank: Rank) -> None:
    three = replace(rank, micro_batch_size=3)
    assert boundary_bytes(model, three).tolist() == [0.0, 300.0, 300.0, 300.0, 0.0]


def test_sharded_output_is_divided_by_tp(model: Model, block: Layer, rank: Rank) -> None:
    sharded = replace(block, output_sharded=True)
    mixed = replace(model, layers=(sharded, block, block))
    two = replace(rank, tp=2, precision="fp32")
    assert boundary_bytes(mixed, two).tolist() == [0.0, 100.0, 200.0, 0.0]


def test_messages_take_their_link(cut_model: CutModel, rank: Rank) -> None:
    inside, between = cuts(cut_model, rank, 0, 1), cuts(cut_model, rank, 1, 2)
    assert inside.sends(CUT_IN_THE_MIDDLE).ravel().tolist() == [0.1, 0.1]
    assert between.sends(CUT_IN_THE_MIDDLE).ravel().tolist() == [1.0, 1.0]


def test_each_replica_has_its_own_times(cut_model: CutModel, rank: Rank) -> None:
    # replica 0 goes from device 0 to 1 (one node), replica 1 from 2 to 3 (one node)
    found = cuts(cut_model, rank, 0, 2, 1, 3, dp=2).sends(CUT_IN_THE_MIDDLE)
    assert found.shape == (2, 1, 2)
    # replica 0 stays in its node, replica 1 crosses
    mixed = cuts(cut_model, rank, 0, 2, 1, 0, dp=2).sends(CUT_IN_THE_MIDDLE)
    assert mixed[0].tolist() == [[0.1, 1.0]]


def test_start_and_latency_come_first(
    cut_model: CutModel, rank: Rank, constants: Constants, cluster: Cluster
) -> None:
    late = tuple(
        replace(node, inter=Link(bandwidth_bytes_per_s=100, latency_s=0.5))
        for node in cluster.nodes
    )
    started = replace(constants, collective_start_s=0.25)
    topology = Topology(cluster=replace(cluster, nodes=late), constants=started)
    slow = replace(cut_model, topology=topology, constants=started)
    assert cuts(slow, rank, 1, 2).sends(CUT_IN_THE_MIDDLE)[0].item() == 1.75


def test_mask_travels_with_every_activation(
    cut_model: CutModel, rank: Rank, traits: RuntimeTraits
) -> None:
    masked = replace(cut_model, traits=replace(traits, mask_bytes=50.0))
    assert cuts(masked, rank, 1, 2).sends(CUT_IN_THE_MIDDLE).ravel().tolist() == [1.5, 1.0]


def test_slices_cross_faster_and_are_gathered(
    cut_model: CutModel, rank: Rank, traits: RuntimeTraits
) -> None:
    sliced = replace(cut_model, traits=replace(traits, sliced_activations=True))
    two = replace(rank, tp=2)
    activation_s, gradient_s = cuts(sliced, two, 0, 1, 2, 3).sends(CUT_IN_THE_MIDDLE).ravel()
    # two messages share 100 B/s: 100 bytes each take 2 s, slices of 50 take 1 s; gathering half
    # of 100 bytes around a ring of 1000 / 1.25 B/s takes 0.0625 s
    assert gradient_s == pytest.approx(2.0)
    assert activation_s == pytest.approx(1.0 + 0.0625)


def test_slices_need_several_ranks(cut_model: CutModel, rank: Rank, traits: RuntimeTraits) -> None:
    both = replace(traits, sliced_activations=True, sliced_gradients=True)
    sliced = replace(cut_model, traits=both)
    assert cuts(sliced, rank, 1, 2).sends(CUT_IN_THE_MIDDLE).ravel().tolist() == [1.0, 1.0]


def test_slower_end_of_a_cut_gathers_last(
    cut_model: CutModel, rank: Rank, traits: RuntimeTraits, cluster: Cluster, constants: Constants
) -> None:
    slow = replace(cluster.nodes[1], intra=Link(bandwidth_bytes_per_s=125, latency_s=0.5))
    uneven = replace(cluster, nodes=(cluster.nodes[0], slow))
    topology = Topology(cluster=uneven, constants=constants)
    sliced = replace(
        cut_model,
        topology=topology,
        traits=replace(traits, sliced_activations=True, sliced_gradients=True),
    )
    found = cuts(sliced, replace(rank, tp=2), 0, 1, 2, 3).sends(CUT_IN_THE_MIDDLE)
    # message 1 s; gathering 50 bytes at 125 / 1.25 B/s after a step of 0.5 s
    assert found.ravel().tolist() == pytest.approx([2.0, 2.0])


def test_rows_are_the_slowest_replica_at_every_boundary(cut_model: CutModel, rank: Rank) -> None:
    seconds, row = cuts(cut_model, rank, 0, 2, 1, 0, 3, 1, pp=3, dp=2).rows(duplex=False)
    # both cuts have a replica that crosses: they share one row
    assert row.tolist() == [0, 0]
    assert seconds.tolist() == [[0.0, 2.0, 2.0, 2.0, 0.0]]


def test_duplex_cuts_take_the_longer_message(
    cut_model: CutModel, rank: Rank, traits: RuntimeTraits
) -> None:
    masked = replace(cut_model, traits=replace(traits, mask_bytes=50.0))
    seconds, _ = cuts(masked, rank, 1, 2).rows(duplex=True)
    assert seconds[0, 1:4].tolist() == [1.5] * 3


def test_one_stage_has_no_cuts(cut_model: CutModel, rank: Rank) -> None:
    found = cuts(cut_model, rank, 0, pp=1)
    seconds, row = found.rows(duplex=False)
    assert (seconds.shape, row.shape) == ((0, 5), (0,))
    assert found.sends((0, 4)).shape == (2, 0, 1)
