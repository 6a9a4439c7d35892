import json
from typing import Any

import pytest

from amp_ray.trials.own_program.metrics import read_told
from amp_ray.trials.result import Measurement, MissingRankError


def record(rank: int = 0, **changes: Any) -> dict[str, Any]:  # noqa: ANN401 - any JSON
    return {
        "trial_id": "t",
        "rank": rank,
        "num_ranks": 2,
        "stage": None,
        "step_s": [3.0, 1.0, 2.0],
        "peak_memory_bytes": None,
        **changes,
    }


def files(*records: dict[str, Any]) -> dict[str, bytes]:
    return {f"metric-rank-{told['rank']}.json": json.dumps(told).encode() for told in records}


def read(told: dict[str, bytes], num_warmup_steps: int = 1) -> Measurement:
    return read_told(told, "t", num_warmup_steps=num_warmup_steps)


def test_the_slowest_rank_counts_at_every_step() -> None:
    found = read(files(record(0), record(1, step_s=[1, 4.0, 1.5])))
    assert found == Measurement(step_time_s=(3.0, 4.0, 2.0), num_warmup_steps=1)


def test_one_rank_may_tell_alone() -> None:
    assert read(files(record(1))).step_time_s == (3.0, 1.0, 2.0)


@pytest.mark.parametrize("missing", range(3))
def test_of_several_ranks_none_may_be_missing(missing: int) -> None:
    """It may be the slowest."""
    ranks = [record(rank, num_ranks=3) for rank in range(3) if rank != missing]
    with pytest.raises(MissingRankError, match=f"2 of 3 ranks .* not rank {missing}: ") as raised:
        read(files(*ranks))
    assert raised.value.rank == missing


def test_a_rank_that_did_not_finish_its_file_is_missed() -> None:
    with pytest.raises(MissingRankError, match="rank 1 told steps and did not write") as raised:
        read(files(record(0), record(1, step_s=None)))
    assert raised.value.rank == 1


def test_a_process_per_node_tells_for_all_its_ranks() -> None:
    nodes = [record(node, num_ranks=8, num_files=2) for node in range(2)]
    assert read(files(*nodes)).step_time_s == (3.0, 1.0, 2.0)


def test_ranks_are_sorted_by_number() -> None:
    ranks = [record(rank, step_s=[1.0] * (3 + rank // 10)) for rank in (10, 2)]
    with pytest.raises(ValueError, match=r"\(rank 2: 3, rank 10: 4\)"):
        read(files(*ranks))


def test_peaks_are_those_of_the_stages() -> None:
    ranks = [
        record(rank, num_ranks=4, stage=rank // 2, peak_memory_bytes=5 + rank) for rank in range(4)
    ]
    assert read(files(*ranks)).peak_memory_bytes == (6, 8)


def test_without_stages_the_peak_is_that_of_the_trial() -> None:
    ranks = [record(0, peak_memory_bytes=5), record(1, stage=0, peak_memory_bytes=7)]
    assert read(files(*ranks)).peak_memory_bytes == (7,)


def test_stages_that_leave_one_out_are_no_stages() -> None:
    ranks = [record(rank, stage=2 * rank, peak_memory_bytes=5) for rank in range(2)]
    assert read(files(*ranks)).peak_memory_bytes == (5,)


def test_a_peak_that_one_rank_does_not_tell_is_unknown() -> None:
    assert read(files(record(0, peak_memory_bytes=5), record(1))).peak_memory_bytes == ()
    assert read(files(record(0, peak_memory_bytes=5))).peak_memory_bytes == ()


def test_a_program_may_write_the_result_itself() -> None:
    result = {"trial_id": "t", "step_s": [3, 1, 2], "peak_memory_bytes": 5}
    found = read({"result.json": json.dumps(result).encode()})
    assert found == Measurement(
        step_time_s=(3.0, 1.0, 2.0), num_warmup_steps=1, peak_memory_bytes=(5,)
    )


def test_a_result_may_name_its_own_warm_up() -> None:
    result = {"trial_id": "t", "step_s": [3, 1, 2], "warmup_steps": 2}
    assert read({"result.json": json.dumps(result).encode()}).num_warmup_steps == 2


def test_what_ranks_told_counts_before_a_result() -> None:
    both = {**files(record(0)), "result.json": b"{}"}
    assert read(both).step_time_s == (3.0, 1.0, 2.0)


def test_silence_is_refused_and_says_what_to_call() -> None:
    with pytest.raises(ValueError, match=r"no rank called report_step.*of amp_ray_metric"):
        read({"rank-0.log": b"done"})


@pytest.mark.parametrize("steps", [[1.0, 0.0, 1.0], [1.0, -2.0], [1.0, float("nan")]])
def test_times_that_no_step_takes_are_refused(steps: list[float]) -> None:
    with pytest.raises(ValueError, match="entry 1 of rank 0 says that a step took"):
        read(files(record(0, step_s=steps)))


@pytest.mark.parametrize("steps", [[], [1.0]])
def test_no_step_after_the_warm_up_is_refused(steps: list[float]) -> None:
    with pytest.raises(ValueError, match=f"told {len(steps)} steps, none of them after 1 warm-up"):
        read(files(record(0, step_s=steps)))


def test_another_trials_file_is_refused() -> None:
    with pytest.raises(ValueError, match=r"metric-rank-0\.json is of trial 'u', not of 't'"):
        read(files(record(0, trial_id="u")))


@pytest.mark.parametrize(
    "data",
    [
        b"{",
        b"[]",
        b"null",
        b"\xff",
        b"{}",
        json.dumps(record(num_ranks="x")).encode(),
        json.dumps(record(step_s=3)).encode(),
        json.dumps(record(step_s=["x"])).encode(),
        json.dumps(record(stage="first")).encode(),
        json.dumps(record(peak_memory_bytes=-1)).encode(),
    ],
)
def test_a_file_of_another_form_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"metric-rank-0\.json is not what amp_ray_metric\.py"):
        read({"metric-rank-0.json": data})
