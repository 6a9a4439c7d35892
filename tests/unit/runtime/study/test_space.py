import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from amp_ray.cost.estimate import Estimate, Infeasible
from amp_ray.errors import InputError, Where
from amp_ray.inputs.experiment import Experiment
from amp_ray.inputs.strategies import Entry
from amp_ray.runtime.files import load_experiment
from amp_ray.runtime.study.space import (
    Space,
    TuneOptions,
    load_replay,
    recorded_outcome,
    study_space,
)
from amp_ray.strategies.candidate import Candidate
from amp_ray.strategies.strategy import StageOptions, Strategy, candidate_of
from amp_ray.trials.outcome import Crashed, Measured, OutOfMemory
from support.experiments import small_experiment
from support.recorded import table_text


def space_of(experiment: Experiment, **options: Any) -> Space:  # noqa: ANN401 - those of TuneOptions
    chosen = TuneOptions(**{"backend": "local", "budget": 3, **options})
    return study_space(experiment, chosen, lambda _done, _total: None)


def replayed(folder: Path, text: str, **options: Any) -> Space:  # noqa: ANN401 - as above
    path = folder / "table.csv"
    path.write_text(text, encoding="utf-8")
    return space_of(small_experiment(), backend="replay", table=path, **options)


def times(space: Space) -> list[float]:
    return [each.iteration_time_s for each in space.results if isinstance(each, Estimate)]


# ------------------------------------------------------------------------- planned


def test_all_candidates_are_planned_and_ranked() -> None:
    space = space_of(small_experiment())
    assert len(space.results) == space.num_feasible == 16
    assert times(space) == sorted(times(space))
    assert (space.order, space.replayed) == (None, ())


def test_what_cannot_run_is_there_and_does_not_count() -> None:
    space = space_of(small_experiment(("num_heads: 8", "num_heads: 1")))
    assert len(space.results) == 16
    assert space.num_feasible == 9
    assert sum(isinstance(each, Infeasible) for each in space.results) == 7


def test_progress_is_told() -> None:
    told: list[tuple[int, int]] = []
    options = TuneOptions(backend="local", budget=3)
    study_space(small_experiment(), options, lambda done, total: told.append((done, total)))
    assert told[-1] == (16, 16)


def test_a_policy_that_follows_the_published_planner_has_its_order(repository: Path) -> None:
    homogeneous = load_experiment(repository / "experiments" / "homogeneous.yaml")
    space = space_of(homogeneous, policy="amp-2022")
    assert space.order is not None
    ours = [each.strategy for each in space.results if isinstance(each, Estimate)]
    assert set(space.order) == set(ours)
    assert [*space.order] != ours


def test_the_published_planner_refuses_what_it_does_not_know() -> None:
    with pytest.raises(InputError, match="cost model amp-2022 needs a measured profile"):
        space_of(small_experiment(), policy="amp-2022")


# ------------------------------------------------------------------------- replayed


def test_the_candidates_are_the_strategies_of_the_table(tmp_path: Path) -> None:
    lines = table_text(small_experiment(), {1: "oom"}).splitlines()
    space = replayed(tmp_path, "\n".join(lines[:6]))
    assert len(space.results) == len(space.replayed) == 5
    assert times(space) == sorted(times(space))
    assert [given.failure for _, given in space.replayed].count("oom") == 1


def test_cuts_of_the_table_are_kept_and_missing_ones_solved(tmp_path: Path) -> None:
    header = "tp,pp,dp,micro_batch_size,bounds,measured_s\n"
    space = replayed(tmp_path, header + "1,2,2,1,0 1 9,0.5\n2,2,1,1,,0.6\n")
    bounds = {strategy.tp: strategy.bounds for strategy, _ in space.replayed}
    assert bounds[1] == (0, 1, 9)
    solved = next(
        each.strategy.bounds
        for each in space_of(small_experiment()).results
        if isinstance(each, Estimate)
        and (each.strategy.tp, each.strategy.pp, each.strategy.micro_batch_size) == (2, 2, 1)
    )
    assert bounds[2] == solved


def test_what_the_planner_thinks_impossible_stays_a_candidate_only_if_it_can_be_cut(
    tmp_path: Path,
) -> None:
    experiment = small_experiment(("num_heads: 8", "num_heads: 1"))
    path = tmp_path / "table.csv"
    path.write_text(
        "tp,pp,dp,micro_batch_size,bounds,measured_s\n1,2,2,1,0 4 9,0.5\n2,2,1,1,,0.6\n",
        encoding="utf-8",
    )
    space = space_of(experiment, backend="replay", table=path)
    assert [strategy.tp for strategy, _ in space.replayed] == [1]
    assert len(space.results) == 2


def test_the_published_order_holds_for_the_table_of_its_own_trials(repository: Path) -> None:
    homogeneous = load_experiment(repository / "experiments" / "homogeneous.yaml")
    table = repository / "amp_ray" / "data" / "tables" / "amp-2022-homogeneous.csv"
    space = space_of(homogeneous, backend="replay", table=table, policy="amp-2022")
    planned = space_of(homogeneous, policy="amp-2022")
    assert space.order is not None
    assert planned.order is not None
    answered = {candidate_of(strategy) for strategy, _ in space.replayed}
    assert [candidate_of(each) for each in space.order] == [
        candidate_of(each) for each in planned.order if candidate_of(each) in answered
    ]


# ------------------------------------------------------------------------- nothing to try


def test_nothing_fits() -> None:
    tiny = ("slots: 2,", "slots: 2, memory_gib: 0.001,")
    experiment = small_experiment(tiny)
    space = space_of(experiment)
    assert space.num_feasible == 0
    assert re.fullmatch(
        "no strategy is expected to run: 16 out of memory; closest: tp 2, pp 2, dp 1, "
        r"micro-batch size 1, bounds 0 . 9: stage . needs \S+ GiB of 0\.00 \(T4\)",
        space.why_none(experiment),
    )


def test_nothing_can_be_launched() -> None:
    results = tuple(
        replace(each, launchable=False, warnings=("first", reason))
        for each, reason in zip(
            [each for each in space_of(small_experiment()).results if isinstance(each, Estimate)],
            ["no way to shard"] * 15 + ["another"],
            strict=True,
        )
    )
    space = Space(results=results)
    assert space.num_feasible == 0
    assert space.why_none(small_experiment()) == (
        "none of the strategies that fit (16) can be launched; 15 of them: no way to shard"
    )


def test_nothing_can_be_launched_and_nobody_said_why() -> None:
    results = tuple(
        replace(each, launchable=False, warnings=())
        for each in space_of(small_experiment()).results
        if isinstance(each, Estimate)
    )
    assert "can be launched" in Space(results=results).why_none(small_experiment())


# ------------------------------------------------------------------------- recorded trials

EXPERIMENT = small_experiment()
HEADER = "tp,pp,dp,micro_batch_size,bounds,measured_s\n"
WHERE = Where(file="table.csv", line=7)
GRID = Candidate(micro_batch_size=1, options=StageOptions(tp=1, dp=4), pp=1, num_micro_batches=2)
STRATEGY = Strategy.uniform(GRID, (0, 9))


def table(folder: Path, text: str) -> Path:
    path = folder / "table.csv"
    path.write_text(text, encoding="utf-8")
    return path


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
