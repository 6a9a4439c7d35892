"""Rankings as tables for people, in terminals of at least 80 columns."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import groupby
from textwrap import wrap
from typing import Final

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.text import Text

from amp_ray.clusters.cluster import Cluster
from amp_ray.cost.estimate import Estimate, Infeasible, Result
from amp_ray.cost.verdict import OUT_OF_MEMORY, RISKY_PROBABILITY
from amp_ray.inputs.experiment import Experiment
from amp_ray.models.model import Model
from amp_ray.report.console import FIGURE, TEXT, WORD, Column, Row, phrase_lines, table
from amp_ray.report.strategy_text import (
    COMMUNICATION,
    chosen_texts,
    communication,
    cuts_text,
    has_even_cuts,
    notation,
    options_text,
    with_idle,
)
from amp_ray.search.ranking import (
    Ranking,
    first_reason,
    is_risky,
    plainest_text,
    reasons_text,
)
from amp_ray.search.replan import Moves
from amp_ray.search.rows import idle_devices, training_needs
from amp_ray.strategies.candidate import Candidate, GroupsCandidate
from amp_ray.strategies.strategy import Strategy
from amp_ray.units import GIB, counted, figure_text

_COMM: Final = "tp\ncomm"
_PARTS: Final = {
    "compute_s": "compute",
    "tensor_parallel_s": _COMM,
    "bubble_s": "bubble",
    "pipeline_p2p_s": "p2p",
    "gradient_sync_s": "sync",
    "optimizer_s": "optim",
    "other_s": "other",
}
_MEMORY: Final = "peak/limit\nGiB"
_COST: Final = "cost\n/iter"
"""Headers of the columns behind the breakdown."""

_EVEN: Final = "even"
_WHOLE: Final = "whole"
"""Words for bounds: stages with equal numbers of blocks, and a single stage."""

_LEAST_ROOM: Final = 30
"""Least width of bounds and places; the breakdown is left out before they get less."""

_LEAST_BOUNDS: Final = 16
"""Least width of bounds and places if figures can be left out for them."""

_LONG_RUN: Final = 3  # number of nodes from which on only the ends of a run are named


def ranking_table(
    ranking: Ranking, experiment: Experiment, *, title: str, num_rows: int | None
) -> RenderableType:
    """Draw the head of a ranking, with a summary of the rest.

    ``num_rows`` counts feasible rows; None shows all rows, including infeasible ones.
    """
    shown = ranking.results
    if num_rows is not None:
        shown = shown[: min(num_rows, ranking.num_feasible)]
    parts: list[RenderableType] = []
    if shown:
        parts.append(
            ResultsTable(
                results=shown, experiment=experiment, title=title, num_tied=ranking.num_tied
            )
        )
    best = ranking.best
    if best is not None and best.tokens_per_s is not None:
        parts.append(Text(_speed_text(best, experiment.tokens)))
    parts.extend(_notes(ranking, num_shown=len(shown)))
    return Group(*parts)


@dataclass(frozen=True, kw_only=True)
class ResultsTable:
    """A table of results in their order, with an explanation of the marks below it.

    Degrees, micro-batch size, time, tokens/s, MFU, memory, risk and bounds are always shown, where
    the cost model has them; even bounds by that word. The nodes of the stages are shown unless all
    stages use the devices in order. The breakdown of the time is left out if a line has no room for
    it.
    """

    results: Sequence[Result]
    experiment: Experiment
    title: str
    num_tied: int = 0  # number of first rows that are ties

    def __rich_console__(self, _: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        """Draw the table as wide as the lines of the console."""
        figures, parts = self._figures(), self._parts()
        padding, room = _room([*figures, *parts], options.max_width, most_padding=1)
        is_whole = room >= _LEAST_ROOM
        if not is_whole:
            padding, room = _room(figures, options.max_width, most_padding=0)
        for name in ("+-", self._risk, _MEMORY, "MFU"):  # in terminals below 80 columns
            if room < _LEAST_BOUNDS:
                figures = [column for column in figures if column[0] != name]
                padding, room = _room(figures, options.max_width, most_padding=0)
        num_speeds = sum(header not in {_MEMORY, _COST, self._risk} for header, *_cells in figures)
        columns = [*figures[:num_speeds], *(parts if is_whole else ()), *figures[num_speeds:]]
        num_able = sum(isinstance(result, Estimate) and result.feasible for result in self.results)
        last = "cuts, options" if num_able == len(self.results) else "cuts, options, or why not"
        settings = [(_two_lines(header), _settings(header)) for header, *_cells in columns]
        rows = [
            Row((*cells, "\n".join(self._last(result, max(room, 1)))), _style(result))
            for result, *cells in zip(
                self.results, *(cells for _header, *cells in columns), strict=True
            )
        ]
        yield Text(self.title, style="italic")
        yield table([*settings, (_two_lines(last), TEXT)], rows, padding=padding)
        headers = {header for header, *_cells in figures}
        yield from map(Text, self._legend(options.max_width, has_mfu="MFU" in headers))
        if parts and is_whole and self._communication[1:]:
            yield Text(
                f"layer comm: {', '.join(COMMUNICATION[key] for key in self._communication)}"
            )
        if parts and not is_whole:
            yield Text("where the time goes: --wide")

    @cached_property
    def _estimates(self) -> list[Estimate]:
        return [result for result in self.results if isinstance(result, Estimate)]

    def _column(self, header: str, cell: Callable[[Estimate], str | None]) -> list[str]:
        """Return a header and a cell per result; a dash if the value is unknown."""
        cells = (cell(result) if isinstance(result, Estimate) else None for result in self.results)
        return [header, *(text or "-" for text in cells)]

    def _figures(self) -> list[list[str]]:
        rows = (
            (f"{'=' if 1 <= index < self.num_tied else ''}{index + 1}", *_degrees(result))
            for index, result in enumerate(self.results)
        )
        headers = ("#", "tp", "dp", "pp", "micro-\nbatch")
        columns = [[header, *cells] for header, *cells in zip(headers, *rows, strict=True)]
        cells = {"+-": _interval, "tok/s\n/dev": _tokens, "MFU": _mfu}
        cells |= {_MEMORY: _memory, _COST: _cost}
        if any(estimate.failure_probability for estimate in self._estimates):
            cells[self._risk] = _risk
        optional = (self._column(header, cell) for header, cell in cells.items())
        shown = (column for column in optional if set(column[1:]) - {"-"})
        return [*columns, self._column("s/iter", _time), *shown]

    @property
    def _risk(self) -> str:
        """Return the header of the risk column: some launchers also have a time limit."""
        return f"{'OOM' if self.experiment.traits.launch_limit_s is None else 'failure'}\nrisk"

    def _parts(self) -> list[list[str]]:
        if not any(estimate.breakdown for estimate in self._estimates):
            return []
        kinds = self._communication
        comm = "layer\ncomm" if kinds[1:] else f"{kinds[0]}\ncomm" if kinds else _COMM
        headers = {**_PARTS, "tensor_parallel_s": comm}
        return [self._column(header, partial(_part, name)) for name, header in headers.items()]

    @cached_property
    def _communication(self) -> list[str]:
        """The degrees for which ranks of a layer talk to each other in some row."""
        options = (stage.options for one in self._estimates for stage in one.strategy.stages)
        degrees = ("tp", "cp", "ep")
        return communication(*({key: getattr(part, key) for key in degrees} for part in options))

    def _last(self, result: Result, room: int) -> list[str]:
        """Return the lines of the last column: bounds and places, after a failure's reason."""
        if isinstance(result, Infeasible):
            return [
                *wrap(str(first_reason(result)), room),
                *wrap(options_text(result.candidate), room),
            ]
        why_not = [] if result.feasible else wrap(str(first_reason(result)), room)
        plan = self._plan_lines(result, room)
        remedies = phrase_lines(result.remedies_text, room) if result.remedies_text else []
        return [*why_not, *plan, *remedies]

    def _plan_lines(self, result: Estimate, room: int) -> list[str]:
        """Return the cuts of a strategy, its choices and its places."""
        idle = idle_devices(result.strategy, self.experiment.cluster)
        lines = phrase_lines(with_idle(self._plan_text(result), idle), room)
        if not self._has_places:
            return lines
        places = places_text(result.strategy, self.experiment.cluster)
        return lines + phrase_lines(f"on {places}" if result.strategy.is_uniform else places, room)

    def _plan_text(self, result: Estimate) -> str:
        """Return the cuts of a strategy with their marks, and its choices."""
        marks = [self._marks[text] for text in result.warnings if text in self._marks]
        cuts = "".join([self._cuts(result.strategy), *(f" ({mark})" for mark in marks)])
        return ", ".join((cuts, *chosen_texts(result.strategy, self.experiment)))

    def _cuts(self, strategy: Strategy) -> str:
        """Return the bounds, or a word where stages have equal numbers of blocks."""
        if strategy.pp == 1 and not strategy.has_operators:
            return _WHOLE
        is_even = has_even_cuts(strategy, self.experiment.model)
        return _EVEN if is_even else cuts_text(strategy.given_bounds)

    @cached_property
    def _has_places(self) -> bool:
        """Return whether some strategy uses the devices in another order than listed."""
        return not all(is_in_order(estimate.strategy) for estimate in self._estimates)

    @property
    def _places(self) -> list[str]:
        """Return the nodes of each row's stages, if they are shown."""
        shown = self._estimates if self._has_places else []
        return [places_text(estimate.strategy, self.experiment.cluster) for estimate in shown]

    @cached_property
    def _marks(self) -> dict[str, str]:
        """Return a letter for each warning of some feasible rows, but not of all."""
        texts = [text for text in self._warnings if text not in self._remarks]
        return {text: chr(ord("a") + index) for index, text in enumerate(texts)}

    @cached_property
    def _remarks(self) -> list[str]:
        """Return the warnings that all feasible rows share."""
        return [
            text
            for text in self._warnings
            if all(text in estimate.warnings for estimate in self._remarked)
        ]

    @cached_property
    def _warnings(self) -> list[str]:
        """Return the warnings of the feasible rows, or of all if none is feasible, each once."""
        return list(dict.fromkeys(text for row in self._remarked for text in row.warnings))

    @cached_property
    def _remarked(self) -> list[Estimate]:
        return [row for row in self._estimates if row.feasible] or self._estimates

    def _legend(self, width: int, *, has_mfu: bool) -> Iterator[str]:
        """Explain the marks and the columns that are not self-explanatory."""
        operators = self.experiment.profile.operators
        cuts = {self._cuts(estimate.strategy) for estimate in self._estimates}
        if not cuts - {_WHOLE, _EVEN}:
            pass
        elif operators and any(estimate.strategy.has_operators for estimate in self._estimates):
            yield f"cuts count operators of {operators.model}: {operators.num_operators} in all"
        else:
            layers = layers_text(self.experiment.model)
            yield from phrase_lines(f"cuts count layers: {layers}", width)
        if _EVEN in cuts:
            yield f"{_EVEN}: stages have equal numbers of blocks"
        yield from notation([*map(self._plan_text, self._estimates), *self._places])
        if has_mfu and self.experiment.model.shape.is_causal:
            yield "MFU: causal attention counts by halves"
        if self._has_places:
            yield "below cuts: the nodes of each stage in turn"
        too_large = [
            estimate
            for estimate in self._estimates
            if any(reason.kind == OUT_OF_MEMORY for reason in estimate.reasons)
        ]
        if too_large:
            again = any("recompute" in self._plan_text(estimate) for estimate in too_large)
            shown = ", recompute as shown" if again else ""
            yield f"times of rows that do not fit: with enough memory{shown}"
        if any(_is_split(result) for result in self.results):
            yield "split: samples of all dp ranks of a stage together, else of one replica"
        for warning, mark in self._marks.items():
            yield f"({mark}) {warning}"
        for remark in self._remarks:
            yield f"remark: {remark}"


def moves_table(moves: Moves) -> RenderableType:
    """Draw the state that each host must receive before the best strategy can run."""
    figures = ("state GiB", "to move GiB", "of it from a checkpoint GiB")
    rows = []
    for host, state in moves.needed_bytes.items():
        sizes = (state, moves.moved_bytes[host], moves.lost_bytes[host])
        rows.append(Row((host, *(f"{size / GIB:.2f}" for size in sizes))))
    drawn = table([("host", WORD), *((name, FIGURE) for name in figures)], rows)
    total, lost = moves.total_bytes / GIB, sum(moves.lost_bytes.values()) / GIB
    summary = (
        f"the best strategy moves {total:.2f} GiB, {lost:.2f} of it from a checkpoint; "
        f"about {figure_text(moves.transfer_s, 3)} s over the network"
    )
    return Group(drawn, Text(summary))


def layers_text(model: Model) -> str:
    """List the layers of a model: ``0 embedding, 1-24 block, 25 final-norm, 26 head``."""
    runs, first = [], 0
    for name, run in groupby(layer.name for layer in model.layers):
        last = first + len(list(run)) - 1
        runs.append(f"{first} {name}" if first == last else f"{first}-{last} {name}")
        first = last + 1
    return ", ".join(runs)


def _room(columns: Sequence[Sequence[str]], width: int, *, most_padding: int) -> tuple[int, int]:
    """Return the padding of columns, and the remaining width of a line."""
    cells = ([line for cell in column for line in cell.split("\n")] for column in columns)
    used = sum(max(map(len, lines)) + 1 for lines in cells)
    padding = most_padding if width - used - len(columns) > _LEAST_ROOM else 0
    return padding, width - used - padding * (len(columns) + 1)


def _settings(header: str) -> Column:
    is_part = header in _PARTS.values() or header.endswith(_COMM.removeprefix("tp"))
    return {**FIGURE, "style": "dim"} if is_part else FIGURE


def _two_lines(header: str) -> str:
    """Put a header on the lower of two lines, unless it needs both."""
    return header if "\n" in header else f"\n{header}"


def _may_fail(estimate: Estimate) -> bool:
    return estimate.failure_probability >= RISKY_PROBABILITY


def _style(result: Result) -> str | None:
    if isinstance(result, Infeasible) or not result.feasible:
        return "red"
    return "yellow" if is_risky(result) else None


def _is_split(result: Result) -> bool:
    """Return whether the micro-batch size counts all data-parallel ranks of a stage together."""
    if isinstance(result, Infeasible):
        return isinstance(result.candidate, GroupsCandidate)
    return any(stage.shares is not None for stage in result.strategy.stages)


def _degrees(result: Result) -> list[str]:
    """Return tp, dp, pp and micro-batch size; a star marks degrees that differ by stage."""
    plan = result.candidate if isinstance(result, Infeasible) else result.strategy
    size = f"{plan.micro_batch_size}{' split' if _is_split(result) else ''}"
    if isinstance(plan, GroupsCandidate):
        return ["*", "*", "*", size]
    degrees = plan.options if isinstance(plan, Candidate) else plan
    return [*(str(degree or "*") for degree in (degrees.tp, degrees.dp, plan.pp)), size]


def _time(estimate: Estimate) -> str:
    time_s = estimate.iteration_time_s
    return figure_text(time_s)


def _interval(estimate: Estimate) -> str | None:
    if estimate.interval_s is None:
        return None
    return f"{100 * (estimate.interval_s[1] / estimate.iteration_time_s - 1):.0f} %"


def _tokens(estimate: Estimate) -> str | None:
    rate = estimate.tokens_per_s_per_device
    return None if rate is None else f"{rate:.0f}"


def _mfu(estimate: Estimate) -> str | None:
    return None if estimate.mfu is None else f"{100 * estimate.mfu:.0f} %"


def _part(name: str, estimate: Estimate) -> str | None:
    parts = estimate.breakdown
    return None if parts is None else f"{getattr(parts, name):.3f}"


def _memory(estimate: Estimate) -> str | None:
    """Return the memory of the stage that is closest to its limit."""
    if estimate.fullest_bytes is None:
        return None
    peak, limit = estimate.fullest_bytes
    return f"{peak / GIB:.1f}/{limit / GIB:.1f}"


def _cost(estimate: Estimate) -> str | None:
    return None if estimate.cost is None else figure_text(estimate.cost.per_iteration)


def _risk(estimate: Estimate) -> str:
    percent = round(100 * estimate.failure_probability)
    return "<1 %" if percent < 1 else ">99 %" if percent > 99 else f"{percent} %"  # noqa: PLR2004


def _speed_text(best: Estimate, tokens: float | None) -> str:
    """Return the tokens per second of the best strategy, and the time for all tokens, as text."""
    mfu = "" if best.mfu is None else f", MFU {100 * best.mfu:.1f} %"
    per_device = f"{best.tokens_per_s_per_device:,.0f} per device{mfu}"
    text = f"# 1: {best.tokens_per_s:,.0f} tokens/s, {per_device}"
    needs = training_needs(best, tokens)
    if needs is None:
        return text
    money = "" if needs["money"] is None else f", {needs['money']:,.0f} of money"
    return (
        f"{text}; {tokens:.3g} tokens take {figure_text(needs['days'], 3)} days, "
        f"{needs['device_hours']:,.0f} device-hours{money}"
    )


def _ties_text(ranking: Ranking) -> str:
    """Describe the ties among the first rows."""
    num_tied = ranking.num_tied
    if not ranking.relative_error:
        what = "cost the same" if ranking.objective == "cost" else "take the same time"
        return f"= the first {num_tied} {what}"
    number = (
        f"at least the first {num_tied}" if ranking.may_have_more_ties else f"the first {num_tied}"
    )
    return f"= {number} are as good: closer than the model can tell apart"


def _near_lines(ranking: Ranking) -> Iterator[str]:
    """Explain rows that are ordered by plainness instead of time."""
    near = ranking.results[: ranking.num_near]
    times_s = [result.iteration_time_s for result in near if isinstance(result, Estimate)]
    fastest = ranking.fastest
    if fastest is not None and plainest_text(ranking):
        yield f"# 1: {plainest_text(ranking)}, {figure_text(fastest.iteration_time_s)} s"
    elif times_s != sorted(times_s):
        percent = 100 * ranking.near_fraction
        yield f"the first {len(near)}, within {percent:.2g} % of the fastest: the plainest first"


def _notes(ranking: Ranking, *, num_shown: int) -> list[Text]:
    """Return remarks on ties, on rows not shown, and on reasons of infeasible rows."""
    notes = [Text(_ties_text(ranking))] if ranking.num_tied > 1 else []
    notes += [Text(line) for line in _near_lines(ranking)]
    if ranking.num_front:
        first = counted(ranking.num_front, "strategy", "strategies")
        notes.append(Text(f"the first {first}: no other is both faster and cheaper"))
    if ranking.num_left_out:
        slower = counted(ranking.num_left_out, "candidate")
        notes.append(Text(f"{slower} proven to be slower or not to fit, not planned: --all"))
    shown = ranking.results[: min(num_shown, ranking.num_feasible)]
    if len({_may_fail(result) for result in shown if isinstance(result, Estimate)}) > 1:
        risky = 100 * RISKY_PROBABILITY
        notes.append(Text(f"strategies with a risk of {risky:.0f} % or more come after all others"))
    num_hidden = ranking.num_feasible - num_shown
    if num_hidden > 0:
        more = counted(num_hidden, "more feasible strategy", "more feasible strategies")
        notes.append(Text(f"{more}: --top K or --all"))
    rest = ranking.results[ranking.num_feasible : num_shown]
    if ranking.infeasible and not rest:
        total = counted(len(ranking.results), "candidate")
        notes.append(
            Text(
                f"{len(ranking.infeasible)} of {total} ruled out: "
                f"{reasons_text(ranking.infeasible)}"
            )
        )
    return notes


def is_in_order(strategy: Strategy) -> bool:
    """Return whether a strategy is one grid on the devices in listed order."""
    return strategy.is_uniform and strategy.placement == tuple(range(len(strategy.placement)))


def places_text(strategy: Strategy, cluster: Cluster) -> str:
    """Name the nodes of each stage, in pipeline order; if stages differ, also their tp and dp.

    ``node3 x4, node0+node1, node4..node7`` means four stages on node3, one stage on two nodes, and
    one stage on four nodes in listed order.
    """
    stages = [_place(strategy, index, cluster) for index in range(strategy.pp)]
    runs = [(text, len(list(run))) for text, run in groupby(stages)]
    return ", ".join(text if length == 1 else f"{text} x{length}" for text, length in runs)


def _place(strategy: Strategy, index: int, cluster: Cluster) -> str:
    """Name the nodes of one stage, with its degrees if stages differ."""
    nodes = dict.fromkeys(cluster.host_of_device[device] for device in strategy.devices(index))
    names = "+".join(_run_text(run, cluster) for run in _runs(tuple(nodes)))
    if strategy.is_uniform:
        return names
    stage = strategy.stages[index]
    return f"tp{stage.options.tp} dp{stage.options.dp} on {names}"


def _runs(nodes: Sequence[int]) -> list[list[int]]:
    """Divide nodes into runs of consecutive indices in the cluster."""
    runs: list[list[int]] = []
    for node in nodes:
        if runs and node == runs[-1][-1] + 1:
            runs[-1].append(node)
        else:
            runs.append([node])
    return runs


def _run_text(run: Sequence[int], cluster: Cluster) -> str:
    """Name all nodes of a run, or only its ends if it is long."""
    names = [cluster.host_names[host] for host in run]
    return "+".join(names) if len(names) < _LONG_RUN else f"{names[0]}..{names[-1]}"
