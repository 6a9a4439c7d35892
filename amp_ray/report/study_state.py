"""The state of a study, drawn from what its journal tells."""

from collections.abc import Mapping
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from amp_ray.errors import printable
from amp_ray.report.variants import figure_text, plan_text
from amp_ray.units import counted


def state_view(state: Mapping[str, Any], *, most: int | None = None) -> RenderableType:
    """Draw what ``show --json`` writes; with ``most``, no more than the last trials."""
    trials = state["trials"]
    shown = trials if most is None else trials[-most:]
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for name in ("trial", "predicted s", "measured s", "slower by"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("strategy, and what came of it", overflow="fold")
    for trial in shown:
        is_best = trial["number"] == state["best"]
        failed = trial["outcome"] not in {None, "measured"}
        style = "bold green" if is_best else "red" if failed else None
        table.add_row(*map(Text, _cells(trial)), style=style)
    head = f"{state['experiment']}: {counted(len(trials), 'trial')}"
    if len(shown) < len(trials):
        head += f", the last {len(shown)} of them"
    return Group(Text(printable(head)), table, Text(printable(_summary(state))))


def _cells(trial: Mapping[str, Any]) -> list[str]:
    """Return the cells of one trial."""
    measured_s, predicted_s = trial["measured_s"], trial["predicted_s"]
    excess = f"{measured_s / predicted_s - 1:+.1%}" if measured_s and predicted_s else "-"
    remark = plan_text(trial["strategy"])
    if trial["repeats"] is not None:
        remark += f", repeats {trial['repeats']}"
    if trial["outcome"] is None:
        remark += ": runs" if trial["running"] else ": waits"
    elif trial["outcome"] != "measured":
        remark += f": {trial['outcome']}: {printable(str(trial['reason']))}"
    figures = (figure_text(predicted_s), figure_text(measured_s), excess)
    return [str(trial["number"]), *figures, remark]


def _summary(state: Mapping[str, Any]) -> str:
    """Say how far the study is."""
    best = state["best"]
    told = f"best so far {figure_text(state['best_s'])} s, trial {best}"
    words = ["nothing measured yet" if best is None else told]
    if state["ending"] is None:
        words.append(f"its last event was at {state['last_event_at']}")
    else:
        words.append(f"it ended: {state['ending_text'] or state['ending']}")
    return "; ".join(words)
