"""A log of nccl-tests."""

from collections.abc import Iterable, Sequence

_BUS = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0, "alltoall": 1.0}


def nccl_log(collective: str, hosts: Sequence[str], times: Iterable[tuple[int, float]]) -> str:
    """Return the output of a program of nccl-tests.

    Args:
        collective: What it measures.
        hosts: Host of each rank.
        times: Sizes in bytes and times in microseconds.
    """
    ranks = len(hosts)
    bus = _BUS[collective] * (ranks - 1) / ranks if collective in _BUS else 1.0
    redop = "sum" if "reduce" in collective else "none"
    lines = [f"# Collective test starting: {collective}_perf", "# nThread 1 nGpus 8", "#"]
    lines += [
        f"#  Rank {rank:2} Group  0 Pid {4000 + rank} on {host} device {rank:2} [0x07] NVIDIA H100"
        for rank, host in enumerate(hosts)
    ]
    lines.append("#       size         count      type   redop    root     time   algbw   busbw")
    lines.append("#        (B)    (elements)                               (us)  (GB/s)  (GB/s)")
    for size, us in times:
        rate = size / us / 1e3
        cells = f"  {us:8.2f} {rate:7.2f} {rate * bus:7.2f}      0"
        lines.append(f"{size:12} {size // 4:12}     float {redop:>7}      -1{cells}{cells}")
    return "\n".join([*lines, "# Out of bounds values : 0 OK", "# Avg bus bandwidth : 10", ""])
