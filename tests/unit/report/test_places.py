from dataclasses import replace

import pytest

from amp_ray.report.tables import is_in_order, places_text
from amp_ray.strategies.candidate import Candidate
from amp_ray.strategies.strategy import Stage, StageOptions, Strategy
from support.experiments import small_experiment

CLUSTER = small_experiment().cluster
GRID = Strategy.uniform(
    Candidate(micro_batch_size=1, options=StageOptions(tp=1, dp=1), pp=3, num_micro_batches=2),
    (0, 1, 2, 3),
)


@pytest.mark.parametrize(
    ("placement", "text"),
    [
        ((0, 1, 2), "node0 x2, node1"),
        ((2, 0, 1), "node1, node0 x2"),
        ((0, 2, 1), "node0, node1, node0"),
    ],
)
def test_stages_are_named_by_their_nodes_in_runs(placement: tuple[int, ...], text: str) -> None:
    assert places_text(replace(GRID, placement=placement), CLUSTER) == text


def test_degrees_are_told_where_stages_differ() -> None:
    stages = (
        Stage(first_layer=0, end_layer=1, options=StageOptions(tp=1, dp=2), shares=(2, 1)),
        Stage(first_layer=1, end_layer=3, options=StageOptions(tp=2, dp=1), shares=(3,)),
    )
    strategy = Strategy(
        stages=stages, micro_batch_size=3, num_micro_batches=1, placement=(1, 2, 3, 0)
    )
    assert places_text(strategy, CLUSTER) == "tp1 dp2 on node0+node1, tp2 dp1 on node1+node0"


def test_the_order_of_the_devices_is_recognised() -> None:
    assert is_in_order(GRID)
    assert not is_in_order(replace(GRID, placement=(1, 0, 2)))


def test_of_many_nodes_in_a_row_only_the_ends_are_named() -> None:
    cluster = small_experiment(("count: 2, device: T4, slots: 2", "count: 6, device: T4, slots: 1"))
    wide = Candidate(
        micro_batch_size=1, options=StageOptions(tp=1, dp=5), pp=1, num_micro_batches=1
    )
    strategy = Strategy.uniform(wide, (0, 1), (5, 1, 2, 3, 4))
    assert places_text(strategy, cluster.cluster) == "node5+node1..node4"
