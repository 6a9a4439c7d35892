import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest

import amp_ray.runtime.ray
from amp_ray.cost.estimate import Estimate, Result
from amp_ray.errors import InputError
from amp_ray.runtime.planning import plan_experiment
from amp_ray.runtime.ray import searching
from amp_ray.runtime.ray.address import RayUnavailableError
from amp_ray.runtime.ray.searching import ALONE, Stopwatch, Workers, num_cpus, search_candidates
from amp_ray.search.amp_ray_planner import AmpRayPlanner
from amp_ray.search.candidate_queue import CandidateQueue, Work
from amp_ray.search.planner import OptionalCandidates
from amp_ray.search.ranking import Ranking
from amp_ray.search.space import uniform_candidates
from amp_ray.strategies.candidate import AnyCandidate
from support.experiments import small_experiment
from support.programs import python

EXPERIMENT = small_experiment()
PLANNER = AmpRayPlanner(experiment=EXPERIMENT)
CANDIDATES = uniform_candidates(EXPERIMENT)
NUM = 16


def quiet(_done: int, _total: int) -> None:
    """Show no progress."""


EXPECTED = search_candidates(PLANNER, CANDIDATES, workers=ALONE)


class FakeActors(ModuleType):
    """Stands for `amp_ray.runtime.ray.actors`: plans here, and notes what was asked for."""

    def __init__(self) -> None:
        """Take the module's name."""
        super().__init__("amp_ray.runtime.ray.actors")
        self.connected: list[tuple[str | None, int | None]] = []
        self.asked: list[tuple[int, int]] = []
        self.lost_after = NUM
        self.has_cluster = True

    @contextmanager
    def connect(self, address: str | None, *, num_cpus: int | None) -> Iterator[None]:
        self.connected.append((address, num_cpus))
        if not self.has_cluster:
            message = "no Ray"
            raise RayUnavailableError(message)
        yield

    def num_cluster_cpus(self) -> int:
        return 5

    def plan_batches(
        self, work: Work, numbers: range, num_workers: int, stop: Callable[[], int]
    ) -> Iterator[tuple[range, list[Result | ValueError]]]:
        self.asked.append((len(numbers), num_workers))
        for number in reversed(numbers):  # in any order
            if numbers.stop - 1 - number == self.lost_after:
                message = "Ray is lost"
                raise RayUnavailableError(message)
            if number < stop():
                yield range(number, number + 1), work.plan(range(number, number + 1))


@pytest.fixture
def actors(monkeypatch: pytest.MonkeyPatch) -> FakeActors:
    """No Ray, but what it would be asked for."""
    fake = FakeActors()
    monkeypatch.setitem(sys.modules, fake.__name__, fake)
    monkeypatch.setattr(amp_ray.runtime.ray, "actors", fake, raising=False)
    monkeypatch.setattr(searching, "find_spec", lambda _name: object())
    monkeypatch.setattr(searching, "require_ray", lambda _what: None)
    monkeypatch.setattr(searching, "num_cpus", lambda: 4)
    return fake


def run(workers: Workers, progress: Callable[[int, int], None] = quiet) -> Ranking:
    return search_candidates(PLANNER, CANDIDATES, workers=workers, progress=progress)


def test_little_work_stays_in_this_process(actors: FakeActors) -> None:
    assert run(Workers()) == EXPECTED
    assert actors.connected == []


def test_much_work_goes_to_ray_but_for_what_is_done(
    actors: FakeActors, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(searching, "RAY_S", 0.0)
    seen: list[tuple[int, int]] = []
    assert run(Workers(), lambda done, total: seen.append((done, total))) == EXPECTED
    assert actors.connected == [(None, 4)]
    assert actors.asked == [(NUM - searching.NUM_SAMPLES, 5)]
    assert seen == sorted(seen)
    assert seen[-1] == (NUM, NUM)


class SecondPerCandidate(Stopwatch):
    """A stopwatch by which each candidate takes a second."""

    def add(self, time_s: float) -> None:  # noqa: ARG002 - the real time
        super().add(1.0)


def test_candidates_that_their_tight_bounds_exclude_are_no_work_for_ray(
    actors: FakeActors, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(searching, "RAY_S", 3.0)
    monkeypatch.setattr(searching, "Stopwatch", SecondPerCandidate)
    monkeypatch.setattr(CandidateQueue, "may_shrink", False)
    rough_s = {candidate: number * 1e-6 for number, candidate in enumerate(CANDIDATES)}
    tight_s = dict.fromkeys(CANDIDATES[searching.NUM_SAMPLES + 1 :], 1000000000.0)
    bounds = OptionalCandidates(
        candidates=CANDIDATES,
        least_s=lambda one, limit_s: (tight_s if limit_s and one in tight_s else rough_s)[one],
        num_rows=1,
    )
    planned = search_candidates(PLANNER, (), optional=bounds, workers=Workers())
    assert len(planned.results) == searching.NUM_SAMPLES + 1
    assert actors.connected == []


@pytest.mark.parametrize("lacking", ["a second CPU", "Ray"])
def test_much_work_stays_where_there_is_nothing_else(
    actors: FakeActors, monkeypatch: pytest.MonkeyPatch, lacking: str
) -> None:
    monkeypatch.setattr(searching, "RAY_S", 0.0)
    if lacking == "Ray":
        monkeypatch.setattr(searching, "find_spec", lambda _name: None)
    else:
        monkeypatch.setattr(searching, "num_cpus", lambda: 1)
    assert run(Workers()) == EXPECTED
    assert actors.connected == []


def test_a_number_of_workers_is_taken_at_its_word(actors: FakeActors) -> None:
    assert run(Workers(num=3)) == EXPECTED
    assert (actors.connected, actors.asked) == ([(None, 3)], [(NUM, 3)])


def test_no_more_workers_than_candidates(actors: FakeActors) -> None:
    run(Workers(num=1000))
    assert (actors.connected, actors.asked) == ([(None, NUM)], [(NUM, NUM)])


def test_an_address_alone_means_all_cpus_of_that_cluster(actors: FakeActors) -> None:
    run(Workers(address="head:6379"))
    assert (actors.connected, actors.asked) == ([("head:6379", 4)], [(NUM, 5)])


def test_ray_that_is_asked_for_and_missing_is_told_without_a_place_in_the_experiment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("amp_ray.runtime.ray.address.find_spec", lambda _name: None)
    with pytest.raises(InputError, match=r"^a search with --workers .* pip install 'amp-ray\[ray"):
        plan_experiment(EXPERIMENT, workers=Workers(num=2), progress=quiet)


def test_what_is_no_address_is_told_without_a_place_in_the_experiment() -> None:
    with pytest.raises(InputError, match=r"^'head' is no address of a Ray cluster"):
        plan_experiment(EXPERIMENT, workers=Workers(address="head"), progress=quiet)


def test_no_workers_means_this_process(actors: FakeActors, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(searching, "RAY_S", 0.0)
    assert run(ALONE) == EXPECTED
    assert actors.connected == []


@pytest.mark.parametrize("workers", [Workers(), Workers(num=2), Workers(address="head:6379")])
@pytest.mark.parametrize("num_found", [1, 5])
def test_a_search_that_loses_ray_goes_on_in_this_process(
    actors: FakeActors,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    workers: Workers,
    num_found: int,
) -> None:
    monkeypatch.setattr(searching, "RAY_S", 0.0)
    actors.lost_after = num_found
    seen: list[tuple[int, int]] = []
    assert run(workers, lambda done, total: seen.append((done, total))) == EXPECTED
    assert caplog.messages == ["Ray is lost. The search goes on in this process"]
    assert seen == sorted(seen)
    assert seen[-1] == (NUM, NUM)
    assert len(actors.asked) == 1


def test_a_search_without_an_address_does_not_need_ray(
    actors: FakeActors, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(searching, "RAY_S", 0.0)
    actors.has_cluster = False
    assert run(Workers()) == EXPECTED
    assert run(Workers(num=2)) == EXPECTED
    assert caplog.messages == ["no Ray. The search goes on in this process"] * 2
    with pytest.raises(RayUnavailableError, match="no Ray"):
        run(Workers(address="head:6379"))


def mixed(workers: Workers) -> Ranking:
    """Plan the heterogeneous space, whose grids are optional."""
    chosen = small_experiment(
        ("name: small", "name: small\nsearch: {space: heterogeneous}"),
        ("num_layers: 6, hidden_size: 256", "num_layers: 12, hidden_size: 1024"),
        ("inter_gbit_per_s: 10", "inter_gbit_per_s: 1"),
    )
    return plan_experiment(chosen, workers=workers, progress=quiet).ranking


@pytest.mark.parametrize("lost_after", [NUM, 3])
def test_workers_plan_optional_candidates_as_this_process_does(
    actors: FakeActors, lost_after: int
) -> None:
    alone = mixed(ALONE)
    actors.lost_after = lost_after
    assert repr(mixed(Workers(num=3))) == repr(alone)
    assert len(actors.asked) == (2 if lost_after == NUM else 1)
    assert all(number > 0 for number, _ in actors.asked)


@pytest.mark.parametrize("workers", [ALONE, Workers(num=2)])
def test_each_strategy_that_leads_is_told(actors: FakeActors, workers: Workers) -> None:
    del actors
    told: list[Estimate] = []
    ranking = search_candidates(PLANNER, CANDIDATES, workers=workers, leading=told.append)
    times_s = [estimate.iteration_time_s for estimate in told]
    assert times_s == sorted(set(times_s), reverse=True)
    found = [each for each in ranking.results if isinstance(each, Estimate) and each.feasible]
    assert told[-1] == min(found, key=lambda each: each.iteration_time_s)


class WrongAt(AmpRayPlanner):
    """Refuses two candidates."""

    def plan(self, candidate: AnyCandidate) -> Result:
        for number in (2, 9):
            if candidate == CANDIDATES[number]:
                message = f"candidate {number}"
                raise InputError(message)
        return super().plan(candidate)


@pytest.mark.parametrize("lost_after", [NUM, 3])
def test_the_first_error_in_the_order_of_the_candidates_is_raised(
    actors: FakeActors, lost_after: int
) -> None:
    actors.lost_after = lost_after
    with pytest.raises(InputError, match="candidate 2"):
        search_candidates(WrongAt(experiment=EXPERIMENT), CANDIDATES, workers=Workers(num=2))


def test_a_batch_ends_with_the_first_error() -> None:
    work = Work(planner=WrongAt(experiment=EXPERIMENT), candidates=CANDIDATES)
    found = work.plan(range(1, 5))
    assert found[0] == PLANNER.plan(CANDIDATES[1])
    assert [type(entry) for entry in found[1:]] == [InputError]


@pytest.mark.parametrize(
    ("times_s", "remaining_s"),
    [
        pytest.param([10.0] * (searching.NUM_SAMPLES - 1), 0.0, id="too few samples"),
        pytest.param([10.0] * searching.NUM_SAMPLES, 1000.0, id="enough"),
        pytest.param([8.0, *[0.01] * (searching.NUM_SAMPLES - 1)], 1.0, id="one has compiled"),
        pytest.param(
            [0.01] * searching.NUM_SAMPLES + [1.0] * searching.NUM_SAMPLES, 100.0, id="they grow"
        ),
    ],
)
def test_the_stopwatch_estimates_the_rest(times_s: list[float], remaining_s: float) -> None:
    watch = Stopwatch()
    for time_s in times_s:
        watch.add(time_s)
    assert watch.remaining_s(100) == pytest.approx(remaining_s)


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
    loaded = json.loads(python("-c", program, "plan", experiment).stdout.splitlines()[-1])
    assert "amp_ray.runtime.ray.searching" in loaded
    assert [name for name in loaded if name.partition(".")[0] == "ray"] == []


@pytest.mark.parametrize(
    ("workers", "message"),
    [
        (Workers(num=-1), "workers must be at least 0, found -1"),
        (Workers(num=0, address="head:1"), "0 workers use no Ray, but its address is 'head:1'"),
    ],
)
def test_workers_that_cannot_search_are_refused(workers: Workers, message: str) -> None:
    with pytest.raises(InputError, match=message):
        workers.check()
