from amp_ray.search.placement.improve import swap_replicas
from amp_ray.search.placement.simple_placements import Chains
from amp_ray.strategies.strategy import Strategy
from support.mixed_cluster import mixed_candidate, mixed_cost_model

BOUNDS = (0, 4, 7, 11)
CROSSED = (2, 4, 0, 1, 5, 3)
"""Both ends stand on both quick nodes, but the replicas that share a weight on different ones."""


def chains_of(*, tied: bool, slow_gib: float = 16) -> Chains:
    cost_model = mixed_cost_model(tied=tied, slow_gib=slow_gib)
    return Chains(cost_model=cost_model, candidate=mixed_candidate(dp=2))


def crossed(chains: Chains) -> Strategy:
    return Strategy.uniform(chains.candidate, BOUNDS, CROSSED)


def test_replicas_that_share_a_weight_come_together() -> None:
    chains = chains_of(tied=True)
    start = chains.estimate(crossed(chains))
    swapped = swap_replicas(chains, start)
    assert swapped.strategy.placement == (2, 4, 0, 1, 3, 5)
    assert swapped.iteration_time_s < start.iteration_time_s
    assert swapped.strategy.bounds == BOUNDS


def test_without_a_tied_weight_nothing_is_swapped() -> None:
    chains = chains_of(tied=False)
    start = chains.estimate(crossed(chains))
    assert swap_replicas(chains, start) is start


def test_what_cannot_run_is_left_as_it_is() -> None:
    chains = chains_of(tied=True, slow_gib=1)
    start = chains.estimate(crossed(chains))
    assert not start.feasible
    assert swap_replicas(chains, start) is start


def test_a_summit_is_left_as_it_is() -> None:
    chains = chains_of(tied=True)
    summit = swap_replicas(chains, chains.estimate(crossed(chains)))
    assert swap_replicas(chains, summit) is summit
