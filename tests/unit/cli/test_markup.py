"""Nothing that comes from input is markup, whatever prints it."""

import ast
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest
from rich.live import Live

from amp_ray.cli.exits import table_console
from amp_ray.cost.estimate import Estimate, Reason
from amp_ray.cost.model import CostModel
from amp_ray.inputs.experiment import Experiment
from amp_ray.report.console import console
from amp_ray.report.study import LiveView, PlainView, end_view
from amp_ray.report.tables import ranking_table
from amp_ray.search.ranking import rank
from amp_ray.trials.outcome import Crashed
from support.commands import Run
from support.driving import MemoryLog, ScriptedPool, drive, make_driver, small_study
from support.planted import small_strategies
from support.recorded import table_text, write_experiment

NAME: Final = "[/x] [red] b[/]"
"""A closing tag without its opening one, a colour, and a tag that closes everything."""

CRASHED: Final = Crashed(reason=NAME, kind="crash", rank=1, host=NAME, lines=(NAME,), wall_s=1.0)

Show = Callable[[], None]


def named() -> Experiment:
    """The small experiment with names that look like markup."""
    experiment = small_study().experiment
    nodes = tuple(
        replace(node, name=f"{node.name}{NAME}", device=replace(node.device, name=f"T4 {NAME}"))
        for node in experiment.cluster.nodes
    )
    return replace(experiment, name=NAME, cluster=replace(experiment.cluster, nodes=nodes))


def estimates() -> list[Estimate]:
    """A strategy that runs on the nodes in reverse and has a warning, and one that cannot run."""
    experiment = named()
    model = CostModel(experiment=experiment)
    plans = [model.estimate(strategy) for strategy in small_strategies(experiment)[:2]]
    turned = replace(plans[0].strategy, placement=(3, 2, 1, 0))
    return [
        replace(plans[0], strategy=turned, warnings=(NAME,)),
        replace(plans[1], reasons=(Reason(kind=NAME, detail=NAME),)),
    ]


def show_ranking() -> None:
    table_console().print(ranking_table(rank(estimates()), named(), title=NAME, num_rows=1))


def show_end() -> None:
    state = replace(small_study(budget=1), experiment=named())
    table_console().print(end_view(drive(state, lambda _task, _group: CRASHED), NAME))


def show_live() -> None:
    with Live(console=console(), auto_refresh=False) as live:
        view = LiveView(live)
        view.note(NAME)
        study_before(view)


def study_before(view: PlainView | LiveView) -> None:
    """Drive a study whose only trial crashes."""
    pool = ScriptedPool(answer=lambda _task, _group: CRASHED, num_groups=1)
    make_driver(small_study(budget=1), pool, MemoryLog(), view).run()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "show",
    [show_ranking, show_end, show_live],
)
def test_names_are_printed_as_they_are(
    show: Show, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    show()
    assert NAME in capsys.readouterr().out


def test_the_name_of_an_experiment_is_printed_as_it_is(
    amp_ray: Run, small: Path, tmp_path: Path
) -> None:
    text = small.read_text(encoding="utf-8").replace("name: small", 'name: "x [red] :fire: b"')
    small.write_text(text, encoding="utf-8")
    assert "x [red] :fire: b: gpt2, " in amp_ray("plan", small).out


def test_a_study_ends_as_it_should_whatever_its_name(amp_ray: Run, tmp_path: Path) -> None:
    path = write_experiment(tmp_path, ("name: small", 'name: "x [red] b"'))
    table = tmp_path / "table.csv"
    table.write_text(table_text(small_study().experiment), encoding="utf-8")
    ended = amp_ray(
        *("tune", path, "--trials", f"replay:{table}", "--budget", "2"),
        *("--study", tmp_path / "study"),
    )
    assert ended.code == 0, ended.err
    assert "x [red] b: 2 trials" in ended.out


# ------------------------------------------------------------------------- by construction


def test_one_place_makes_consoles_and_nothing_reads_markup(repository: Path) -> None:
    reads_markup = {"Console", "TextColumn", "from_markup", "render_str"}
    callers = {
        path.relative_to(repository).as_posix()
        for folder in ("amp_ray", "cluster", "experiments")
        for path in sorted((repository / folder).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and getattr(node.func, "attr", getattr(node.func, "id", None)) in reads_markup
    }
    own_words_only = {"experiments/accuracy.py"}
    assert callers - own_words_only == {"amp_ray/report/console.py"}
