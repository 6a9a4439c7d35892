"""Plans beside each other: with changed keys, and against what would help."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import RenderableType

from amp_ray.api.functions import AnyPath, CostModel, Progress, Source, load, refuse_useless, silent
from amp_ray.api.results import Shown
from amp_ray.calibration import Calibration
from amp_ray.cost.estimate import Estimate
from amp_ray.cost.model import CostModel as OurCostModel
from amp_ray.errors import InputError
from amp_ray.inputs.experiment import Experiment
from amp_ray.report.explanation import explanation_view
from amp_ray.report.variants import sweep_view
from amp_ray.runtime.files import document_of
from amp_ray.runtime.planning import Planned
from amp_ray.runtime.ray.searching import Workers
from amp_ray.runtime.variants import Variant, Variants, advise, combinations_of, knee
from amp_ray.search.explanation import difference, link_records, stage_records
from amp_ray.search.planner import AMP_RAY
from amp_ray.search.rows import SCHEMA, flat_row, row
from amp_ray.units import counted


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Sweep(Shown):
    """The best plans of an experiment for every value of some keys.

    Args:
        points: In the order of the values; the last key's change first.
    """

    name: str
    cost_model: str
    points: tuple[Variant, ...]

    @property
    def knee(self) -> Variant | None:
        """The largest cluster up to which more devices are worth it; see docs/formats.md."""
        return knee(self.points)

    @property
    def bests(self) -> tuple[Estimate | None, ...]:
        """The best plan of each point; None where none can run."""
        return tuple(point.best for point in self.points)

    def to_json(self) -> dict[str, Any]:
        """Return the object of ``sweep --json``."""
        at = self.knee
        return {
            "schema": SCHEMA,
            "experiment": self.name,
            "cost_model": self.cost_model,
            "points": [point.to_json() for point in self.points],
            "knee": None if at is None else self.points.index(at),
        }

    def records(self) -> list[dict[str, Any]]:
        """Return a flat mapping for each point, with what was set."""
        found = []
        for point in self.points:
            record = point.to_json()
            changes = dict(change.split("=", 1) for change in record["set"])
            found.append({**changes, **(flat_row(record["row"]) if record["row"] else {})})
        return found

    def drawn(self) -> RenderableType:
        """Draw a line for each point."""
        return sweep_view(self.to_json())


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Explanation(Shown):
    """Why a plan takes as long as it does, and what would help; draws itself.

    Args:
        record: The object of ``explain --json``.
        problem: Why no strategy can run; empty where one can.
    """

    record: dict[str, Any]
    problem: str

    def to_json(self) -> dict[str, Any]:
        """Return the object of ``explain --json``."""
        return self.record

    def records(self) -> list[dict[str, Any]]:
        """Return a mapping for each stage."""
        return [dict(stage) for stage in self.record.get("stages", [])]

    def drawn(self) -> RenderableType:
        """Draw it."""
        return explanation_view(self.record)


def sweep(
    source: Source,
    sets: Mapping[str, Sequence[Any]] | Sequence[str],
    *,
    cost_model: CostModel | None = None,
    calibration: Calibration | AnyPath | None = None,
    transfer: bool = False,
    workers: int | None = None,
    address: str | None = None,
    progress: Progress | None = None,
) -> Sweep:
    """Plan an experiment for every value of some keys.

    Args:
        source: A file, or its keys as a mapping; see `amp_ray.load`.
        sets: Values by dotted key, or texts as ``sweep --set`` takes them.
        cost_model: Whose predictions.
        calibration: See `amp_ray.load`.
        transfer: See `amp_ray.load`.
        workers: See `amp_ray.plan`.
        address: See `amp_ray.plan`.
        progress: Told how many points are planned.

    Raises:
        InputError: If a key or all values are wrong.

    Example:
        >>> import amp_ray as amp
        >>> node = dict(device="A100-80", slots=8, inter_gbit_per_s=400)
        >>> model = dict(family="gpt2", num_layers=24, hidden_size=2048, num_heads=16)
        >>> model |= dict(sequence_length=2048, vocab_size=50304)
        >>> given = dict(name="mine", model=model, cluster=dict(nodes=[node]), global_batch_size=64)
        >>> one, two = amp.sweep(given, {"cluster.nodes.0.count": [1, 2]}).bests
        >>> two.iteration_time_s < one.iteration_time_s
        True
    """
    refuse_useless(cost_model, calibration)

    def loaded(changes: Sequence[str]) -> Experiment:
        experiment = load(source, changes=changes, calibration=calibration, transfer=transfer)
        refuse_useless(cost_model or experiment.planner, calibration)
        return experiment

    variants = Variants(
        load=loaded, cost_model=cost_model, workers=Workers(num=workers, address=address)
    )
    points = variants.plan_all(combinations_of(sets), progress or silent)
    named = source if isinstance(source, Mapping) else {"name": Path(str(source)).name}
    first = next(point.planned for point in points if point.planned is not None)
    return Sweep(name=str(named.get("name")), cost_model=first.cost_model, points=points)


def explain(
    source: Source,
    *,
    position: int = 1,
    advice: bool = True,
    changes: Sequence[str] = (),
    calibration: Calibration | AnyPath | None = None,
    transfer: bool = False,
    progress: Progress | None = None,
) -> Explanation:
    """Say why a plan takes as long as it does, what the next one loses, and what would help.

    What would help is planned with the change, as ``--set`` makes it. A calibration counts there as
    far as one of another cluster does.

    Args:
        source: A file, or its keys as a mapping; see `amp_ray.load`.
        position: Which strategy of the ranking, from 1.
        advice: Whether to plan what would help.
        changes: See `amp_ray.load`.
        calibration: See `amp_ray.load`.
        transfer: See `amp_ray.load`.
        progress: Told how many changes are planned.

    Raises:
        InputError: If something does not fit, or the ranking has no such position.
    """
    if isinstance(source, Experiment):
        message = "what would help needs the keys of the experiment: give its file or values"
        raise InputError(message)

    def loaded(more: Sequence[str]) -> Experiment:
        return load(
            source,
            changes=(*changes, *more),
            calibration=calibration,
            transfer=transfer or (bool(more) and calibration is not None),
        )

    variants = Variants(load=loaded, cost_model=AMP_RAY)
    today = variants.plan(())
    if today.planned is None:
        raise InputError(today.problem)
    record = _explained(today.planned, position)
    if advice:
        keys = document_of(source if isinstance(source, Mapping) else Path(source), changes)
        found = advise(variants, today, keys.values, progress or silent)
        record["advice"] = [each.to_json() for each in found]
    return Explanation(record=record, problem=today.problem)


def _explained(planned: Planned, position: int) -> dict[str, Any]:
    """Return the object of ``explain --json`` without advice."""
    experiment, ranking = planned.experiment, planned.ranking
    feasible = list(ranking.results[: ranking.num_feasible])
    record: dict[str, Any] = {"schema": SCHEMA, "experiment": experiment.name, "row": None}
    if not feasible:
        return record
    if position > len(feasible):
        there = counted(len(feasible), "feasible strategy", "feasible strategies")
        raise InputError(f"--position {position}: the ranking has {there}")
    chosen = feasible[position - 1]
    assert isinstance(chosen, Estimate)
    # Against the next one, and any other one against the best.
    other = feasible[0] if position > 1 else next(iter(feasible[1:]), None)
    cost_model = OurCostModel(experiment=experiment)
    record |= {
        "row": row(chosen, position, experiment, planned.planner),
        "stages": stage_records(cost_model, chosen),
        "links": link_records(cost_model, chosen.strategy),
        "other": None,
    }
    if isinstance(other, Estimate):
        number = 1 if position > 1 else 2
        seconds = difference(chosen, other)
        record["other"] = {
            "row": row(other, number, experiment, planned.planner),
            "difference_s": seconds,
        }
    return record
