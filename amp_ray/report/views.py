"""Views of an explanation, a sweep, a calibration and the doctor's findings."""

import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.table import Table
from rich.text import Text

from amp_ray.calibration.calibration import Calibration, TrialRecord
from amp_ray.report.console import FIGURE, TEXT, WORD, Row, phrase_lines, table
from amp_ray.report.strategy_text import COMMUNICATION, communication, plan_text, with_idle
from amp_ray.trials.doctor.findings import Finding, Level, only
from amp_ray.units import GIB, MILLISECONDS_PER_SECOND, counted, figure_text

if TYPE_CHECKING:
    from amp_ray.runtime.doctor import Diagnosis

Record = Mapping[str, Any]

_LEAST_SHARE: Final = 0.005  # smaller parts of an iteration are left out
_LEAST_GAIN: Final = 0.005  # advice with a smaller gain is dimmed
_LONGEST_REASON: Final = 60  # characters of the reason why a point has no plan

_LINEAR: Final = "of\nlinear"
_LEAST_PLAN: Final = 30  # least width of the column of plans
_LEAST_NEEDED: Final = ("GiB", "cost\n/iter", "s/iter", "MFU")
"""Columns of a sweep to leave out where there is no room for plans, the first one first."""

_FIGURES: Final[Mapping[str, Callable[[Record], str | None]]] = {
    "s/iter": lambda point: figure_text(point["row"]["iteration_time_s"]),
    "samples\n/s": lambda point: (
        None if point["row"]["tokens_per_s"] else figure_text(point["samples_per_s"])
    ),
    "tok/s\n/dev": lambda point: _whole(point["row"]["tokens_per_s_per_device"]),
    _LINEAR: lambda point: _percent(point["linear_fraction"]),
    "MFU": lambda point: _percent(point["row"]["mfu"]),
    "GiB": lambda point: _gib(point["row"]["peak_memory_bytes"]),
    "cost\n/iter": lambda point: (
        point["row"]["cost"] and figure_text(point["row"]["cost"]["per_iteration"])
    ),
    "days": lambda point: _need(point["row"], "days"),
    "money": lambda point: _need(point["row"], "money"),
}
"""Columns of a sweep, by header: a figure of a point's ROW. Empty columns are left out."""


def explanation_view(record: Record) -> RenderableType:
    """Draw the object of ``explain --json``."""
    if record["row"] is None:
        return Group(Text("what would help, planned again:"), _advice(record.get("advice", ())))
    row = record["row"]
    seconds = figure_text(row["iteration_time_s"])
    plan = _plan_text(row)
    title = f"{record['experiment']}, #{row['position']}: {plan}, {seconds} s"
    parts: list[RenderableType] = [Text(title, style="bold"), Text(_shares(row))]
    parts += ["", _stages(record["stages"], communication(row["strategy"]))]
    parts += map(Text, _bottleneck(record["stages"], row["memory_bytes"]))
    parts += ["", *map(Text, _links(record["links"]))]
    if record["other"] is not None:
        parts += ["", *map(Text, _other(record["other"], row))]
    if "advice" in record:
        parts += ["", Text("what would help, planned again:"), _advice(record["advice"])]
    return Group(*parts)


def _plan_text(row: Record) -> str:
    return with_idle(plan_text(row["strategy"]), row.get("idle_devices", {}))


def _shares(row: Record) -> str:
    total_s, parts = row["iteration_time_s"], row["breakdown_s"] or {}
    shares = sorted(((value / total_s, name) for name, value in parts.items()), reverse=True)
    kinds = communication(row["strategy"])
    words = [
        f"{_words(name, kinds)} {share:.0%}" for share, name in shares if share >= _LEAST_SHARE
    ]
    return f"where the time goes: {', '.join(words)}"


def _stages(stages: Sequence[Record], kinds: Sequence[str]) -> Table:
    passes = {"forward ms": "forward_s", "backward ms": "backward_s"}
    passes |= {f"of it {' + '.join(kinds) or 'tp'} ms": "tensor_parallel_s"}
    if "forward_s" not in stages[0]:
        passes = {}
    texts = [(name, TEXT) for name in ("stage", "layers", "nodes")]
    figures = [(name, FIGURE) for name in (*passes, "GiB", "of")]
    rows = []
    for index, stage in enumerate(stages):
        first, end = stage["layers"]
        names = stage["nodes"]
        times = [figure_text(stage[key] * MILLISECONDS_PER_SECOND) for key in passes.values()]
        memory = [f"{stage[key] / GIB:.1f}" for key in ("peak_memory_bytes", "memory_limit_bytes")]
        where = names[0] if len(names) == 1 else f"{names[0]} + {len(names) - 1} more"
        style = "bold" if stage.get("is_bottleneck") else None
        rows.append(Row((str(index), f"{first}-{end - 1}", where, *times, *memory), style))
    return table([*texts, *figures], rows)


def _bottleneck(stages: Sequence[Record], memory: Sequence[Record] | None) -> Iterator[str]:
    """Name the slowest stage, then the fullest one with the parts of its memory."""
    for index, stage in enumerate(stages):
        if stage.get("is_bottleneck"):
            mean_s = sum(timed["forward_s"] + timed["backward_s"] for timed in stages) / len(stages)
            longest_s = stage["forward_s"] + stage["backward_s"]
            above = f", {longest_s / mean_s - 1:.0%} above the mean" if len(stages) > 1 else ""
            yield f"bottleneck: stage {index}, whose passes take the longest{above}"
    shares = [full["peak_memory_bytes"] / full["memory_limit_bytes"] for full in stages]
    fullest = max(range(len(shares)), key=shares.__getitem__)
    held = sorted(memory[fullest].items(), key=lambda part: -part[1]) if memory else ()
    peak = stages[fullest]["peak_memory_bytes"]
    words = [f"{name} {part / peak:.0%}" for name, part in held if part / peak > _LEAST_SHARE]
    made_of = f", of that {', '.join(words)}" if words else ""
    yield f"fullest: stage {fullest}, {shares[fullest]:.0%} of its memory{made_of}"


def _links(links: Sequence[Record]) -> Iterator[str]:
    cuts = [link for link in links if "from_stage" in link]
    for scope in ("within nodes", "within racks", "between nodes"):
        here = [cut for cut in cuts if cut["scope"] == scope]
        if here:
            longest = max(here, key=lambda cut: cut["activation_s"] + cut["gradient_s"])
            ms = [longest[key] * MILLISECONDS_PER_SECOND for key in ("activation_s", "gradient_s")]
            yield (
                f"{len(here)} of {len(cuts)} cuts {scope}: up to {figure_text(ms[0], 3)} ms for an "
                f"activation, {figure_text(ms[1], 3)} ms for its gradient (stage "
                f"{longest['from_stage']} to {longest['to_stage']})"
            )
    for link in links:
        if "num_groups" in link:
            groups = counted(link["num_groups"], link["what"].removesuffix("s"))
            yield f"{groups}: {link['scope']}"


def _other(other: Record, row: Record) -> Iterator[str]:
    """List the differences from another plan, part by part."""
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
    kinds = communication(row["strategy"], its["strategy"])
    words = [
        f"{_words(name, kinds)} {value:+.3g} s" for name, value in large if abs(value) >= least_s
    ]
    yield f"  {', '.join(words) or 'every part is about the same'}"


def _advice(advice: Sequence[Record]) -> Table:
    plan_column = "plan then, and how to set it"
    columns = [("change", TEXT), ("samples/s", FIGURE), (plan_column, TEXT)]
    return table(columns, map(_advice_row, advice))


def _advice_row(change: Record) -> Row:
    speedup, row = change["speedup"], change["row"]
    fits = speedup is None and row is not None
    gain = "fits" if fits else "no plan" if speedup is None else f"{speedup - 1:+.1%}"
    plan = change["reason"] if row is None else _plan_text(row)
    sets = sets_text(change["set"])
    helps = fits or (speedup is not None and speedup > 1 + _LEAST_GAIN)
    return Row((change["what"], gain, f"{plan}\n{sets}"), None if helps else "dim")


def fitting_text(ways: Sequence[Record]) -> str:
    """Return the end of a message that nothing fits: changes with which something does."""
    return "".join(
        f"\n{way['what']} would do: {sets_text(way['set'])} "
        f"({_plan_text(way['row'])}: {figure_text(way['row']['iteration_time_s'])} s)"
        for way in ways
    )


def sets_text(changes: Sequence[str]) -> str:
    """Return changes of a file as options to paste."""
    return " ".join(f"--set {shlex.quote(change)}" for change in changes)


def _words(part: str, kinds: Sequence[str]) -> str:
    """Name a part of the time; ``kinds`` is what `communication` returns for the plans."""
    layers = " and ".join(COMMUNICATION[kind] for kind in kinds or ("tp",))
    names = {"tensor_parallel": layers, "pipeline_p2p": "p2p"}
    return names.get(part, part.replace("_", " "))


@dataclass(frozen=True, kw_only=True)
class SweepView:
    """The object of ``sweep --json``, below a head that names what is planned.

    Columns that can be computed from others are left out if the plans have no room.
    """

    record: Record
    head: str

    def __rich_console__(self, _: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        """Draw the table as wide as the lines of the console."""
        points = self.record["points"]
        columns = self._columns()
        for name in _LEAST_NEEDED:
            if options.max_width - _width(columns) < _LEAST_PLAN:
                columns = [column for column in columns if column[0] != name]
        room = options.max_width - _width(columns)
        padding = int(room - len(columns) - 1 >= _LEAST_PLAN)
        room -= padding * (len(columns) + 1)
        plans = ["\n".join(phrase_lines(_plan_or_why(point), room)) for point in points]
        settings = [(header, FIGURE) for header, *_cells in columns]
        cells = zip(*(cells for _header, *cells in columns), plans, strict=True)
        rows = [
            Row(texts, None if point["row"] else "red")
            for texts, point in zip(cells, points, strict=True)
        ]
        yield Text(self.head)
        yield Text(", ".join([*self._same(), f"cost model {self.record['cost_model']}"]))
        plan = ("plan, or why none", TEXT)
        yield table([*settings, plan], rows, padding=padding)
        if self.record["knee"] is not None:
            yield "* from here on, added devices bring less than half of their share of samples/s"
        if any(header == _LINEAR for header, *_cells in columns):
            yield "of linear: speed per device, relative to that of the smallest cluster"

    def _same(self) -> list[str]:
        """Return the changes that all points have."""
        first, *others = (point["set"] for point in self.record["points"])
        return [change for change in first if all(change in other for other in others)]

    def _columns(self) -> list[list[str]]:
        """Return the columns, each with its header: changed keys, devices, figures of the plans."""
        points, same = self.record["points"], self._same()
        changes = [[text for text in point["set"] if text not in same] for point in points]
        keys = short_keys([text.partition("=")[0] for text in changes[0]])
        columns = [
            [key, *(texts[index].partition("=")[2] for texts in changes)]
            for index, key in enumerate(keys)
        ]
        marks = ("*" if number == self.record["knee"] else "" for number in range(len(points)))
        sizes = [
            f"{mark}{point['num_devices'] or '-'}"
            for mark, point in zip(marks, points, strict=True)
        ]
        figures = [
            [header, *((point["row"] and figure(point)) or "-" for point in points)]
            for header, figure in _FIGURES.items()
        ]
        shown = [column for column in figures if set(column[1:]) - {"-"}]
        return [*columns, ["de-\nvices", *sizes], *shown]


def _width(columns: Iterable[Sequence[str]]) -> int:
    """Return the width of columns with a blank behind each."""
    lines = ([line for cell in column for line in cell.split("\n")] for column in columns)
    return sum(max(map(len, column)) + 1 for column in lines)


def _plan_or_why(point: Record) -> str:
    """Return the best plan of a point, or the reason why it has none, cut to a fixed length."""
    if point["row"]:
        return _plan_text(point["row"])
    reason: str = point["reason"]
    return reason if len(reason) <= _LONGEST_REASON else f"{reason[: _LONGEST_REASON - 3]}..."


def short_keys(keys: Sequence[str]) -> list[str]:
    """Return the shortest ends of dotted keys that distinguish them.

    Example:
        >>> short_keys(["cluster.nodes.0.count", "precision"]), short_keys(["a.0.x", "a.1.x"])
        (['count', 'precision'], ['0.x', '1.x'])
    """
    num_parts = 1
    while True:
        ends = [".".join(key.split(".")[-num_parts:]) for key in keys]
        if len(set(ends)) == len(keys) or num_parts > max(key.count(".") for key in keys):
            return ends
        num_parts += 1


def _gib(peak_memory_bytes: Sequence[float] | None) -> str | None:
    return f"{max(peak_memory_bytes) / GIB:.1f}" if peak_memory_bytes else None


def _whole(value: float | None) -> str | None:
    return None if value is None else f"{value:.0f}"


def _percent(fraction: float | None) -> str | None:
    return None if fraction is None else f"{100 * fraction:.0f} %"


def _need(row: Record, name: str) -> str | None:
    """Return days or money of the whole training; None without tokens or prices."""
    value = (row["training"] or {}).get(name)
    return None if value is None else figure_text(value, 3)


# ------------------------------------------------------------------------- calibrations


def calibration_view(calibration: Calibration) -> RenderableType:
    """Draw fitted and refused constants, and the errors of trials before and after."""
    return Group(
        _constants(calibration),
        *(
            Text(f"{constant.name}: {constant.reason}", style="dim")
            for constant in calibration.refused
        ),
        _fitted_trials(calibration),
        *([Text(slow)] if (slow := calibration.second_population_text) else []),
        _errors(calibration),
    )


def _constants(calibration: Calibration) -> Table:
    figures = ("prior", "fitted", "ratio", "sigma", "prior sigma")
    rows = [
        Row(
            (
                constant.name,
                f"{constant.prior:.4g}",
                f"{constant.value:.4g}",
                f"{constant.ratio:.3f}",
                f"{constant.sigma:.3f}",
                f"{constant.prior_sigma:.2f}",
            )
        )
        for constant in calibration.constants
    ]
    title = f"{calibration.experiment}: {counted(calibration.num_constants, 'constant')} fitted"
    return table([("constant", WORD), *((name, FIGURE) for name in figures)], rows, title=title)


def _fitted_trials(calibration: Calibration) -> Table:
    names = ("tp", "dp", "pp", "micro-batch", "measured", "before", "after", "left out")
    keys = ("tp", "dp", "pp", "micro_batch_size")
    rows = [
        Row((*(str(trial.strategy.get(key) or "*") for key in keys), *_residuals(trial)))
        for trial in calibration.trials
    ]
    return table([(name, FIGURE) for name in names], rows, title="trials")


def _residuals(trial: TrialRecord) -> tuple[str, ...]:
    """Return the measured time, and the relative error of each prediction."""
    if trial.measured_s is None:
        return trial.outcome, "-", "-", "-"
    predictions = (trial.before_s, trial.after_s, trial.left_out_s)
    return f"{figure_text(trial.measured_s)} s", *(
        "-" if predicted is None else f"{100 * (predicted / trial.measured_s - 1):+.1f} %"
        for predicted in predictions
    )


def _errors(calibration: Calibration) -> Text:
    errors = {
        "before": calibration.mean_error("before_s"),
        "after": calibration.mean_error("after_s"),
        "leave-one-out": calibration.mean_error("left_out_s"),
    }
    parts = [f"{name} {100 * error:.2f} %" for name, error in errors.items() if error is not None]
    return Text(
        f"mean absolute error: {', '.join(parts)}; "
        f"{counted(calibration.num_constants, 'constant')}, "
        f"{counted(sum(trial.tells_time for trial in calibration.trials), 'timed trial')}"
    )


# ------------------------------------------------------------------------- doctor


_STYLES: Final[dict[Level, str]] = {"ok": "green", "warning": "yellow", "error": "bold red"}
_PROBLEMS: Final[tuple[Level, ...]] = ("error", "warning")


def diagnosis_view(diagnosis: "Diagnosis", *, show_all: bool = False) -> RenderableType:
    """Draw a row per host and check, then the commands that fix problems.

    Checks without a problem share a row per host, unless ``show_all``.
    """
    return Group(_findings(diagnosis, show_all=show_all), *_mending(diagnosis), _verdict(diagnosis))


def _findings(diagnosis: "Diagnosis", *, show_all: bool) -> Table:
    """Draw the findings; checks of a host without a problem share a row."""
    rows: list[Row] = []
    for host in diagnosis.hosts:
        findings = [finding for finding in diagnosis.findings if finding.host == host]
        cells = [_cells(row) for row in findings if show_all or row.level != "ok"]
        good = len(only(findings, "ok"))
        if good and not show_all:
            cells.append([counted(good, "check"), Text("ok", style=_STYLES["ok"]), "", ""])
        rows += [Row([host if row is cells[0] else "", *row]) for row in cells]
    num_hosts = counted(len(diagnosis.hosts), "host")
    return table(
        [("host", WORD), ("check", WORD), ("", WORD), ("found", TEXT), ("expected", TEXT)],
        rows,
        title=f"{diagnosis.experiment}: {num_hosts} in {diagnosis.elapsed_s:.1f} s",
    )


def _cells(finding: Finding) -> list[str | Text]:
    level = Text(finding.level, style=_STYLES[finding.level])
    return [finding.check, level, finding.found, finding.expected]


def _mending(diagnosis: "Diagnosis") -> Iterator[Text]:
    """Yield the fix of each problem, errors first; each command is on a line of its own."""
    for level in _PROBLEMS:
        for finding in only(diagnosis.findings, level):
            if not finding.advice and finding.command is None:
                continue
            head = Text.assemble(
                (f"{level}: ", _STYLES[level]), f"{finding.host}: {finding.check}: {finding.advice}"
            )
            head.rstrip()
            yield head
            if finding.command is not None:
                # Not wrapped, so that the command can be pasted.
                yield Text(f"  {finding.command}", no_wrap=True, overflow="ignore")


def _verdict(diagnosis: "Diagnosis") -> Text:
    counts = {level: len(only(diagnosis.findings, level)) for level in _PROBLEMS}
    parts = [
        f"{count} {level}{'s' if count > 1 else ''}" for level, count in counts.items() if count
    ]
    if counts["error"]:
        return Text(", ".join(parts), style=_STYLES["error"])
    return Text("; ".join(["trials can start", *parts]), style=_STYLES["ok"])
