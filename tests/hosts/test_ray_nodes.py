"""A Ray cluster of three nodes, which are namespaces of one machine."""

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from amp_ray.runtime.ray.searching import ALONE, search_candidates
from amp_ray.search.amp_ray_planner import AmpRayPlanner
from amp_ray.search.space import candidates_of
from support.experiments import small_experiment
from support.host_cluster import HostCluster, NamespaceHost
from support.waiting import HANG_GUARD_S

if TYPE_CHECKING:
    from tests.hosts.conftest import MakeCluster

pytestmark = pytest.mark.hosts

PORT = 6379

SEARCH = """
import logging, sys, time
logging.basicConfig(format="%(message)s", stream=sys.stdout)
from amp_ray.runtime.ray.actors import connect, num_cluster_cpus
from amp_ray.runtime.ray.searching import Workers, search_candidates
from amp_ray.search.amp_ray_planner import AmpRayPlanner
from amp_ray.search.space import candidates_of
from support.experiments import small_experiment

class SlowPlanner(AmpRayPlanner):
    def plan(self, candidate):
        time.sleep(0.5)
        return super().plan(candidate)

def progress(done, total):
    print(f"done {done}", flush=True)

experiment = small_experiment()
planner = SlowPlanner(experiment=experiment)
with connect():
    assert num_cluster_cpus() == 3
    workers, candidates = Workers(address=sys.argv[1]), candidates_of(experiment)
    ranking = search_candidates(planner, candidates, workers=workers, progress=progress)
print(repr(ranking))
"""


class RayNodes:
    """Three hosts, each a Ray node with one CPU; the first is the head."""

    def __init__(self, cluster: HostCluster, *paths: Path) -> None:
        """Start Ray on every host with a new token; ``paths`` are import paths of the workers."""
        self.cluster = cluster
        self.environment = {
            **os.environ,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(),
            "RAY_ADDRESS": f"{cluster.hosts[0].address}:{PORT}",
            "TMPDIR": "/run/tmp",
        }
        head, *others = cluster.hosts
        self.start_ray(head, ["--head", f"--port={PORT}", "--include-dashboard=false"])
        for host, path in zip_longest(others, paths):
            environment = {"PYTHONPATH": str(path)} if path else {}
            self.start_ray(host, [f"--address={head.address}:{PORT}"], **environment)

    def start_ray(self, host: NamespaceHost, options: Sequence[str], **environment: str) -> None:
        argv = [sys.executable, "-m", "ray.scripts.scripts", "start", *options, "--num-cpus=1"]
        argv += [f"--node-ip-address={host.address}", "--temp-dir=/run/tmp/ray"]
        argv += ["--object-store-memory=100000000", "--disable-usage-stats"]
        done = subprocess.run(
            self.on(host, argv),
            env={**self.without_address(), **environment},
            capture_output=True,
            text=True,
            check=False,
            timeout=HANG_GUARD_S,
        )
        assert done.returncode == 0, done.stderr + done.stdout

    def without_address(self) -> dict[str, str]:
        return {name: text for name, text in self.environment.items() if name != "RAY_ADDRESS"}

    def on(self, host: NamespaceHost, argv: Sequence[str]) -> list[str]:
        flags = ["--net", "--uts", "--mount", "--pid", "--ipc"]
        return ["nsenter", "--target", str(host.init_pid), *flags, "--", *argv]

    @contextmanager
    def driver(self, program: str, argument: str) -> Iterator[Iterator[str]]:
        """Run a driver on the head; yield an iterator over the lines that it prints."""
        argv = self.on(self.cluster.hosts[0], [sys.executable, "-c", program, argument])
        with subprocess.Popen(
            argv, env=self.environment, stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            try:
                yield (line.rstrip("\n") for line in process.stdout)
                assert process.wait(HANG_GUARD_S) == 0
            finally:
                process.kill()


@pytest.fixture
def nodes(make_cluster: "MakeCluster") -> RayNodes:
    """Three Ray nodes."""
    return RayNodes(make_cluster(num_hosts=3))


def ranking_here() -> str:
    experiment = small_experiment()
    planner = AmpRayPlanner(experiment=experiment)
    return repr(search_candidates(planner, candidates_of(experiment), workers=ALONE))


def test_a_node_killed_in_the_middle_costs_time_only(nodes: RayNodes) -> None:
    with nodes.driver(SEARCH, nodes.environment["RAY_ADDRESS"]) as lines:
        disturbed = []
        for line in lines:
            disturbed.append(line)
            if line == "done 4":
                nodes.cluster.kill_host(nodes.cluster.hosts[2])
    assert disturbed[-1] == ranking_here()


def test_nodes_without_this_version_are_named_and_left_out(
    make_cluster: "MakeCluster", tmp_path: Path
) -> None:
    problems = {
        "import sys; sys.modules['amp_ray'] = None": (
            "cannot import amp_ray: import of amp_ray halted"
        ),
        "import amp_ray; amp_ray.__version__ = '0.0.1'": "has amp-ray 0.0.1, not ",
    }
    tmp_path.chmod(0o755)
    paths = [tmp_path / "none", tmp_path / "other"]
    for path, sitecustomize in zip(paths, problems, strict=True):
        path.mkdir(mode=0o755)
        (path / "sitecustomize.py").write_text(sitecustomize, encoding="utf-8")
    nodes = RayNodes(make_cluster(num_hosts=3), *paths)
    with nodes.driver(SEARCH, nodes.environment["RAY_ADDRESS"]) as lines:
        said = list(lines)
    warnings = sorted(line for line in said if line.startswith("the Ray node host"))
    assert [line.split()[3] for line in warnings] == ["host2", "host3"]
    for problem, line in zip(problems.values(), warnings, strict=True):
        assert problem in line
    assert said[-1] == ranking_here()
