from dataclasses import replace

import numpy as np
import pytest

from amp_ray.arrays import FloatArray
from amp_ray.clusters.cluster import Cluster, Link, Node
from amp_ray.clusters.constants import Constants
from amp_ray.clusters.device import Device
from amp_ray.cost.kernels import slowest_messages
from amp_ray.cost.messages import MessageModel, rank_table
from amp_ray.cost.stages import PlacedStages
from amp_ray.cost.topology import Topology
from amp_ray.models.model import Model
from amp_ray.runtimes.traits import RuntimeTraits
from amp_ray.strategies.candidate import Candidate, StageOptions

FOUR = 4  # slots of each node here


def link(bandwidth_bytes_per_s: float, latency_s: float) -> Link:
    return Link(bandwidth_bytes_per_s=bandwidth_bytes_per_s, latency_s=latency_s)


@pytest.fixture
def messages(
    device: Device, constants: Constants, model: Model, traits: RuntimeTraits
) -> MessageModel:
    """Nodes 0, 1: 900 B/s inside, 120 B/s outside; node 2: 80 and 40. 1 s inside, 2 s outside."""
    nodes = [
        Node(
            name=str(i),
            device=device,
            num_slots=FOUR,
            intra=link(80 if i == 2 else 900, 1.0),
            inter=link(40 if i == 2 else 120, 2.0),
        )
        for i in range(3)
    ]
    return MessageModel(
        model=model,
        topology=Topology(cluster=Cluster(nodes=tuple(nodes)), constants=constants),
        traits=traits,
        constants=constants,
        precision="fp16",
    )


def met(
    messages: MessageModel, *devices: int, pp: int, dp: int = 1, tp: int = 1
) -> tuple[FloatArray, FloatArray]:
    """Return inverse rate and latency of the slowest message of every cut and replica."""
    candidate = Candidate(
        micro_batch_size=1, options=StageOptions(tp=tp, dp=dp), pp=pp, num_micro_batches=1
    )
    stages = PlacedStages.of_candidate(candidate, devices)
    pairs = np.stack([np.arange(pp - 1), np.arange(1, pp)], axis=1)
    ranks = rank_table(messages.topology, stages)
    found = slowest_messages(pairs, ranks, *messages.links, dp)
    return found[:, :, 3], found[:, :, 1]


def on(messages: MessageModel, cluster: Cluster) -> MessageModel:
    """Put the messages on another cluster."""
    return replace(messages, topology=replace(messages.topology, cluster=cluster))


def test_message_within_a_node_runs_at_the_nodes_own_rate(messages: MessageModel) -> None:
    found, found_step = met(messages, 0, 1, pp=2)
    assert found == pytest.approx(np.array([[1 / 900]]))
    assert found_step == pytest.approx(np.array([[1.0]]))


def test_messages_of_one_cut_share_the_interface(messages: MessageModel) -> None:
    alone, _ = met(messages, 0, 4, pp=2)
    four, four_step = met(messages, *range(8), pp=2, dp=2, tp=2)
    assert alone == pytest.approx(np.array([[1 / 120]]))
    assert four == pytest.approx(np.array([[4 / 120] * 2]))
    assert four_step == pytest.approx(np.array([[2.0] * 2]))


def test_messages_that_enter_one_node_share_its_interface(messages: MessageModel) -> None:
    # from nodes 0 and 1 into node 2, whose interface (40 B/s) both messages share
    found, _ = met(messages, 0, 4, 8, 9, pp=2, dp=2)
    assert found == pytest.approx(np.array([[2 / 40] * 2]))


def test_cuts_do_not_share_with_each_other(messages: MessageModel) -> None:
    found, _ = met(messages, 0, 4, 1, pp=3)
    assert found == pytest.approx(np.array([[1 / 120], [1 / 120]]))


def test_only_messages_that_leave_the_node_share_its_interface(messages: MessageModel) -> None:
    # replica 0 stays in node 0, replica 1 goes from node 0 to node 1
    found, _ = met(messages, 0, 1, 2, 4, pp=2, dp=2)
    assert found == pytest.approx(np.array([[1 / 900, 1 / 120]]))


def test_replica_waits_for_the_slowest_of_its_ranks(messages: MessageModel) -> None:
    found, _ = met(messages, 0, 1, 2, 4, pp=2, tp=2)
    assert found == pytest.approx(np.array([[1 / 120]]))


def test_message_cannot_leave_faster_than_its_rank_feeds_the_interface(
    messages: MessageModel,
) -> None:
    wide = replace(
        messages.topology.cluster, pair_links={(0, 2): link(10_000, 0.0)}
    )  # node 2 moves 80 B/s inside
    found, _ = met(on(messages, wide), 0, 8, pp=2)
    assert found == pytest.approx(np.array([[1 / 80]]))


def test_known_link_of_a_pair_counts_instead_of_the_interfaces(messages: MessageModel) -> None:
    paired = replace(messages.topology.cluster, pair_links={(0, 1): link(60, 5.0)})
    found, found_step = met(on(messages, paired), 0, 4, pp=2)
    assert found == pytest.approx(np.array([[1 / 60]]))
    assert found_step == pytest.approx(np.array([[5.0]]))


def test_efficiencies_and_latency_scale_apply(messages: MessageModel, constants: Constants) -> None:
    slower = replace(constants, intra_efficiency=0.5, nic_efficiency=0.25, latency_scale=3.0)
    slowed = replace(messages, topology=replace(messages.topology, constants=slower))
    found, found_step = met(slowed, 0, 1, 4, pp=3)
    assert found == pytest.approx(np.array([[1 / 450], [1 / 30]]))
    assert found_step == pytest.approx(np.array([[3.0], [6.0]]))
