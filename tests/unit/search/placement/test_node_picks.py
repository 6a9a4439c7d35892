from amp_ray.search.placement.node_picks import (
    AWAITS_FIRST,
    NodeState,
    Pick,
    any_picks,
    even_picks,
    row_picks,
)

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


def test_nodes_in_a_row_are_finished_first() -> None:
    begun = NodeState(used=2, last=2)
    ((pick,),) = row_picks([(FRESH, 2), (begun, 1)], 4, 2, 2)
    assert pick.before == begun
    assert pick.after.used == 4


def test_nodes_in_a_row_are_taken_by_a_common_divisor() -> None:
    assert list(row_picks([(FRESH, 3)], 4, 3, 6)) == []
    assert [parts(picks) for picks in row_picks([(FRESH, 3)], 4, 6, 6)] == [[4, 2]] * 2


def test_nodes_in_a_row_promise_no_more_than_the_next_stage() -> None:
    found = list(row_picks([(FRESH, 2)], 4, 3, 3))
    assert found == [(Pick(before=FRESH, after=NodeState(used=3, last=3)),)]
    begun = NodeState(used=3, last=3)
    joined = [
        [(pick.after.promised, pick.after.joined) for pick in picks]
        for picks in row_picks([(FRESH, 1), (begun, 1)], 4, 3, 3)
    ]
    assert joined == [[(1, 1), (1, 1)], [(1, 1), (2, 1)]]


def test_rows_are_among_all_picks() -> None:
    groups = [(FRESH, 2), (HALF, 1)]
    for units in range(5):
        every = {tuple(sorted(picks)) for picks in any_picks(groups, 2, units, 4)}
        assert {tuple(sorted(picks)) for picks in row_picks(groups, 2, units, 4)} <= every


def test_a_row_has_no_more_than_its_nodes() -> None:
    assert list(row_picks([(HALF, 1)], 2, 2, 2)) == []
