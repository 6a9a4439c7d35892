"""What a user may get wrong about the search."""

from typing import Final

import pytest

from support.bad_input import Refused, edited

SEARCHES: Final = {
    "word for a flag": (
        ("{space: uniform}", "{tp_across_nodes: yes}"),
        "experiment.yaml:11: search.tp_across_nodes: found 'yes'; expected true or false",
    ),
    "key without a value": (
        ("search: {space: uniform}", "search:"),
        "experiment.yaml:11: search: found nothing; expected a mapping of keys",
    ),
    "text instead of a mapping": (
        ("search: {space: uniform}", "search: uniform"),
        "experiment.yaml:11: search: found 'uniform'; expected a mapping of keys",
    ),
    "unknown search space": (
        ("space: uniform", "space: everything"),
        "experiment.yaml:11: search.space: found 'everything'; expected 'uniform'",
    ),
    "operators in a space without": (
        ("{space: uniform}", "{per_operator: true}"),
        (
            "experiment.yaml:11: search.per_operator: operators are planned in space operator; the "
            "space is uniform"
        ),
    ),
    "limits that leave nothing": (
        ("{space: uniform}", "{min_tp: 4}"),
        (
            "experiment.yaml:11: search: no candidate for 4 devices and global_batch_size 8: no tp "
            "within min_tp 4 divides the slots of every node (2); widen the limits or set"
        ),
    ),
    "sizes that do not divide the batch": (
        ("{space: uniform}", "{micro_batch_sizes: [3]}"),
        (
            "experiment.yaml:11: search: no candidate for 4 devices and global_batch_size 8: with "
            "tp 1, 2 and micro_batch_sizes [3] no dp x micro-batch size divides the batch; widen"
        ),
    ),
}


@pytest.mark.parametrize(("replacement", "message"), SEARCHES.values(), ids=SEARCHES)
def test_a_wrong_search_is_led_to_its_line(
    refused: Refused, replacement: tuple[str, str], message: str
) -> None:
    assert message in refused({"experiment.yaml": edited(replacement)})
