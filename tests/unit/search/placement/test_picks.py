from amp_ray.search.placement.picks import AWAITS_FIRST, NodeState, Pick, any_picks, even_picks

FRESH = NodeState()
HALF = NodeState(used=1, last=1)


def parts(picks: tuple[Pick, ...]) -> list[int]:
    """Units that each node gives, most first."""
    return sorted((pick.after.used - pick.before.used for pick in picks), reverse=True)


def test_equal_nodes_are_interchangeable() -> None:
    found = [parts(picks) for picks in any_picks([(FRESH, 3)], 2, 2, 2)]
    assert found.count([2]) == 1
    assert [1, 1] in found
    assert [1, 0, 1] not in found


def test_nothing_is_one_way_to_take_nothing() -> None:
    assert list(any_picks([(FRESH, 2)], 2, 0, 2)) == [()]


def test_no_node_gives_more_than_it_has_left() -> None:
    assert list(any_picks([(HALF, 1)], 2, 2, 2)) == []


def test_a_stage_within_a_node_promises_nothing() -> None:
    ((pick,),) = any_picks([(FRESH, 1)], 4, 2, 2)
    assert pick.after == NodeState(used=2, last=2)


def test_a_stage_across_nodes_promises_in_how_many_such_stages_its_node_will_be() -> None:
    found = list(any_picks([(FRESH, 1)], 3, 1, 2))
    assert [pick.after.promised for (pick,) in found] == [1, 2, 3]
    assert {pick.after.joined for (pick,) in found} == {1}


def test_a_promise_cannot_be_exceeded() -> None:
    spent = NodeState(used=1, last=1, promised=1, joined=1)
    assert list(any_picks([(spent, 1)], 3, 1, 2)) == []
    held = spent._replace(promised=2)
    ((pick,),) = any_picks([(held, 1)], 3, 1, 2)
    assert (pick.after.promised, pick.after.joined) == (2, 2)


def test_the_first_stage_is_remembered_where_it_is_awaited() -> None:
    awaiting = NodeState(home=AWAITS_FIRST)
    ((pick,),) = any_picks([(awaiting, 1)], 4, 2, 2)
    assert pick.after.home == 2


def test_even_picks_leave_all_begun_nodes_alike() -> None:
    groups = [(FRESH, 2), (HALF, 2)]
    for picks in even_picks(groups, 2, 2, 2):
        taken = [pick.before for pick in picks]
        begun = [pick.after.used for pick in picks if pick.after.used < 2]
        assert taken.count(HALF) in {0, 2}
        assert len(set(begun)) <= 1


def test_even_picks_are_among_all_picks() -> None:
    groups = [(FRESH, 2), (HALF, 1)]
    for units in range(5):
        every = {tuple(sorted(parts(picks))) for picks in any_picks(groups, 2, units, 4)}
        even = {tuple(sorted(parts(picks))) for picks in even_picks(groups, 2, units, 4)}
        assert even <= every
