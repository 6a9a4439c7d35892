import os
import signal
import stat
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray

from amp_ray import load
from amp_ray.cost.estimate import Result
from amp_ray.errors import InputError, Where
from amp_ray.inputs.experiment import Experiment
from amp_ray.runtime.files import load_experiment
from amp_ray.runtime.planning import Planned, plan_experiment
from amp_ray.runtime.ray import actors
from amp_ray.runtime.ray.searching import ALONE, Workers, search_candidates
from amp_ray.search.amp_ray_planner import AmpRayPlanner
from amp_ray.search.planner import Planner, make_planner
from amp_ray.search.ranking import Ranking
from amp_ray.search.space import uniform_candidates
from amp_ray.strategies.candidate import AnyCandidate
from support.aceso import EXPERIMENT, aceso_experiment
from support.experiments import small_experiment
from support.waiting import HANG_GUARD_S

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("cluster", "sent_by_value")]

SMALL = small_experiment()
CANDIDATES = uniform_candidates(SMALL)


@dataclass(frozen=True, kw_only=True, eq=False)
class MisfortunePlanner(AmpRayPlanner):
    """A planner that kills its process, or raises an error, at some candidates.

    A file records each kill, so that it happens once. Only a worker of Ray is killed, never the
    process of the tests.
    """

    killed_at: frozenset[int] = frozenset()
    wrong_at: frozenset[int] = frozenset()
    broken_at: frozenset[int] = frozenset()
    folder: Path = Path()
    home: int = field(default_factory=os.getpid)

    def plan(self, candidate: AnyCandidate) -> Result:
        number = uniform_candidates(self.experiment).index(candidate)
        mark = self.folder / f"killed-{number}"
        if number in self.killed_at and not mark.exists() and os.getpid() != self.home:
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        message = f"candidate {number}"
        if number in self.wrong_at:
            raise InputError(message, where=Where(file="profile.csv", line=number))
        if number in self.broken_at:
            raise ZeroDivisionError(message)
        return super().plan(candidate)


def with_ray(planner: Planner, num: int, experiment: Experiment = SMALL) -> Ranking:
    return search_candidates(planner, uniform_candidates(experiment), workers=Workers(num=num))


def without_ray(planner: Planner, experiment: Experiment = SMALL) -> Ranking:
    return search_candidates(planner, uniform_candidates(experiment), workers=ALONE)


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for Ray as long as a busy machine needs, instead of searching without Ray."""
    monkeypatch.setattr(actors, "START_TIMEOUT_S", HANG_GUARD_S)
    monkeypatch.setattr(actors, "LOST_TIMEOUT_S", HANG_GUARD_S)


@pytest.mark.parametrize(("cost_model", "num_workers"), [("amp-ray", 3), ("amp-2022", 1)])
def test_the_ranking_is_the_same_for_any_number_of_workers(
    repository: Path, cost_model: str, num_workers: int
) -> None:
    experiment = load_experiment(repository / "experiments" / "het_cluster.yaml")
    planner = make_planner(experiment, cost_model)
    alone = without_ray(planner, experiment)
    together = with_ray(planner, num_workers, experiment)
    assert together == alone
    assert repr(together) == repr(alone)  # every digit of every float


@pytest.mark.parametrize("cost_model", ["amp-ray", "aceso-2024"])
def test_micro_batches_of_operators_are_shared_out(cost_model: str) -> None:
    text = f"{EXPERIMENT}search: {{space: operator}}\nrecompute: auto\n"
    experiment = aceso_experiment(text)
    candidates = make_planner(experiment, cost_model).candidates().required
    assert len(candidates) > 2
    found = [
        search_candidates(make_planner(experiment, cost_model), candidates, workers=workers)
        for workers in (ALONE, Workers(num=2))
    ]
    assert repr(found[0]) == repr(found[1])


def test_workers_leave_out_what_one_process_leaves_out() -> None:
    experiment = load(
        {
            "name": "many",
            "model": {
                "family": "llama",
                "num_layers": 24,
                "hidden_size": 2048,
                "num_heads": 16,
                "sequence_length": 4096,
                "vocab_size": 32000,
            },
            "cluster": {
                "nodes": [{"device": "H100", "count": 4, "slots": 8, "inter_gbit_per_s": 3200}]
            },
            "zero_stage": "auto",
            "recompute": "auto",
            "runtime": "megatron-core",
            "global_batch_size": 256,
            "search": {"max_cp": "auto", "virtual_stages": "auto"},
        }
    )
    num_planned = dict[int, int]()
    plans = dict[int, Planned]()
    for num_workers in (0, 2):

        def progress(done: int, _total: int, num_workers: int = num_workers) -> None:
            num_planned[num_workers] = done

        workers = Workers(num=num_workers)
        plans[num_workers] = plan_experiment(
            experiment, num_rows=5, workers=workers, progress=progress
        )
    assert repr(plans[0].ranking) == repr(plans[2].ranking)
    num_candidates = len(plans[0].planner.candidates(5).optional.candidates)
    assert num_planned[0] <= num_planned[2] < num_candidates / 2


def test_more_workers_than_cpus_search_with_those_that_get_one(cluster: int) -> None:
    planner = AmpRayPlanner(experiment=SMALL)
    assert with_ray(planner, 3 * cluster) == without_ray(planner)


@pytest.mark.parametrize(("num_workers", "killed_at"), [(1, (5,)), (3, (0, -1))])
def test_killed_workers_only_cost_time(
    tmp_path: Path, num_workers: int, killed_at: tuple[int, ...]
) -> None:
    planner = AmpRayPlanner(experiment=SMALL)
    killed = frozenset(range(len(CANDIDATES))[place] for place in killed_at)
    misfortune = MisfortunePlanner(experiment=SMALL, killed_at=killed, folder=tmp_path)
    assert with_ray(misfortune, num_workers) == without_ray(planner)
    assert len(list(tmp_path.glob("killed-*"))) == len(killed)


def test_wrong_input_is_the_same_error_as_in_one_process() -> None:
    planner = MisfortunePlanner(experiment=SMALL, wrong_at=frozenset({3, 4, 11}))
    with pytest.raises(InputError) as alone:
        without_ray(planner)
    with pytest.raises(InputError) as together:
        with_ray(planner, 3)
    assert str(together.value) == str(alone.value) == "profile.csv:3: candidate 3"
    assert together.value.where == alone.value.where


def test_a_mistake_in_a_planner_is_told_with_its_place() -> None:
    planner = MisfortunePlanner(experiment=SMALL, broken_at=frozenset({7}))
    with pytest.raises(ZeroDivisionError, match=r"(?s)in plan.*candidate 7"):
        with_ray(planner, 2)


def test_without_a_free_cpu_a_search_is_done_here_and_that_is_told(
    cluster: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(actors, "START_TIMEOUT_S", 1.5)
    occupant = ray.remote(SimpleNamespace).options(num_cpus=cluster).remote()
    ray.get(occupant.__ray_ready__.remote(), timeout=300)
    try:
        planner = AmpRayPlanner(experiment=SMALL)
        assert with_ray(planner, 2) == without_ray(planner)
    finally:
        ray.kill(occupant)
    (message,) = caplog.messages
    assert f"of the {cluster} of the Ray cluster 0 are free" in message
    assert message.endswith("The search goes on in this process")


# ------------------------------------------------------------------------- the session

INTRUDER = """
import os, socket, sys
path = sys.argv[1]
os.setgroups([]); os.setgid(65534); os.setuid(65534)
def attempt(what, *arguments):
    try:
        what(*arguments)
    except PermissionError:
        return
    sys.exit(f"{what} {arguments} is allowed")
folder = path
while folder.count("/") > 2:
    folder = os.path.dirname(folder)
    attempt(os.listdir, folder)
attempt(socket.socket(socket.AF_UNIX).connect, path)
attempt(os.rename, path, path + ".old")
attempt(os.unlink, path)
attempt(os.mknod, path + ".new")
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_can_neither_enter_nor_replace_a_socket() -> None:
    path = Path(ray.nodes()[0]["RayletSocketName"])
    outer = Path(*path.parts[:3])
    assert outer.name.startswith("amp-ray-")
    assert stat.S_IMODE(outer.stat().st_mode) == 0o700
    # Only the outer folder protects the socket: all users may enter the folders inside.
    assert {stat.S_IMODE(parent.stat().st_mode) & 0o005 for parent in path.parents[:-3]} == {0o005}
    done = subprocess.run(
        [sys.executable, "-I", "-c", INTRUDER, str(path)],
        capture_output=True,
        text=True,
        check=False,
        cwd="/",
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert path.is_socket()
