import pytest

from amp_ray.tuner.state import CHUNK, Log


def log_of(num_items: int) -> Log[int]:
    """A log that counts."""
    log: Log[int] = Log()
    for item in range(num_items):
        log = log.appended(item)
    return log


@pytest.mark.parametrize("num_items", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK])
def test_a_log_holds_what_was_appended(num_items: int) -> None:
    log = log_of(num_items)
    assert len(log) == num_items
    assert list(log) == list(range(num_items))


def test_an_older_version_stays_as_it_was() -> None:
    before = log_of(CHUNK + 2)
    after = before.replaced(1, -1).appended(7)
    assert before == log_of(CHUNK + 2)
    assert (before[1], after[1], after[-1]) == (1, -1, 7)


def test_replacing_changes_one_place() -> None:
    changed = log_of(2 * CHUNK).replaced(CHUNK + 3, -1)
    assert [item for item in changed if item < 0] == [-1]
    assert changed[CHUNK + 3] == -1


def test_a_log_is_indexed_like_a_tuple() -> None:
    log, plain = log_of(CHUNK + 5), tuple(range(CHUNK + 5))
    assert log[-2] == plain[-2]
    assert log[2:-2:7] == plain[2:-2:7]


@pytest.mark.parametrize("index", [3, -4])
def test_an_index_that_is_not_there_is_refused(index: int) -> None:
    with pytest.raises(IndexError, match="has 3 items, asked for number"):
        log_of(3)[index]
    with pytest.raises(IndexError, match="has 3 items"):
        log_of(3).replaced(index, 0)
