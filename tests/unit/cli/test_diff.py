"""What differs between two plans, or two experiments."""

import json
from pathlib import Path

from support.checked import check_ended
from support.commands import Run


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
    check_ended(amp_ray("diff", small, other), 2, f"{other}: no plan; expected a strategy")
