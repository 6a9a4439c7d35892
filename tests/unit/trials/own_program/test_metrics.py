import json
from collections.abc import Mapping
from typing import Any, Literal

import pytest

from amp_ray.inputs.own_program import BuiltIn, Pattern
from amp_ray.trials.own_program.metrics import (
    formats_of,
    log_lines,
    read_logs,
    read_told,
    words_of,
)
from amp_ray.trials.result import Measurement, MissingRankError

MEGATRON_LINE = (
    " [2025-03-01 10:00:0{n}] iteration {n:8d}/      25 | consumed samples: {n:12d} | "
    "elapsed time per iteration (ms): {ms} | throughput per GPU (TFLOP/s/GPU): 1.2 | "
    "learning rate: 1.5E-04 | global batch size:     8 | lm loss: 1.0E+01 |\n"
)
"""As Megatron-LM prints it."""

PIPELINE_LINE = "steps: {n} loss: 4.8527 iter time (s): {s} samples/sec: 14.981\n"
"""As DeepSpeed 0.19.8 prints it: runtime/pipe/engine.py."""

ENGINE_LINE = (
    "[2025-03-01 10:00:00,000] [INFO] [timer.py:264:stop] epoch=0/micro_step={n}/global_step={n}, "
    "RunningAvgSamplesPerSec=15.5, CurrSamplesPerSec={rate}, MemAllocated=0.1GB, "
    "MaxMemAllocated=0.2GB\n"
)
"""As DeepSpeed 0.19.8 prints it: utils/timer.py."""


def read(
    logs: Mapping[str, str | bytes],
    metric: BuiltIn | Pattern,
    num_warmup_steps: int = 0,
    samples: int = 8,
) -> Measurement:
    files = {name: log.encode() if isinstance(log, str) else log for name, log in logs.items()}
    return read_logs(files, formats_of(metric), num_warmup_steps=num_warmup_steps, samples=samples)


def own(pattern: str = r"took ([\d.]+)", unit: Literal["s", "ms", "us"] = "s") -> Pattern:
    return Pattern(pattern=pattern, unit=unit)


def megatron(*entries: tuple[int, float]) -> str:
    return "".join(MEGATRON_LINE.format(n=number, ms=ms) for number, ms in entries)


def engine(*entries: tuple[int, float]) -> str:
    return "".join(ENGINE_LINE.format(n=number, rate=rate) for number, rate in entries)


LINES: dict[str, tuple[BuiltIn | Pattern, str | bytes, tuple[float, ...]]] = {
    "DeepSpeed's pipeline": (
        "deepspeed",
        "".join(PIPELINE_LINE.format(n=n, s=s) for n, s in ((1, "0.900"), (2, "0.534"))),
        (0.9, 8 / 14.981),
    ),
    "a line with more losses": (
        "deepspeed",
        "steps: 1 loss: 4.8 aux: 0.1 router: 2 iter time (s): 0.534 samples/sec: 14.981\n",
        (8 / 14.981,),
    ),
    "a rate of samples": ("deepspeed", engine((3, 16.0), (4, 3.2)), (0.5, 2.5)),
    "a rate, which has more digits than a short time": (
        "deepspeed",
        "steps: 1 loss: 1.2 iter time (s): 0.004 samples/sec: 2258.645\n",
        (8 / 2258.645,),
    ),
    "a rate of another batch, which is not believed": (
        "deepspeed",
        "steps: 1 loss: 1.2 iter time (s): 0.004 samples/sec: 4517.29\n",
        (0.004,),
    ),
    "a time that is rounded to nothing": (
        "deepspeed",
        "steps: 1 loss: 1.2 iter time (s): 0.000 samples/sec: 20000.000\n",
        (0.0004,),
    ),
    "a pipeline's line before a rate": (
        "deepspeed",
        PIPELINE_LINE.format(n=3, s="0.500") + engine((3, 1.0)),
        (0.5,),
    ),
    "milliseconds": (
        own(r"took (\S+) ms", "ms"),
        "took 250 ms\nsomething else\ntook 1e3 ms\n",
        (0.25, 1.0),
    ),
    "ranks with torchrun's marks": (
        own("^took (.*)$"),
        "[default0]:took 1\n[default1]:took 3\n[default1]:took 2\n[default0]:took 4\n",
        (3.0, 4.0),
    ),
    "ranks with MPI's marks": (
        own("^took (.*)$"),
        "[1,0]<stdout>:took 1\n[1,1]<stdout>:took 3\n",
        (3.0,),
    ),
    "two times in one line": (own(r"took (\d)"), "took 1took 2\n", (1.0, 2.0)),
    "a named group with a back reference": (
        own(r"took (?P<rate>\d) then (?P=rate)$"),
        "took 1 then 2\ntook 2 then 2\n",
        (2.0,),
    ),
    "progress bars and colours": (
        own("^took (.*)$"),
        b"10%\r20%\r\x1b[32mtook\x1b[0m 1\x1b[K\r\n30%\r\x1b]0;title\x07took 2\r\n",
        (1.0, 2.0),
    ),
    "bytes that are no text": (own(), b"\xff\xfe\x00took 1\n", (1.0,)),
    "lines that run into each other": (
        "megatron",
        megatron((1, 300), (2, 400)).replace("|\n", "|"),
        (0.3, 0.4),
    ),
    "a line that another process broke": (
        "megatron",
        " iteration        1/      25 | elapsed time per iteration (ms): 12warning: slow\n"
        + megatron((2, 400)),
        (0.4,),
    ),
}


@pytest.mark.parametrize("name", LINES)
def test_times_are_read(name: str) -> None:
    metric, log, times = LINES[name]
    assert read({"rank-0.log": log}, metric).step_time_s == pytest.approx(times)


RANKS: dict[str, tuple[BuiltIn | Pattern, dict[str, str], tuple[float, ...]]] = {
    "Megatron's last rank": (
        "megatron",
        {"rank-0.log": "training ...\n", "rank-3.log": "x\n" + megatron((1, 1234.5), (2, 500.0))},
        (1.2345, 0.5),
    ),
    "the slowest rank of a step by its number": (
        "megatron",
        {"rank-0.log": megatron((1, 300), (2, 400)), "rank-1.log": megatron((2, 500))},
        (0.3, 0.5),
    ),
    "the slowest rank of a step by its position": (
        own(),
        {"rank-0.log": "took 1\ntook 4\n", "rank-1.log": "took 3\ntook 2\n"},
        (3.0, 4.0),
    ),
    "logs of ranks alone": (
        own(),
        {"notes.log": "took 1\n", "rank-0.log": "took 2\n", "rank-0.log.old": "took 3\n"},
        (2.0,),
    ),
}


@pytest.mark.parametrize("name", RANKS)
def test_ranks_are_combined(name: str) -> None:
    metric, logs, times = RANKS[name]
    assert read(logs, metric).step_time_s == pytest.approx(times)


@pytest.mark.parametrize(
    ("metric", "log", "asked", "counted"),
    [
        ("megatron", megatron((1, 900), (2, 500), (3, 500)), 1, 1),
        # Steps that an engine did not log count as its warm-up.
        ("deepspeed", engine(*((n, 16.0) for n in range(3, 8))), 4, 2),
        # A mean over steps that are warm-up in part is left out.
        ("megatron", megatron((10, 900), (20, 500), (30, 500)), 15, 2),
        # A run that goes on from a checkpoint warms up there.
        ("megatron", megatron((1001, 900), (1002, 500), (1003, 500)), 1, 1),
    ],
)
def test_entries_with_warm_up_steps_are_counted(
    metric: BuiltIn, log: str, asked: int, counted: int
) -> None:
    found = read({"rank-0.log": log}, metric, num_warmup_steps=asked)
    assert found.num_warmup_steps == counted


def test_a_long_line_takes_no_longer_than_its_length() -> None:
    log = " iteration 1/ 2 |" + " | x" * 200_000 + " steps: 1 loss: " * 100_000
    metrics: tuple[BuiltIn, ...] = ("megatron", "deepspeed")
    for metric in metrics:
        with pytest.raises(ValueError, match="never appeared"):
            read({"rank-0.log": log}, metric)


def test_lines_are_those_that_a_person_saw() -> None:
    assert list(log_lines(b"a\r\x1b[2Kb\n")) == ["a", "b", ""]


NO_TIME = "says that a step took"
REFUSED: dict[str, tuple[BuiltIn | Pattern, dict[str, str], int, str]] = {
    "unequal numbers": (
        own(),
        {"rank-0.log": "took 1\ntook 4\n", "rank-1.log": "took 3\n", "rank-2.log": "-\n"},
        0,
        r"\(rank-0\.log: 2, rank-1\.log: 1\)",
    ),
    "no number": (
        own(),
        {"rank-0.log": "took 1.2.3\n"},
        0,
        r"found '1\.2\.3', which is no number, in 'took 1\.2\.3'",
    ),
    "a group without text": (
        own(r"took( \d)?"),
        {"rank-0.log": "took\n"},
        0,
        "found None, which is no number",
    ),
    "no line of a pattern": (
        own(),
        {"rank-10.log": "done\n", "rank-2.log": "done\n"},
        0,
        r"never appeared: no line of rank-2\.log, rank-10\.log has 'took \(\[\\\\d\.\]\+\)'",
    ),
    "no line of DeepSpeed's": (
        "deepspeed",
        {},
        0,
        r"no line of any log has 'steps: N .*' or 'global_step=N",
    ),
    "warm-up alone": (
        own(),
        {"rank-0.log": "took 1\ntook 2\n"},
        2,
        "found 2 times, none of them after 2 warm-up steps",
    ),
    "one mean over everything": (
        "megatron",
        {"rank-0.log": megatron((25, 500))},
        5,
        "found 1 times, none of them after 5 warm-up steps",
    ),
    **{
        f"time {text}": (
            own(r"took (\S+)"),
            {"rank-0.log": f"took 1\ntook {text}\n"},
            0,
            rf"entry 1 of rank-0\.log {NO_TIME}",
        )
        for text in ("0", "0.000", "-1", "nan", "inf", "1e-9")
    },
    **{
        f"rate {rate}": ("deepspeed", {"rank-0.log": engine((3, float(rate)))}, 0, NO_TIME)
        for rate in ("0.0", "-2.0", "nan", "inf", "-inf")
    },
    **{
        f"milliseconds {ms}": ("megatron", {"rank-0.log": megatron((1, float(ms)))}, 0, NO_TIME)
        for ms in ("nan", "0.0", "-3.0")
    },
}


@pytest.mark.parametrize("name", REFUSED)
def test_logs_without_times_are_refused(name: str) -> None:
    metric, logs, num_warmup_steps, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        read(logs, metric, num_warmup_steps=num_warmup_steps)


@pytest.mark.parametrize(
    ("metric", "line"),
    [
        ("megatron", MEGATRON_LINE.format(n=1, ms=2.0)),
        ("deepspeed", PIPELINE_LINE.format(n=1, s=0.5)),
        (own(), "it took 3.5"),
        (own(r"(?:took|in) ([0-9.]+) ms$"), "in 3.5 ms"),
        (own(r"(?i)TOOK ([0-9.]+)"), "took 3.5"),
        (own(r"steps?:? *([0-9.]+)"), "step 3.5"),
        (own(r"x*([0-9.]+)"), "3.5"),
        (own(r"a ([0-9.]+)|b"), "a 3.5"),
        (own(r"zeit für ([0-9.]+)"), "zeit für 3.5"),
        (own(r"\[time\] (?=3)([0-9.]+)"), "[time] 3.5"),
    ],
)
def test_every_line_that_tells_a_time_has_one_of_the_words(
    metric: BuiltIn | Pattern, line: str
) -> None:
    assert any(word in line for word in words_of(formats_of(metric)))


def test_words_are_as_long_as_can_be() -> None:
    assert words_of(formats_of(own(r"step took ([0-9.]+) ms"))) == ("step took ",)


# ------------------------------------------------------------------- files of the helper module


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


def read_files(told: dict[str, bytes], num_warmup_steps: int = 1) -> Measurement:
    return read_told(told, "t", num_warmup_steps=num_warmup_steps)


def test_the_slowest_rank_counts_at_every_step() -> None:
    found = read_files(files(record(0), record(1, step_s=[1, 4.0, 1.5])))
    assert found == Measurement(step_time_s=(3.0, 4.0, 2.0), num_warmup_steps=1)


def test_one_rank_may_tell_alone() -> None:
    assert read_files(files(record(1))).step_time_s == (3.0, 1.0, 2.0)


@pytest.mark.parametrize("missing", range(3))
def test_of_several_ranks_none_may_be_missing(missing: int) -> None:
    """It may be the slowest."""
    ranks = [record(rank, num_ranks=3) for rank in range(3) if rank != missing]
    with pytest.raises(MissingRankError, match=f"2 of 3 ranks .* not rank {missing}: ") as raised:
        read_files(files(*ranks))
    assert raised.value.rank == missing


def test_a_rank_that_did_not_finish_its_file_is_missed() -> None:
    with pytest.raises(MissingRankError, match="rank 1 told steps and did not write") as raised:
        read_files(files(record(0), record(1, step_s=None)))
    assert raised.value.rank == 1


def test_a_process_per_node_tells_for_all_its_ranks() -> None:
    nodes = [record(node, num_ranks=8, num_files=2) for node in range(2)]
    assert read_files(files(*nodes)).step_time_s == (3.0, 1.0, 2.0)


def test_ranks_are_sorted_by_number() -> None:
    ranks = [record(rank, step_s=[1.0] * (3 + rank // 10)) for rank in (10, 2)]
    with pytest.raises(ValueError, match=r"\(rank 2: 3, rank 10: 4\)"):
        read_files(files(*ranks))


@pytest.mark.parametrize(
    ("ranks", "peaks"),
    [
        (
            [
                record(rank, num_ranks=4, stage=rank // 2, peak_memory_bytes=5 + rank)
                for rank in range(4)
            ],
            (6, 8),
        ),
        # Without stages, or where one is left out, the peak is that of the trial.
        ([record(0, peak_memory_bytes=5), record(1, stage=0, peak_memory_bytes=7)], (7,)),
        ([record(rank, stage=2 * rank, peak_memory_bytes=5) for rank in range(2)], (5,)),
        # A peak that one rank does not tell is unknown.
        ([record(0, peak_memory_bytes=5), record(1)], ()),
        ([record(0, peak_memory_bytes=5)], ()),
    ],
)
def test_peaks_are_those_of_the_stages(ranks: list[dict[str, Any]], peaks: tuple[int, ...]) -> None:
    assert read_files(files(*ranks)).peak_memory_bytes == peaks


def test_a_program_may_write_the_result_itself() -> None:
    result = {"trial_id": "t", "step_s": [3, 1, 2], "peak_memory_bytes": 5}
    found = read_files({"result.json": json.dumps(result).encode()})
    assert found == Measurement(
        step_time_s=(3.0, 1.0, 2.0), num_warmup_steps=1, peak_memory_bytes=(5,)
    )


def test_a_result_may_name_its_own_warm_up() -> None:
    result = {"trial_id": "t", "step_s": [3, 1, 2], "warmup_steps": 2}
    assert read_files({"result.json": json.dumps(result).encode()}).num_warmup_steps == 2


def test_what_ranks_told_counts_before_a_result() -> None:
    both = {**files(record(0)), "result.json": b"{}"}
    assert read_files(both).step_time_s == (3.0, 1.0, 2.0)


def test_silence_is_refused_and_says_what_to_call() -> None:
    with pytest.raises(ValueError, match=r"no rank called report_step.*of amp_ray_metric"):
        read_files({"rank-0.log": b"done"})


@pytest.mark.parametrize("steps", [[1.0, 0.0, 1.0], [1.0, -2.0], [1.0, float("nan")]])
def test_times_that_no_step_takes_are_refused(steps: list[float]) -> None:
    with pytest.raises(ValueError, match="entry 1 of rank 0 says that a step took"):
        read_files(files(record(0, step_s=steps)))


@pytest.mark.parametrize("steps", [[], [1.0]])
def test_no_step_after_the_warm_up_is_refused(steps: list[float]) -> None:
    with pytest.raises(ValueError, match=f"told {len(steps)} steps, none of them after 1 warm-up"):
        read_files(files(record(0, step_s=steps)))


def test_another_trials_file_is_refused() -> None:
    with pytest.raises(ValueError, match=r"metric-rank-0\.json is of trial 'u', not of 't'"):
        read_files(files(record(0, trial_id="u")))


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
        read_files({"metric-rank-0.json": data})
