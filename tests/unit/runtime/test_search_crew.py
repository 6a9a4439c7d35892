import os
from collections.abc import Sequence

import pytest

from amp_ray import __version__
from amp_ray.cost.estimate import Result
from amp_ray.errors import AmpRayError, InputError
from amp_ray.runtime import search_crew
from amp_ray.runtime.search_batches import Batch
from amp_ray.runtime.search_crew import CrewSearch, Event, Hello, SearchWorker, Work
from amp_ray.search.planner import AmpRayPlanner
from amp_ray.search.space import uniform_candidates
from amp_ray.spec.candidate import AnyCandidate
from amp_ray.testing.experiments import small_experiment

EXPERIMENT = small_experiment()
PLANNER = AmpRayPlanner(experiment=EXPERIMENT)
CANDIDATES = uniform_candidates(EXPERIMENT)
WORK = Work(planner=PLANNER, candidates=CANDIDATES)
ALONE = [PLANNER.plan(candidate) for candidate in CANDIDATES]


class FakeCrew:
    """Workers that answer at once; some never start, are mute, or die with their second batch."""

    def __init__(self, *fates: str) -> None:
        """Start those that ever start."""
        self.fates = fates
        self.waiting = [Event(worker=n) for n, fate in enumerate(fates) if fate != "never starts"]
        self.asked: list[tuple[int, Batch]] = []
        self.workers = [SearchWorker(WORK) for _ in fates]

    @property
    def num_workers(self) -> int:
        return len(self.fates)

    def ask(self, worker: int, batch: Batch) -> None:
        assert self.fates[worker] != "never starts"
        before = sum(number == worker for number, _ in self.asked)
        self.asked.append((worker, batch))
        if self.fates[worker] == "dies" and before:
            self.waiting.append(Event(worker=worker, batch=batch, gone="bus error"))
        elif self.fates[worker] == "loses" and before % 2:
            self.waiting.append(Event(worker=worker, batch=batch))
        elif self.fates[worker] != "is mute":
            answer = self.workers[worker].plan(batch)
            self.waiting.append(Event(worker=worker, batch=batch, answer=answer))

    def events(self, timeout_s: float) -> Sequence[Event]:
        del timeout_s
        events, self.waiting = self.waiting, []
        return events

    def shortage(self) -> str:
        return "too few"


def search(crew: FakeCrew) -> list[Result]:
    return CrewSearch(crew, len(CANDIDATES), lambda _num: None).run()


@pytest.mark.parametrize(
    "fates",
    [
        ("works",),
        ("works", "works", "works"),
        ("never starts", "works"),
        ("dies", "works", "dies"),
        ("loses", "loses"),
    ],
)
def test_results_are_those_of_one_process(fates: tuple[str, ...]) -> None:
    assert search(FakeCrew(*fates)) == ALONE


def test_a_mute_worker_gets_no_third_batch_and_others_do_its_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("amp_ray.runtime.search_batches.PATIENCE_S", 0.0)
    crew = FakeCrew("is mute", "works")
    assert search(crew) == ALONE
    assert sum(worker == 0 for worker, _ in crew.asked) == 2


def test_results_are_counted_as_they_come() -> None:
    counts: list[int] = []
    CrewSearch(FakeCrew("works"), len(CANDIDATES), counts.append).run()
    assert counts == sorted(counts)
    assert counts[-1] == len(CANDIDATES)


def test_no_worker_left_is_told_with_the_reason() -> None:
    with pytest.raises(AmpRayError, match="no worker of the search is left: bus error"):
        search(FakeCrew("dies", "dies"))


def test_no_worker_that_starts_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search_crew, "START_TIMEOUT_S", 0.01)
    with pytest.raises(AmpRayError, match=r"has started in 0\.01 s: too few"):
        search(FakeCrew("never starts"))


def test_silence_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search_crew, "SILENCE_TIMEOUT_S", 0.01)
    with pytest.raises(AmpRayError, match="has answered"):
        search(FakeCrew("is mute"))


class WrongAt(AmpRayPlanner):
    """Refuses the third candidate."""

    def plan(self, candidate: AnyCandidate) -> Result:
        if candidate == CANDIDATES[2]:
            message = "third"
            raise InputError(message)
        return super().plan(candidate)


def test_a_worker_plans_up_to_the_first_error() -> None:
    worker = SearchWorker(Work(planner=WrongAt(experiment=EXPERIMENT), candidates=CANDIDATES))
    answer = worker.plan(Batch(start=1, stop=5))
    assert answer.results == (ALONE[1],)
    assert isinstance(answer.error, InputError)


def test_only_the_first_batch_of_a_worker_is_cold() -> None:
    worker = SearchWorker(WORK)
    assert [worker.plan(Batch(start=n, stop=n + 1)).warm for n in range(3)] == [False, True, True]


def test_a_process_tells_who_it_is() -> None:
    hello = Hello.here()
    assert (hello.pid, hello.version) == (os.getpid(), __version__)
    hello.check_version()


def test_another_version_is_refused() -> None:
    with pytest.raises(AmpRayError, match=r"node7 has amp-ray 0\.0\.1 and this machine"):
        Hello(version="0.0.1", pid=1, host="node7").check_version()
