from math import factorial

import pytest

from amp_ray.search.placement.placement_prices import matchings


def test_one_unit_goes_to_the_only_place() -> None:
    assert matchings(((1, 0), (0, 1)), 4, 8) == (((0, 1, 1),),)


def test_what_can_stay_in_its_node_does_in_the_first_matching() -> None:
    assert matchings(((2, 2), (1, 1)), 4, 8)[0] == ((0, 0, 2), (1, 1, 1))


def test_few_units_are_matched_in_every_way() -> None:
    pairs = tuple((1, 1) for _ in range(4))
    found = matchings(pairs, 4, 8)
    assert len(found) == len(set(found)) == factorial(4)


@pytest.mark.parametrize("pairs", [((2, 1), (1, 0), (0, 2)), ((4, 4), (4, 2), (0, 2)), ((8, 8),)])
def test_every_unit_sends_and_receives_once(pairs: tuple[tuple[int, int], ...]) -> None:
    for matching in matchings(pairs, 4, 8):
        for node, (sent, received) in enumerate(pairs):
            assert sum(units for i, _, units in matching if i == node) == sent
            assert sum(units for _, j, units in matching if j == node) == received


def test_many_units_keep_all_they_can_in_their_nodes() -> None:
    found = matchings(((4, 2), (4, 2), (0, 2), (0, 2)), 4, 8)
    assert 1 < len(found) <= 8
    assert all({(0, 0, 2), (1, 1, 2)} <= set(matching) for matching in found)
