"""A plan or a study as a static page: its record, and an HTML file that needs no server."""

import html
import json
import platform
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from importlib.metadata import PackageNotFoundError, version
from string import Template
from typing import Any, Final

from amp_ray import __version__
from amp_ray.cost.estimate import Estimate, Result
from amp_ray.cost.timeline import Timeline
from amp_ray.inputs.experiment import Experiment
from amp_ray.inputs.strategies import strategy_from_json
from amp_ray.redaction import redact_values
from amp_ray.report.strategy_text import (
    plan_text,
    recommendation_lines,
    strategy_text,
    time_text,
)
from amp_ray.report.study import warning_texts
from amp_ray.runtime.planning import Planned
from amp_ray.runtime.study.reading import ReadStudy
from amp_ray.search.planner import AMP_RAY, Planner, make_planner
from amp_ray.search.rows import difference, row
from amp_ray.strategies.strategy import Strategy
from amp_ray.trials.outcome import trial_tells_time, with_mean
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
        style=text("page.css"),
        data=data.replace("<", "\\u003c"),
        plotly=text(_LIBRARY),
        script=text("page.js"),
    )


_NUM_LOST: Final = 5  # number of plans after the best one to compare with it

_MOST_INSTRUCTIONS: Final = 6000
"""Most bars for a browser to draw; a longer timeline shows its first micro-batches."""

_PACKAGES: Final = ("numpy", "numba", "ray", "torch", "deepspeed")


@dataclass(slots=True)
class _Names:
    """Numbers the names of plans, so that a record has each name only once."""

    numbers: dict[str, int] = field(default_factory=dict)

    def id(self, strategy: Mapping[str, Any]) -> int:
        """Return the number of a STRATEGY's name, adding a new name."""
        return self.numbers.setdefault(strategy_text(strategy), len(self.numbers))


def plan_record(planned: Planned, *, source: str) -> dict[str, Any]:
    """Return the record of a plan.

    Args:
        planned: A plan by any cost model; stages and timeline always come from ours.
        source: Path of the experiment file, for the commands on the page.
    """
    experiment, ranking, names = planned.experiment, planned.ranking, _Names()
    results = ranking.results
    rows = [row(result, number, experiment) for number, result in enumerate(results, start=1)]
    best, record = ranking.best, _empty(experiment)
    record |= {
        "subtitle": _subtitle(experiment, planned.cost_model, len(rows)),
        "rows": [_slim(full, names) for full in rows],
    }
    if best is None:
        record["notes"] = [f"No strategy can run: {planned.why_none()}."]
    else:
        able = ranking.results[: min(ranking.num_feasible, 1 + _NUM_LOST)]
        for tied in record["rows"][1 : ranking.num_tied]:
            tied["tied"] = True
        record |= {
            "figures": _figures(rows[0], best),
            "commands": _commands(source, rows[0], experiment),
            **_best(able, record["rows"], experiment, planned.planner, names),
        }
    return record | {"names": list(names.numbers)}


def study_record(study: ReadStudy, *, source: str) -> dict[str, Any]:
    """Return the record of a study; ``source``, its folder, appears in the commands.

    Its first plan is the recommended one, with the time of the recommendation.
    """
    experiment, result, names = study.calibrated(), study.result, _Names()
    rows, recommended, certificate = study.ranking, study.recommendation, result.get("certificate")
    record = _empty(experiment) | {
        "subtitle": _subtitle(experiment, AMP_RAY, len(rows)),
        "rows": [_slim(full, names) for full in rows],
    }
    if recommended is not None:
        first, *next_rows = rows[: 1 + _NUM_LOST]
        planner = make_planner(experiment, AMP_RAY)
        best = _estimate(first, experiment, planner).taking(recommended["time_s"])
        able = [_estimate(full, experiment, planner) for full in next_rows if full["feasible"]]
        ties = [tie["strategy"] for tie in recommended["ties"]]
        for full, slim in zip(rows, record["rows"], strict=True):
            slim["tied"] = full["strategy"] in ties
        record |= {
            "figures": _study_figures(row(best, 1, experiment), best, recommended),
            "commands": _commands(source, rows[0], experiment),
            **_best([best, *able], record["rows"], experiment, planner, names),
            "measured_timeline": measured_lanes(study.timeline(best.strategy)),
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
    """Return a record with only the versions that made the report."""
    environment = [("amp-ray", __version__), ("Python", platform.python_version())]
    for package in _PACKAGES:
        try:
            environment.append((package, version(package)))
        except PackageNotFoundError:
            continue
    environment.append(("system", f"{platform.system()} {platform.machine()}"))
    empty: tuple[str, ...] = ("figures", "notes", "commands", "rows", "lost", "cluster", "trials")
    return {
        "title": experiment.name,
        "best": None,
        "timeline": None,
        "measured_timeline": None,
        "timeline_note": None,
        "environment": environment,
        **{name: [] for name in (*empty, "fitted", "constants")},
    }


def _subtitle(experiment: Experiment, cost_model: str, num_rows: int) -> str:
    cluster, model = experiment.cluster, experiment.model
    devices = ", ".join(
        f"{sum(node.num_slots for node in cluster.nodes if node.device == device)} x {device.name}"
        for device in cluster.device_types
    )
    return (
        f"{model.name}, {model.num_parameters / 1e9:.3g} billion parameters, batch "
        f"{experiment.global_batch_size}, {experiment.precision}, on {devices} "
        f"({counted(len(cluster.nodes), 'node')}); {counted(num_rows, 'candidate')} by cost model "
        f"{cost_model}, runtime {experiment.traits.name}"
    )


def _slim(full: Mapping[str, Any], names: _Names) -> dict[str, Any]:
    """Return a ROW with the name of its strategy instead of the strategy."""
    return {key: value for key, value in full.items() if key not in {"strategy", "warnings"}} | {
        "id": names.id(full["strategy"])
    }


def _figures(full: Mapping[str, Any], best: Estimate) -> list[tuple[str, str]]:
    """Return the figures at the top of the page, as names and texts."""
    interval = full.get("interval_s")
    ends = " to ".join(figure_text(end, 3) for end in interval or ())
    around = f" ({ends})" if ends else ""
    figures = [
        ("plan", plan_text(full["strategy"])),
        ("per iteration", f"{figure_text(best.iteration_time_s)} s{around}"),
    ]
    if best.tokens_per_s:
        figures.append(("tokens per second", f"{best.tokens_per_s:,.0f}"))
    if full.get("mfu"):
        figures.append(("model FLOPs utilisation", f"{full['mfu']:.1%}"))
    if best.peak_memory_bytes:
        pairs = zip(best.peak_memory_bytes, best.memory_limit_bytes, strict=True)
        peak, limit = max(pairs, key=lambda pair: pair[0] / pair[1])
        figures.append(
            ("memory of the fullest stage", f"{peak / GIB:.1f} of {limit / GIB:.1f} GiB")
        )
    figures.append(("risk of failure", f"{best.failure_probability:.1%}"))
    if best.cost is not None:
        figures.append(("cost per iteration", figure_text(best.cost.per_iteration)))
    return figures


def _study_figures(
    full: Mapping[str, Any], best: Estimate, recommended: Mapping[str, Any]
) -> list[tuple[str, str]]:
    """Return the figures at the top of a study's page, measured times first."""
    plan, _, *further = _figures(full, best)
    how = {"posterior": "measured and predicted,"}.get(recommended["rests_on"])
    times = [(f"{how or recommended['rests_on']} per iteration", time_text(recommended))]
    if recommended["rests_on"] != "predicted":
        predicted_s = figure_text(recommended["predicted_s"])
        times.append(("predicted per iteration", f"{predicted_s} s"))
    return [plan, *times, *further]


def _commands(
    source: str, full: Mapping[str, Any], experiment: Experiment
) -> list[tuple[str, str]]:
    """Return commands with descriptions; they repeat this plan's ``--set`` options."""
    commands, name = [], shlex.quote(source)
    if source.endswith((".yaml", ".yml")):
        name += "".join(
            f" --set {shlex.quote(change)}" for change in experiment.source.changes.values()
        )
        is_tried = experiment.trials.program is not None or experiment.traits.name in RUNTIMES
        if full["launchable"] and is_tried:
            commands.append(("Prove it by real trials:", f"amp-ray tune {name}"))
    return [
        *commands,
        ("Hand it over; --help lists the formats:", f"amp-ray export {name} --to ..."),
    ]


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
        {"name": node.name, "device": node.device.name, "stages": [None] * node.num_slots}
        for node in cluster.nodes
    ]
    for device, stage in stages.items():
        slot = cluster.slot_of_device[device]
        nodes[cluster.node_of_device[device]]["stages"][slot] = stage
    return nodes


def _timeline(planner: Planner, best: Estimate) -> dict[str, Any]:
    """Return the predicted timeline in lanes, shortened if it is too long."""
    timeline = planner.timeline(best.strategy)
    if timeline is None:
        return {}
    lanes, is_cut = _predicted_lanes(timeline, best.strategy.num_micro_batches)
    note = "The first micro-batches and the end; those between look alike." if is_cut else None
    return {"timeline": lanes, "timeline_note": note}


def _predicted_lanes(
    timeline: Timeline, num_micro_batches: int
) -> tuple[list[dict[str, Any]], bool]:
    """Return a lane per stage with its instructions, and whether some were left out."""
    total = sum(map(len, timeline))
    shown = num_micro_batches
    if total > _MOST_INSTRUCTIONS:
        shown = max(1, _MOST_INSTRUCTIONS * num_micro_batches // total)
    lanes = [
        {
            "name": f"stage {stage}",
            "items": [
                (str(span.instruction), round(span.begin_s, 9), round(span.end_s, 9))
                for span in order
                if span.end_s > span.begin_s and (span.instruction.micro_batch or 0) < shown
            ],
        }
        for stage, order in enumerate(timeline)
    ]
    return lanes, shown < num_micro_batches


def measured_lanes(ranks: Sequence[RankTimeline]) -> list[dict[str, Any]] | None:
    """Return a lane per stage, for its first rank in a measured timeline; None without one."""
    if not ranks:
        return None
    first = {rank.stage: rank.spans for rank in ranks if rank.is_first}
    return [
        {"name": f"stage {stage}", "items": first[stage][:_MOST_INSTRUCTIONS]}
        for stage in sorted(first)
    ]
