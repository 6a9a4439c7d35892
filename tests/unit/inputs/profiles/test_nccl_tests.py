"""Logs as nccl-tests 2.17 prints them, with what MPI and NCCL put between."""

import time

import pytest

from amp_ray.errors import InputError
from amp_ray.inputs.profiles.nccl_tests import NcclTest, parse_nccl_tests
from support.nccl_log import nccl_log

TIMES = ((1024, 16.0), (2**20, 40.5), (2**26, 580.0))


def parsed(text: str, collective: str | None = None) -> NcclTest:
    (test,) = parse_nccl_tests(text, file="x.log", collective=collective)
    return test


@pytest.mark.parametrize(
    "collective", ["all_reduce", "all_gather", "reduce_scatter", "alltoall", "sendrecv"]
)
def test_a_log_tells_ranks_and_times(collective: str) -> None:
    test = parsed(nccl_log(collective, ["a"] * 4 + ["b"] * 4, TIMES))
    assert (test.collective, test.num_ranks, test.num_nodes) == (collective, 8, 2)
    assert dict(test.times) == pytest.approx({size: us * 1e-6 for size, us in TIMES})


def test_lines_of_other_programs_do_not_matter() -> None:
    text = nccl_log("all_reduce", ["a"] * 2, TIMES)
    noisy = "".join(f"[1,0]<stdout>:{line}\nNCCL INFO x\n" for line in text.splitlines())
    srun = "".join(f"0: {line}\n" for line in text.splitlines())
    assert parsed(noisy) == parsed(srun) == parsed(text)


def test_old_releases_have_no_root_and_no_name() -> None:
    text = nccl_log("all_reduce", ["a"] * 2, TIMES).replace("     -1 ", " ")
    nameless = "\n".join(line for line in text.splitlines() if "starting" not in line)
    assert parsed(nameless, "all_reduce") == parsed(nccl_log("all_reduce", ["a"] * 2, TIMES))
    with pytest.raises(InputError, match="does not name its program; say --collective all_reduce"):
        parsed(nameless)


GOOD = nccl_log("all_reduce", ["a"] * 4, TIMES)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"^x\.log: found lines '# Rank N .* of 0 ranks"),
        (GOOD.replace("Rank  2", "Rank  9"), r"^x\.log: found lines"),
        (GOOD.replace("on a device  3", "on b device  3"), "hosts have 1 and 3 ranks"),
        (nccl_log("all_reduce", ["a"] * 4, TIMES[:1]), "has rows of 1 sizes"),
        (GOOD.replace("    580.00", "    nothing"), r"^x\.log:12: expected time and bandwidths"),
        (GOOD.replace("    580.00", "    -1"), r"^x\.log:12: expected a time in us, found '-1'"),
        (GOOD.replace("    580.00", "    nan"), r"^x\.log:12: expected a time in us, found 'nan'"),
        (
            GOOD.replace("      0  ", "      7  "),
            r"^x\.log:10: the test found wrong values \('7'\)",
        ),
        (
            GOOD.replace("     -1  ", " -1 -1 -1 "),
            r"^x\.log:10: found 15 columns; expected 12 or 13",
        ),
        (GOOD.replace("all_reduce_perf", "broadcast_perf"), "found 'broadcast'; say --collective"),
        (GOOD.replace("all_reduce_perf", "sendrecv_perf"), r"^x\.log:11: bus over algorithm"),
    ],
)
def test_a_bad_log_is_refused_with_its_line(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parsed(text)


OLD = "#  size  count  type  redop  time  algbw  busbw  error  time  algbw  busbw  error\n"


def _old(error: str, data_type: str = "float") -> str:
    """Return a log of a release that tells the largest difference, without root and name."""
    head, *rows = (
        nccl_log("all_reduce", ["a"] * 2, TIMES).replace("     -1 ", " ").split("(GB/s)\n")
    )
    table = rows[0].replace("      0", f" {error}").replace("float", data_type)
    return head.split("#       size")[0].split("_perf\n")[1] + OLD + table


@pytest.mark.parametrize("error", ["0e+00", "5e-07", "1e-05", "N/A"])
def test_the_error_of_old_releases_may_be_a_rounding_error(error: str) -> None:
    assert len(parsed(_old(error), "all_reduce").times) == len(TIMES)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (_old("2e-05"), r"x\.log:9?.*wrong values \('2e-05'\)"),
        (_old("5e-07", "int32"), "wrong values"),
        (
            GOOD.replace("580.00", "0.0001"),
            r"x\.log:12: 67108864 bytes in 1e-10 s are 1.007e\+09 GB/s",
        ),
        (
            GOOD.replace("   busbw", "   busbw #wrong cputime algbw busbw #wrong").replace(
                "    time ", " cputime "
            ),
            "expected the columns time",
        ),
    ],
)
def test_rates_of_no_link_and_times_of_the_host_are_refused(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parsed(text, "all_reduce")


def test_a_file_may_have_several_programs_and_cycles() -> None:
    first, second = (nccl_log(name, ["a"] * 2, TIMES) for name in ("all_reduce", "alltoall"))
    tests = parse_nccl_tests(first + second, file="x.log")
    assert tests == (parsed(first), parsed(second))
    slower = nccl_log("all_reduce", ["a"] * 2, [(size, 3 * us) for size, us in TIMES])
    rows = [line for line in slower.splitlines() if " float " in line]
    cycles = parsed("\n".join([*first.splitlines(), *rows]))
    assert dict(cycles.times) == pytest.approx({size: 2e-6 * us for size, us in TIMES})


def test_columns_that_are_not_read_are_named() -> None:
    heading = "   busbw #wrong time algbw busbw #wrong timestamp"
    text = GOOD.replace("   busbw\n", heading + "\n", 1)
    rows = [line + " 12:00" if " float " in line else line for line in text.splitlines()]
    (note,) = parsed("\n".join(rows)).not_read
    assert note.names == ("time, algbw and busbw in place", "timestamp")


def test_many_ranks_and_rows_are_read_in_linear_time() -> None:
    hosts = [f"h{rank // 8}" for rank in range(40_000)]
    rows = [(4 * size, 1e5) for size in range(1, 40_001)]
    start = time.monotonic()
    assert parsed(nccl_log("all_reduce", hosts, rows)).num_nodes == 5_000
    parsed(GOOD + "a/b_c/" * 200_000)
    assert time.monotonic() - start < 60  # squares of the lines would take ten minutes
