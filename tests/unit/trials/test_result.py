import json
from typing import Any

import pytest

from amp_ray.trials.own_program.metrics import read_told
from amp_ray.trials.result import AllFiles, Measurement, MissingRankError, measured, read_result

GOOD = {"trial_id": "t", "step_s": [3, 1.0, 1.0, 1.0]}


def files(record: object) -> dict[str, bytes]:
    return {"result.json": json.dumps(record).encode()}


def test_a_result_is_read() -> None:
    expected = Measurement(step_time_s=(3.0, 1.0, 1.0, 1.0))
    assert read_result(files(GOOD), "t") == expected


@pytest.mark.parametrize(
    ("more", "peaks"),
    [
        ({}, ()),
        ({"peak_memory_bytes": 5}, (5,)),
        ({"stages": [{"peak_memory_bytes": 5}, {"peak_memory_bytes": 6}]}, (5, 6)),
        ({"stages": [{"peak_memory_bytes": 5}, {}], "peak_memory_bytes": 7}, (7,)),
        ({"stages": []}, ()),
    ],
)
def test_peaks_are_those_of_the_stages_or_of_the_trial(
    more: dict[str, Any], peaks: tuple[int, ...]
) -> None:
    assert read_result(files({**GOOD, **more}), "t").peak_memory_bytes == peaks


def test_a_missing_result_is_refused() -> None:
    with pytest.raises(ValueError, match=r"without writing result\.json"):
        read_result({}, "t")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"{", "is not JSON"),
        (b"[]", "must be a JSON object"),
        (json.dumps({**GOOD, "trial_id": "old"}).encode(), "of trial 'old', not of 't'"),
        (json.dumps({"trial_id": "t"}).encode(), "found step_s None"),
        (json.dumps({**GOOD, "step_s": [1, 0]}).encode(), "entry 1 .* took 0 s"),
        (json.dumps({**GOOD, "step_s": [True]}).encode(), r"found step_s \[True\]"),
        (json.dumps({**GOOD, "warmup_steps": 4}).encode(), "leave none to measure"),
        (json.dumps({**GOOD, "step_s": []}).encode(), "leave none to measure"),
    ],
)
def test_a_wrong_result_is_refused_with_what_is_wrong(data: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_result({"result.json": data}, "t")


def test_known_warmup_steps_do_not_count_and_more_are_found() -> None:
    measurement = Measurement(
        step_time_s=(9.0, 2.0, 1.0, 1.0, 1.0), num_warmup_steps=1, peak_memory_bytes=(7,)
    )
    outcome = measured(measurement, wall_s=20.0)
    assert (outcome.num_warmup_steps, outcome.measured_s) == (2, 1.0)
    assert (outcome.step_time_s, outcome.peak_memory_bytes) == (measurement.step_time_s, (7,))


def test_files_of_all_hosts_come_together_in_the_order_of_the_hosts() -> None:
    found = {"a": {"rank-0.log": b"a", "x": b"a"}, "b": {"rank-1.log": b"b", "x": b"b"}}
    assert dict(AllFiles(found)) == {"rank-0.log": b"a", "rank-1.log": b"b", "x": b"a"}


def test_a_result_of_another_host_than_the_first_is_left_out() -> None:
    assert dict(AllFiles({"a": {}, "b": {"result.json": b"{}"}})) == {}


def test_the_incomplete_log_of_a_rank_is_missed_by_whoever_reads_it() -> None:
    found = {"a": {"rank-0.log": b"a", "result.json": b"{}"}, "b": {"rank-1.log": b"b"}}
    files = AllFiles(found, {"rank-1.log": (1, "no space left")})
    assert files["result.json"] == b"{}"
    assert (len(files), "rank-1.log" in files) == (3, True)
    with pytest.raises(MissingRankError, match=r"rank-1\.log cannot be used: no space") as raised:
        _ = files["rank-1.log"]
    assert raised.value.rank == 1


def test_two_hosts_cannot_speak_for_one_rank() -> None:
    files = AllFiles({name: {"metric-rank-1.json": b"{}", "x": b"x"} for name in "ab"})
    assert files["x"] == b"x"
    with pytest.raises(MissingRankError, match="b sent it, and another host before"):
        _ = files["metric-rank-1.json"]


HOSTILE = {
    "infinite": b'{"trial_id": "t", "step_s": [1, Infinity]}',
    "overflows": b'{"trial_id": "t", "step_s": [1, 1e999]}',
    "no number": b'{"trial_id": "t", "step_s": [1, NaN]}',
    "huge integer": b'{"trial_id": "t", "step_s": [1, 1%s]}' % (b"0" * 4000),
    "too many digits": b'{"trial_id": "t", "step_s": [1, 1%s]}' % (b"0" * 40_000),
    "negative": b'{"trial_id": "t", "step_s": [1, -1e308]}',
    "negative integer": b'{"trial_id": "t", "step_s": [-1%s]}' % (b"0" * 4000),
    "longer than any trial": b'{"trial_id": "t", "step_s": [1, 1e300]}',
    "nested": b'{"trial_id": "t", "step_s": %s}' % (b"[" * 100_000),
    "nested and closed": b'{"trial_id": "t", "step_s": %s1%s}' % (b"[" * 900, b"]" * 900),
    "nested names": b'{"trial_id": %s1%s, "step_s": [1]}' % (b'{"a":' * 900, b"}" * 900),
    "negative memory": b'{"trial_id": "t", "step_s": [1], "peak_memory_bytes": -1}',
    "more memory than there is": b'{"trial_id": "t", "step_s": [1], "peak_memory_bytes": 1%s}'
    % (b"0" * 4000),
    "infinite memory": b'{"trial_id": "t", "step_s": [1], "peak_memory_bytes": 1e999}',
    "text as memory": b'{"trial_id": "t", "step_s": [1], "stages": [{"peak_memory_bytes": "x"}]}',
    "huge warm-up": b'{"trial_id": "t", "step_s": [1], "warmup_steps": 1%s}' % (b"0" * 4000),
    "many bytes": b'{"trial_id": "t", "step_s": [1], "x": "%s"}' % bytes(2**23),
    "long id": b'{"trial_id": "%s", "step_s": [1]}' % (b"t" * 10**6),
    "many steps that are none": b'{"trial_id": "t", "step_s": ["%s"]}' % (b"x" * 10**6),
}


OF_RESULTS_ONLY = ("huge warm-up", "text as memory")


@pytest.mark.parametrize(
    ("name", "case"),
    [
        *(("result.json", case) for case in HOSTILE),
        *(("metric-rank-3.json", case) for case in HOSTILE if case not in OF_RESULTS_ONLY),
    ],
)
def test_what_no_step_takes_and_no_device_has_is_refused_in_one_line(name: str, case: str) -> None:
    content = HOSTILE[case].replace(b"{", b'{"num_ranks": 4, ', 1)
    with pytest.raises(ValueError, match=r".") as caught:
        read_told({name: content}, "t", num_warmup_steps=0)
    text = str(caught.value)
    assert type(caught.value) in {ValueError, MissingRankError}
    assert getattr(caught.value, "rank", 3) == 3
    assert len(text) < 300
    assert text.isprintable()
    assert name in text or "rank 3" in text
