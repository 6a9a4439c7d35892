import numpy as np
import pytest

from amp_ray.cost.model import CostModel
from amp_ray.search.placement.nodes import Pairs, node_classes
from amp_ray.search.placement.prices import Prices
from amp_ray.spec.candidate import Candidate
from amp_ray.spec.strategy import Strategy
from support.mixed_cluster import mixed_candidate, mixed_cost_model

BOUNDS = (0, 4, 7, 11)


def prices_of(cost_model: CostModel, candidate: Candidate) -> Prices:
    cluster = cost_model.experiment.cluster
    classes = node_classes(cluster, candidate.options.tp, pairs_matter=True)
    return Prices(cost_model=cost_model, candidate=candidate, classes=classes)


def by_class(prices: Prices, *, slow: Pairs = (), quick: Pairs = ()) -> tuple[Pairs, ...]:
    """Put figures of the slow and the quick nodes in the order of the classes."""
    return tuple(slow if 0 in found.nodes else quick for found in prices.classes)


def test_a_block_costs_what_its_stage_costs() -> None:
    cost_model, candidate = mixed_cost_model(slow_gib=3), mixed_candidate(dp=2)
    prices = prices_of(cost_model, candidate)
    devices = prices.stage_devices(
        [by_class(prices, slow=((2, 0),)), by_class(prices, slow=((1, 1),), quick=((1, 1),))]
    )
    costs = cost_model.costs(candidate, (0, 1, 2, 3, 4, 5))
    expected, row = costs.times.rows()
    assert np.array_equal(devices.time_prefix_s[devices.time_row[0]], expected[row[0]])
    slower, mixed = devices.time_prefix_s[devices.time_row]  # the slower replica counts
    assert np.array_equal(slower, mixed)
    assert devices.memory_bytes.tolist() == [3 * 2**30] * 2


def test_step_ends_are_those_of_the_cost_model() -> None:
    cost_model, candidate = mixed_cost_model(), mixed_candidate(dp=2)
    prices = prices_of(cost_model, candidate)
    # Stages 0 and 1 take one device of the slow node and one of a quick one each.
    placement = (0, 2, 1, 3, 4, 5)
    devices = prices.stage_devices(
        [by_class(prices, slow=((1, 2),), quick=((1, 2),)), by_class(prices, quick=((2, 0),))]
    )
    breakdown = cost_model.estimate(Strategy.uniform(candidate, BOUNDS, placement)).breakdown
    assert breakdown is not None
    held = cost_model.weights(candidate.options.tp).of_stages(BOUNDS)
    step_ends = devices.step_ends[[0, 0, 1], 0] + devices.step_ends[[0, 0, 1], 1] * held
    expected = breakdown.gradient_sync_s + breakdown.optimizer_s
    assert step_ends.max() == pytest.approx(expected, rel=1e-12)


def test_cuts_cost_what_their_messages_take() -> None:
    cost_model, candidate = mixed_cost_model(), mixed_candidate(dp=2)
    prices = prices_of(cost_model, candidate)
    ((cut,),) = prices.cut_rows([by_class(prices, slow=((2, 0),), quick=((0, 2),))])
    seconds, row = cost_model.costs(candidate, (0, 1, 2, 3, 4, 5)).messages.rows()
    assert np.array_equal(prices.cut_time_s[cut.row], seconds[row[0]])


def test_equal_cuts_share_a_row() -> None:
    prices = prices_of(mixed_cost_model(), mixed_candidate(dp=2))
    relation = by_class(prices, slow=((2, 0),), quick=((0, 2),))
    turned = by_class(prices, slow=((0, 2),), quick=((2, 0),))
    first, second, again = prices.cut_rows([relation, turned, relation])
    assert first == again
    assert first[0].row == second[0].row


def test_messages_within_a_node_are_cheaper() -> None:
    prices = prices_of(mixed_cost_model(), mixed_candidate())
    ((inside,), (across,)) = prices.cut_rows(
        [by_class(prices, quick=((1, 1),)), by_class(prices, quick=((1, 0), (0, 1)))]
    )
    inner = slice(1, -1)
    assert (prices.cut_time_s[inside.row][inner] < prices.cut_time_s[across.row][inner]).all()


def test_only_prices_that_nothing_undercuts_are_kept() -> None:
    prices = prices_of(mixed_cost_model(), mixed_candidate(dp=2))
    # Two units on each of two nodes: staying within the nodes beats every exchange.
    ((kept,),) = prices.cut_rows([by_class(prices, quick=((1, 1), (1, 1)))])
    assert kept.matching == ((0, 0, 1), (1, 1, 1))


@pytest.mark.parametrize(
    ("ends", "placement"),
    [
        (((1, 0), (0, 1)), (2, 0, 1, 3, 5, 4)),
        (((1, 1),), (2, 0, 1, 4, 5, 3)),
    ],
)
def test_a_tied_weight_takes_what_the_cost_model_says(
    ends: Pairs, placement: tuple[int, ...]
) -> None:
    tied, untied = mixed_cost_model(tied=True), mixed_cost_model()
    candidate = mixed_candidate()
    prices = prices_of(tied, candidate)
    bounds = (0, 4, 5, 6, 7, 8, 11)  # the first stage is the slowest to update
    with_it, without = (
        model.costs(candidate, placement).step_ends.at(bounds) for model in (tied, untied)
    )
    tied_s = prices.tied_s(by_class(prices, quick=ends))
    assert tied_s == pytest.approx(with_it.gradient_sync_s - without.gradient_sync_s)
    assert prices_of(untied, candidate).tied_s(by_class(prices, quick=ends)) == 0.0
