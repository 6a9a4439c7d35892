"""Logs as nccl-tests 2.17 prints them, with what MPI and NCCL put between."""

import pytest

from amp_ray.errors import InputError
from amp_ray.inputs.profiles.nccl_tests import NcclTest, parse_nccl_test
from support.nccl_log import nccl_log

TIMES = ((1024, 16.0), (2**20, 40.5), (2**26, 580.0))


def parsed(text: str, collective: str | None = None) -> NcclTest:
    return parse_nccl_test(text, file="x.log", collective=collective)


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
