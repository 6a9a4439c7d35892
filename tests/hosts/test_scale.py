"""A study on many hosts: no host counts as lost by mistake, and the controller needs little memory.

``make scale N=256`` runs it on 256 hosts; each has an sshd, an agent and a rank.
"""

import logging
import os
import re
import time
from pathlib import Path
from typing import Final

import pytest

from support.waiting import wait_for

from .conftest import Bench, MakeCluster
from .test_soak import STEP_S, SoakStudy

pytestmark = pytest.mark.hosts

_LOGGER = logging.getLogger(__name__)

NUM_HOSTS: Final = int(os.environ.get("AMP_RAY_HOSTS", "12"))
BUDGET: Final = 2
MOST_CORES: Final = 1.0
MOST_MEMORY_KIB: Final = 500 * 1024
TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")


def cpu_s(pid: int) -> float:
    """Return the CPU seconds of a process and of its children that have ended."""
    words = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()
    return sum(map(int, words[11:15])) / TICKS_PER_S


def peak_kib(pid: int) -> int:
    """Return the peak resident memory of a process; 0 if it has ended."""
    found = re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{pid}/status").read_text(encoding="utf-8"))
    return int(found[1]) if found is not None else 0


def test_no_host_of_many_is_taken_for_lost(make_cluster: MakeCluster, tmp_path: Path) -> None:
    begun_s = time.monotonic()
    # So many hosts share this machine's cores that other work must not take a part of them, too.
    cluster = make_cluster(num_hosts=NUM_HOSTS, disk_bytes=2**22, weight=2)
    set_up_s = time.monotonic() - begun_s
    study = SoakStudy(folder=tmp_path, bench=Bench(cluster, tmp_path))
    study.write(step_s=STEP_S)
    used_s, peak, start_s = 0.0, 0, time.monotonic()
    with study.started("--budget", str(BUDGET), "--no-doctor") as driver:
        while driver.poll() is None:
            used_s, peak = max(used_s, cpu_s(driver.pid)), max(peak, peak_kib(driver.pid))
            time.sleep(0.2)
        errors = driver.communicate()[1]
    wall_s = time.monotonic() - start_s
    told = study.outcomes()
    attempts = [event["attempt"] for event in study.events("started")]
    summary = (
        f"{NUM_HOSTS} hosts: set up {set_up_s:.1f} s, study {wall_s:.1f} s, "
        f"controller {used_s / wall_s:.2f} cores, {peak / 1024:.0f} MiB"
    )
    _LOGGER.info(summary)
    print(summary)  # noqa: T201 - what `make scale` shows
    assert [event["outcome"] for event in told.values()] == ["measured"] * BUDGET, errors
    assert attempts == [0] * BUDGET
    assert used_s / wall_s <= MOST_CORES
    assert peak <= MOST_MEMORY_KIB
    wait_for(lambda: not study.busy_hosts())
