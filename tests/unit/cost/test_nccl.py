from dataclasses import replace

import numpy as np
import pytest

from amp_ray.arrays import FloatArray
from amp_ray.clusters.constants import Constants
from amp_ray.clusters.device import find_device
from amp_ray.cost.collective import RING_OVERHEAD_RANKS, all_gather_s, all_reduce_s
from amp_ray.cost.nccl import BASE_S, SIZES, Curve, Group, generation, measured_curve, measured_s
from amp_ray.cost.topology import Topology
from support.checked import required
from support.experiments import small_experiment

MIB = 2.0**20
BOARDS = ("A100-80", "H100", "H200", "B200", "B300", "GB200", "GB300")
IN_NODE = Group(num_ranks=8, within_bytes_per_s=334e9, within="nvlink", generation=2)
ACROSS = replace(IN_NODE, num_ranks=64, num_nodes=8, network_bytes_per_s=48e9)
ALONE = replace(ACROSS, num_ranks=8)


def test_a_curve_is_linear_between_sizes_and_beyond() -> None:
    curve = Curve.of(np.ones_like(SIZES) + SIZES)
    sizes = (512.0, 700.0, 1000.0, 1e6, 2.0**29, 1e12)
    assert [curve.at(size) for size in sizes] == pytest.approx([1 + size for size in sizes])
    assert curve.at(0.0) == curve.at(512.0)


def test_a_larger_message_never_takes_less_time() -> None:
    curve = Curve.of(np.array([3.0, 1.0, *range(4, 23)]))
    times = [curve.at(size) for size in (0, 512, 900, 1024, 1e4, 1e6, 1e9, 1e10)]
    assert times == sorted(times)


def test_a_ring_in_a_node_has_nccl_s_latencies() -> None:
    """LL: 6.6 us and 7 hops of .6 for a gather; twice the hops for an all-reduce."""
    assert BASE_S + IN_NODE.gather().at(0) == pytest.approx(10.8e-6, rel=1e-3)
    assert BASE_S + IN_NODE.all_reduce().at(0) == pytest.approx(15.0e-6, rel=1e-3)


def test_large_messages_go_at_the_rate_of_a_ring() -> None:
    rate = 1.75 / IN_NODE.all_reduce().s_per_byte
    assert rate == pytest.approx(334e9)
    assert 63 / 64 / ACROSS.gather().s_per_byte == pytest.approx(48e9)


def test_small_all_reduces_over_nodes_take_a_tree() -> None:
    """LL: 6.8 us, up and down 7 hops of .6 in a node and 3 of 5 between nodes."""
    expected = (6.8 + 2 * (7 * 0.6 + 3 * 5)) * 1e-6
    assert BASE_S + ACROSS.all_reduce().at(0) == pytest.approx(expected, rel=1e-2)
    assert ACROSS.gather().at(0) > 7 * 2.7e-6  # only rings gather: seven hops cross the network


def test_only_some_networks_keep_the_order_that_short_protocols_need() -> None:
    simple = replace(ALONE, has_ll=False)
    assert simple.gather().at(0) == pytest.approx(7 * 14e-6, rel=1e-2)
    assert ALONE.gather().at(0) < simple.gather().at(0)


def test_a_slower_network_slows_every_step_of_a_ring() -> None:
    slow = replace(ACROSS, slower_s=55e-6)
    more_s = slow.gather().at(0) - ACROSS.gather().at(0)
    assert more_s == pytest.approx(63 * 55e-6)


def test_a_stated_step_is_every_hop_of_its_kind() -> None:
    stated = replace(ACROSS, network=1e-3)
    assert stated.gather().at(0) == pytest.approx(63e-3, rel=1e-2)
    assert replace(IN_NODE, within=1e-3).gather().at(0) == pytest.approx(7e-3, rel=1e-2)


def test_switches_add_up_large_all_reduces_from_hopper_on() -> None:
    switched = replace(IN_NODE, switch_bytes_per_s=355e9)
    ratio = IN_NODE.all_reduce().at(512 * MIB) / switched.all_reduce().at(512 * MIB)
    assert ratio == pytest.approx(0.85 * 355 / 334 * 1.75 / 1.2, rel=0.02)
    assert switched.gather().at(512 * MIB) == IN_NODE.gather().at(512 * MIB)
    for other in (replace(switched, generation=1), replace(switched, num_ranks=2)):
        plain = replace(other, switch_bytes_per_s=0.0)
        assert other.all_reduce().seconds == plain.all_reduce().seconds


@pytest.mark.parametrize(("num_nodes", "rate"), [(2, 48e9), (3, 24e9), (8, 24e9)])
def test_from_three_nodes_on_switches_send_every_byte_twice(num_nodes: int, rate: float) -> None:
    slow_ring = replace(
        ACROSS, num_ranks=8 * num_nodes, num_nodes=num_nodes, within_bytes_per_s=1e9
    )
    switched = replace(slow_ring, switch_bytes_per_s=355e9)
    assert 6 / 5 / switched.all_reduce().s_per_byte == pytest.approx(rate)


def test_pat_needs_its_release_and_one_rank_per_node() -> None:
    slow = replace(ACROSS, slower_s=55e-6)  # 63 such steps of a ring, 6 of PAT
    for group, is_quicker in ((replace(slow, num_nodes=64), True), (slow, False), (ACROSS, False)):
        with_pat = replace(group, has_pat=True)
        assert (with_pat.gather().at(MIB) < group.gather().at(MIB)) == is_quicker
        assert with_pat.all_reduce().seconds == group.all_reduce().seconds


@pytest.mark.parametrize("group", [IN_NODE, ACROSS, replace(ALONE, num_ranks=64, num_nodes=64)])
def test_every_time_moves_with_the_constants(group: Group) -> None:
    group = replace(group, has_pat=True, switch_bytes_per_s=355e9)
    slow = replace(
        group,
        within_bytes_per_s=group.within_bytes_per_s / 2,
        network_bytes_per_s=group.network_bytes_per_s / 2,
        switch_bytes_per_s=group.switch_bytes_per_s / 2,
        rate_scale=0.5,
        latency_scale=2.0,
    )
    for once, twice in (
        (group.all_reduce(), slow.all_reduce()),
        (group.gather(), slow.gather()),
    ):
        assert twice.seconds == pytest.approx([2 * seconds for seconds in once.seconds])


def test_generations_follow_the_rate_of_a_board_s_links() -> None:
    boards = ("T4", "V100-16", "A100-80", "H100", "B200")
    assert [generation(find_device(name).link_bytes_per_s) for name in boards] == [0, 0, 1, 2, 3]


# --------------------------------------------------------------------------- measurements


def _measured(board: str, collective: str, num_ranks: int) -> FloatArray:
    return required(measured_s(board, collective, num_ranks))


def test_times_between_two_measured_numbers_of_ranks_lie_between_theirs() -> None:
    two, three, four = (_measured("H100", "all_reduce", ranks) for ranks in (2, 3, 4))
    assert three == pytest.approx((two + four) / 2)
    assert measured_s("H100", "all_reduce", 16) is None
    assert measured_s("GB200", "all_reduce", 8) is None
    assert measured_s("T4", "all_reduce", 2) is None
    assert measured_s("A100-40", "all_reduce", 2) is measured_s("A100-80", "all_reduce", 2)


def test_measured_collectives_move_with_the_constants() -> None:
    plain, late, slow = (
        measured_curve("H100", ("all_reduce",), 8, latency=latency, rate=rate)
        for latency, rate in ((1, 1), (2, 1), (1, 0.5))
    )
    assert plain is not None
    assert late is not None
    assert slow is not None
    first_s = plain.at(0) + BASE_S
    assert late.at(1e8) - plain.at(1e8) == pytest.approx(first_s - BASE_S)
    assert slow.at(1e8) - plain.at(1e8) == pytest.approx(plain.at(1e8) + BASE_S - first_s)


def test_a_node_of_a_measured_board_takes_its_times() -> None:
    experiment = small_experiment(
        (
            "{count: 2, device: T4, slots: 2, intra_gbit_per_s: 50, inter_gbit_per_s: 10}",
            "{count: 2, device: H100, slots: 8, inter_gbit_per_s: 3200}",
        )
    )
    topology = Topology(cluster=experiment.cluster, constants=Constants())
    (path,) = topology.rings([list(range(8))]).paths
    measured = _measured("H100", "all_reduce", 8)
    assert all_reduce_s(16 * MIB, 8, path, BASE_S) == pytest.approx(float(measured[15]))
    both = [_measured("H100", name, 8)[15] for name in ("all_gather", "reduce_scatter")]
    assert all_gather_s(16 * MIB, 8, path, BASE_S) == pytest.approx(float(np.mean(both)))
    assert topology.exchange([list(range(8))]).exchange is not None
    (wide,) = topology.rings([[*range(8), 8]]).paths
    assert wide.all_reduce is not None
    assert wide.all_reduce.at(0) > path.step_s


def _model(board: str, num_ranks: int) -> Group:
    device = find_device(board)
    rate = required(device.reached_link_bytes_per_s)
    return Group(
        num_ranks=num_ranks,
        within_bytes_per_s=rate / (1 + RING_OVERHEAD_RANKS / num_ranks),
        within="nvlink",
        generation=generation(device.link_bytes_per_s),
        switch_bytes_per_s=rate,
    )


@pytest.mark.parametrize(
    ("least_bytes", "median", "p90"),
    [(512, 0.197, 0.365), (MIB, 0.162, 0.34)],
)
def test_the_model_s_error_on_the_measured_boards(
    least_bytes: float, median: float, p90: float
) -> None:
    """Without its table every board would have these errors, of all-reduces and gathers."""
    errors: list[float] = []
    for board in BOARDS:
        for collective in ("all_reduce", "all_gather", "reduce_scatter"):
            for num_ranks in (2, 4, 8):
                measured = measured_s(board, collective, num_ranks)
                if measured is None:
                    continue
                group = _model(board, num_ranks)
                curve = group.all_reduce() if collective == "all_reduce" else group.gather()
                ratios = (np.array(curve.seconds) + BASE_S) / measured - 1
                errors.extend(np.abs(ratios)[least_bytes <= SIZES])
    assert float(np.median(errors)) == pytest.approx(median, abs=0.005)
    assert float(np.percentile(errors, 90)) == pytest.approx(p90, abs=0.01)
