"""The commands as functions: what they take may be a file or a value, and they return values."""

import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console

from amp_ray.api.results import Plan, Scores, Study
from amp_ray.calibration import Calibration, Choice, calibration_to_json
from amp_ray.calibration import calibrate as fit
from amp_ray.cost.estimate import Estimate
from amp_ray.errors import InputError, NotFeasibleError, Where
from amp_ray.inputs.experiment import Experiment, Objective, launchable_only
from amp_ray.report.console import console as quiet_console
from amp_ray.runtime.calibrating import load_observations, with_calibration
from amp_ray.runtime.files import (
    experiment_from_values,
    load_experiment,
    load_strategies,
    write_result,
)
from amp_ray.runtime.planning import plan_experiment, score_intervals
from amp_ray.runtime.ray.searching import Workers
from amp_ray.runtime.replanning import replan, without_hosts
from amp_ray.search.planner import AMP_RAY, load_planner, make_planner
from amp_ray.search.run import score_given
from amp_ray.strategies.strategy import Strategy
from amp_ray.trials.runtime_strategy import untrained

if TYPE_CHECKING:
    from amp_ray.runtime.study.space import PoolKind, TuneOptions
    from amp_ray.runtime.study.tuning import Tuning
    from amp_ray.tuner.state import Policy

AnyPath = str | os.PathLike[str]
Source = Experiment | AnyPath | Mapping[str, Any]
"""An experiment, the path of its file, or the keys of such a file as a mapping."""

Given = AnyPath | Iterable[Strategy | Estimate | Mapping[str, Any]]
"""A file of strategies, or strategies: values, estimates of them, or STRATEGY objects."""

Progress = Callable[[int, int], None]  # called with (candidates done, candidates in all)

CostModel = str
"""The name of a planner: ours (amp-ray), a published one (amp-2022, metis-2024, aceso-2024), or one
that another package adds."""


def load(
    source: Source,
    *,
    hostfile: AnyPath | None = None,
    changes: Sequence[str] = (),
    calibration: Calibration | AnyPath | None = None,
    transfer: bool = False,
) -> Experiment:
    """Return an experiment, with the constants of a calibration where one is given.

    Args:
        source: A file, or its keys as a mapping; files that a mapping names are looked for in the
            current folder.
        hostfile: Names the hosts instead of the experiment's own hostfile.
        changes: Keys with other values, as ``--set`` takes them: ``cluster.nodes.0.count=4``.
        calibration: What `calibrate` returns, or its file.
        transfer: Whether it may be of another model, cluster or runtime: what holds here too is
            taken.

    Raises:
        InputError: With file, line and key, for whatever is wrong or does not fit.
    """
    if isinstance(source, Experiment):
        if changes or hostfile is not None:
            message = "an experiment that is built takes no changes: give its file or values"
            raise InputError(message)
        experiment = source
    elif isinstance(source, Mapping):
        experiment = experiment_from_values(source, _path(hostfile), changes)
    else:
        experiment = load_experiment(Path(source), _path(hostfile), changes)
    chosen = calibration if isinstance(calibration, Calibration) else _path(calibration)
    return with_calibration(experiment, chosen, transfer=transfer)


def plan(
    source: Source,
    *,
    cost_model: CostModel | None = None,
    calibration: Calibration | AnyPath | None = None,
    transfer: bool = False,
    objective: Objective | None = None,
    launchable: bool = False,
    without: Sequence[str] = (),
    before: AnyPath | None = None,
    num_rows: int | None = None,
    workers: int | None = None,
    address: str | None = None,
    progress: Progress | None = None,
    leading: Callable[[Estimate], None] = lambda _estimate: None,
) -> Plan:
    """Search the strategies of an experiment and rank them by what is predicted.

    Args:
        source: See `load`.
        cost_model: Whose predictions: ours, or a published planner's formulas. Default: those that
            the experiment names.
        calibration: See `load`.
        transfer: See `load`.
        objective: Instead of the experiment's own.
        launchable: Whether only strategies matter that the runtime launches as they are.
        without: Hosts that are lost.
        before: File with what runs today: among ties, the plan that moves the least comes first.
        num_rows: First rows that matter: of many candidates those are left out that are proven not
            to be among them, which is much faster. By default none is.
        workers: Ray workers that search; None: none, unless the search would take long.
        address: Of the Ray cluster to search on.
        progress: Told how far the search is.
        leading: Told each strategy that is faster than all before it, while the search goes on.

    Raises:
        InputError: If something does not fit, or the limits leave no candidate.

    Example:
        >>> import amp_ray as amp
        >>> node = dict(device="A100-80", slots=8, inter_gbit_per_s=400)
        >>> model = dict(family="gpt2", num_layers=24, hidden_size=2048, num_heads=16)
        >>> model |= dict(sequence_length=2048, vocab_size=50304)
        >>> given = dict(name="mine", model=model, cluster=dict(nodes=[node]), global_batch_size=64)
        >>> best = amp.plan(given).best
        >>> best.strategy.pp, best.strategy.tp * best.strategy.dp
        (1, 8)
    """
    whole, cost_model = _loaded(source, cost_model, calibration, transfer=transfer)
    if before is not None and not load_planner(cost_model).traits.has_constants:
        raise InputError(f"--from compares plans by cost model {AMP_RAY}; {cost_model} cannot")
    experiment = without_hosts(whole, without)
    if launchable:
        experiment = launchable_only(experiment)
    experiment = replace(experiment, objective=objective or experiment.objective)
    planned = plan_experiment(
        experiment,
        cost_model,
        num_rows=num_rows,
        workers=Workers(num=workers, address=address),
        progress=progress or silent,
        leading=leading,
    )
    if before is not None:
        planned = replan(planned, Path(before), whole.cluster)
    return Plan(planned=planned)


def score(
    source: Source,
    strategies: Given,
    *,
    cost_model: CostModel | None = None,
    calibration: Calibration | AnyPath | None = None,
    transfer: bool = False,
) -> Scores:
    """Estimate given strategies, without search: what would these take?

    Args:
        source: See `load`.
        strategies: A file, or values.
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
        >>> given = dict(name="mine", model=model, cluster=dict(nodes=[node]), global_batch_size=64)
        >>> [mine] = amp.score(given, [dict(tp=2, pp=2, dp=2, micro_batch_size=4)])
        >>> mine.feasible, len(mine.strategy.bounds)
        (True, 3)
    """
    experiment, cost_model = _loaded(source, cost_model, calibration, transfer=transfer)
    given = strategies if isinstance(strategies, str | os.PathLike) else list(strategies)
    entries = load_strategies(Path(given) if not isinstance(given, list) else given, experiment)
    planner = make_planner(experiment, cost_model)
    results = score_intervals(experiment, planner, score_given(planner, entries))
    return Scores(experiment=experiment, cost_model=cost_model, planner=planner, results=results)


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
        measurements: File of strategies with ``measured_s``; a study's ``measured.csv`` is one.
        constants: These; None for those that the measurements tell most about.
        output: File to write it to, for ``--calibration``.

    Returns:
        For ``calibration=`` of the other functions.

    Raises:
        InputError: If the file does not fit the experiment, or tells too little.
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


def tune(
    source: Source,
    *,
    budget: int | None = None,
    trials: Literal["ssh", "local"] | None = None,
    replay: AnyPath | None = None,
    study: AnyPath | None = None,
    resume: bool = False,
    hostfile: AnyPath | None = None,
    calibration: Calibration | AnyPath | None = None,
    transfer: bool = False,
    time_budget_s: float | None = None,
    concurrency: int | None = None,
    policy: "Policy" = "best",
    seed: int = 0,
    pool: "PoolKind" = "auto",
    salvage: bool = False,
    doctor: bool = True,
    workers: int | None = None,
    address: str | None = None,
    progress: Progress | None = None,
    console: Console | None = None,
) -> Study:
    """Launch the most promising strategies, measure, recalibrate, repeat; see docs/tuning.md.

    Args:
        source: See `load`.
        budget: Trials, those before ``resume`` included; None for the experiment's.
        trials: Where they run: on the hosts, or on this machine; None for the experiment's.
        replay: Table of recorded measurements that answers instead.
        study: Folder that everything is kept in; None for ``NAME-study``.
        resume: Whether the study in that folder goes on.
        hostfile: See `load`.
        calibration: See `load`.
        transfer: See `load`.
        time_budget_s: Wall time that it may take.
        concurrency: Trials side by side, one per group of hosts.
        policy: Which strategy is tried next.
        seed: Of policy ``random``.
        pool: What holds the hosts.
        salvage: Whether a damaged journal is continued from the records before the damage.
        doctor: Whether the hosts are checked before.
        workers: Ray workers of the search.
        address: Ray cluster of the search.
        progress: Told how far the search is.
        console: Shows the trials while they run.

    Raises:
        InputError: If something does not fit.
        NotFeasibleError: If no strategy is expected to run.
        AmpRayError: If hosts or the disk fail.
    """
    from amp_ray.runtime.study.space import TuneOptions

    experiment = load(source, hostfile=hostfile, calibration=calibration, transfer=transfer)
    options = TuneOptions(
        backend="replay" if replay is not None else trials or experiment.trials.backend,
        table=_path(replay),
        budget=experiment.trials.budget if budget is None else budget,
        workers=Workers(num=workers, address=address),
        time_budget_s=time_budget_s,
        concurrency=concurrency,
        policy=policy,
        seed=seed,
        pool=pool,
        salvage=salvage,
    )
    _check(experiment, options)
    return _tune(experiment, options, _path(study), progress, console, resume=resume, doctor=doctor)


def _tune(
    experiment: Experiment,
    options: "TuneOptions",
    folder: Path | None,
    progress: Progress | None,
    console: Console | None,
    *,
    resume: bool,
    doctor: bool,
) -> Study:
    """Plan, look at the hosts, and run a study."""
    from amp_ray.runtime.doctor.diagnosis import require_ready_hosts
    from amp_ray.runtime.study.folder import check_folder, folder_for
    from amp_ray.runtime.study.tuning import prepare

    folder = folder or folder_for(experiment.name)
    check_folder(folder, resume=resume)  # before anybody waits for a search
    tuning = prepare(experiment, options, progress or silent)
    if not tuning.space.num_feasible:
        raise NotFeasibleError(tuning.space.why_none(tuning.experiment))
    if options.table is None and doctor:
        require_ready_hosts(tuning.experiment)
    if options.table is not None and console is not None:
        text = f"replay: outcomes come from {options.table}, nothing is launched"
        console.print(text, soft_wrap=True)
    return _run(tuning, folder, console, resume=resume)


def _run(tuning: "Tuning", folder: Path, console: Console | None, *, resume: bool) -> Study:
    """Run a study; signals end it in order where this is the main thread."""
    from amp_ray.report.study import study_view
    from amp_ray.runtime.study.interruption import Interruption

    with ExitStack() as stack:
        steady: Any = nullcontext
        if threading.current_thread() is threading.main_thread():
            steady = stack.enter_context(Interruption()).steady
        view = stack.enter_context(study_view(console or quiet_console(quiet=True)))
        result = tuning.run(folder, view, resume=resume, steady=steady)
    return Study(folder=folder, result=result)


def _check(experiment: Experiment, options: "TuneOptions") -> None:
    """Refuse options without a use."""
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


def _loaded(
    source: Source,
    cost_model: CostModel | None,
    calibration: Calibration | AnyPath | None,
    *,
    transfer: bool,
) -> tuple[Experiment, CostModel]:
    """Return an experiment and the cost model to use, which takes the calibration."""
    refuse_useless(cost_model, calibration)
    experiment = load(source, calibration=calibration, transfer=transfer)
    cost_model = cost_model or experiment.planner
    refuse_useless(cost_model, calibration)
    return experiment, cost_model


def refuse_useless(cost_model: CostModel | None, calibration: Calibration | AnyPath | None) -> None:
    """Refuse a calibration for a cost model that has no constants."""
    if calibration is None or cost_model is None:
        return
    if not load_planner(cost_model).traits.has_constants:
        message = f"--calibration fits constants of cost model {AMP_RAY}; {cost_model} has none"
        raise InputError(message)


def _path(name: AnyPath | None) -> Path | None:
    """Return a path, if there is one."""
    return None if name is None else Path(name)


def silent(_done: int, _total: int) -> None:
    """Tell nobody how far a search is."""
