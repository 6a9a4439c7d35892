from collections.abc import Mapping
from typing import Literal

import pytest

from amp_ray.inputs.experiment import BuiltIn, Pattern
from amp_ray.trials.own_program.metrics import formats_of, log_lines, read_logs, words_of
from amp_ray.trials.result import Measurement

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


# ------------------------------------------------------------------------ built-in formats


def test_megatrons_times_are_read_from_the_last_rank() -> None:
    logs = {
        "rank-0.log": "training ...\n",
        "rank-3.log": "x\n" + megatron((1, 1234.5), (2, 500.0), (3, 501.0)),
    }
    found = read(logs, "megatron", num_warmup_steps=1)
    assert found.step_time_s == pytest.approx((1.2345, 0.5, 0.501))
    assert found.num_warmup_steps == 1


def test_deepspeeds_pipeline_times_are_read() -> None:
    log = "".join(PIPELINE_LINE.format(n=n, s=s) for n, s in ((1, "0.900"), (2, "0.534")))
    assert read({"rank-0.log": log}, "deepspeed").step_time_s == pytest.approx(
        (0.9, 0.534), abs=0.0005
    )


def test_deepspeeds_pipeline_line_may_name_more_losses() -> None:
    log = "steps: 1 loss: 4.8 aux: 0.1 router: 2 iter time (s): 0.534 samples/sec: 14.981\n"
    assert read({"rank-0.log": log}, "deepspeed").step_time_s == pytest.approx((0.534,), abs=0.0005)


def test_a_rate_of_samples_becomes_a_time() -> None:
    log = "".join(ENGINE_LINE.format(n=n, rate=rate) for n, rate in ((3, 16.0), (4, 3.2)))
    assert read({"rank-0.log": log}, "deepspeed", samples=8).step_time_s == (0.5, 2.5)


def test_steps_that_an_engine_did_not_log_count_as_its_warm_up() -> None:
    log = "".join(ENGINE_LINE.format(n=n, rate=16.0) for n in range(3, 8))
    assert read({"rank-0.log": log}, "deepspeed", num_warmup_steps=4).num_warmup_steps == 2


def test_a_rate_has_more_digits_than_a_short_time() -> None:
    log = "steps: 1 loss: 1.2 iter time (s): 0.004 samples/sec: 2258.645\n"
    assert read({"rank-0.log": log}, "deepspeed").step_time_s == pytest.approx((8 / 2258.645,))


def test_a_rate_of_another_batch_is_not_believed() -> None:
    log = "steps: 1 loss: 1.2 iter time (s): 0.004 samples/sec: 2258.645\n"
    assert read({"rank-0.log": log}, "deepspeed", samples=16).step_time_s == (0.004,)


def test_a_time_that_is_rounded_to_nothing_is_known_by_its_rate() -> None:
    log = "steps: 1 loss: 1.2 iter time (s): 0.000 samples/sec: 20000.000\n"
    assert read({"rank-0.log": log}, "deepspeed").step_time_s == (0.0004,)


def test_a_pipelines_own_line_counts_before_a_rate() -> None:
    log = PIPELINE_LINE.format(n=3, s="0.500") + ENGINE_LINE.format(n=3, rate=1.0)
    assert read({"rank-0.log": log}, "deepspeed").step_time_s == (0.5,)


def test_a_mean_over_steps_that_are_warm_up_in_part_is_left_out() -> None:
    log = megatron((10, 900), (20, 500), (30, 500))
    assert read({"rank-0.log": log}, "megatron", num_warmup_steps=15).num_warmup_steps == 2


def test_a_run_that_goes_on_from_a_checkpoint_warms_up_there() -> None:
    log = megatron((1001, 900), (1002, 500), (1003, 500))
    assert read({"rank-0.log": log}, "megatron", num_warmup_steps=1).num_warmup_steps == 1


def test_a_step_that_is_logged_twice_counts_once_and_the_slower_way() -> None:
    logs = {"rank-0.log": megatron((1, 300), (2, 400)), "rank-1.log": megatron((2, 500))}
    assert read(logs, "megatron").step_time_s == (0.3, 0.5)


# --------------------------------------------------------------------------- own patterns


def test_an_own_pattern_is_read_in_its_unit() -> None:
    log = "took 250 ms\nsomething else\ntook 1e3 ms\n"
    found = read({"rank-0.log": log}, own(r"took (\S+) ms", "ms"))
    assert found.step_time_s == pytest.approx((0.25, 1.0))


def test_the_slowest_rank_counts_at_every_step() -> None:
    logs = {"rank-0.log": "took 1\ntook 4\n", "rank-1.log": "took 3\ntook 2\n"}
    assert read(logs, own()).step_time_s == (3.0, 4.0)


def test_ranks_that_tell_unequally_often_are_refused_with_the_counts() -> None:
    logs = {"rank-0.log": "took 1\ntook 4\n", "rank-1.log": "took 3\n", "rank-2.log": "-\n"}
    with pytest.raises(ValueError, match=r"\(rank-0\.log: 2, rank-1\.log: 1\)"):
        read(logs, own())


def test_ranks_of_one_log_are_told_apart_by_their_marks() -> None:
    log = "[default0]:took 1\n[default1]:took 3\n[default1]:took 2\n[default0]:took 4\n"
    assert read({"rank-0.log": log}, own("^took (.*)$")).step_time_s == (3.0, 4.0)


def test_mpis_marks_are_known_too() -> None:
    log = "[1,0]<stdout>:took 1\n[1,1]<stdout>:took 3\n"
    assert read({"rank-0.log": log}, own("^took (.*)$")).step_time_s == (3.0,)


def test_two_times_in_one_line_are_two_steps() -> None:
    assert read({"rank-0.log": "took 1took 2\n"}, own(r"took (\d)")).step_time_s == (1.0, 2.0)


def test_back_references_and_named_groups_work() -> None:
    pattern = own(r"took (?P<rate>\d) then (?P=rate)$")
    assert read({"rank-0.log": "took 1 then 2\ntook 2 then 2\n"}, pattern).step_time_s == (2.0,)


def test_what_is_no_number_is_refused() -> None:
    with pytest.raises(ValueError, match=r"found '1\.2\.3', which is no number, in 'took 1\.2\.3'"):
        read({"rank-0.log": "took 1.2.3\n"}, own())


def test_a_group_that_takes_no_part_is_refused() -> None:
    with pytest.raises(ValueError, match="found None, which is no number"):
        read({"rank-0.log": "took\n"}, own(r"took( \d)?"))


# --------------------------------------------------------------------------- logs as they are


def test_progress_bars_and_colours_are_no_obstacle() -> None:
    log = b"10%\r20%\r\x1b[32mtook\x1b[0m 1\x1b[K\r\n30%\r\x1b]0;title\x07took 2\r\n"
    assert read({"rank-0.log": log}, own("^took (.*)$")).step_time_s == (1.0, 2.0)


def test_bytes_that_are_no_text_are_no_obstacle() -> None:
    assert read({"rank-0.log": b"\xff\xfe\x00took 1\n"}, own()).step_time_s == (1.0,)


def test_lines_that_run_into_each_other_are_told_apart() -> None:
    lines = megatron((1, 300), (2, 400)).replace("|\n", "|")
    assert read({"rank-0.log": lines}, "megatron").step_time_s == (0.3, 0.4)


def test_a_line_that_another_process_broke_is_left_out() -> None:
    broken = " iteration        1/      25 | elapsed time per iteration (ms): 12"
    log = broken + "warning: slow\n" + megatron((2, 400))
    assert read({"rank-0.log": log}, "megatron").step_time_s == (0.4,)


def test_only_logs_of_ranks_are_read() -> None:
    logs = {"notes.log": "took 1\n", "rank-0.log": "took 2\n", "rank-0.log.old": "took 3\n"}
    assert read(logs, own()).step_time_s == (2.0,)


def test_a_long_line_takes_no_longer_than_its_length() -> None:
    log = " iteration 1/ 2 |" + " | x" * 200_000 + " steps: 1 loss: " * 100_000
    with pytest.raises(ValueError, match="never appeared"):
        read({"rank-0.log": log}, "megatron")
    with pytest.raises(ValueError, match="never appeared"):
        read({"rank-0.log": log}, "deepspeed")


def test_lines_are_those_that_a_person_saw() -> None:
    assert list(log_lines(b"a\r\x1b[2Kb\n")) == ["a", "b", ""]


# ------------------------------------------------------------------------------- refusals


def test_a_metric_that_never_appears_is_refused_with_its_pattern_and_the_logs() -> None:
    logs = {"rank-10.log": "done\n", "rank-2.log": "done\n"}
    message = r"never appeared: no line of rank-2\.log, rank-10\.log has 'took \(\[\\\\d\.\]\+\)'"
    with pytest.raises(ValueError, match=message):
        read(logs, own())


def test_both_patterns_of_deepspeed_are_named() -> None:
    with pytest.raises(ValueError, match=r"no line of any log has 'steps: N .*' or 'global_step=N"):
        read({}, "deepspeed")


@pytest.mark.parametrize("text", ["0", "0.000", "-1", "nan", "inf", "1e-9"])
def test_times_that_no_step_takes_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"entry 1 of rank-0\.log says that a step took"):
        read({"rank-0.log": f"took 1\ntook {text}\n"}, own(r"took (\S+)"))


@pytest.mark.parametrize("rate", ["0.0", "-2.0", "nan", "inf", "-inf"])
def test_rates_that_no_training_has_are_refused(rate: str) -> None:
    with pytest.raises(ValueError, match="says that a step took"):
        read({"rank-0.log": ENGINE_LINE.format(n=3, rate=rate)}, "deepspeed")


@pytest.mark.parametrize("ms", ["nan", "0.0", "-3.0"])
def test_megatrons_times_are_checked_too(ms: str) -> None:
    with pytest.raises(ValueError, match="says that a step took"):
        read({"rank-0.log": MEGATRON_LINE.format(n=1, ms=ms)}, "megatron")


def test_steps_that_are_all_warm_up_are_refused() -> None:
    with pytest.raises(ValueError, match="found 2 times, none of them after 2 warm-up steps"):
        read({"rank-0.log": "took 1\ntook 2\n"}, own(), num_warmup_steps=2)


def test_one_mean_over_everything_is_refused() -> None:
    with pytest.raises(ValueError, match="found 1 times, none of them after 5 warm-up steps"):
        read({"rank-0.log": megatron((25, 500))}, "megatron", num_warmup_steps=5)


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
