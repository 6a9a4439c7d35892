from pathlib import Path

import pytest

from amp_ray.errors import InputError, Where
from amp_ray.inputs.strategies import Entry
from amp_ray.runtime.study.pool import ReplayPool, Task
from amp_ray.runtime.study.space import load_replay, recorded_outcome
from amp_ray.strategies.candidate import Candidate
from amp_ray.strategies.strategy import StageOptions, Strategy
from amp_ray.trials.outcome import Crashed, Measured, OutOfMemory
from support.experiments import small_experiment
from support.replaying import crashed, measured

EXPERIMENT = small_experiment()
HEADER = "tp,pp,dp,micro_batch_size,bounds,measured_s\n"
WHERE = Where(file="table.csv", line=7)
GRID = Candidate(micro_batch_size=1, options=StageOptions(tp=1, dp=4), pp=1, num_micro_batches=2)
STRATEGY = Strategy.uniform(GRID, (0, 9))
OTHER = Strategy.uniform(
    Candidate(micro_batch_size=2, options=StageOptions(tp=1, dp=4), pp=1, num_micro_batches=1),
    (0, 9),
)


def table(folder: Path, text: str) -> Path:
    path = folder / "table.csv"
    path.write_text(text, encoding="utf-8")
    return path


def task(strategy: Strategy, number: int = 0) -> Task:
    return Task(
        number=number, attempt=0, trial_id=f"t-{number}", strategy=strategy, folder=Path("unused")
    )


# ------------------------------------------------------------------------- the table


def test_every_line_is_one_recorded_trial(tmp_path: Path) -> None:
    path = table(tmp_path, HEADER + "1,1,4,1,0 9,0.5\n1,2,2,1,0 4 9,oom\n2,1,2,1,,failed\n")
    found = load_replay(path, EXPERIMENT)
    assert [(given.measured_s, given.failure) for given in found] == [
        (0.5, None),
        (None, "oom"),
        (None, "failed"),
    ]


def test_a_line_without_a_measurement_is_refused(tmp_path: Path) -> None:
    path = table(tmp_path, HEADER + "1,1,4,1,0 9,0.5\n1,2,2,1,0 4 9,\n")
    message = r"table\.csv:3: nothing was measured; expected measured_s with seconds, oom or failed"
    with pytest.raises(InputError, match=message):
        load_replay(path, EXPERIMENT)


@pytest.mark.parametrize(
    ("runs", "answer"),
    [
        (("0.7", "0.5", "0.6"), (0.6, None)),
        (("0.7", "0.5"), (0.5, None)),
        (("oom", "0.5"), (0.5, None)),
        (("oom", "failed"), (None, "oom")),
    ],
)
@pytest.mark.parametrize("bounds", ["0 4 9", ""])
def test_of_several_runs_of_a_strategy_the_middle_one_answers(
    tmp_path: Path, runs: tuple[str, ...], answer: tuple[float | None, str | None], bounds: str
) -> None:
    path = table(tmp_path, HEADER + "".join(f"1,2,2,1,{bounds},{run}\n" for run in runs))
    (found,) = load_replay(path, EXPERIMENT)
    assert (found.measured_s, found.failure) == answer


def test_the_same_degrees_with_other_cuts_are_another_strategy(tmp_path: Path) -> None:
    path = table(tmp_path, HEADER + "1,2,2,1,0 4 9,0.5\n1,2,2,1,0 5 9,0.6\n")
    assert len(load_replay(path, EXPERIMENT)) == 2


def test_a_table_of_another_model_is_refused_by_line(tmp_path: Path) -> None:
    path = table(tmp_path, HEADER + "1,1,4,1,0 30,0.5\n")
    with pytest.raises(InputError, match=r"table\.csv:2: bounds: found 0 30; expected 0 to 9"):
        load_replay(path, EXPERIMENT)


def test_a_table_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none\.csv"):
        load_replay(tmp_path / "none.csv", EXPERIMENT)


# ------------------------------------------------------------------------- what it answers


def test_seconds_are_a_measurement_of_which_only_the_table_s_figures_are_known() -> None:
    given = Entry(
        where=WHERE,
        candidate=GRID,
        strategy=STRATEGY,
        measured_s=0.5,
        spread_s=0.01,
        peak_memory_bytes=(3e9, 2e9),
    )
    assert recorded_outcome(given) == Measured(
        measured_s=0.5,
        mean_s=0.5,
        spread_s=0.01,
        step_time_s=(0.5,),
        num_warmup_steps=0,
        peak_memory_bytes=(3_000_000_000, 2_000_000_000),
        wall_s=0.0,
    )


def test_the_mean_of_a_table_counts_and_its_spread_is_judged() -> None:
    given = Entry(
        where=WHERE, candidate=GRID, strategy=None, measured_s=0.5, mean_s=0.6, spread_s=0.16
    )
    outcome = recorded_outcome(given)
    assert isinstance(outcome, Measured)
    assert (outcome.measured_s, outcome.mean_s, outcome.warnings) == (0.5, 0.6, ("unsteady",))


def test_a_table_without_a_spread_does_not_pretend_to_know_one() -> None:
    outcome = recorded_outcome(Entry(where=WHERE, candidate=GRID, strategy=None, measured_s=0.5))
    assert isinstance(outcome, Measured)
    assert not outcome.has_spread


def test_failures_name_their_line() -> None:
    oom = recorded_outcome(Entry(where=WHERE, candidate=GRID, strategy=None, failure="oom"))
    failed = recorded_outcome(Entry(where=WHERE, candidate=GRID, strategy=None, failure="failed"))
    assert isinstance(oom, OutOfMemory)
    assert oom.reason == "recorded as out of memory (table.csv:7)"
    assert isinstance(failed, Crashed)
    assert failed.reason == "recorded as failed, the cause is not known (table.csv:7)"


# ------------------------------------------------------------------------- the pool


def test_the_answer_is_there_at_once() -> None:
    pool = ReplayPool({STRATEGY: measured(0.5), OTHER: crashed()})
    pool.start(task(STRATEGY), 0)
    [finished] = pool.wait(0.0)
    assert (finished.task, finished.outcome, finished.group) == (
        task(STRATEGY),
        measured(0.5),
        0,
    )
    assert pool.wait(0.0) == []


def test_as_many_may_be_asked_for_at_once_as_there_are_groups() -> None:
    pool = ReplayPool({STRATEGY: measured(0.5), OTHER: crashed()}, 2)
    assert len(pool.free()) == 2
    pool.start(task(STRATEGY), 1)
    assert pool.free() == (0,)
    pool.start(task(OTHER, 1), 0)
    assert pool.free() == ()
    assert [(entry.task.number, entry.group) for entry in pool.wait(1.0)] == [(0, 1), (1, 0)]
    assert pool.free() == (0, 1)


def test_a_group_that_is_set_aside_is_not_free() -> None:
    pool = ReplayPool({}, 2)
    pool.set_aside(0)
    assert pool.free() == (1,)


def test_nothing_is_left_to_sweep_or_close() -> None:
    pool = ReplayPool({STRATEGY: measured(0.5)})
    assert pool.sweep(["a", "b"]) == []
    pool.start(task(STRATEGY), 0)
    pool.close()
    assert [entry.outcome for entry in pool.wait(0.0)] == [measured(0.5)]
