"""The public API: the same answers as the commands, from files and from values."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml
from click.testing import CliRunner

import amp_ray as amp
from amp_ray.cli import commands
from amp_ray.cost.estimate import Estimate
from amp_ray.errors import AmpRayError, InputError, NotFeasibleError
from amp_ray.redaction import NOT_KEPT
from support.experiments import SMALL


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """The small experiment as a file."""
    path = tmp_path / "small.yaml"
    path.write_text(SMALL, encoding="utf-8")
    return path


def run(*arguments: object) -> str:
    """Run a command; return its standard output."""
    done = CliRunner().invoke(commands, [*map(str, arguments)], catch_exceptions=False)
    assert done.exit_code == 0
    return done.stdout


def values() -> dict[str, Any]:
    """Return the small experiment as values."""
    keys: dict[str, Any] = yaml.safe_load(SMALL)
    return keys


def test_names_are_sorted_and_all_there() -> None:
    classes = [name for name in amp.__all__ if name[0].isupper()]
    functions = [name for name in amp.__all__ if name[0].islower()]
    assert amp.__all__ == [*sorted(classes), "__version__", *sorted(functions)]
    assert set(amp.__all__) <= set(dir(amp))
    assert all(getattr(amp, name).__doc__ for name in amp.__all__ if name != "__version__")
    with pytest.raises(AttributeError, match="no attribute 'plans'"):
        amp.plans  # type: ignore[attr-defined] # noqa: B018


def test_importing_the_package_loads_nothing_else() -> None:
    program = "import sys, amp_ray; print([m for m in sys.modules if m.startswith('amp_ray.')])"
    done = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.strip() == "['amp_ray.compiled']"  # how kernels are found


def test_values_and_their_file_give_the_same_plan(small: Path) -> None:
    by_file, by_values = amp.plan(small), amp.plan(values())
    again = amp.plan(amp.load(str(small)))
    for plan in (by_values, again):
        assert plan.results == by_file.results
    assert by_file.best is by_file.results[0]
    assert by_file.to_json(num_rows=3)["ranking"] == by_values.to_json()["ranking"][:3]


def test_values_may_be_tuples_and_paths(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("a slots=2\nb slots=2\n", encoding="utf-8")
    keys = values()
    keys["cluster"] = {
        "nodes": tuple(keys["cluster"]["nodes"]),
        "hostfile": tmp_path / "hosts",
    }
    assert [node.name for node in amp.load(keys).cluster.nodes] == ["a", "b"]


def test_a_mistake_in_values_is_told_with_its_key() -> None:
    with pytest.raises(InputError, match=r"experiment: model\.num_layer: unknown key 'num_layer'"):
        amp.load({**values(), "model": {"num_layer": 3}})


def test_scores_are_those_of_the_plan(small: Path, tmp_path: Path) -> None:
    plan = amp.plan(small)
    assert plan.best is not None
    record = plan.to_json()["ranking"][0]
    file = tmp_path / "plan.json"
    file.write_text(json.dumps([record]), encoding="utf-8")
    strategies: list[Any] = [plan.best, plan.best.strategy, record, record["strategy"]]
    scores = amp.score(small, strategies)
    assert len(scores) == 4
    times = [each["iteration_time_s"] for each in scores.to_json()["rows"]]
    assert set(times) == {plan.best.iteration_time_s}
    assert list(amp.score(small, file)) == [scores[0]]


def test_a_plan_shows_itself(small: Path) -> None:
    plan = amp.plan(small)
    html = plan._repr_html_()
    assert html.startswith("<div>small: ")
    assert html.count("<table>") == 1
    assert html.count("<tr>") == 1 + min(10, len(plan.feasible))
    assert ">s/iter</th>" in html
    assert "<script" not in html
    assert repr(plan).startswith("<Plan of small: ")
    assert "tp " in repr(plan)


def test_nothing_of_the_input_is_markup() -> None:
    html = amp.plan({**values(), "name": "<b>&[bold]x"})._repr_html_()
    assert "&lt;b&gt;&amp;[bold]x" in html


@pytest.mark.parametrize("integer", [int, np.int64])
def test_presets_stand_for_a_file(tmp_path: Path, integer: Callable[[int], int]) -> None:
    keys: dict[str, Any] = {"model": "gpt2-1.5b", "cluster": "dgx-a100"}
    plan = amp.plan(**keys, nodes=integer(1), batch=integer(16), num_rows=1)
    path = tmp_path / "my.yaml"
    options = ("--model", "gpt2-1.5b", "--cluster", "dgx-a100", "--nodes", "1", "--batch", "16")
    commands(["init", "-o", str(path), *options], standalone_mode=False)
    best = amp.plan(path, num_rows=1).best
    assert plan.best is not None
    assert best is not None
    # Only the place differs that the remark on the vocabulary names
    (remark, *rest), (same, *others) = plan.best.warnings, best.warnings
    assert rest == others == ["wide interval: no published time of runtime 'deepspeed'"]
    assert remark.removeprefix("experiment: ") == same.removeprefix(f"{path}:7: ")
    assert replace(plan.best, warnings=()) == replace(best, warnings=())
    assert amp.load(**keys, nodes=1, batch=16).name == "gpt2-1.5b"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "expected a source, or model, cluster, nodes, batch; missing: model, cluster"),
        ({"model": "gpt2-1.5b"}, "missing: cluster, nodes, batch"),
        ({"source": "a.yaml", "model": "gpt2-1.5b"}, "found a source and model: expected one"),
        ({"source": 5}, "found 5; expected the path of an experiment file, or its keys"),
        (
            {"model": "gpt2-1.5b", "cluster": "dgx-a100", "nodes": 2.0, "batch": 16},
            "cluster.nodes.0.count: found 2.0; expected an integer",
        ),
    ],
)
def test_a_source_that_is_none_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        amp.plan(**arguments)


def test_numpy_values_are_plain_ones(small: Path) -> None:
    degrees = {name: np.int64(1) for name in ("tp", "pp", "micro_batch_size")}
    [mine] = amp.score(small, [{**degrees, "dp": np.int64(4)}])
    assert isinstance(mine, Estimate)
    counts: Any = np.array([1, 2])
    assert len(amp.sweep(small, {"cluster.nodes.0.count": counts}).bests) == 2


def test_rows_are_flat(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = amp.plan(small)
    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=lambda rows: rows))
    rows = plan.to_pandas()
    assert rows == plan.records()
    assert len(rows) == len(plan.results)
    plain = {str, int, float, bool, type(None)}
    assert plain | {list} >= {type(value) for row in rows for value in row.values()}
    assert plan.best is not None
    assert rows[0]["bounds"] == list(plan.best.strategy.bounds)
    assert rows[0]["interval_s"] == list(plan.best.interval_s or ())
    assert rows[0]["peak_memory_bytes"] == [round(peak) for peak in plan.best.peak_memory_bytes]
    assert len(rows[0]["memory_weights"]) == plan.best.strategy.pp
    assert rows[0]["breakdown_compute"] > 0


def test_rows_of_a_sweep_have_the_values_of_its_keys(small: Path) -> None:
    key = "trials.environment.API_KEY"
    rows = amp.sweep(
        small, {"global_batch_size": [8, 16], "recompute": ["none"], key: ["secret-text"]}
    ).records()
    assert [row["global_batch_size"] for row in rows] == [8, 16]
    assert {(row["recompute"], row[key]) for row in rows} == {("none", NOT_KEPT)}


def test_without_pandas_the_message_says_what_to_do(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(AmpRayError, match="pip install pandas"):
        amp.plan(small).to_pandas()


def test_why_nothing_is_feasible() -> None:
    keys = values()
    keys["cluster"]["nodes"][0]["memory_gib"] = 0.01
    plan = amp.plan(keys)
    assert plan.best is None
    assert "out of memory" in str(plan.why_none())
    assert "no feasible strategy" in repr(plan)
    with pytest.raises(NotFeasibleError, match="no strategy is expected to run"):
        amp.tune(keys, trials="local", doctor=False)


def test_a_study_is_replayed_calibrated_and_planned_with(small: Path, tmp_path: Path) -> None:
    table = tmp_path / "table.csv"
    rows = [f"{tp},1,{4 // tp},{size},{0.3 * tp + size / 50}" for tp in (1, 2) for size in (1, 2)]
    table.write_text("\n".join(["tp,pp,dp,micro_batch_size,measured_s", *rows]), encoding="utf-8")
    study = amp.tune(small, replay=table, study=tmp_path / "study", budget=4)
    assert study.best is not None
    assert [row["outcome"] for row in study.records()] == ["measured"] * len(study.records())
    assert study.to_json() == json.loads((tmp_path / "study" / "result.json").read_text("utf-8"))
    assert "measured" in study._repr_html_()
    calibration = amp.calibrate(small, table, output=tmp_path / "fitted.json")
    by_value = amp.plan(small, calibration=calibration)
    assert by_value.results == amp.plan(small, calibration=tmp_path / "fitted.json").results
    assert by_value.results != amp.plan(small).results


def test_the_document_runs(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(repository)
    text = (repository / "docs" / "python.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 3
    exec("".join(blocks), {})  # noqa: S102 - our own document
    public = {name for name in amp.__all__ if name[0].islower()}
    assert public == set(re.findall(r"^\| `amp\.(\w+)", text, re.MULTILINE))


def test_the_notebook_runs(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its cells one after the other, from the top of the checkout; its page goes elsewhere."""
    monkeypatch.chdir(repository)
    text = (repository / "experiments" / "notebook.ipynb").read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    for cell in json.loads(text)["cells"]:
        source = "".join(cell["source"]).replace("report.html", str(tmp_path / "report.html"))
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            exec(source, names)  # noqa: S102 - our own notebook
    assert 0.3 < names["best"].mfu < 0.6
    assert len(names["curve"].points) == 3
    assert (tmp_path / "report.html").is_file()


@pytest.mark.parametrize(
    ("function", "keyword", "message"),
    [
        (amp.plan, "toq", "plan() takes no 'toq'; did you mean 'top'?"),
        (amp.plan, "worker", "plan() takes no 'worker'; did you mean 'workers'?"),
        (amp.explain, "worker", "explain() takes no 'worker'; did you mean 'workers'?"),
        (amp.tune, "buget", "tune() takes no 'buget'; did you mean 'budget'?"),
        (amp.score, "strategis", "score() takes no 'strategis'; did you mean 'strategies'?"),
        (amp.export, "positon", "export() takes no 'positon'; did you mean 'position'?"),
        (amp.init, "modell", "init() takes no 'modell'; did you mean 'model'?"),
        (amp.show, "xyz", "show() takes no 'xyz'; known: study"),
    ],
)
def test_an_unknown_keyword_names_itself(
    function: Callable[..., object], keyword: str, message: str, small: Path
) -> None:
    with pytest.raises(InputError, match=f"^{re.escape(message)}$"):
        function(small, **{keyword: 2})


def test_results_are_sequences(small: Path) -> None:
    plan = amp.plan(small, top=2)
    assert plan[0] is plan.best
    assert list(plan) == list(plan.results) == [plan[index] for index in range(len(plan))]
    assert plan[:2] == plan.results[:2]
    assert plan.num_shown == 2
    keys = values()
    keys["cluster"]["nodes"][0]["memory_gib"] = 1.0
    rows = amp.plan(keys)
    assert not any(row.feasible for row in rows)
    assert {type(row.iteration_time_s) for row in rows} <= {float, type(None)}
    sweep = amp.sweep(small, {"recompute": ["none", "full"]})
    assert [point.best for point in sweep] == list(sweep.bests)
    assert len(sweep) == 2


def test_commands_are_functions(small: Path, tmp_path: Path) -> None:
    text = amp.export(small, "csv")
    assert text.text == str(text) == run("export", small, "--to", "csv")
    assert "<pre>position," in text._repr_html_()
    written = amp.export(small, "deepspeed", output=tmp_path / "folder")
    assert sorted(path.name for path in (tmp_path / "folder").iterdir()) == sorted(written.files)
    with pytest.raises(InputError, match="--to: found 'nothing'; expected one of accelerate"):
        amp.export(small, "nothing")
    changed = {**values(), "global_batch_size": 16}
    rows = amp.diff(amp.plan(small), amp.plan(changed))
    assert "iteration_time_s" in {row["key"] for row in rows}
    assert "iteration_time_s" in rows._repr_html_()
    with pytest.raises(InputError, match=r"cluster\.hostfile: not there"):
        amp.doctor(values())
    with pytest.raises(InputError, match="no study can be read here"):
        amp.show(tmp_path)
    path = tmp_path / "first.yaml"
    first = amp.init(path, device="V100-16", slots=2, model="llama-3-8b", nodes=1, batch=8)
    assert path.read_text(encoding="utf-8") == first
    assert amp.load(path).cluster.num_devices == 2
    with pytest.raises(InputError, match="is there already"):
        amp.init(path, model="llama-3-8b", cluster="dgx-h100", nodes=1, batch=8)


def test_changes_are_those_of_set(small: Path) -> None:
    for source in (small, values()):
        assert amp.load(source, changes=["global_batch_size=16"]).global_batch_size == 16
    with pytest.raises(InputError, match="give its file or values"):
        amp.load(amp.load(small), changes=["global_batch_size=16"])
