from dataclasses import replace

import pytest

from amp_ray.clusters.constants import Constants
from amp_ray.cost.collective import NO_RING, Path, all_gather_s, all_reduce_s, start_s
from amp_ray.runtimes.traits import RuntimeTraits

PATH = Path(bytes_per_s=100.0, step_s=0.5)


def test_all_reduce_sends_twice_what_all_others_hold() -> None:
    # 6 steps of 0.5 s; 6/4 of 400 bytes at 100 bytes/s; 1 s to start
    assert all_reduce_s(400, 4, PATH, start=1.0) == pytest.approx(1.0 + 3.0 + 6.0)


def test_all_gather_takes_half_of_an_all_reduce_after_its_start() -> None:
    assert all_gather_s(400, 4, PATH, start=1.0) == pytest.approx(1.0 + 1.5 + 3.0)


def test_every_message_has_a_start_and_a_latency_of_its_own() -> None:
    assert all_reduce_s(400, 4, PATH, 1.0, num_messages=2.5) == pytest.approx(2.5 * 4.0 + 6.0)
    assert all_gather_s(400, 4, PATH, 1.0, num_messages=2.5) == pytest.approx(2.5 * 2.5 + 3.0)


@pytest.mark.parametrize(("tree_s", "latency_s"), [(0.25, 0.5), (1.0, 2.0), (9.0, 3.0)])
def test_all_reduce_over_nodes_takes_a_tree_where_that_is_quicker(
    tree_s: float, latency_s: float
) -> None:
    path = replace(PATH, tree_s=tree_s)
    assert all_reduce_s(400, 4, path, start=1.0) == pytest.approx(1.0 + latency_s + 6.0)
    assert all_gather_s(400, 4, path, start=1.0) == all_gather_s(400, 4, PATH, start=1.0)


def test_a_single_rank_has_nobody_to_talk_to() -> None:
    assert all_reduce_s(400, 1, PATH, start=1.0) == 0.0
    assert all_gather_s(400, 1, NO_RING, start=1.0) == 0.0


def test_start_holds_the_call_and_what_the_runtime_waits_for(
    constants: Constants, traits: RuntimeTraits
) -> None:
    stated = replace(constants, collective_start_s=3.0, message_scale=2.0)
    assert start_s(stated, replace(traits, synchronisation_s=1.0)) == 8.0
