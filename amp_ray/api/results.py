"""Results of the functions: values that terminals and notebooks show as tables."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar, overload

from rich.console import Group, RenderableType
from rich.text import Text

from amp_ray.cost.estimate import Estimate, Result
from amp_ray.errors import AmpRayError
from amp_ray.inputs.experiment import Experiment
from amp_ray.inputs.not_read import NotRead
from amp_ray.inputs.yaml_text import parse_value
from amp_ray.redaction import redact_at
from amp_ray.report.console import html_of
from amp_ray.report.strategy_text import head_text
from amp_ray.report.tables import ResultsTable, moves_table, ranking_table
from amp_ray.report.views import SweepView, diagnosis_view, explanation_view, fitting_text
from amp_ray.runtime.planning import Planned, Replanned
from amp_ray.runtime.variants import Advice, Variant, knee, linear_fractions
from amp_ray.search.planner import Planner
from amp_ray.search.rows import SCHEMA, flat_row, row
from amp_ray.search.space import searched_dimensions
from amp_ray.strategies.strategy import Strategy, degrees_text
from amp_ray.units import counted, figure_text

if TYPE_CHECKING:
    from amp_ray.runtime.doctor import Diagnosis
    from amp_ray.runtime.study.result import StudyResult

_Row = TypeVar("_Row")
NUM_SHOWN: Final = 10  # default number of a plan's strategies to show


class Shown(ABC):
    """A result with rows, shown as a table in a terminal or notebook, or as a data frame."""

    @abstractmethod
    def drawn(self) -> RenderableType:
        """Return the view for a terminal or a notebook."""

    @abstractmethod
    def records(self) -> list[dict[str, Any]]:
        """Return a flat mapping per row, in order, as for data frames."""

    def to_pandas(self) -> Any:  # noqa: ANN401 - pandas is an extra of the user's, without types here
        """Return the rows as a ``pandas.DataFrame``.

        Raises:
            AmpRayError: If pandas is not installed.
        """
        try:
            pandas = import_module("pandas")
        except ImportError as error:
            message = "to_pandas needs pandas, which is not installed: pip install pandas"
            raise AmpRayError(message) from error
        return pandas.DataFrame(self.records())

    def __rich__(self) -> RenderableType:
        return self.drawn()

    def _repr_html_(self) -> str:
        return html_of(self.drawn())


class Listed(Shown, Sequence[_Row]):
    """A result that is a sequence of its rows."""

    @property
    @abstractmethod
    def rows(self) -> tuple[_Row, ...]:
        """The rows, in order."""

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, index: int) -> _Row: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[_Row]: ...

    def __getitem__(self, index: int | slice) -> _Row | Sequence[_Row]:
        return self.rows[index]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Plan(Listed[Result]):
    """The ranked strategies of an experiment; a sequence of its `results`.

    Args:
        planned: The outcome of the search.
        num_shown: Number of feasible strategies to draw; None draws all, including infeasible ones.
        ways_to_fit: If none can run, the smallest change of settings and the smallest cluster with
            which one can.
    """

    planned: Planned
    num_shown: int | None = NUM_SHOWN
    ways_to_fit: tuple[Advice, ...] = ()

    @property
    def experiment(self) -> Experiment:
        """The planned experiment."""
        return self.planned.experiment

    @property
    def results(self) -> tuple[Result, ...]:
        """All planned candidates, best first; infeasible ones last."""
        return self.planned.ranking.results

    @property
    def rows(self) -> tuple[Result, ...]:
        """The results."""
        return self.results

    @property
    def num_candidates(self) -> int:
        """Number of candidates of the search, including those left out."""
        return len(self.results) + self.planned.ranking.num_left_out

    @property
    def best(self) -> Estimate | None:
        """The best strategy with its estimate; None if none can run, see `why_none`."""
        return self.planned.ranking.best

    @property
    def feasible(self) -> tuple[Estimate, ...]:
        """Feasible strategies, best first."""
        first = self.results[: self.planned.ranking.num_feasible]
        return tuple(result for result in first if isinstance(result, Estimate))

    def why_none(self) -> str | None:
        """Return why no strategy can run, the closest one, and what would do; None if one can."""
        if self.feasible:
            return None
        return f"{self.planned.why_none()}{fitting_text(self._ways)}"

    @property
    def _ways(self) -> list[dict[str, Any]]:
        return [way.to_json() for way in self.ways_to_fit]

    def to_json(self, *, num_rows: int | None = None) -> dict[str, Any]:
        """Return the object of ``plan --json``; ``num_rows`` None includes every candidate."""
        record = self.planned.to_json(num_rows=num_rows)
        return {**record, "ways_to_fit": self._ways} if self.ways_to_fit else record

    def records(self) -> list[dict[str, Any]]:
        """Return a flat mapping per candidate.

        Values are numbers, texts or lists of them: ``interval_s`` is ``[low, high]``, and memory
        (``peak_memory_bytes``, ``memory_weights``, ...) has a number per stage, in bytes.
        """
        return [flat_row(record) for record in self.to_json()["ranking"]]

    def drawn(self) -> RenderableType:
        """Draw the head of the ranking."""
        experiment, ranking = self.experiment, self.planned.ranking
        title = (
            f"{head_text([experiment], experiment.name)}\n"
            f"{counted(self.num_candidates, 'candidate')} in "
            f"{figure_text(self.planned.search_s, 3)} s, cost model {self.planned.cost_model}, "
            f"{experiment.profile.source}"
        )
        table = ranking_table(ranking, experiment, title=title, num_rows=self.num_shown)
        searched = searched_dimensions(experiment)
        lines = [f"searched: {', '.join(searched)}"] if searched else []
        lines += [f"remark: {remark}" for remark in self.planned.remarks]
        return Group(table, *map(Text, lines)) if lines else table

    def drawn_moves(self) -> RenderableType | None:
        """Draw the state to move to the best strategy, after a plan with ``before``; else None."""
        moves = self.planned.moves() if isinstance(self.planned, Replanned) else None
        return None if moves is None else moves_table(moves)

    def __repr__(self) -> str:
        if self.best is None:
            return f"<Plan of {self.experiment.name}: no feasible strategy>"
        feasible = counted(len(self.feasible), "strategy", "strategies")
        return f"<Plan of {self.experiment.name}: {feasible}, best {_text(self.best)}>"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Scores(Listed[Result]):
    """Estimates of the given strategies, in their order; a sequence of results.

    Args:
        not_read: Keys of the strategies' file that may change a plan and are not modelled.
    """

    experiment: Experiment
    cost_model: str
    planner: Planner
    results: tuple[Result, ...]
    not_read: tuple[NotRead, ...] = ()

    @property
    def rows(self) -> tuple[Result, ...]:
        """The results."""
        return self.results

    def to_json(self) -> dict[str, Any]:
        """Return the object of ``score --json``."""
        rows = [row(result, None, self.experiment, self.planner) for result in self.results]
        notes = list(map(str, self.not_read))
        rows = [{**record, "warnings": record["warnings"] + notes} for record in rows]
        return {"schema": SCHEMA, "rows": rows}

    def records(self) -> list[dict[str, Any]]:
        """Return a flat mapping per strategy."""
        return [flat_row(record) for record in self.to_json()["rows"]]

    def drawn(self) -> RenderableType:
        """Draw every strategy."""
        strategies = counted(len(self.results), "strategy", "strategies")
        title = (
            f"{head_text([self.experiment], self.experiment.name)}\n"
            f"{strategies}, cost model {self.cost_model}"
        )
        drawn = ResultsTable(results=self.results, experiment=self.experiment, title=title)
        return Group(drawn, *(Text(f"remark: {note}") for note in self.not_read))

    def __repr__(self) -> str:
        strategies = counted(len(self.results), "strategy", "strategies")
        return f"<Scores of {self.experiment.name}: {strategies}>"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Sweep(Listed[Variant]):
    """The best plans of an experiment for every value of some keys; a sequence of its points.

    Args:
        points: The plans, in the order of the values; the last key's value changes first.
        ways_to_fit: If no point has a plan, further changes with which the first one has.
    """

    name: str
    cost_model: str
    points: tuple[Variant, ...]
    ways_to_fit: tuple[Advice, ...] = ()

    @property
    def rows(self) -> tuple[Variant, ...]:
        """The points."""
        return self.points

    @property
    def knee(self) -> Variant | None:
        """The largest cluster size at which more devices still pay off; see docs/formats.md."""
        return knee(self.points)

    @property
    def bests(self) -> tuple[Estimate | None, ...]:
        """The best plan of each point; None if none can run."""
        return tuple(point.best for point in self.points)

    def why_none(self) -> str | None:
        """Return why the first point has no plan, and what would do; None if some point has one."""
        if any(self.bests):
            return None
        problem = next(point.problem for point in self.points if point.planned is not None)
        return f"{problem}{fitting_text([way.to_json() for way in self.ways_to_fit])}"

    def to_json(self) -> dict[str, Any]:
        """Return the object of ``sweep --json``."""
        best_size = self.knee
        return {
            "schema": SCHEMA,
            "experiment": self.name,
            "cost_model": self.cost_model,
            "points": [
                {**point.to_json(), "linear_fraction": fraction}
                for point, fraction in zip(self.points, linear_fractions(self.points), strict=True)
            ],
            "knee": None if best_size is None else self.points.index(best_size),
        }

    def records(self) -> list[dict[str, Any]]:
        """Return a flat mapping per point, with its values of the keys."""
        records = []
        for point in self.points:
            record = point.to_json()
            changes = (change.split("=", 1) for change in point.changes)
            values = {
                key: redact_at(key.split("."), parse_value(text, file=f"--set {key}"))
                for key, text in changes
            }
            records.append({**values, **(flat_row(record["row"]) if record["row"] else {})})
        return records

    def drawn(self) -> RenderableType:
        """Draw a line per point."""
        experiments = [point.planned.experiment for point in self.points if point.planned]
        return SweepView(record=self.to_json(), head=head_text(experiments, self.name))


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Explanation(Shown):
    """The explanation of a plan's time, with changes that would help.

    Args:
        record: The object of ``explain --json``.
        problem: Why no strategy can run; empty if one can.
    """

    record: dict[str, Any]
    problem: str

    def to_json(self) -> dict[str, Any]:
        """Return the object of ``explain --json``."""
        return self.record

    def records(self) -> list[dict[str, Any]]:
        """Return a mapping per stage."""
        return [dict(stage) for stage in self.record.get("stages", [])]

    def drawn(self) -> RenderableType:
        """Draw the explanation."""
        return explanation_view(self.record)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class StudyState(Shown):
    """The trials of a study so far.

    Args:
        record: The object of ``show --json``.
    """

    record: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """Return the object of ``show --json``."""
        return self.record

    def records(self) -> list[dict[str, Any]]:
        """Return a flat mapping per trial."""
        return [flat_row(trial) for trial in self.record["trials"]]

    def drawn(self) -> RenderableType:
        """Draw the trials."""
        from amp_ray.report.study import state_view

        return state_view(self.record)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Checkup(Shown):
    """What the doctor found on the hosts of an experiment."""

    diagnosis: "Diagnosis"

    @property
    def ok(self) -> bool:
        """Whether nothing prevents trials."""
        return not self.diagnosis.errors

    def to_json(self) -> dict[str, Any]:
        """Return the object of ``doctor --json``."""
        return self.diagnosis.to_json()

    def records(self) -> list[dict[str, Any]]:
        """Return a mapping per finding."""
        return [finding.to_json() for finding in self.diagnosis.findings]

    def drawn(self) -> RenderableType:
        """Draw the findings, with the command that mends each."""
        return diagnosis_view(self.diagnosis, show_all=False)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Study(Shown):
    """Real trials of an experiment, and their results.

    Args:
        folder: Folder of the study; ``tune(..., study=folder, resume=True)`` continues it.
        result: Trials, calibration, and the recommendation based on them.
    """

    folder: Path
    result: "StudyResult"

    @property
    def experiment(self) -> Experiment:
        """The experiment of the trials."""
        return self.result.state.experiment

    @property
    def best(self) -> Strategy | None:
        """The recommended strategy; None if nothing was measured."""
        recommended = self.result.recommendation
        return None if recommended is None else recommended.strategy

    def to_json(self) -> dict[str, Any]:
        """Return the object of ``tune --json``."""
        import json

        from amp_ray.runtime.study.result import study_text

        record: dict[str, Any] = json.loads("".join(study_text(self.result, str(self.folder))))
        return record

    def records(self) -> list[dict[str, Any]]:
        """Return a flat mapping per trial."""
        return [flat_row(trial) for trial in self.to_json()["trials"]]

    def drawn(self) -> RenderableType:
        """Draw the trials and how the study ended."""
        from amp_ray.report.study import end_view

        return end_view(self.result, str(self.folder))

    def __repr__(self) -> str:
        trials = counted(len(self.result.state.trials), "trial")
        return f"<Study {self.folder}: {trials}, {self.result.ending}>"


def _text(estimate: Estimate) -> str:
    return f"{degrees_text(estimate.strategy)}: {figure_text(estimate.iteration_time_s)} s"
