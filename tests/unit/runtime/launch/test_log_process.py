"""Logs are searched within a time limit."""

import re
import time

import pytest

from amp_ray.inputs.experiment import Pattern
from amp_ray.runtime.launch.log_process import read_logs_aside
from amp_ray.trials.own_program.metrics import BUILT_IN, MAX_LINE, LogFormat, formats_of, read_logs

LOG = b"took 2.0 s\ntook 1.0 s\ntook 1.0 s\n"
FORMATS = formats_of(Pattern(pattern=r"took ([\d.]+) s"))


def test_the_answer_is_that_of_the_search_itself() -> None:
    files = {"rank-0.log": LOG, "other": b"x"}
    expected = read_logs(files, FORMATS, num_warmup_steps=1, samples=4)
    assert read_logs_aside(files, FORMATS, num_warmup_steps=1, samples=4) == expected
    with pytest.raises(ValueError, match="the metric never appeared: no line of rank-0"):
        read_logs_aside({"rank-0.log": b"x"}, FORMATS, num_warmup_steps=0, samples=4)


def test_a_pattern_that_takes_for_ever_is_ended_and_named() -> None:
    """In this process the limit could not end it: matching lets no other code run."""
    pattern = r"(?:\d+)+x([\d.]+)"
    slow = (LogFormat(pattern=re.compile(pattern), shown=pattern),)
    with pytest.raises(ValueError, match=r"x\(\[.*was ended after 2 s: the pattern can"):
        read_logs_aside(
            {"rank-0.log": b"1" * 40_000}, slow, num_warmup_steps=0, samples=1, limit_s=2.0
        )


@pytest.mark.parametrize("name", ["megatron", "deepspeed"])
@pytest.mark.parametrize(
    "line",
    [
        "elapsed time per iteration (ms): " + "1" * 40_000,
        "iteration 1/ 2 | elapsed time per iteration (ms): " + "1" * 40_000,
        "iteration 1/ 2 | " * 3000,
        "iteration " + "1" * 40_000,
        "iteration 1" + " " * 40_000,
        "iteration 1/ 2 |" + "elapsed time per iteration (ms): 1" * 2000,
        "steps: 1 loss: " * 3000 + "iter time (s): ",
        "steps: 1 loss: 2 iter time (s): " + "1" * 40_000,
        "global_step=1, RunningAvgSamplesPerSec=" + "1" * 40_000,
        "\x1b[" + "1" * 40_000,
        "\x1b]" * 20_000,
        "[" + "a," * 20_000,
    ],
)
def test_built_in_patterns_take_no_time_on_any_line(name: str, line: str) -> None:
    formats = BUILT_IN[name]  # type: ignore[index]
    start = time.process_time()
    with pytest.raises(ValueError, match="never appeared"):
        read_logs({"rank-0.log": line.encode()}, formats, num_warmup_steps=0, samples=1)
    assert time.process_time() - start < 1.0


def test_lines_are_searched_up_to_a_length_which_is_told() -> None:
    measurement = read_logs(
        {"rank-0.log": LOG + b"x" * MAX_LINE + LOG}, FORMATS, num_warmup_steps=0, samples=1
    )
    assert len(measurement.step_time_s) == 5
    with pytest.raises(ValueError, match="1 lines were searched in their first 4096 characters"):
        read_logs({"rank-0.log": b"x" * 5000 + LOG[:10]}, FORMATS, num_warmup_steps=0, samples=1)
