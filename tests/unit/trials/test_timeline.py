"""A timeline comes from a host: nothing of it is believed."""

import json
from typing import Any

import pytest

from amp_ray.trials.command import trial_reader
from amp_ray.trials.result import AllFiles, measured
from amp_ray.trials.timeline import read_timeline
from support.experiments import small_experiment

RANK = {"rank": 0, "host": "a", "stage": 0, "instructions": [["0F0", 0.0, 0.25]]}
GOOD = {"schema": 1, "trial_id": "t", "ranks": [RANK]}
LINK = '<a href="https://example.org">x</a>'
RESULT = b'{"trial_id": "t", "step_s": [0.5]}'


def changed(**keys: Any) -> dict[str, Any]:  # noqa: ANN401 - any JSON value
    return {**GOOD, "ranks": [{**RANK, **keys}]}


def span(*values: object) -> dict[str, Any]:
    return changed(instructions=[["0F0", 0.0, 0.25], [*values]])


def test_a_timeline_is_read() -> None:
    other = {**RANK, "rank": 1, "host": "b\n\x1b[1m", "stage": 1, "tp_rank": 1, "instructions": []}
    first, second = read_timeline(
        json.dumps({**GOOD, "ranks": [RANK, other]}).encode(), num_ranks=2, trial_id="t"
    )
    assert (first.rank, first.host, first.stage, first.is_first) == (0, "a", 0, True)
    assert first.spans == (("0F0", 0.0, 0.25),)
    assert (second.host, second.is_first, second.spans) == (r"b \x1b[1m", False, ())


WRONG: dict[str, tuple[object, str]] = {
    "no object": ([], "must be a JSON object"),
    "another trial": ({**GOOD, "trial_id": "old"}, "of trial 'old', not of 't'"),
    "another schema": ({**GOOD, "schema": 2}, "another schema than 1"),
    "no ranks": ({"trial_id": "t"}, "key 'ranks' is missing"),
    "no list of ranks": ({**GOOD, "ranks": {"a": 1}}, "ranks: found .* expected a list"),
    "a rank twice": ({**GOOD, "ranks": [RANK] * 2}, "has a rank twice"),
    "a rank that is a text": ({**GOOD, "ranks": ["x"]}, "ranks.0: found 'x'; expected a mapping"),
    "a rank that nobody has": (changed(rank=4), "an index 4 of 4 ranks"),
    "a rank that is true": (changed(rank=True), "ranks.0.rank: found true; expected an integer"),
    "no stage": (changed(stage=None), "ranks.0.stage: found nothing"),
    "markup as a stage": (changed(stage=LINK), "ranks.0.stage: found '<a href"),
    "a fraction as an index": (changed(tp_rank=0.5), "ranks.0.tp_rank: found 0.5"),
    "a number as a host": (changed(host=7), "ranks.0.host: found 7; expected text"),
    "a long host": (changed(host="x" * 300), "ranks.0.host: found 'xxx"),
    "no instructions": (changed(instructions=None), "instructions: found nothing; expected a list"),
    "a number as an instruction": (changed(instructions=[1]), "instructions.0: found 1"),
    "two values": (span("0F0", 1.0), "instructions.1.2: entry 2 is missing"),
    "markup as an instruction": (span(LINK, 0, 1), "instructions.1.0: found '<a href"),
    "markup behind an instruction": (span(f"0F0{LINK}", 0, 1), "instructions.1.0: found '0F0<a"),
    "a long instruction": (span("0F" + "1" * 5000, 0, 1), "instructions.1.0: found '0F111"),
    "a line feed": (span("0F0\n", 0, 1), "instructions.1.0: found"),
    "a text as a time": (span("0F0", "0", 1), "instructions.1.1: found '0'; expected a number"),
    "true as a time": (span(*["0F0", 0, True]), "instructions.1.2: found true; expected a number"),
    "nan": (span("0F0", float("nan"), 1), "instructions.1.1: found nan"),
    "infinity": (span("0F0", 0, float("inf")), "instructions.1.2: found inf"),
    "a huge integer": (span("0F0", 0, 10**400), "instructions.1.2: found 1000"),
    "a negative time": (span("0F0", -1, 0), "instructions.1.1: found -1"),
    "an end before the begin": (span("0F0", 2, 1), "expected an end after the begin"),
}


@pytest.mark.parametrize(("record", "message"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_named(record: object, message: str) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        read_timeline(json.dumps(record).encode(), num_ranks=4, trial_id="t")
    assert len(str(raised.value)) < 300


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\xff\xfe\xff", "is not JSON"),
        (b'{"ranks": [' + b"9" * 5000 + b"]}", "is not JSON"),
        (b"[" * 100_000, "is nested too deeply"),
        (b"{}" + b" " * 2**24, "has 16777218 bytes"),
        (b"[" + b"0," * 2**21, "has more than 2097152 values"),
    ],
)
def test_what_would_take_much_memory_is_refused_before(data: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_timeline(data, num_ranks=4)


@pytest.mark.parametrize(
    ("timeline", "remarks"),
    [
        (json.dumps(GOOD).encode(), ()),
        (b"{", ("no timeline: timeline.json is not JSON",)),
        (json.dumps(changed(stage=LINK)).encode(), ("no timeline: timeline.json: ranks.0.st",)),
    ],
)
def test_a_wrong_timeline_is_a_remark_of_a_trial_that_is_measured(
    timeline: bytes, remarks: tuple[str, ...]
) -> None:
    files = AllFiles({"a": {"result.json": RESULT, "timeline.json": timeline}})
    outcome = measured(trial_reader(small_experiment())(files, "t"), wall_s=1.0)
    assert outcome.mean_s == 0.5
    assert len(outcome.remarks) == len(remarks)
    assert all(map(str.startswith, outcome.remarks, remarks))


def test_no_other_host_than_the_first_tells_a_timeline() -> None:
    files = AllFiles({"a": {"result.json": RESULT}, "b": {"timeline.json": b"{"}})
    assert trial_reader(small_experiment())(files, "t").remarks == ()
