"""Texts for strategies and recommendations, shared by all outputs."""

import re
from collections.abc import Mapping, Sequence
from itertools import groupby, pairwise
from typing import Any, Final

from amp_ray.clusters.device import Device
from amp_ray.inputs.experiment import Experiment
from amp_ray.models.model import Model
from amp_ray.strategies.candidate import AnyCandidate, GroupsCandidate, StageOptions
from amp_ray.strategies.recompute import NO_RECOMPUTE, Recompute
from amp_ray.strategies.strategy import Strategy
from amp_ray.strategies.zero import AUTO_STAGE
from amp_ray.units import GIGA, MEGA, counted, figure_text

_NOTATION: Final[Mapping[str, str]] = {
    r"recompute (full|selective):(\d+)": r"\g<0>: in \2 of a stage's blocks",
    r"recompute (none|selective|per-op|full)\S*( x\d+)? (none|selective|per-op|full)[^,]*": (
        r"\g<0>: stage by stage"
    ),
    r" x(\d+)": r"x\1: \1 stages in a row",
    r" \.\. ": "0 2 .. 8: 0 2 4 6 8",
    r"ZeRO \d/(\d+)": r"\g<0>: sharded over groups of \1 ranks",
    r"ZeRO \d\S* kept": r"\g<0>: gathered weights stay until the backward pass",
}
"""Short forms in the text of a row, as patterns, and how to explain what they match."""

_MANY_BOUNDS: Final = 17
"""Largest number of bounds that are all listed."""

_LONG_RUN: Final = 4
"""Least number of equal steps between bounds that are shortened."""


def plan_text(strategy: Mapping[str, Any]) -> str:
    """Name a STRATEGY in a few words; different stages are only counted.

    Example:
        >>> plan_text({"tp": 2, "pp": 2, "dp": 1, "micro_batch_size": 4, "recompute": "full"})
        'tp 2, dp 1, pp 2, micro-batch 4, recompute full'
    >>> kinds = ["none", {"kind": "full", "layers": 5}, "none"]
    >>> plan_text({"tp": 1, "pp": 3, "dp": 1, "micro_batch_size": 4, "recompute": kinds})
    'tp 1, dp 1, pp 3, micro-batch 4, recompute none / full in 5 blocks'
    >>> plan_text({"tp": None, "dp": None, "pp": None, "micro_batch_size": 4, "bounds": None})
    'stages of their own, micro-batch 4'
    """
    if strategy["tp"] is None or strategy["dp"] is None:
        stages = strategy.get("stages")  # a candidate without a feasible plan has none
        degrees = [f"{len(stages)} stages of their own" if stages else "stages of their own"]
    else:
        degrees = [f"{name} {strategy[name]}" for name in ("tp", "dp", "pp")]
    skipped = {"tp", "dp", "pp", "micro_batch_size", "num_micro_batches", "recompute"}
    dimensions = [
        _dimension(item)
        for item in strategy.items()
        if item[0] not in skipped and isinstance(item[1], int | str) and item[1] is not False
    ]
    recompute = strategy.get("recompute")
    kinds = [f"recompute {_kind(recompute)}"] if recompute and recompute != "none" else []
    return ", ".join([*degrees, *dimensions, f"micro-batch {strategy['micro_batch_size']}", *kinds])


def advised_text(strategy: Mapping[str, Any]) -> str:
    """Name a STRATEGY as in advice, its ZeRO stage last.

    Example:
        >>> advised_text({"tp": 1, "pp": 4, "dp": 8, "micro_batch_size": 1, "zero_stage": 1})
        'tp 1, dp 8, pp 4, micro-batch 1 with ZeRO-1'
    """
    zero = strategy.get("zero_stage")
    rest = {name: value for name, value in strategy.items() if name != "zero_stage"}
    return f"{plan_text(rest)} with ZeRO-{zero}" if zero else plan_text(rest)


def with_idle(plan: str, idle: Mapping[str, int]) -> str:
    """Add the devices that a plan leaves idle: ``tp 2, pp 1, 2 x A100-40, 1 x T4 idle``."""
    devices = [f"{number} x {name}" for name, number in idle.items()]
    return ", ".join([plan, *devices]) + (" idle" if idle else "")


def _kind(recompute: Any) -> str:  # noqa: ANN401 - a word, one with a number of layers, or a list
    if isinstance(recompute, str):
        return recompute
    if isinstance(recompute, Mapping):
        return f"{recompute['kind']} in {counted(recompute['layers'], 'block')}"
    return " / ".join(dict.fromkeys(map(_kind, recompute)))


def strategy_text(strategy: Mapping[str, Any]) -> str:
    """Name a strategy; within a study the name is unique up to the placement."""
    bounds = strategy.get("bounds")
    cuts = f", bounds {' '.join(map(str, bounds))}" if bounds and len(bounds) > 2 else ""  # noqa: PLR2004
    return f"{plan_text(strategy)}{cuts}"


def has_even_cuts(strategy: Strategy, model: Model) -> bool:
    """Return whether all stages, or all of their chunks, have equal numbers of blocks."""
    bounds = strategy.given_bounds
    if strategy.has_operators or bounds[-1] != model.num_layers:
        return False
    blocks = [model.block_counts[bound] for bound in bounds]
    counts = {end - first for first, end in pairwise(blocks)}
    return len(counts) == 1 and counts != {0}


def cuts_text(bounds: Sequence[int]) -> str:
    """List the bounds; of many, runs of equal steps only by their ends.

    Example:
        >>> cuts_text([0, 3, 5, 9])
        '0 3 5 9'
        >>> cuts_text([0, 3, *range(4, 20), 22])
        '0 3 4 .. 19 22'
    """
    if len(bounds) <= _MANY_BOUNDS:
        return " ".join(map(str, bounds))
    steps = [after - before for before, after in pairwise(bounds)]
    words: list[str] = []
    start = 0
    while start < len(bounds):
        end = start
        while end + 1 < len(bounds) and bounds[end + 1] - bounds[end] == steps[start]:
            end += 1
        words.append(str(bounds[start]))
        if end - start >= _LONG_RUN:
            words.extend([str(bounds[start + 1]), ".."])
        start = end if end - start >= _LONG_RUN else start + 1
    return " ".join(words)


def chosen_texts(strategy: Strategy, experiment: Experiment) -> list[str]:
    """List the choices of a strategy besides degrees and bounds, each as a text of its own."""
    chosen = f"ZeRO {strategy.zero}" if experiment.zero_stage == AUTO_STAGE else ""
    default = NO_RECOMPUTE if experiment.recompute.kind == "auto" else experiment.recompute
    return _texts(strategy, chosen, default)


def used_texts(strategy: Strategy) -> list[str]:
    """List what a strategy uses besides degrees and bounds, each as a text of its own."""
    return _texts(strategy, f"ZeRO {strategy.zero}" if strategy.zero.stage else "", NO_RECOMPUTE)


def _texts(strategy: Strategy, zero: str, default: Recompute) -> list[str]:
    chunks = f"{strategy.virtual_stages} chunks per stage" if strategy.is_interleaved else ""
    options = _options_text([stage.options for stage in strategy.stages])
    return list(filter(None, (chunks, options, zero, _recompute_text(strategy, default))))


COMMUNICATION: Final[Mapping[str, str]] = {
    "tp": "tensor parallel communication",
    "cp": "context parallel exchange",
    "ep": "experts' exchange",
}
"""What the ranks of a layer send each other, by the degree that they need it for."""


def communication(*strategies: Mapping[str, Any]) -> list[str]:
    """List the degrees for which ranks of a layer of some STRATEGY objects talk to each other.

    Example:
        >>> communication({"tp": 1, "ep": 8}), communication({"tp": 2, "cp": 2}, {"tp": 1})
        (['ep'], ['tp', 'cp'])
    """
    parts = [part for plan in strategies for part in (plan, *(plan.get("stages") or ()))]
    return [key for key in COMMUNICATION if any((part.get(key) or 1) > 1 for part in parts)]


def notation(texts: Sequence[str]) -> list[str]:
    """List explanations of the short forms in the texts of some strategies, each once."""
    matches = {
        pattern: next(filter(None, (re.search(pattern, text) for text in texts)), None)
        for pattern in _NOTATION
    }
    return [match.expand(_NOTATION[pattern]) for pattern, match in matches.items() if match]


def _board(device: Device) -> str:
    """Return a device's name, with the limit of its power if one is set."""
    limit_w = device.power_limit_w
    return device.name if limit_w is None else f"{device.name} at {limit_w:g} W"


def what_is_planned(experiment: Experiment) -> tuple[list[str], list[str]]:
    """List texts on model and cluster of an experiment, and texts on its settings."""
    cluster, model = experiment.cluster, experiment.model
    counts = dict.fromkeys(cluster.device_types, 0)
    for node in cluster.nodes:
        counts[node.device] += node.num_slots
    devices = ", ".join(f"{count:,} x {_board(device)}" for device, count in counts.items())
    assumed = cluster.assumed_network
    racks = f", {counted(len(cluster.nodes), 'rack')}" if cluster.has_racks else ""
    length = model.shape.sequence_length
    zero = "auto" if experiment.zero_stage == AUTO_STAGE else experiment.zero_stage
    size = model.num_parameters
    unit, word = (GIGA, "billion") if size >= GIGA else (MEGA, "million")
    return [
        f"{model.shape.name or model.name}, {figure_text(size / unit, 3)} {word} parameters",
        *([f"sequences of {length:,}"] if length else []),
        f"{devices} in {counted(len(cluster.host_names), 'node')}{racks}",
    ], [
        f"runtime {experiment.traits.full_name}",
        experiment.precision,
        *(f"{name} {key}" for key, name in experiment.traits.formats.kept.items()),
        f"batch {experiment.global_batch_size:,}",
        f"ZeRO {zero}",
        *([f"network taken for {assumed}"] if assumed else []),
    ]


def head_text(experiments: Sequence[Experiment], name: str) -> str:
    """Name model, cluster and settings in two lines, as far as the experiments share them."""
    first, *others = map(what_is_planned, experiments)
    lines = [
        ", ".join(text for text in texts if all(text in other[index] for other in others))
        for index, texts in enumerate(first)
    ]
    return "\n".join(filter(None, (f"{name}: {lines[0]}".removesuffix(": "), lines[1])))


def options_text(candidate: AnyCandidate) -> str:
    """List the dimensions in use of a candidate that have no column."""
    return "" if isinstance(candidate, GroupsCandidate) else _options_text([candidate.options])


def _options_text(of_stages: Sequence[StageOptions]) -> str:
    """List the options of the stages that are not off; if stages differ, each list once."""
    dimensions = dict.fromkeys(tuple(options.others.items()) for options in of_stages)
    texts = [", ".join(map(_dimension, items)) or "-" for items in dimensions]
    return " | ".join(texts) if any(dimensions) else ""


def _dimension(chosen: tuple[str, object]) -> str:
    """Name a dimension with its value, or a flag that is set."""
    name, value = chosen
    if name == "virtual_stages":
        return f"{value} chunks per stage"
    words = "ZeRO" if name == "zero_stage" else name.replace("_", " ")
    return words if value is True else f"{words} {value}"


def _recompute_text(strategy: Strategy, default: Recompute) -> str:
    """Describe the stages' recompute, unless it is the default in all."""
    if strategy.has_operators:
        runs = [[run for run in stage.operators if run.recompute] for stage in strategy.stages]
        counts = [str(sum(run.num_operators for run in of_stage)) for of_stage in runs]
        return f"operators recomputed {' '.join(counts)}"
    per_stage = [str(stage.options.recompute) for stage in strategy.stages]
    if set(per_stage) == {str(default)}:
        return ""
    if len(set(per_stage)) == 1:
        return f"recompute {per_stage[0]}"
    counted_words = [(word, len(list(stages))) for word, stages in groupby(per_stage)]
    words = (word if count == 1 else f"{word} x{count}" for word, count in counted_words)
    return f"recompute {' '.join(words)}"
