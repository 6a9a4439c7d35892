"""The commands as functions: arguments are files or values, results are values."""

import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar, Unpack, cast

from rich.console import Console

from amp_ray.api.keywords import checks_keywords
from amp_ray.api.results import (
    NUM_SHOWN,
    Checkup,
    Explanation,
    Plan,
    Scores,
    Study,
    StudyState,
    Sweep,
)
from amp_ray.calibration.calibrate import Choice
from amp_ray.calibration.calibrate import calibrate as fit
from amp_ray.calibration.calibration import Calibration, calibration_to_json
from amp_ray.calibration.intervals import score_with_intervals
from amp_ray.cost.estimate import Estimate
from amp_ray.cost.model import CostModel as OurCostModel
from amp_ray.errors import InputError, NotFeasibleError, Where, placed
from amp_ray.inputs.experiment import Experiment, Objective, launchable_only, without_hosts
from amp_ray.report.console import console as quiet_console
from amp_ray.report.views import fitting_text
from amp_ray.runtime.files import (
    document_of,
    load_experiment,
    load_observations,
    load_strategies,
    with_calibration,
    write_output,
    write_result,
    write_text,
)
from amp_ray.runtime.first_file import answers_of, experiment_text, keys_of_presets
from amp_ray.runtime.planning import Planned, batch_remarks, plan_experiment, replan
from amp_ray.runtime.ray.searching import Workers
from amp_ray.runtime.variants import (
    Advice,
    Variant,
    Variants,
    advise,
    combinations_of,
    ways_to_fit,
)
from amp_ray.search.planner import AMP_RAY, PlannerChoice, choose_planner, load_planner
from amp_ray.search.rows import SCHEMA, difference, link_records, row, stage_records
from amp_ray.search.run import NUM_INTERVALS, score_given, with_remedies
from amp_ray.strategies.strategy import Strategy
from amp_ray.trials.runtime_strategy import untrained
from amp_ray.units import counted

if TYPE_CHECKING:
    from amp_ray.runtime.study.space import PoolKind, TuneOptions
    from amp_ray.runtime.study.tuning import Tuning
    from amp_ray.tuner.state import Policy

AnyPath = str | os.PathLike[str]
Source = Experiment | AnyPath | Mapping[str, Any]
"""An experiment, the path of its file, or the keys of such a file as a mapping."""

Strategies = AnyPath | Iterable[Strategy | Estimate | Mapping[str, Any]]
"""A file of strategies, or strategies as values, estimates or STRATEGY objects."""

Progress = Callable[[int, int], None]  # called with (finished candidates, all candidates)

CostModel = str
"""Name of a planner: ours (amp-ray), a published one (amp-2022, metis-2024, aceso-2024), or one
that another package adds."""


_Part = TypeVar("_Part")


class Options(TypedDict, total=False):
    """Keywords of every function that searches.

    Attributes:
        calibration: Result of `calibrate`, or its file.
        transfer: Whether to accept a calibration of another model, cluster or runtime; only its
            constants that also hold here are used.
        workers: Number of Ray workers for the search; 0 never uses Ray. None uses none, unless the
            search would take long.
        address: Address of the Ray cluster to search on.
        progress: Called with the number of finished candidates (points of a sweep, changes to
            explain) and their total number.
    """

    calibration: Calibration | AnyPath | None
    transfer: bool
    workers: int | None
    address: str | None
    progress: Progress | None


class Presets(TypedDict, total=False):
    """Keywords that describe an experiment in place of a source, as ``amp-ray init`` does.

    Attributes:
        model: A preset's name, such as ``llama-3-8b``, or the path of a ``config.json``.
        cluster: A preset's name, such as ``dgx-h100``.
        nodes: Number of nodes.
        batch: Samples of an optimizer step.
        runtime: The training program; by default ``deepspeed``, for models with experts
            ``megatron-core``.
        sequence_length: Tokens of a sample; by default the preset's or the configuration's.
    """

    model: str
    cluster: str
    nodes: int
    batch: int
    runtime: str
    sequence_length: int


class NodeOptions(Presets, total=False):
    """Keywords of `init`: those of `Presets`, and a node in place of a preset's.

    Attributes:
        device: The board, as the catalogue names it.
        slots: Devices of a node.
        inter_gbit_per_s: Line rate of a node's network interfaces together.
    """

    device: str
    slots: int
    inter_gbit_per_s: float


class PlanOptions(Presets, Options, total=False):
    """Keywords of `plan`: those of `Options` and `Presets`.

    Attributes:
        top: Number of first rows, to return exactly and to draw, in place of ``num_rows``.
    """

    top: int


class StudyOptions(Options, total=False):
    """Further keywords of `tune`.

    Attributes:
        time_budget_s: Limit on the wall time of the study.
        concurrency: Number of trials side by side, one per group of hosts.
        policy: Rule that chooses the next trial.
        seed: Seed of the policy ``random``.
        pool: Whether threads or Ray actors hold the hosts.
        salvage: Whether to continue a damaged journal from the records before the damage.
    """

    time_budget_s: float | None
    concurrency: int | None
    policy: "Policy"
    seed: int
    pool: "PoolKind"
    salvage: bool


@dataclass(frozen=True, slots=True)
class _Searching:
    """How to search."""

    options: Options

    def load(
        self,
        source: Source,
        changes: Sequence[str] = (),
        *,
        cost_model: CostModel | None = None,
        more: Sequence[str] = (),
    ) -> tuple[Experiment, PlannerChoice]:
        """Load an experiment with the calibration, and choose its planner.

        With further changes in ``more``, the experiment counts as one of another cluster.
        """
        experiment = load(source, changes=(*changes, *more))
        choice = choose_planner(experiment, cost_model)
        calibration = self.options.get("calibration")
        if calibration is not None and not choice.traits.has_constants:
            message = (
                f"--calibration fits constants of cost model {AMP_RAY}; {choice.name} has none"
            )
            raise InputError(message)
        transfer = self.options.get("transfer", False) or (bool(more) and calibration is not None)
        return with_calibration(experiment, calibration, transfer=transfer), choice

    @property
    def by(self) -> Workers:
        """Workers of the search."""
        return Workers(num=self.options.get("workers"), address=self.options.get("address"))

    def tell(self, done: int, total: int) -> None:
        """Report the progress of a search to the caller's function, if there is one."""
        if (progress := self.options.get("progress")) is not None:
            progress(done, total)


@checks_keywords
def load(
    source: Source | None = None,
    *,
    hostfile: AnyPath | None = None,
    changes: Sequence[str] = (),
    calibration: Calibration | AnyPath | None = None,
    transfer: bool = False,
    **presets: Unpack[Presets],
) -> Experiment:
    """Return an experiment, with the constants of a calibration if one is given.

    Args:
        source: Path of a file, or its keys as a mapping. Relative paths in a mapping start at the
            current folder. None if ``presets`` describe it.
        hostfile: Hostfile to use instead of the experiment's.
        changes: New values of keys, in the form of ``--set``: ``cluster.nodes.0.count=4``.
        calibration: Result of `calibrate`, or its file.
        transfer: Whether to accept a calibration of another model, cluster or runtime; only its
            constants that also hold here are used.
        presets: Model, cluster, nodes and batch in place of a source: see `Presets`.

    Raises:
        InputError: If something is wrong or does not fit; with file, line and key.

    Example:
        >>> import amp_ray as amp
        >>> amp.load(model="llama-3-8b", cluster="dgx-h100", nodes=4, batch=512).cluster.num_devices
        32
    """
    source = _source(source, presets)
    if isinstance(source, Experiment):
        if changes or hostfile is not None:
            message = "an experiment that is built takes no changes: give its file or values"
            raise InputError(message)
        experiment = source
    else:
        named = source if isinstance(source, Mapping) else Path(source)
        experiment = load_experiment(named, _path(hostfile), changes)
    return with_calibration(experiment, calibration, transfer=transfer)


def _source(source: Any, presets: Presets) -> Source:  # noqa: ANN401 - checked here
    """Return the source of an experiment, or the keys that presets describe."""
    if source is not None and not isinstance(source, Experiment | Mapping | str | os.PathLike):
        message = f"found {source!r}; expected the path of an experiment file, or its keys"
        raise InputError(message)
    _check_presets(source, presets)
    checked: Source = keys_of_presets(answers_of(**presets)) if source is None else source
    return checked


def _check_presets(source: object, presets: Presets) -> None:
    """Refuse presets beside a source, and presets that are not all there."""
    needed = ("model", "cluster", "nodes", "batch")
    missing = [name for name in needed if name not in presets]
    if source is not None and presets:
        message = f"found a source and {', '.join(presets)}: expected one of them"
        raise InputError(message)
    if source is None and missing:
        message = f"expected a source, or {', '.join(needed)}; missing: {', '.join(missing)}"
        raise InputError(message)


@checks_keywords
def plan(
    source: Source | None = None,
    *,
    cost_model: CostModel | None = None,
    objective: Objective | None = None,
    launchable: bool = False,
    without: Sequence[str] = (),
    before: AnyPath | None = None,
    only: Sequence[str] | None = None,
    changes: Sequence[str] = (),
    num_rows: int | None = NUM_INTERVALS,
    leading: Callable[[Estimate], None] = lambda _estimate: None,
    **options: Unpack[PlanOptions],
) -> Plan:
    """Search the strategies of an experiment and rank them by predicted time or cost.

    Args:
        source: See `load`.
        cost_model: Our cost model, or a published planner's formulas. Default: the planner that the
            experiment names.
        objective: Replaces the experiment's objective.
        launchable: Whether to plan only strategies that the runtime can launch as they are.
        without: Lost hosts, which the plan may not use.
        before: File with the current strategy; among ties, the plan that moves the least comes
            first.
        only: Dimensions to search, such as ``tp``, ``dp`` and ``pp``; others are off, or as the
            experiment sets them. Default: all that the runtime can combine.
        changes: See `load`.
        num_rows: Number of first rows to return exactly. A search of many candidates leaves out
            those that are proven to rank below them, which is much faster. None returns a row for
            every candidate.
        leading: Called with each strategy that is faster than all earlier ones.
        options: Calibration, transfer, workers, address, progress: see `Options`; model, cluster,
            nodes and batch in place of a source: see `Presets`.

    Raises:
        InputError: If something does not fit, or the limits leave no candidate.

    Example:
        >>> import amp_ray as amp
        >>> node = dict(device="A100-80", slots=8, inter_gbit_per_s=400)
        >>> model = dict(family="gpt2", num_layers=24, hidden_size=2048, num_heads=16)
        >>> model |= dict(sequence_length=2048, vocab_size=50304)
        >>> keys = dict(name="mine", model=model, cluster=dict(nodes=[node]), global_batch_size=64)
        >>> best = amp.plan(keys).best
        >>> best.strategy.pp, best.strategy.tp * best.strategy.dp
        (1, 8)
    """
    top = options.pop("top", None)
    num_rows = top or num_rows
    searching, checked = _search_of(source, options)

    def narrowed(more: Sequence[str] = ()) -> tuple[Experiment, PlannerChoice]:
        whole, choice = searching.load(checked, changes, cost_model=cost_model, more=more)
        experiment = without_hosts(whole, () if more else without)
        experiment = replace(experiment, objective=objective or experiment.objective)
        return _limited(experiment, launchable=launchable, only=only), choice

    experiment, choice = narrowed()
    if before is not None and not choice.traits.has_constants:
        raise InputError(f"--from compares plans by cost model {AMP_RAY}; {choice.name} cannot")
    if before is not None and num_rows is not None:
        num_rows = max(num_rows, NUM_INTERVALS)  # among their ties, the least moves come first
    planned = plan_experiment(
        experiment,
        choice,
        num_rows=num_rows,
        workers=searching.by,
        progress=searching.tell,
        leading=leading,
    )
    if before is not None:
        whole, _ = searching.load(checked, changes)
        planned = replan(planned, Path(before), whole.cluster)
    if planned.ranking.best is None:
        variants = Variants(load=narrowed, workers=searching.by, num_rows=1)
        return Plan(planned=planned, ways_to_fit=_ways_to_fit(variants, planned, checked, changes))
    planned = replace(planned, remarks=batch_remarks(planned, choice))
    return Plan(planned=planned, num_shown=top or NUM_SHOWN)


def _limited(experiment: Experiment, *, launchable: bool, only: Sequence[str] | None) -> Experiment:
    """Return an experiment that searches these dimensions, of plans that can be launched."""
    if launchable:
        experiment = launchable_only(experiment)
    if only is not None:
        with placed(Where(file="--only"), ValueError):
            experiment = experiment.only(only)
    return experiment


def _search_of(source: Source | None, options: Mapping[str, Any]) -> tuple[_Searching, Source]:
    """Return how to search, and what: the source, or that of the presets among the options."""
    return _Searching(cast("Options", options)), _source(source, _part(options, Presets))


def _ways_to_fit(
    variants: Variants, planned: Planned, source: Source, changes: Sequence[str]
) -> tuple[Advice, ...]:
    """Return the changes with which a plan exists; none for an experiment without its keys."""
    if isinstance(source, Experiment):
        return ()
    today = Variant(changes=(), planned=planned, problem="")
    return ways_to_fit(variants, today, _values(source, changes))


def _values(source: AnyPath | Mapping[str, Any], changes: Sequence[str]) -> Mapping[str, Any]:
    keys = source if isinstance(source, Mapping) else Path(source)
    return document_of(keys, changes).values


@checks_keywords
def score(
    source: Source,
    strategies: Strategies,
    *,
    cost_model: CostModel | None = None,
    calibration: Calibration | AnyPath | None = None,
    transfer: bool = False,
) -> Scores:
    """Estimate the time and memory of given strategies, without search.

    Args:
        source: See `load`.
        strategies: A file, or the strategies as values.
        cost_model: See `plan`.
        calibration: See `load`.
        transfer: See `load`.

    Raises:
        InputError: If a strategy does not fit the experiment.

    Example:
        >>> import amp_ray as amp
        >>> node = dict(device="A100-80", slots=8, inter_gbit_per_s=400)
        >>> model = dict(family="gpt2", num_layers=24, hidden_size=2048, num_heads=16)
        >>> model |= dict(sequence_length=2048, vocab_size=50304)
        >>> keys = dict(name="mine", model=model, cluster=dict(nodes=[node]), global_batch_size=64)
        >>> [mine] = amp.score(keys, [dict(tp=2, pp=2, dp=2, micro_batch_size=4)])
        >>> mine.feasible, len(mine.strategy.bounds)
        (True, 3)
    """
    searching = _Searching({"calibration": calibration, "transfer": transfer})
    experiment, choice = searching.load(source, cost_model=cost_model)
    named = Path(strategies) if isinstance(strategies, str | os.PathLike) else list(strategies)
    entries = load_strategies(named, experiment)
    planner = choice.make(experiment)
    results = tuple(score_given(planner, entries))
    if planner.traits.has_constants:
        results = score_with_intervals(experiment, results, NUM_INTERVALS)
        results = tuple(with_remedies(experiment, results))
    return Scores(
        experiment=experiment,
        cost_model=choice.name,
        planner=planner,
        results=results,
        not_read=tuple(dict.fromkeys(note for entry in entries for note in entry.not_read)),
    )


@checks_keywords
def sweep(
    source: Source,
    sets: Mapping[str, Sequence[Any]] | Sequence[str],
    *,
    cost_model: CostModel | None = None,
    **options: Unpack[Options],
) -> Sweep:
    """Plan an experiment for every value of some keys.

    Args:
        source: A file, or its keys as a mapping; see `load`.
        sets: Values by dotted key, or texts as ``sweep --set`` takes them.
        cost_model: See `plan`.
        options: Calibration, transfer, workers, address, progress: see `Options`.

    Raises:
        InputError: If a key or all values are wrong.

    Example:
        >>> import amp_ray as amp
        >>> node = dict(device="A100-80", slots=8, inter_gbit_per_s=400)
        >>> model = dict(family="gpt2", num_layers=24, hidden_size=2048, num_heads=16)
        >>> model |= dict(sequence_length=2048, vocab_size=50304)
        >>> keys = dict(name="mine", model=model, cluster=dict(nodes=[node]), global_batch_size=64)
        >>> one, two = amp.sweep(keys, {"cluster.nodes.0.count": [1, 2]}).bests
        >>> two.iteration_time_s < one.iteration_time_s
        True
    """
    searching = _Searching(options)
    variants = Variants(
        load=lambda changes: searching.load(source, changes, cost_model=cost_model),
        workers=searching.by,
    )
    points = variants.plan_all(combinations_of(sets), searching.tell)
    named = source if isinstance(source, Mapping) else {"name": Path(str(source)).name}
    first = next(point for point in points if point.planned is not None)
    assert first.planned is not None
    ways: tuple[Advice, ...] = ()
    if not (isinstance(source, Experiment) or any(point.best for point in points)):
        of_first = replace(variants, load=lambda more: variants.load((*first.changes, *more)))
        ways = ways_to_fit(of_first, first, _values(source, first.changes))
    return Sweep(
        name=str(named.get("name")),
        cost_model=first.planned.cost_model,
        points=points,
        ways_to_fit=ways,
    )


@checks_keywords
def explain(
    source: Source,
    *,
    position: int = 1,
    advice: bool = True,
    changes: Sequence[str] = (),
    **options: Unpack[Options],
) -> Explanation:
    """Explain the time of a plan, the loss of the next one, and changes that would help.

    Each change is planned as with ``--set``. A calibration applies to a changed experiment as to
    an experiment on another cluster.

    Args:
        source: A file, or its keys as a mapping; see `load`.
        position: Position of the strategy in the ranking, from 1.
        advice: Whether to plan changes that would help.
        changes: See `load`.
        options: Calibration, transfer, workers, address, progress: see `Options`.

    Raises:
        InputError: If something does not fit, or the ranking has no such position.
    """
    if isinstance(source, Experiment):
        message = "what would help needs the keys of the experiment: give its file or values"
        raise InputError(message)
    searching = _Searching(options)
    variants = Variants(
        load=lambda more: searching.load(source, changes, cost_model=AMP_RAY, more=more),
        workers=searching.by,
    )
    today = variants.plan(())
    if today.planned is None:
        raise InputError(today.problem)
    record, values = _explained(today.planned, position), _values(source, changes)
    fitting = () if today.best else ways_to_fit(variants, today, values)
    if advice:
        helpful = advise(variants, today, values, searching.tell)
        record["advice"] = [change.to_json() for change in (*fitting, *helpful)]
    ways = fitting_text([way.to_json() for way in fitting])
    return Explanation(record=record, problem=f"{today.problem}{ways}")


@checks_keywords
def show(study: AnyPath) -> StudyState:
    """Return the trials of a study so far; nothing is locked or changed.

    Raises:
        InputError: If the folder is no study.
    """
    from amp_ray.runtime.study.reading import study_state

    return StudyState(record=study_state(Path(study)))


@checks_keywords
def doctor(
    source: Source,
    *,
    trials: Literal["ssh", "local"] | None = None,
    changes: Sequence[str] = (),
) -> Checkup:
    """Check every host of an experiment; nothing on them is changed.

    Args:
        source: See `load`.
        trials: Where trials would run; None for what the experiment says.
        changes: See `load`.

    Raises:
        InputError: If something does not fit, or the experiment names no hosts.
    """
    from amp_ray.runtime.doctor import diagnose
    from amp_ray.runtime.hosts.host import host_maker
    from amp_ray.runtime.profile.parts import load_unprofiled

    if isinstance(source, Experiment | Mapping):
        experiment = load(source, changes=changes)
    else:
        experiment = load_unprofiled(Path(source), tuple(changes))
    if trials is not None:
        experiment = replace(experiment, trials=replace(experiment.trials, backend=trials))
    return Checkup(diagnosis=diagnose(experiment, host_maker(experiment)))


@checks_keywords
def init(
    output: AnyPath | None = None, *, name: str | None = None, **options: Unpack[NodeOptions]
) -> str:
    """Return the text of a first experiment file, as ``amp-ray init`` writes it.

    Args:
        output: File to write; it must not exist yet.
        name: Name of the experiment; by default that of the file, or the model.
        options: Model, cluster, nodes and batch, see `Presets`; or a board, see `NodeOptions`.

    Raises:
        InputError: If a name is unknown, a number is wrong, or the file exists.

    Example:
        >>> import amp_ray as amp
        >>> amp.init(model="llama-3-8b", cluster="dgx-h100", nodes=4, batch=512).split()[:4]
        ['#', 'An', 'experiment', 'of']
    """
    path = None if output is None else Path(output)
    if path is not None and path.exists():
        message = "is there already; name another file by -o"
        raise InputError(message, where=Where(file=str(path)))
    presets, node = _part(options, Presets), _without(options, Presets)
    if {"device", "slots"} <= node.keys():
        presets.setdefault("cluster", "")
    _check_presets(None, presets)
    answers = answers_of(**presets)
    answers = replace(answers, nodes=({**answers.nodes[0], **node},))
    named = name or (answers.name if path is None else path.stem)
    text = experiment_text(replace(answers, name=named), path or Path("experiment.yaml"))
    if path is not None:
        write_text(path, text)
    return text


def _explained(planned: Planned, position: int) -> dict[str, Any]:
    """Return the object of ``explain --json`` without advice."""
    experiment, ranking, planner = planned.experiment, planned.ranking, planned.planner
    feasible = list(ranking.results[: ranking.num_feasible])
    record: dict[str, Any] = {"schema": SCHEMA, "experiment": experiment.name, "row": None}
    if not feasible:
        return record
    if position > len(feasible):
        there = counted(len(feasible), "feasible strategy", "feasible strategies")
        raise InputError(f"--position {position}: the ranking has {there}")
    chosen = feasible[position - 1]
    assert isinstance(chosen, Estimate)
    cost_model = OurCostModel(experiment=experiment)
    record |= {
        "row": row(chosen, position, experiment, planner),
        "stages": stage_records(cost_model, chosen),
        "links": link_records(cost_model, chosen.strategy),
        "other": None,
    }
    # The best one is compared with the next one, any other one with the best.
    number = 1 if position > 1 else 2
    if number <= len(feasible):
        other = feasible[number - 1]
        assert isinstance(other, Estimate)
        record["other"] = {
            "row": row(other, number, experiment, planner),
            "difference_s": difference(chosen, other),
        }
    return record


@checks_keywords
def write_report(
    source: Source,
    output: AnyPath,
    *,
    changes: Sequence[str] = (),
    cost_model: CostModel | None = None,
    **options: Unpack[Options],
) -> None:
    """Write an experiment's plan, or a study, as one static page that needs no network.

    Args:
        source: The folder of a study, or an experiment; see `load`.
        output: The page, an ``.html`` file.
        changes: See `load`.
        cost_model: See `plan`; for a study always ours.
        options: Calibration, transfer, workers, address, progress: see `Options`; a study has its
            own calibration.

    Raises:
        InputError: If something does not fit, or the page cannot be written.
    """
    from amp_ray.report.page import page, plan_record, study_record
    from amp_ray.runtime.study.reading import read_study

    target = Path(output)
    if target.suffix not in {".html", ".htm"}:
        raise InputError(f"{target}: the report is a page; name it .html")
    if isinstance(source, str | os.PathLike) and Path(source).is_dir():
        ours = cost_model is None or load_planner(cost_model).traits.has_constants
        if changes or options.get("calibration") is not None or not ours:
            raise InputError(
                "a study has its own experiment, cost model and calibration: no options go with it"
            )
        record = study_record(read_study(Path(source)), source=str(source))
    else:
        drawn = plan(source, changes=changes, cost_model=cost_model, **options)
        file = drawn.experiment.source.file
        name = "EXPERIMENT.yaml" if isinstance(source, Mapping) else str(file)
        record = plan_record(drawn.planned, source=name, why_none=drawn.why_none())
    write_output(target, page(record))


@checks_keywords
def calibrate(
    source: Source,
    measurements: AnyPath,
    *,
    constants: Sequence[str] | None = None,
    output: AnyPath | None = None,
) -> Calibration:
    """Fit a few named constants to measured trials of an experiment.

    Args:
        source: See `load`.
        measurements: File of strategies with ``measured_s``, such as a study's ``measured.csv``.
        constants: Names of the constants to fit; None chooses them by the measurements.
        output: File to write the calibration to, for ``--calibration``.

    Returns:
        The calibration, for the argument ``calibration`` of the other functions.

    Raises:
        InputError: If the file does not fit the experiment, or has too few measurements.
    """
    experiment = load(source)
    observations = load_observations(Path(measurements), experiment)
    names = None if constants is None else tuple(constants)
    try:
        calibration = fit(experiment, observations, Choice(names=names))
    except InputError:
        raise
    except ValueError as error:
        raise InputError(str(error), where=Where(file=os.fspath(measurements))) from error
    if output is not None:
        write_result(calibration_to_json(calibration), Path(output))
    return calibration


@checks_keywords
def tune(
    source: Source,
    *,
    budget: int | None = None,
    trials: Literal["ssh", "local"] | None = None,
    replay: AnyPath | None = None,
    study: AnyPath | None = None,
    resume: bool = False,
    hostfile: AnyPath | None = None,
    doctor: bool = True,
    console: Console | None = None,
    **options: Unpack[StudyOptions],
) -> Study:
    """Launch the most promising strategies, measure, recalibrate, repeat; see docs/tuning.md.

    Args:
        source: See `load`.
        budget: Number of trials, including those before ``resume``; None uses the experiment's.
        trials: Where trials run: on the hosts, or on this machine; None uses the experiment's.
        replay: Table of recorded measurements to use instead of trials.
        study: Folder of the study; None means ``NAME-study``.
        resume: Whether to continue the study in that folder.
        hostfile: See `load`.
        doctor: Whether to check the hosts first.
        console: Console that shows the trials while they run.
        options: Time budget, concurrency, policy, seed, pool, salvage: see `StudyOptions`; and
            calibration, transfer, workers, address, progress: see `Options`.

    Raises:
        InputError: If something does not fit.
        NotFeasibleError: If no strategy is expected to run.
        AmpRayError: If hosts or the disk fail.
    """
    from amp_ray.runtime.doctor import require_ready_hosts
    from amp_ray.runtime.study.folder import check_folder, folder_for
    from amp_ray.runtime.study.space import TuneOptions
    from amp_ray.runtime.study.tuning import prepare

    searching = _Searching(options)
    experiment = load(
        source,
        hostfile=hostfile,
        calibration=options.get("calibration"),
        transfer=options.get("transfer", False),
    )
    chosen = TuneOptions(
        backend="replay" if replay is not None else trials or experiment.trials.backend,
        table=_path(replay),
        budget=experiment.trials.budget if budget is None else budget,
        workers=searching.by,
        **_without(options, Options),
    )
    _check(experiment, chosen)
    folder = _path(study) or folder_for(experiment.name)
    check_folder(folder, resume=resume)  # before the long search
    tuning = prepare(experiment, chosen, searching.tell)
    if not tuning.space.num_feasible:
        raise NotFeasibleError(tuning.space.why_none(tuning.experiment))
    if replay is None and doctor:
        require_ready_hosts(tuning.experiment)
    if replay is not None and console is not None:
        console.print(
            f"replay: outcomes come from {chosen.table}, nothing is launched", soft_wrap=True
        )
    return _run(tuning, folder, console, resume=resume)


def _check(experiment: Experiment, options: "TuneOptions") -> None:
    """Refuse options that would have no effect."""
    if options.budget == 0:
        raise InputError(
            "a budget of 0 trials measures nothing: give --budget 1 or more, or rank without "
            "trials by amp-ray plan"
        )
    if options.table is not None and options.workers.forced:
        message = "--workers and --address have nothing to do: a table is scored in this process"
        raise InputError(message)
    if options.table is None and not experiment.is_trained:
        raise InputError(untrained(experiment.model.shape), where=experiment.where("model"))


def _run(tuning: "Tuning", folder: Path, console: Console | None, *, resume: bool) -> Study:
    """Run a study; in the main thread, signals end it cleanly."""
    from amp_ray.report.study import study_view
    from amp_ray.runtime.study.tuning import Interruption

    with ExitStack() as stack:
        steady: Any = nullcontext
        if threading.current_thread() is threading.main_thread():
            steady = stack.enter_context(Interruption()).steady
        view = stack.enter_context(study_view(console or quiet_console(quiet=True)))
        result = tuning.run(folder, view, resume=resume, steady=steady)
    return Study(folder=folder, result=result)


def _part(options: Mapping[str, Any], kind: type[_Part]) -> _Part:
    """Return the options that are keywords of one kind."""
    names = options.keys() & kind.__annotations__.keys()
    return cast("_Part", {name: options[name] for name in names})


def _without(options: Mapping[str, Any], kind: type) -> dict[str, Any]:
    return {key: value for key, value in options.items() if key not in kind.__annotations__}


def _path(name: AnyPath | None) -> Path | None:
    return None if name is None else Path(name)
