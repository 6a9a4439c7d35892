"""A plan or a study as a static page: its record, and an HTML file that needs no server."""

import html
import json
import platform
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from importlib.metadata import PackageNotFoundError, version
from string import Template
from typing import Any, Final

from amp_ray import __version__
from amp_ray.clusters.device import is_cpu
from amp_ray.cost.estimate import Estimate, Result
from amp_ray.cost.verdict import RISKY_PROBABILITY
from amp_ray.exports.chosen import Chosen
from amp_ray.exports.starts import Start, start_of
from amp_ray.inputs.experiment import Experiment
from amp_ray.inputs.strategies import strategy_from_json
from amp_ray.redaction import redact_values
from amp_ray.report.strategy_text import (
    advised_text,
    strategy_text,
    what_is_planned,
    with_idle,
)
from amp_ray.report.study import recommendation_lines, time_text, warning_texts
from amp_ray.runtime.planning import Planned
from amp_ray.runtime.study.reading import ReadStudy
from amp_ray.search.planner import AMP_RAY, Planner, make_planner
from amp_ray.search.ranking import plainest_text
from amp_ray.search.rows import difference, row
from amp_ray.strategies.strategy import Strategy
from amp_ray.trials.outcome import no_success_text, trial_tells_time, with_mean
from amp_ray.trials.runtime_strategy import RUNTIMES
from amp_ray.trials.timeline import RankTimeline
from amp_ray.units import GIB, counted, figure_text

_FOLDER: Final = "data/report"
_LIBRARY: Final = "plotly-basic.min.js"


def page(record: Mapping[str, Any]) -> str:
    """Return the HTML page of a report's record (`amp_ray.report.record`).

    The page holds the record as JSON without ``<``, and its script inserts the values as text, so a
    record cannot become markup. The content security policy forbids the page to load anything.
    """
    folder = resources.files("amp_ray").joinpath(_FOLDER)

    def text(name: str) -> str:
        return folder.joinpath(name).read_text(encoding="utf-8")

    record = redact_values(record)
    data = json.dumps(record, allow_nan=False, separators=(",", ":"))
    return Template(text("page.html")).substitute(
        title=html.escape(record["title"]),
        subtitle=html.escape(record["subtitle"]),
        lead=f'<p class="lead">{html.escape(record["lead"])}</p>' if record["lead"] else "",
        style=text("page.css"),
        data=data.replace("<", "\\u003c"),
        plotly=text(_LIBRARY),
        script=text("page.js"),
    )


_NUM_LOST: Final = 5  # number of plans after the best one to compare with it

_MOST_INSTRUCTIONS: Final = 6000
"""Most bars for a browser to draw; a longer timeline shows every second stage, or fewer."""

_LEAST_RISK: Final = 0.001  # smaller probabilities of a failure are not written out

_LEAST_CUT: Final = 4  # passes of the first stage from which on the steady part is left out

_PASS: Final = re.compile(r"(?P<stage>\d+)(?P<kind>[FB])\d")  # see `cost.instructions.Instruction`

_Item = tuple[str, float, float]

_NUMBERS: Final = (
    *("no other", "one other", "two others", "three others", "four others", "five others"),
    *("six others", "seven others", "eight others", "nine others", "ten others"),
)
"""Numbers of ties in a sentence; larger ones are written as figures."""

_PACKAGES: Final = ("numpy", "ray", "torch", "deepspeed")


@dataclass(slots=True)
class _Names:
    """Numbers the names of plans, so that a record has each name only once."""

    numbers: dict[str, int] = field(default_factory=dict)

    def id(self, strategy: Mapping[str, Any]) -> int:
        """Return the number of a STRATEGY's name, adding a new name."""
        return self.numbers.setdefault(strategy_text(strategy), len(self.numbers))


def plan_record(planned: Planned, *, source: str, why_none: str | None = None) -> dict[str, Any]:
    """Return the record of a plan by any cost model; stages and timeline always come from ours.

    ``why_none`` says why no strategy can run, and what would; by default in the planner's words.
    """
    experiment, ranking, names = planned.experiment, planned.ranking, _Names()
    number = len(ranking.results) + ranking.num_left_out
    sizes = f"{counted(number, 'candidate')} by cost model {planned.cost_model}"
    results = ranking.results
    rows = [row(result, number, experiment) for number, result in enumerate(results, start=1)]
    best, record = ranking.best, _empty(experiment)
    record |= {
        "subtitle": _subtitle(experiment, sizes),
        "rows": [_slim(full, names) for full in rows],
    }
    if best is None:
        why, *ways = (why_none or planned.why_none()).split("\n")
        record["notes"] = [f"No strategy can run: {why}.", *ways]
    else:
        able = ranking.results[: min(ranking.num_feasible, 1 + _NUM_LOST)]
        for tied in record["rows"][1 : ranking.num_tied]:
            tied["tied"] = True
        record |= {
            "lead": _lead(
                rows[0],
                best,
                experiment,
                why=plainest_text(ranking),
                ties=_ties_text(ranking.num_tied - 1, or_more=ranking.may_have_more_ties),
            ),
            "figures": _figures(rows[0], best),
            **_run(source, best, experiment),
            **_best(able, record["rows"], experiment, planned.planner, names),
        }
    return record | {"names": list(names.numbers)}


def study_record(study: ReadStudy, *, source: str) -> dict[str, Any]:
    """Return the record of a study; ``source``, its folder, appears in the commands.

    Its first plan is the recommended one, with the time of the recommendation.
    """
    experiment, result, names = study.calibrated(), study.result, _Names()
    rows, recommended, certificate = study.ranking, study.recommendation, result.get("certificate")
    sizes = f"a study of {counted(len(result['trials']), 'trial')}"
    record = _empty(experiment) | {
        "subtitle": _subtitle(experiment, sizes),
        "rows": [_slim(full, names) for full in rows],
    }
    failed = no_success_text(result["trials"])
    if failed is not None:
        record["lead"] = f"{failed}."
    elif recommended is not None:
        first, *next_rows = rows[: 1 + _NUM_LOST]
        planner = make_planner(experiment, AMP_RAY)
        best = _estimate(first, experiment, planner).taking(recommended["time_s"])
        able = [_estimate(full, experiment, planner) for full in next_rows if full["feasible"]]
        ties = [tie["strategy"] for tie in recommended["ties"]]
        for full, slim in zip(rows, record["rows"], strict=True):
            slim["tied"] = full["strategy"] in ties
        full = row(best, 1, experiment) | {"interval_s": recommended.get("interval_s")}
        record |= {
            "lead": _lead(full, best, experiment, why="", ties=_ties_text(len(ties))),
            "figures": _study_figures(full, best, recommended),
            **_run(source, best, experiment),
            **_best([best, *able], record["rows"], experiment, planner, names),
            "measured_timeline": abridged(measured_lanes(study.timeline(best.strategy))),
        }
        record["notes"] += [text.strip() for text in recommendation_lines(recommended)]
    record |= _trial_records(result, names)
    if certificate is not None:
        record["notes"].append(f"{certificate['text'].capitalize()}.")
    record["notes"].append(f"The study ended: {result['ending_text']}.")
    record["notes"] += [
        f"Trial {trial['number']}: {remark}."
        for trial in result["trials"]
        for remark in trial.get("remarks", ())
    ]
    return record | {"names": list(names.numbers)}


def _trial_records(result: Mapping[str, Any], names: _Names) -> dict[str, Any]:
    """Return the trials of a study's result, and the calibration from them."""
    trials = [
        {key: trial.get(key) for key in ("number", "predicted_s", "predicted_sigma", "outcome")}
        | {key: trial.get(key) for key in ("measured_s", "mean_s", "reason")}
        | {"warnings": warning_texts(trial), "tells_time": trial_tells_time(trial)}
        | {"id": names.id(trial["strategy"])}
        for trial in map(with_mean, result["trials"])
    ]
    calibration = result.get("calibration") or {"trials": [], "constants": []}
    fitted = [
        {key: trial[key] for key in ("measured_s", "before_s", "after_s")}
        | {"id": names.id({"num_micro_batches": 1, **trial["strategy"]})}
        for trial in calibration["trials"]
    ]
    constants = [
        {key: constant[key] for key in ("name", "prior", "value", "sigma")}
        for constant in calibration["constants"]
    ]
    return {"trials": trials, "fitted": fitted, "constants": constants}


def _best(
    able: Sequence[Result],
    rows: Sequence[Mapping[str, Any]],
    experiment: Experiment,
    planner: Planner,
    names: _Names,
) -> dict[str, Any]:
    best = able[0]
    assert isinstance(best, Estimate)
    full = row(best, 1, experiment, planner)
    return {
        "best": _slim(full, names),
        "lost": _lost(best, able[1:], rows[1:]),
        "cluster": _places(best.strategy, experiment),
        **_timeline(planner, best),
    }


def _estimate(record: Mapping[str, Any], experiment: Experiment, planner: Planner) -> Estimate:
    """Return the estimate of a row's strategy, with the time of the row."""
    strategy = strategy_from_json(record["strategy"], experiment.cluster)
    estimate = planner.score(strategy)
    assert isinstance(estimate, Estimate), "it was estimated before"
    return estimate.taking(record["iteration_time_s"])


def _empty(experiment: Experiment) -> dict[str, Any]:
    environment = [("amp-ray", __version__), ("Python", platform.python_version())]
    for package in _PACKAGES:
        try:
            environment.append((package, version(package)))
        except PackageNotFoundError:
            continue
    environment.append(("system", f"{platform.system()} {platform.machine()}"))
    [model, *_lengths, cluster], _settings = what_is_planned(experiment)
    empty: tuple[str, ...] = ("figures", "notes", "commands", "rows", "lost", "cluster", "trials")
    return {
        "title": f"{model} on {cluster}",
        "lead": None,
        "best": None,
        "timeline": None,
        "measured_timeline": None,
        "environment": environment,
        **{name: [] for name in (*empty, "fitted", "constants")},
    }


def _subtitle(experiment: Experiment, sizes: str) -> str:
    """Name the experiment with the settings that the title leaves out."""
    [_model, *lengths, _cluster], settings = what_is_planned(experiment)
    return f"{experiment.name}: {', '.join((*lengths, *settings))}; {sizes}"


def _lead(
    full: Mapping[str, Any], best: Estimate, experiment: Experiment, *, why: str, ties: str
) -> str:
    """Say in a sentence which plan to use, how fast it is, and how many are as good.

    ``full`` is the plan's ROW, ``best`` its estimate, ``why`` the reason if it is not the fastest,
    ``ties`` what `_ties_text` says.
    """
    is_gpu = not any(is_cpu(device.name) for device in experiment.cluster.device_types)
    rate = best.tokens_per_s_per_device
    speed = f"{figure_text(best.iteration_time_s)} s per iteration"
    if rate is not None:
        speed = f"{rate:,.0f} tokens/s per {'GPU' if is_gpu else 'device'}"
    if full.get("interval_s"):
        speed += f", ±{full['interval_s'][1] / best.iteration_time_s - 1:.0%}".replace("%", " %")
    if best.failure_probability >= RISKY_PROBABILITY:
        speed += f", with a risk of {best.failure_probability:.0%} to fail".replace("%", " %")
    plan = with_idle(advised_text(full["strategy"]), full.get("idle_devices", {}))
    return f"Use {plan}: {'; '.join(filter(None, (speed, why, ties)))}."


def _ties_text(number: int, *, or_more: bool = False) -> str:
    """Say how many other strategies are as good; "" if there is none."""
    if number < 1:
        return ""
    words = _NUMBERS[number] if number < len(_NUMBERS) else f"{number} others"
    return f"{'at least ' if or_more else ''}{words} {'is' if number == 1 else 'are'} as good"


def _slim(full: Mapping[str, Any], names: _Names) -> dict[str, Any]:
    """Return a ROW with the name of its strategy instead of the strategy."""
    return {key: value for key, value in full.items() if key not in {"strategy", "warnings"}} | {
        "id": names.id(full["strategy"])
    }


def _figures(full: Mapping[str, Any], best: Estimate) -> list[tuple[str, str]]:
    interval = full.get("interval_s")
    ends = " to ".join(figure_text(end, 3) for end in interval or ())
    around = f" ({ends})" if ends else ""
    figures = [("per iteration", f"{figure_text(best.iteration_time_s)} s{around}")]
    if best.tokens_per_s:
        figures.append(("tokens per second", f"{best.tokens_per_s:,.0f}"))
    if full.get("mfu"):
        figures.append(("model FLOPs utilisation", f"{full['mfu']:.1%}"))
    if best.fullest_bytes:
        peak, limit = best.fullest_bytes
        figures.append(
            ("memory of the fullest stage", f"{peak / GIB:.1f} of {limit / GIB:.1f} GiB")
        )
    is_safe = best.failure_probability < _LEAST_RISK
    risk = f"<{_LEAST_RISK:.1%}" if is_safe else f"{best.failure_probability:.1%}"
    figures.append(("risk of failure", risk))
    if best.cost is not None:
        figures.append(("cost per iteration", figure_text(best.cost.per_iteration)))
    return figures


def _study_figures(
    full: Mapping[str, Any], best: Estimate, recommended: Mapping[str, Any]
) -> list[tuple[str, str]]:
    """Return the figures at the top of a study's page, measured times first."""
    _, *further = _figures(full, best)
    how = {"posterior": "measured and predicted,"}.get(recommended["rests_on"])
    times = [(f"{how or recommended['rests_on']} per iteration", time_text(recommended))]
    if recommended["rests_on"] != "predicted":
        predicted_s = figure_text(recommended["predicted_s"])
        times.append(("predicted per iteration", f"{predicted_s} s"))
    return [*times, *further]


def _run(source: str, best: Estimate, experiment: Experiment) -> dict[str, Any]:
    """Return commands with descriptions, the start first, and a note if there is no start.

    The commands repeat this plan's ``--set`` options.
    """
    commands, name, runtime = [], shlex.quote(source), experiment.traits.name
    if source.endswith((".yaml", ".yml")):
        name += "".join(
            f" --set {shlex.quote(change)}" for change in experiment.source.changes.values()
        )
        is_tried = experiment.trials.program is not None or runtime in RUNTIMES
        if best.launchable and is_tried:
            commands.append(("Prove it by real trials:", f"amp-ray tune {name}"))
    commands.append(("Hand it over; --help lists the formats:", f"amp-ray export {name} --to ..."))
    chosen = Chosen(
        experiment=experiment, strategy=best.strategy, predicted_s=best.iteration_time_s
    )
    try:
        start = start_of(chosen)
    except ValueError as refusal:
        note = f"{runtime} has no start command for this plan: {refusal}."
        return {"commands": commands, "notes": [note]}
    if start is not None:
        commands = [*_start(start, name, runtime), *commands]
    return {"commands": commands, "notes": []}


def _start(start: Start, name: str, runtime: str) -> Iterator[tuple[str, str]]:
    """Yield the script of a start, and the command that writes it or the files that it needs."""
    yield f"Start it by {runtime}, on every host, with NODE_RANK=0, 1, ...:", start.script
    if start.target is not None:
        yield "Write it:", f"amp-ray export {name} --to {start.target} -o {start.output}"
        return
    for file, text in start.files.items():
        yield f"{file}, which it needs in its folder:", text


def _lost(
    best: Estimate, results: Sequence[object], rows: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return where each of the next plans loses time to the best one; ``rows`` are theirs."""
    return [
        {**{key: slim[key] for key in ("position", "id")}, "difference_s": difference(best, later)}
        for later, slim in zip(results[:_NUM_LOST], rows, strict=False)
        if isinstance(later, Estimate)
    ]


def _places(strategy: Strategy, experiment: Experiment) -> list[dict[str, Any]]:
    """Return the stage of every slot, node by node; None if a slot is idle."""
    cluster = experiment.cluster
    stages: dict[int, int] = {}
    for stage in range(strategy.pp):
        stages |= dict.fromkeys(strategy.devices(stage), stage)
    nodes: list[dict[str, Any]] = [
        {
            "name": boards[0].name,
            "device": " + ".join(node.device.name for node in boards),
            "stages": [None] * sum(node.num_slots for node in boards),
        }
        for boards in cluster.machines
    ]
    for device, stage in stages.items():
        _, slot = cluster.places[device]
        nodes[cluster.host_of_device[device]]["stages"][slot] = stage
    return nodes


def _timeline(planner: Planner, best: Estimate) -> dict[str, Any]:
    """Return the predicted timeline in lanes, a lane per stage."""
    timeline = planner.timeline(best.strategy)
    if timeline is None:
        return {}
    lanes = [
        {
            "name": f"stage {stage}",
            "items": [
                (str(span.instruction), round(span.begin_s, 9), round(span.end_s, 9))
                for span in order
                if span.end_s > span.begin_s
            ],
        }
        for stage, order in enumerate(timeline)
    ]
    return {"timeline": abridged(lanes)}


def abridged(lanes: list[dict[str, Any]] | None) -> dict[str, Any] | None:
    """Return lanes without the steady part, in which all micro-batches look alike.

    Shown are warm-up and cool-down: until the first stage has finished two backward passes of
    each of its chunks, and from the begin of its last two forward passes on.

    Args:
        lanes: Name and items of each lane; an item is (instruction, begin, end) in seconds.

    Returns:
        ``lanes``, ``cut`` (begin and end of the part that is left out, or None), ``num_cut``
        (passes of the first stage in it) and ``step`` (every how many stages one is shown).
    """
    if not lanes:
        return None
    first = [(_PASS.match(name), begin, end) for name, begin, end in lanes[0]["items"]]
    forward = sorted(begin for found, begin, _ in first if found and found["kind"] == "F")
    backward = sorted(end for found, _, end in first if found and found["kind"] == "B")
    num_kept = 2 * len({found["stage"] for found, *_ in first if found})
    cut, num_cut = None, 0
    if min(len(forward), len(backward)) > 2 * num_kept:
        cut = (backward[num_kept - 1], forward[-num_kept])
        num_cut = sum(cut[0] <= begin < cut[1] for begin in forward)
    if cut is None or num_cut < _LEAST_CUT:
        cut, num_cut = None, 0
    else:
        lanes = [{**lane, "items": list(_outside(lane["items"], *cut))} for lane in lanes]
    step = -(-sum(len(lane["items"]) for lane in lanes) // _MOST_INSTRUCTIONS)
    return {"lanes": lanes[:: max(step, 1)], "cut": cut, "num_cut": num_cut, "step": step}


def _outside(items: Iterable[_Item], begin_s: float, end_s: float) -> Iterator[_Item]:
    """Yield the parts of items before and behind a span of time."""
    for name, first_s, last_s in items:
        if first_s < begin_s:
            yield name, first_s, min(last_s, begin_s)
        if last_s > end_s:
            yield name, max(first_s, end_s), last_s


def measured_lanes(ranks: Sequence[RankTimeline]) -> list[dict[str, Any]] | None:
    """Return a lane per stage, for its first rank in a measured timeline; None without one."""
    if not ranks:
        return None
    first = {rank.stage: rank.spans for rank in ranks if rank.is_first}
    return [{"name": f"stage {stage}", "items": first[stage]} for stage in sorted(first)]
