"""What differs between two plans, or two experiments."""

import json
from pathlib import Path

from support.commands import Run


def changed(small: Path) -> Path:
    """Write the small experiment with twice the nodes, and faster ones."""
    path = small.with_name("larger.yaml")
    text = small.read_text(encoding="utf-8").replace("count: 2", "count: 4")
    text = text.replace("device: T4", "device: V100-16")  # 4 of as many T4 would be idle
    path.write_text(text, encoding="utf-8")
    return path


def test_two_experiments_differ_in_keys_and_in_their_best_plans(amp_ray: Run, small: Path) -> None:
    larger = changed(small)
    record = amp_ray("diff", small, larger, "--json").json
    differences = {entry["key"]: (entry["a"], entry["b"]) for entry in record["differences"]}
    assert differences["cluster.nodes.0.count"] == (2, 4)
    rows = [amp_ray("plan", path, "--json").json["ranking"][0] for path in (small, larger)]
    assert differences["iteration_time_s"] == tuple(row["iteration_time_s"] for row in rows)
    assert "model.num_layers" not in differences


def test_plans_that_commands_wrote_are_compared(amp_ray: Run, small: Path, tmp_path: Path) -> None:
    plans = [tmp_path / "a.json", tmp_path / "b.json"]
    amp_ray("plan", small, "--json", plans[0])
    amp_ray("plan", small, "--set", "recompute=full", "--json", plans[1])
    out = amp_ray("diff", *plans).out
    (line,) = [line for line in out.splitlines() if line.startswith("recompute ")]
    assert line.split()[1:] == ["none", "full"]
    assert "%" in out
    assert amp_ray("diff", plans[0], plans[0]).out == "no difference\n"
    strategy = tmp_path / "strategy.json"
    strategy.write_text(json.dumps(json.loads(plans[0].read_text())["ranking"][0]["strategy"]))
    assert "recompute" in amp_ray("diff", strategy, plans[1]).out


def test_what_is_no_plan_is_refused(amp_ray: Run, small: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    other.write_text('{"a": [1, 2]}', encoding="utf-8")
    ended = amp_ray("diff", small, other)
    assert ended.code == 2
    assert f"{other}: no plan; expected a strategy" in ended.err
