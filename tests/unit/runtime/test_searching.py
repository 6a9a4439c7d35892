import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest

import amp_ray.runtime
from amp_ray.cost.estimate import Result
from amp_ray.errors import InputError
from amp_ray.runtime import searching
from amp_ray.runtime.search_crew import Work
from amp_ray.runtime.searching import Stopwatch, Workers, num_cpus, search_candidates
from amp_ray.search.planner import AmpRayPlanner, search
from amp_ray.search.ranking import Ranking
from amp_ray.search.space import uniform_candidates
from amp_ray.testing.experiments import small_experiment

EXPERIMENT = small_experiment()
PLANNER = AmpRayPlanner(experiment=EXPERIMENT)
CANDIDATES = uniform_candidates(EXPERIMENT)
NUM = 16


def quiet(_done: int, _total: int) -> None:
    """Show no progress."""


ALONE = search(EXPERIMENT, PLANNER, progress=quiet)


class FakeActors(ModuleType):
    """Stands for `amp_ray.runtime.actors`: plans here, and notes what was asked for."""

    def __init__(self) -> None:
        """Take the module's name."""
        super().__init__("amp_ray.runtime.actors")
        self.connected: list[tuple[str | None, int | None]] = []
        self.asked: list[tuple[int, int]] = []

    @contextmanager
    def connect(self, address: str | None, *, num_cpus: int | None) -> Iterator[None]:
        self.connected.append((address, num_cpus))
        yield

    def num_cluster_cpus(self) -> int:
        return 5

    def plan_candidates(
        self, work: Work, num_workers: int, num_done: Callable[[int], None]
    ) -> list[Result]:
        self.asked.append((len(work.candidates), num_workers))
        results = []
        for candidate in work.candidates:
            results.append(work.planner.plan(candidate))
            num_done(len(results))
        return results


@pytest.fixture
def actors(monkeypatch: pytest.MonkeyPatch) -> FakeActors:
    """No Ray, but what it would be asked for."""
    fake = FakeActors()
    monkeypatch.setitem(sys.modules, fake.__name__, fake)
    monkeypatch.setattr(amp_ray.runtime, "actors", fake, raising=False)
    monkeypatch.setattr(searching, "find_spec", lambda _name: object())
    monkeypatch.setattr(searching, "require_ray", lambda: None)
    monkeypatch.setattr(searching, "num_cpus", lambda: 4)
    return fake


def run(workers: Workers, progress: Callable[[int, int], None] = quiet) -> Ranking:
    return search_candidates(PLANNER, CANDIDATES, workers=workers, progress=progress)


def test_little_work_stays_in_this_process(actors: FakeActors) -> None:
    assert run(Workers()) == ALONE
    assert actors.connected == []


def test_much_work_goes_to_ray_but_for_what_is_done(
    actors: FakeActors, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(searching, "RAY_PAYS_S", 0.0)
    seen: list[tuple[int, int]] = []
    assert run(Workers(), lambda done, total: seen.append((done, total))) == ALONE
    assert actors.connected == [(None, 4)]
    assert actors.asked == [(NUM - searching.NUM_SAMPLES, 5)]
    assert seen == sorted(seen)
    assert seen[-1] == (NUM, NUM)


@pytest.mark.parametrize("lacking", ["a second CPU", "Ray"])
def test_much_work_stays_where_there_is_nothing_else(
    actors: FakeActors, monkeypatch: pytest.MonkeyPatch, lacking: str
) -> None:
    monkeypatch.setattr(searching, "RAY_PAYS_S", 0.0)
    if lacking == "Ray":
        monkeypatch.setattr(searching, "find_spec", lambda _name: None)
    else:
        monkeypatch.setattr(searching, "num_cpus", lambda: 1)
    assert run(Workers()) == ALONE
    assert actors.connected == []


def test_a_number_of_workers_is_taken_at_its_word(actors: FakeActors) -> None:
    assert run(Workers(num=3)) == ALONE
    assert (actors.connected, actors.asked) == ([(None, 3)], [(NUM, 3)])


def test_no_more_workers_than_candidates(actors: FakeActors) -> None:
    run(Workers(num=1000))
    assert (actors.connected, actors.asked) == ([(None, NUM)], [(NUM, NUM)])


def test_an_address_alone_means_all_cpus_of_that_cluster(actors: FakeActors) -> None:
    run(Workers(address="head:6379"))
    assert (actors.connected, actors.asked) == ([("head:6379", 4)], [(NUM, 5)])


def test_ray_that_is_asked_for_and_missing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("amp_ray.runtime.ray_address.find_spec", lambda _name: None)
    with pytest.raises(InputError, match=r"pip install 'amp-ray\[ray\]'"):
        run(Workers(num=2))


def test_the_stopwatch_waits_for_enough_samples() -> None:
    watch = Stopwatch(100)
    for _ in range(searching.NUM_SAMPLES - 1):
        watch.add(10.0)
    assert watch.remaining_s == 0.0
    watch.add(10.0)
    assert watch.remaining_s == 10.0 * (100 - searching.NUM_SAMPLES)


def test_the_stopwatch_leaves_out_a_candidate_that_compiled() -> None:
    watch = Stopwatch(100 + searching.NUM_SAMPLES)
    for time_s in (8.0, *[0.01] * (searching.NUM_SAMPLES - 1)):
        watch.add(time_s)
    assert watch.remaining_s == pytest.approx(1.0)


def test_the_stopwatch_follows_candidates_that_grow() -> None:
    watch = Stopwatch(100 + 2 * searching.NUM_SAMPLES)
    for time_s in (*[0.01] * searching.NUM_SAMPLES, *[1.0] * searching.NUM_SAMPLES):
        watch.add(time_s)
    assert watch.remaining_s == pytest.approx(100.0)


def test_there_is_a_cpu() -> None:
    assert num_cpus() >= 1


def test_planning_does_not_import_ray(repository: Path) -> None:
    program = (
        "import json, sys\n"
        "from amp_ray.cli import main\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code\n"
        "print(json.dumps(sorted(sys.modules)))\n"
    )
    experiment = repository / "experiments" / "homogeneous.yaml"
    argv = [sys.executable, "-c", program, "plan", str(experiment)]
    done = subprocess.run(argv, check=True, capture_output=True, text=True, timeout=120)
    loaded = json.loads(done.stdout.splitlines()[-1])
    assert "amp_ray.runtime.searching" in loaded
    assert [name for name in loaded if name.partition(".")[0] == "ray"] == []
