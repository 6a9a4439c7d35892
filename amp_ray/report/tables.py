"""Rankings as tables for people."""

from collections.abc import Sequence
from dataclasses import fields

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from amp_ray.cost.estimate import Breakdown, Estimate, Infeasible, Result
from amp_ray.report.places import is_in_order, places_text
from amp_ray.search.ranking import Ranking
from amp_ray.spec.candidate import GroupsCandidate
from amp_ray.spec.cluster import Cluster
from amp_ray.units import GIB

_SHORT_NAMES = {
    "compute_s": "compute",
    "tensor_parallel_s": "tp",
    "bubble_s": "bubble",
    "pipeline_p2p_s": "p2p",
    "gradient_sync_s": "sync",
    "optimizer_s": "optim",
    "other_s": "other",
}
_MAX_BOUNDS = 60
"""Characters of bounds that a table shows; JSON has them whole."""


def ranking_table(
    ranking: Ranking, cluster: Cluster, *, title: str, num_rows: int | None
) -> RenderableType:
    """Draw the head of a ranking, with what became of the rest.

    Args:
        ranking: What to draw.
        cluster: Gives nodes their names.
        title: Headline.
        num_rows: Feasible rows to show; None shows everything, the infeasible included.
    """
    shown = ranking.results
    if num_rows is not None:
        shown = shown[: min(num_rows, ranking.num_feasible)]
    parts: list[RenderableType] = []
    if shown:
        parts.append(results_table(shown, cluster, title=title, num_tied=ranking.num_tied))
    parts.extend(_notes(ranking, num_shown=len(shown)))
    return Group(*parts)


def results_table(
    results: Sequence[Result], cluster: Cluster, *, title: str, num_tied: int = 0
) -> Table:
    """Draw results in the given order, with the breakdown of each strategy.

    Where some are placed otherwise than in the order of the devices, a column says where.
    """
    has_breakdown = any(isinstance(result, Estimate) and result.breakdown for result in results)
    has_memory = any(
        isinstance(result, Estimate) and result.peak_memory_bytes for result in results
    )
    has_places = any(
        isinstance(result, Estimate) and not is_in_order(result.strategy) for result in results
    )
    table = Table(title=title, title_justify="left", header_style="bold", pad_edge=False)
    for name in ("#", "tp", "dp", "pp", "micro", "s/iter"):
        table.add_column(name, justify="right", no_wrap=True)
    if has_breakdown:
        for name in _SHORT_NAMES.values():
            table.add_column(name, justify="right", no_wrap=True, style="dim")
    if has_memory:
        table.add_column("peak/limit GiB", justify="right", no_wrap=True)
    if has_places:
        table.add_column("stages on", overflow="fold")
    table.add_column("bounds, or why not", overflow="fold")
    for position, result in enumerate(results, start=1):
        mark = "=" if 1 < position <= num_tied else ""
        cells = [f"{mark}{position}", *_degrees(result), _time(result)]
        if has_breakdown:
            cells += _breakdown(result)
        if has_memory:
            cells.append(_memory(result))
        if has_places:
            cells.append(_places(result, cluster))
        style = None if isinstance(result, Estimate) and result.feasible else "red"
        table.add_row(*cells, _remark(result), style=style)
    return table


def _degrees(result: Result) -> list[str]:
    """Return tp, dp, pp and micro-batch size; a star where stages differ."""
    plan = result.candidate if isinstance(result, Infeasible) else result.strategy
    if isinstance(plan, GroupsCandidate):
        return ["*", "*", "*", str(plan.micro_batch_size)]
    return [str(value or "*") for value in (plan.tp, plan.dp, plan.pp, plan.micro_batch_size)]


def _time(result: Result) -> str:
    """Return seconds per iteration."""
    return f"{result.iteration_time_s:.4g}" if isinstance(result, Estimate) else "-"


def _breakdown(result: Result) -> list[str]:
    """Return the parts of an iteration."""
    parts = result.breakdown if isinstance(result, Estimate) else None
    if parts is None:
        return ["-"] * len(_SHORT_NAMES)
    return [f"{getattr(parts, part.name):.3f}" for part in fields(Breakdown)]


def _memory(result: Result) -> str:
    """Return the stage that comes closest to its limit."""
    if isinstance(result, Infeasible) or not result.peak_memory_bytes:
        return "-"
    pairs = zip(result.peak_memory_bytes, result.memory_limit_bytes, strict=True)
    peak, limit = max(pairs, key=lambda pair: pair[0] / pair[1])
    return f"{peak / GIB:.1f}/{limit / GIB:.1f}"


def _places(result: Result, cluster: Cluster) -> str:
    """Return the nodes of each stage."""
    return places_text(result.strategy, cluster) if isinstance(result, Estimate) else "-"


def _remark(result: Result) -> str:
    """Return the bounds of what can run, the reasons of what cannot."""
    if isinstance(result, Infeasible):
        return str(result.reason)
    if not result.feasible:
        return "; ".join(map(str, result.reasons))
    bounds = " ".join(map(str, result.strategy.bounds))
    short = (
        bounds
        if len(bounds) <= _MAX_BOUNDS
        else bounds[: _MAX_BOUNDS - 4].rsplit(" ", 1)[0] + " ..."
    )
    return "; ".join((short, *result.warnings))


def _notes(ranking: Ranking, *, num_shown: int) -> list[Text]:
    """Return what the table does not show: ties, the rest, and why some cannot run."""
    notes = []
    if ranking.num_tied > 1:
        share = f"{100 * ranking.relative_error:.0f} %"
        notes.append(
            Text(f"= the first {ranking.num_tied} are ties within the model's error of {share}")
        )
    num_hidden = ranking.num_feasible - num_shown
    if num_hidden > 0:
        notes.append(Text(f"{num_hidden} more feasible strategies: --top K or --all"))
    num_infeasible = len(ranking.results) - ranking.num_feasible
    if num_infeasible and num_shown <= ranking.num_feasible:
        notes.append(Text(f"{num_infeasible} not feasible: {reasons_text(ranking)}"))
    return notes


def reasons_text(ranking: Ranking) -> str:
    """Count the reasons, e.g. ``12 out of memory, 5 more stages than layers``."""
    return ", ".join(f"{count} {kind}" for kind, count in ranking.reason_counts())
