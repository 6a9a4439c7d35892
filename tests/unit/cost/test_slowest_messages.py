from dataclasses import replace

import numpy as np
import pytest

from amp_ray.arrays import FloatArray
from amp_ray.clusters.cluster import Cluster, Link
from amp_ray.clusters.constants import Constants
from amp_ray.cost.kernels.stages import slowest_messages
from amp_ray.cost.messages import MessageModel, rank_table
from amp_ray.cost.stages import PlacedStages
from amp_ray.cost.topology import Topology
from amp_ray.models.model import Model
from amp_ray.runtimes.traits import RuntimeTraits
from support.checked import grid_of


def link(bandwidth_bytes_per_s: float, latency_s: float) -> Link:
    return Link(bandwidth_bytes_per_s=bandwidth_bytes_per_s, latency_s=latency_s)


@pytest.fixture
def messages(
    topology: Topology, constants: Constants, model: Model, traits: RuntimeTraits
) -> MessageModel:
    """Messages over these links."""
    return MessageModel(
        model=model,
        topology=topology,
        traits=traits,
        constants=constants,
        precision="fp16",
    )


def met(
    messages: MessageModel, *devices: int, pp: int, dp: int = 1, tp: int = 1
) -> tuple[FloatArray, FloatArray]:
    """Return inverse rate and latency of the slowest message of every cut and replica."""
    candidate = grid_of(tp=tp, dp=dp, pp=pp)
    stages = PlacedStages.of_candidate(candidate, devices)
    pairs = np.stack([np.arange(pp - 1), np.arange(1, pp)], axis=1)
    ranks = rank_table(messages.topology, stages)
    found = slowest_messages(pairs, ranks, messages.topology.links, dp)
    return found[:, :, 3], found[:, :, 1]


ONE = 1 / 900  # within node 0
CROSS = 1 / 120  # between nodes 0 and 1


@pytest.mark.parametrize(
    ("devices", "degrees", "per_byte_s"),
    [
        ((0, 1), {"pp": 2}, [[ONE]]),
        ((0, 4), {"pp": 2}, [[CROSS]]),
        # messages of one cut share the interface
        (tuple(range(8)), {"pp": 2, "dp": 2, "tp": 2}, [[4 * CROSS] * 2]),
        # from nodes 0 and 1 into node 2, whose interface (40 B/s) both messages share
        ((0, 4, 8, 9), {"pp": 2, "dp": 2}, [[2 / 40] * 2]),
        # cuts do not share with each other
        ((0, 4, 1), {"pp": 3}, [[CROSS], [CROSS]]),
        # replica 0 stays in node 0, replica 1 goes from node 0 to node 1
        ((0, 1, 2, 4), {"pp": 2, "dp": 2}, [[ONE, CROSS]]),
        # a replica waits for the slowest of its ranks
        ((0, 1, 2, 4), {"pp": 2, "tp": 2}, [[CROSS]]),
    ],
)
def test_slowest_messages_share_what_they_use_at_once(
    devices: tuple[int, ...],
    degrees: dict[str, int],
    per_byte_s: list[list[float]],
    messages: MessageModel,
) -> None:
    found, found_step = met(messages, *devices, **degrees)
    assert found == pytest.approx(np.array(per_byte_s))
    steps = np.where(np.array(per_byte_s) == ONE, 1.0, 2.0)
    assert found_step == pytest.approx(steps)


@pytest.mark.parametrize(
    ("pair", "known", "devices", "expected"),
    [
        # node 2 moves 80 B/s inside: its rank feeds the interface no faster
        ((0, 2), (10_000, 0.0), (0, 8), (1 / 80, 0.0)),
        # the known link of a pair counts instead of the interfaces
        ((0, 1), (60, 5.0), (0, 4), (1 / 60, 5.0)),
    ],
)
def test_pairs_of_nodes_may_have_links_of_their_own(
    pair: tuple[int, int],
    known: tuple[float, float],
    devices: tuple[int, int],
    expected: tuple[float, float],
    messages: MessageModel,
) -> None:
    cluster = replace(messages.topology.cluster, pair_links={pair: link(*known)})
    paired = replace(messages, topology=replace(messages.topology, cluster=cluster))
    found, found_step = met(paired, *devices, pp=2)
    assert (found.item(), found_step.item()) == pytest.approx(expected)


def test_efficiencies_and_latency_scale_apply(messages: MessageModel, constants: Constants) -> None:
    slower = replace(constants, intra_efficiency=0.5, nic_efficiency=0.25, latency_scale=3.0)
    slowed = replace(messages, topology=replace(messages.topology, constants=slower))
    found, found_step = met(slowed, 0, 1, 4, pp=3)
    assert found == pytest.approx(np.array([[1 / 450], [1 / 30]]))
    assert found_step == pytest.approx(np.array([[3.0], [6.0]]))


@pytest.mark.parametrize(
    ("devices", "degrees", "expected"),
    [
        ((0, 4), {"pp": 2}, (ONE, 1.0)),  # two hosts of a rack
        ((0, 8), {"pp": 2}, (CROSS, 2.0)),  # to another rack: a rank has its host's interface
        # eight ranks share the interfaces of two hosts
        (tuple(range(16)), {"pp": 2, "dp": 8}, (8 / 240, 2.0)),
    ],
)
def test_messages_within_a_rack_use_no_interface(
    devices: tuple[int, ...],
    degrees: dict[str, int],
    expected: tuple[float, float],
    messages: MessageModel,
) -> None:
    one = messages.topology.cluster.nodes[0]
    racks = tuple(one.of_hosts([f"{rack}0", f"{rack}1"]) for rack in "ab")
    topology = replace(messages.topology, cluster=Cluster(nodes=racks))
    found, found_step = met(replace(messages, topology=topology), *devices, **degrees)
    assert [found.max(), found_step.max()] == pytest.approx(list(expected))


def test_messages_within_a_host_leave_its_interface_free(messages: MessageModel) -> None:
    one, two, three = messages.topology.cluster.nodes
    nodes = (one, replace(two, name=one.name, first_slot=4), three)
    cluster = Cluster(nodes=nodes, pair_links={(0, 1): link(300, 1.5)})
    joined = replace(messages, topology=replace(messages.topology, cluster=cluster))
    assert met(joined, 0, 1, 4, 5, pp=2, dp=2)[0].tolist() == [[2 / 300, 2 / 300]]
    assert met(joined, 0, 4, 8, 9, pp=2, dp=2)[0].tolist() == [[2 / 40, 2 / 40]]
    assert met(joined, 0, 1, 4, 8, pp=2, dp=2)[0].tolist() == [[1 / 300, 1 / 40]]
