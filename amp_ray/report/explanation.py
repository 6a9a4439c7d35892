"""Why a plan is what it is, for people."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from amp_ray.report.console import plain_table
from amp_ray.report.variants import figure_text, plan_text
from amp_ray.units import GIB, MILLISECONDS_PER_SECOND

Record = Mapping[str, Any]

_LEAST_SHARE: Final = 0.005  # part of an iteration below which nothing is said of it

_LEAST_GAIN: Final = 0.005


def explanation_view(record: Record) -> RenderableType:
    """Draw what ``explain --json`` writes."""
    if record["row"] is None:
        return Group(Text("what would help, planned again:"), _advice(record.get("advice", ())))
    row = record["row"]
    seconds = figure_text(row["iteration_time_s"])
    title = f"{record['experiment']}, #{row['position']}: {plan_text(row['strategy'])}, {seconds} s"
    parts: list[RenderableType] = [Text(title, style="bold"), Text(_shares(row))]
    parts += ["", _stages(record["stages"])]
    parts += map(Text, _bottleneck(record["stages"], row["memory_bytes"]))
    parts += ["", *map(Text, _links(record["links"]))]
    if record["other"] is not None:
        parts += ["", *map(Text, _other(record["other"], row))]
    if "advice" in record:
        parts += ["", Text("what would help, planned again:"), _advice(record["advice"])]
    return Group(*parts)


def _shares(row: Record) -> str:
    """Say where the time goes, largest part first."""
    total_s, parts = row["iteration_time_s"], row["breakdown_s"] or {}
    shares = sorted(((value / total_s, name) for name, value in parts.items()), reverse=True)
    words = [f"{_words(name)} {share:.0%}" for share, name in shares if share >= _LEAST_SHARE]
    return f"where the time goes: {', '.join(words)}"


def _stages(stages: Sequence[Record]) -> Table:
    """Draw a line for each stage."""
    timed = "forward_s" in stages[0]
    table = plain_table()
    for name in ("stage", "layers", "nodes"):
        table.add_column(name, overflow="fold", justify="left")
    for name in ("forward ms", "backward ms", "of it tp ms") if timed else ():
        table.add_column(name, justify="right")
    table.add_column("GiB", justify="right")
    table.add_column("of", justify="right")
    for index, stage in enumerate(stages):
        first, end = stage["layers"]
        names = stage["nodes"]
        keys = ("forward_s", "backward_s", "tensor_parallel_s") if timed else ()
        times = [f"{stage[key] * MILLISECONDS_PER_SECOND:.4g}" for key in keys]
        memory = [f"{stage[key] / GIB:.1f}" for key in ("peak_memory_bytes", "memory_limit_bytes")]
        where = names[0] if len(names) == 1 else f"{names[0]} + {len(names) - 1} more"
        style = "bold" if stage.get("is_bottleneck") else None
        cells = [str(index), f"{first}-{end - 1}", where, *times, *memory]
        table.add_row(*map(Text, cells), style=style)
    return table


def _bottleneck(stages: Sequence[Record], memory: Sequence[Record] | None) -> Iterator[str]:
    """Name the slowest stage, and the fullest one with what its memory holds."""
    for index, stage in enumerate(stages):
        if stage.get("is_bottleneck"):
            mean_s = sum(each["forward_s"] + each["backward_s"] for each in stages) / len(stages)
            own_s = stage["forward_s"] + stage["backward_s"]
            above = f", {own_s / mean_s - 1:.0%} above the mean" if len(stages) > 1 else ""
            yield f"bottleneck: stage {index}, whose passes take the longest{above}"
    shares = [each["peak_memory_bytes"] / each["memory_limit_bytes"] for each in stages]
    fullest = max(range(len(shares)), key=shares.__getitem__)
    held = sorted(memory[fullest].items(), key=lambda part: -part[1]) if memory else ()
    peak = stages[fullest]["peak_memory_bytes"]
    words = [f"{name} {part / peak:.0%}" for name, part in held if part / peak > _LEAST_SHARE]
    told = f", of that {', '.join(words)}" if words else ""
    yield f"fullest: stage {fullest}, {shares[fullest]:.0%} of its memory{told}"


def _links(links: Sequence[Record]) -> Iterator[str]:
    """Say which links messages meet."""
    cuts = [link for link in links if "from_stage" in link]
    for scope in ("within nodes", "between nodes"):
        own = [cut for cut in cuts if cut["scope"] == scope]
        if own:
            longest = max(own, key=lambda cut: cut["activation_s"] + cut["gradient_s"])
            ms = [longest[key] * MILLISECONDS_PER_SECOND for key in ("activation_s", "gradient_s")]
            yield (
                f"{len(own)} of {len(cuts)} cuts {scope}: up to {ms[0]:.3g} ms for an activation, "
                f"{ms[1]:.3g} ms for its gradient (stage {longest['from_stage']} to "
                f"{longest['to_stage']})"
            )
    for link in links:
        if "num_groups" in link:
            yield f"{link['num_groups']} {link['what']}: {link['scope']}"


def _other(other: Record, row: Record) -> Iterator[str]:
    """Say what another plan loses or gains, part by part."""
    seconds = dict(other["difference_s"])
    total_s = seconds.pop("iteration_time")
    its = other["row"]
    how = "longer" if total_s >= 0 else "less"
    yield (
        f"#{its['position']} ({plan_text(its['strategy'])}) takes "
        f"{figure_text(its['iteration_time_s'])} s, {abs(total_s) / row['iteration_time_s']:.1%} "
        f"{how}:"
    )
    least_s = _LEAST_SHARE * row["iteration_time_s"]
    large = sorted(seconds.items(), key=lambda entry: -abs(entry[1]))
    words = [f"{_words(name)} {value:+.3g} s" for name, value in large if abs(value) >= least_s]
    yield f"  {', '.join(words) or 'every part is about the same'}"


def _advice(advice: Sequence[Record]) -> Table:
    """Draw a line for each change."""
    table = plain_table()
    table.add_column("change", overflow="fold")
    table.add_column("samples/s", justify="right", no_wrap=True)
    table.add_column("best plan then, and how to set it", overflow="fold")
    for each in advice:
        speedup = each["speedup"]
        is_new = speedup is None and each["row"] is not None
        gain = "fits" if is_new else "no plan" if speedup is None else f"{speedup - 1:+.1%}"
        plan = each["reason"] if each["row"] is None else plan_text(each["row"]["strategy"])
        sets = " ".join(f"--set {change}" for change in each["set"])
        helps = is_new or (speedup is not None and speedup > 1 + _LEAST_GAIN)
        style = None if helps else "dim"
        table.add_row(*map(Text, (each["what"], gain, f"{plan}\n{sets}")), style=style)
    return table


def _words(part: str) -> str:
    """Name a part of the breakdown."""
    names = {"tensor_parallel": "tensor parallel communication", "pipeline_p2p": "p2p"}
    return names.get(part, part.replace("_", " "))
