from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from amp_ray.arrays import FloatArray
from amp_ray.clusters.cluster import Cluster, Link
from amp_ray.clusters.constants import Constants
from amp_ray.cost.messages import MessageModel, Messages, sample_bytes
from amp_ray.cost.stages import PlacedStages
from amp_ray.cost.topology import Topology
from amp_ray.models.model import Layer, Model
from amp_ray.runtimes.traits import RuntimeTraits
from amp_ray.strategies.candidate import StageOptions

CUT_IN_THE_MIDDLE = (0, 2, 4)

Row = tuple[int, ...]


@pytest.fixture
def messages(
    model: Model, cluster: Cluster, traits: RuntimeTraits, constants: Constants
) -> MessageModel:
    """100 bytes per sample cross a boundary: 0.1 s within a node, 1 s between nodes."""
    return MessageModel(
        model=model,
        topology=Topology(cluster=cluster, constants=constants),
        traits=traits,
        constants=constants,
        precision="fp16",
    )


def between(
    model: MessageModel, *stages: Sequence[Row], shares: Sequence[Row] | None = None
) -> Messages:
    """Return the messages of stages, each given by the devices of its data-parallel ranks."""
    placed = PlacedStages(
        options=[StageOptions(tp=len(rows[0]), dp=len(rows)) for rows in stages],
        devices=np.concatenate([np.array(rows) for rows in stages], axis=None),
        shares=[(1,) * len(rows) for rows in stages] if shares is None else list(shares),
        num_micro_batches=1,
    )
    return model.between(placed, model.topology.rings(placed.groups))


def seconds(model: MessageModel, *stages: Sequence[Row]) -> FloatArray:
    """Return activation and gradient seconds of two stages with one replica."""
    return between(model, *stages).at(CUT_IN_THE_MIDDLE).ravel()


def test_nothing_enters_or_leaves_the_chain(model: Model) -> None:
    assert sample_bytes(model, 1, "fp16").tolist() == [0.0, 100.0, 100.0, 100.0, 0.0]


def test_sharded_output_is_divided_by_tp(model: Model, block: Layer) -> None:
    sharded = replace(block, output_sharded=True)
    mixed = replace(model, layers=(sharded, block, block))
    assert sample_bytes(mixed, 2, "fp32").tolist() == [0.0, 100.0, 200.0, 0.0]


def test_each_replica_has_its_own_times(messages: MessageModel) -> None:
    # replica 0 stays in its node, replica 1 crosses
    mixed = between(messages, [(0,), (2,)], [(1,), (0,)]).at(CUT_IN_THE_MIDDLE)
    assert mixed.shape == (2, 1, 2)
    assert mixed[0].tolist() == [[0.1, 1.0]]


def test_replicas_of_unequal_shares_are_told_apart(messages: MessageModel) -> None:
    stages = between(messages, [(0,), (2,)], [(1,), (3,)], shares=[(3, 1), (3, 1)])
    assert stages.at(CUT_IN_THE_MIDDLE)[0] == pytest.approx(np.array([[0.3, 0.1]]))


def test_start_and_latency_come_first(
    messages: MessageModel, constants: Constants, cluster: Cluster
) -> None:
    late = tuple(
        replace(node, inter=Link(bandwidth_bytes_per_s=100, latency_s=0.5))
        for node in cluster.nodes
    )
    started = replace(constants, collective_start_s=0.25)
    topology = Topology(cluster=replace(cluster, nodes=late), constants=started)
    slow = replace(messages, topology=topology, constants=started)
    assert seconds(slow, [(1,)], [(2,)])[0] == 1.75


def test_every_message_of_a_rank_is_started(messages: MessageModel, constants: Constants) -> None:
    started = replace(messages, constants=replace(constants, collective_start_s=0.5))
    found = between(started, [(0,)], [(2,), (3,)], shares=[(2,), (1, 1)])
    assert found.at(CUT_IN_THE_MIDDLE)[0].item() == pytest.approx(2 * 0.5 + 2.0)


def test_ranks_share_the_interface_of_the_node_that_all_send_to(messages: MessageModel) -> None:
    found = between(messages, [(0,), (1,)], [(2,)], shares=[(2, 2), (4,)])
    assert found.at(CUT_IN_THE_MIDDLE)[0].item() == pytest.approx(4.0)


BOTH = {"sliced_activations": True, "sliced_gradients": True}


@pytest.mark.parametrize(
    ("stages", "changes", "expected_s"),
    [
        (([(0,)], [(1,)]), {}, (0.1, 0.1)),
        (([(1,)], [(2,)]), {}, (1.0, 1.0)),
        # a larger tensor-parallel group gets the tensor on every rank
        (([(0,)], [(2, 3)]), {}, (2.0, 1.0)),
        # a mask travels with every activation
        (([(1,)], [(2,)]), {"mask_bytes": 50.0}, (1.5, 1.0)),
        # two messages share 100 B/s: 100 bytes each take 2 s, slices of 50 take 1 s; gathering half
        # of 100 bytes around a ring of 1000 / 1.25 B/s takes 0.0625 s
        (([(0, 1)], [(2, 3)]), {"sliced_activations": True}, (1.0 + 0.0625, 2.0)),
        (([(1,)], [(2,)]), BOTH, (1.0, 1.0)),  # slices need several ranks
    ],
)
def test_messages_take_their_link(
    stages: tuple[Sequence[Row], ...],
    changes: dict[str, float],
    expected_s: tuple[float, float],
    messages: MessageModel,
) -> None:
    changed = replace(messages, traits=replace(messages.traits, **changes))  # type: ignore[arg-type]
    assert seconds(changed, *stages).tolist() == pytest.approx(expected_s)


def test_slower_end_of_a_cut_gathers_last(
    messages: MessageModel, traits: RuntimeTraits, cluster: Cluster, constants: Constants
) -> None:
    slow = replace(cluster.nodes[1], intra=Link(bandwidth_bytes_per_s=125, latency_s=0.5))
    uneven = replace(cluster, nodes=(cluster.nodes[0], slow))
    sliced = replace(
        messages,
        topology=Topology(cluster=uneven, constants=constants),
        traits=replace(traits, sliced_activations=True, sliced_gradients=True),
    )
    # message 1 s; gathering 50 bytes at 125 / 1.25 B/s after a step of 0.5 s
    assert seconds(sliced, [(0, 1)], [(2, 3)]).tolist() == pytest.approx([2.0, 2.0])


def test_the_larger_holding_is_gathered_where_tp_differs(
    messages: MessageModel, model: Model, block: Layer, traits: RuntimeTraits
) -> None:
    sharded = replace(model, layers=(replace(block, output_sharded=True),) * 4)
    sliced = replace(messages, model=sharded, traits=replace(traits, sliced_activations=True))
    forward, backward = seconds(sliced, [(0, 1)], [(2,)])
    # 100 bytes cross at 100 B/s; the first stage gathers the other half of the larger holding, the
    # 100 bytes of the second one
    assert (forward, backward) == pytest.approx((1.0 + 50 / 800, 1.0))
    # the other way, two ranks get 25 bytes each of the 50 that they hold; gathered is as much
    forward, backward = seconds(sliced, [(2,)], [(0, 1)])
    assert (forward, backward) == pytest.approx((0.5 + 50 / 800, 1.0))


def test_rows_are_the_slowest_replica_at_every_boundary(messages: MessageModel) -> None:
    rows, row = between(messages, [(0,), (2,)], [(1,), (0,)], [(3,), (1,)]).rows()
    # both cuts have a replica that crosses: they share one row
    assert row.tolist() == [0, 0]
    assert rows.tolist() == [[0.0, 2.0, 2.0, 2.0, 0.0]]


def test_duplex_cuts_take_the_longer_message(messages: MessageModel, traits: RuntimeTraits) -> None:
    masked = replace(messages, traits=replace(traits, mask_bytes=50.0, duplex_transfers=True))
    rows, _ = between(masked, [(1,)], [(2,)]).rows()
    assert rows[0, 1:4].tolist() == [1.5] * 3


def test_cuts_between_chosen_stages_are_told(messages: MessageModel) -> None:
    placed = PlacedStages(
        options=(StageOptions(tp=1, dp=1),) * 3,
        devices=np.concatenate([np.array([[device]]) for device in (0, 2, 1)], axis=None),
        shares=((1,),) * 3,
        num_micro_batches=1,
    )
    rings = messages.topology.rings(placed.groups)
    found = messages.between(placed, rings, np.array([[0, 2]]))
    assert found.everywhere()[0, 1] == pytest.approx(0.2)


def test_one_stage_has_no_cuts(messages: MessageModel) -> None:
    found = between(messages, [(0,)])
    rows, row = found.rows()
    assert (rows.shape, row.shape) == ((0, 5), (0,))
    assert found.at((0, 4)).shape == (2, 0, 1)
