"""The test hosts themselves."""

import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from amp_ray.runtime.hosts.ssh import SshHost
from support import namespaces
from support.waiting import wait_for

from .conftest import require

if TYPE_CHECKING:
    from tests.hosts.conftest import Bench, MakeCluster

pytestmark = pytest.mark.hosts

NUM_BYTES = 2_500_000


def seconds_to_receive(bench: "Bench") -> float:
    """Time a transfer from the second host to this thread, in the controller's network."""
    host = bench.cluster.hosts[1]
    with socket.create_server(("10.77.0.1", 0)) as server:
        port = server.getsockname()[1]
        sender = (
            "import socket\n"
            f"with socket.create_connection(('10.77.0.1', {port})) as peer:\n"
            f"    peer.sendall(bytes({NUM_BYTES}))\n"
        )
        flags = ["--net", "--target", str(host.init_pid)]
        with subprocess.Popen(["/usr/bin/nsenter", *flags, sys.executable, "-c", sender]):
            peer = server.accept()[0]
            start = time.monotonic()
            with peer:
                while peer.recv(1 << 20):
                    pass
    return time.monotonic() - start


def test_a_shaped_link_is_as_slow_as_asked_for(bench: "Bench") -> None:
    host = bench.cluster.hosts[1]
    bench.cluster.shape(host, 50_000_000)
    # 20 Mbit at 50 Mbit/s take 0.4 s; the token bucket lets the first 64 KiB through at once.
    assert seconds_to_receive(bench) > 0.36
    rules = ["tc", "qdisc", "show"]
    assert "tbf" in bench.cluster.run_in(host, rules).stdout
    bench.cluster.shape(host, None)
    assert "tbf" not in bench.cluster.run_in(host, rules).stdout


def test_a_quota_holds_back_a_busy_host(bench: "Bench") -> None:
    require(bench.cluster.why_no_quota)
    host = bench.cluster.hosts[0]
    program = (
        "import time\nend, begin = time.monotonic() + 0.6, time.process_time()\n"
        "while time.monotonic() < end: pass\nprint(time.process_time() - begin)"
    )
    connection = SshHost(host.address, bench.ssh)
    bench.cluster.limit_cpu(host, 0.25)
    limited = float(connection.run([sys.executable, "-c", program], timeout_s=120).stdout)
    bench.cluster.limit_cpu(host, None)
    connection.close()
    assert limited < 0.3  # a quarter of 0.6 s, and what one period of the quota lets through


def test_there_is_no_way_out(bench: "Bench") -> None:
    with pytest.raises(OSError, match="Network is unreachable"):
        socket.create_connection(("192.0.2.1", 80), timeout=1).close()
    routes = bench.cluster.run_in(bench.cluster.hosts[0], ["ip", "route"]).stdout
    assert routes.startswith("10.77.0.0/16")
    assert routes.count("\n") == 1


def test_hosts_share_no_disk_and_no_processes(bench: "Bench") -> None:
    first, second = bench.cluster.hosts
    bench.cluster.run_in(first, ["touch", "/run/tmp/mine"])
    assert (bench.folders_on(first), bench.folders_on(second)) == (["mine"], [])
    bench.cluster.run_in(first, ["rm", "/run/tmp/mine"])
    assert bench.cluster.run_in(first, ["cat", "/proc/1/comm"]).stdout == "sshd\n"


def test_two_clusters_do_not_meet(make_cluster: "MakeCluster") -> None:
    first, second = make_cluster(num_hosts=2), make_cluster(num_hosts=2)
    assert first.hosts[0].address == second.hosts[0].address
    assert first.hosts[0].init_pid != second.hosts[0].init_pid


def test_everything_goes_when_the_process_that_made_it_is_killed(
    make_cluster: "MakeCluster",
) -> None:
    make_cluster  # noqa: B018 - asks for the check whether hosts are possible
    program = (
        "import time\nfrom support.host_cluster import HostCluster\n"
        "cluster = HostCluster()\n"
        "print(*(host.init_pid for host in cluster.hosts), cluster.folder, flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as maker:
        assert maker.stdout is not None
        *pids, folder = maker.stdout.readline().decode().split()
        assert all(namespaces.exists(int(pid)) for pid in pids)
        maker.kill()
    wait_for(lambda: not any(namespaces.exists(int(pid)) for pid in pids))
    wait_for(lambda: not Path(folder).exists())
