"""Golden strategies: each with what `CostModel.estimate` says of it, kept in one file."""

import gzip
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from amp_ray.cost.model import CostModel
from amp_ray.cost.timeline import predicted_timeline
from amp_ray.inputs.experiment import Experiment
from amp_ray.strategies.strategy import Strategy
from goldens.documents import REPOSITORY, Values, experiment_of, short_record, strategy_of

STRATEGIES: Final = REPOSITORY / "tests" / "golden" / "strategies.jsonl.gz"
ROUNDING: Final = 1e-12
"""Largest relative difference of a figure; parts are compared with the sum of all parts."""

_MOST_UNITS: Final = 64
"""Passes of the longest schedule whose timeline is recorded."""

_ADDED: Final = ("breakdown_s", "fullest_bytes")
"""Figures with parts, of which some may be differences of large numbers."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """Strategies of one experiment."""

    document: Values
    sources: Sequence[str]  # where each strategy comes from: ``drawn`` or ``search``
    strategies: Sequence[Values]  # short STRATEGY records
    figures: Sequence[Values]  # what the cost model says of each

    def to_json(self) -> dict[str, Any]:
        """Return the object of a line of the file."""
        kept = zip(self.sources, self.strategies, self.figures, strict=True)
        return {
            "document": self.document,
            "strategies": [
                {"source": source, "strategy": strategy, "figures": figures}
                for source, strategy, figures in kept
            ],
        }

    @classmethod
    def from_json(cls, line: Mapping[str, Any]) -> "Group":
        """Read the object of a line."""
        kept = line["strategies"]
        return cls(
            document=line["document"],
            sources=[one["source"] for one in kept],
            strategies=[one["strategy"] for one in kept],
            figures=[one["figures"] for one in kept],
        )


def group_of(document: Values, experiment: Experiment, sources: Mapping[Strategy, str]) -> Group:
    """Price strategies, each with its source, of an experiment."""
    model = CostModel(experiment=experiment)
    return Group(
        document=document,
        sources=list(sources.values()),
        strategies=[short_record(strategy, experiment) for strategy in sources],
        figures=[figures_of(model, strategy) for strategy in sources],
    )


def figures_of(model: CostModel, strategy: Strategy) -> dict[str, Any]:
    """Return what a cost model says of a strategy."""
    plain = model.estimate(strategy)
    assert plain.breakdown is not None
    estimate = model.with_columns(plain)
    fullest = max(model.memory_parts(strategy), key=lambda parts: sum(parts.values()))
    cost = estimate.cost
    return {
        "iteration_time_s": estimate.iteration_time_s,
        "breakdown_s": plain.breakdown.to_json(),
        "peak_memory_bytes": list(estimate.peak_memory_bytes),
        "memory_limit_bytes": list(estimate.memory_limit_bytes),
        "fullest_bytes": fullest,  # parts of the stage that needs most
        "feasible": estimate.feasible,
        "reasons": [reason.kind for reason in estimate.reasons],
        "failure_probability": estimate.failure_probability,
        "unexplained": estimate.unexplained,
        "num_warnings": len(estimate.warnings),
        "launchable": estimate.launchable,
        "timeline_s": _timeline_s(model, strategy),
        "money": None if cost is None else [cost.devices, cost.egress],
        "tokens_per_s": estimate.tokens_per_s,
        "mfu": estimate.mfu,
    }


def _timeline_s(model: CostModel, strategy: Strategy) -> float | None:
    """Return the sum of the ends of all instructions of a short schedule; None for a long one."""
    slices = sum(len(tokens) for _, tokens in strategy.token_slices) or 1
    units = strategy.pp * strategy.num_micro_batches * strategy.virtual_stages * slices
    if units > _MOST_UNITS:
        return None
    return sum(each.end_s for order in predicted_timeline(model, strategy) for each in order)


def priced(group: Group) -> Group:
    """Return the group with the figures of today."""
    experiment = experiment_of(group.document)
    read = [strategy_of(record, experiment) for record in group.strategies]
    return group_of(group.document, experiment, dict(zip(read, group.sources, strict=True)))


def differences(old: Group, new: Group) -> Iterator[str]:
    """Yield a line for each figure that differs, with the strategy."""
    rows = zip(old.strategies, old.sources, old.figures, new.figures, strict=True)
    for strategy, source, before, after in rows:
        for name in before:
            yield from (
                f"{line}\n  {source} strategy {json.dumps(strategy)}\n"
                f"  of experiment {json.dumps(old.document)}"
                for line in _different(name, before[name], after[name])
            )


def _different(name: str, before: object, after: object, scale: float = 0.0) -> Iterator[str]:
    """Yield the places where two values differ by more than rounding."""
    if isinstance(before, dict) and isinstance(after, dict) and before.keys() == after.keys():
        scale = sum(map(abs, before.values())) if name in _ADDED else 0.0
        for key in before:
            yield from _different(f"{name}.{key}", before[key], after[key], scale)
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for index, pair in enumerate(zip(before, after, strict=True)):
            yield from _different(f"{name}[{index}]", *pair)
    elif isinstance(before, float) and isinstance(after, float):
        difference = abs(before - after)
        if not difference <= ROUNDING * max(scale, abs(before)):
            yield f"{name}: {before!r} recorded, {after!r} now"
    elif before != after:
        yield f"{name}: {before!r} recorded, {after!r} now"


def read_groups() -> list[Group]:
    """Read the golden strategies."""
    text = gzip.decompress(STRATEGIES.read_bytes()).decode()
    return [Group.from_json(json.loads(line)) for line in text.splitlines()]


def write_groups(groups: Iterable[Group]) -> None:
    """Write the golden strategies; equal groups give equal bytes."""
    lines = [json.dumps(group.to_json(), separators=(",", ":")) for group in groups]
    text = "\n".join(lines) + "\n"
    STRATEGIES.write_bytes(gzip.compress(text.encode(), compresslevel=9, mtime=0))
