"""`export`: a strategy, an experiment or a study as files of other programs."""

import html
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from amp_ray import guests
from amp_ray.api.functions import AnyPath, CostModel, Source, load, plan, score
from amp_ray.api.keywords import checks_keywords
from amp_ray.cost.estimate import Estimate
from amp_ray.cost.model import CostModel as OurCostModel
from amp_ray.cost.timeline import predicted_timeline
from amp_ray.errors import InputError, NotFeasibleError, Where, placed
from amp_ray.exports.chosen import Chosen, Export
from amp_ray.exports.configs import accelerate_config, nanotron_config
from amp_ray.exports.megatron import bridge_overrides, megatron_script
from amp_ray.exports.our_program import deepspeed_folder
from amp_ray.exports.rows import csv_table, optuna_script
from amp_ray.exports.schedulers import ray_script, slurm_folder
from amp_ray.exports.torchtitan import titan_config
from amp_ray.exports.trace import trace
from amp_ray.inputs.experiment import Experiment
from amp_ray.runtime.files import write_output
from amp_ray.runtime.study.reading import ReadStudy, read_study
from amp_ray.search.rows import strategy_rows
from amp_ray.units import counted

_OF_ONE: Final[Mapping[str, Callable[[Chosen], Export]]] = {
    "accelerate": accelerate_config,
    "deepspeed": deepspeed_folder,
    "megatron-bridge": bridge_overrides,
    "megatron-lm": megatron_script,
    "nanotron": nanotron_config,
    "ray-train": ray_script,
    "slurm": slurm_folder,
    "torchtitan": titan_config,
}
"""Writers of formats for one strategy."""

_TRACE: Final = "perfetto"  # needs the cost model, and timelines of trials
FOLDERS: Final = ("deepspeed", "metis", "slurm")  # formats of several files
_OF_ALL: Final = ("csv", "optuna")  # formats of all strategies

TARGETS: Final = sorted(
    [*_OF_ONE, *_OF_ALL, _TRACE, *guests.STRATEGY_EXPORTS, *guests.EXPERIMENT_EXPORTS]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """Files for another program; the text is that of the file to start with."""

    title: str  # what was exported, in one line
    files: Mapping[str, str]  # text by name
    notes: tuple[str, ...]  # what the program cannot express, and steps left to the user
    path: Path | None  # where the files were written; None if they were not

    @property
    def text(self) -> str:
        """The first file's text."""
        return next(iter(self.files.values()))

    def __str__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        lines = (self.title, *self.notes)
        head = "".join(f"<p>{html.escape(line)}</p>" for line in lines)
        return f"{head}<pre>{html.escape(self.text)}</pre>"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Order:
    """What to export, and from where."""

    source: Source
    target: str
    position: int | None
    strategies: AnyPath | None
    hostfile: AnyPath | None
    cost_model: CostModel | None
    changes: tuple[str, ...]
    file: str  # name of the file to write; empty for standard output

    @property
    def study(self) -> Path | None:
        """The folder, if the source is a study."""
        if isinstance(self.source, Experiment | Mapping) or not Path(self.source).is_dir():
            return None
        return Path(self.source)

    def read(self) -> Experiment | ReadStudy:
        """Read the source."""
        if self.study is not None:
            return read_study(self.study, self.changes)
        return load(self.source, changes=self.changes)

    def named(self, experiment: Experiment) -> Experiment:
        """Return the experiment with the hosts of the hostfile, if there is one."""
        if self.hostfile is None:
            return experiment
        if self.study is not None:
            named = f"cluster.hostfile={json.dumps(str(Path(self.hostfile).absolute()))}"
            return read_study(self.study, (*self.changes, named)).experiment
        return load(self.source, changes=self.changes, hostfile=self.hostfile)

    def all_strategies(self, source: Experiment | ReadStudy) -> tuple[Export, str]:
        """Write all strategies; of a study its trials, and for Optuna also untested strategies."""
        if isinstance(source, ReadStudy):
            experiment, records = source.experiment, [*source.result["trials"]]
            if self.target == "optuna":
                records += [row for row in source.result["ranking"] if row["feasible"]]
        else:
            planned = plan(source, cost_model=self.cost_model, num_rows=None)
            experiment, records = source, planned.to_json()["ranking"]
            if self.target == "optuna":
                records = records[: len(planned.feasible)]
        name, rows = experiment.name, strategy_rows(records, experiment.cluster)
        is_csv = self.target == "csv"
        files = csv_table(rows) if is_csv else optuna_script(name, rows, self.file)
        return files, f"{name}: {counted(len(rows), 'strategy', 'strategies')}"

    def one_strategy(self, source: Experiment | ReadStudy) -> tuple[Export, str]:
        """Write the chosen strategy."""
        chosen, not_read = self._chosen(source)
        chosen = replace(chosen, file=self.file, experiment=self.named(chosen.experiment))
        is_guest = self.target in guests.STRATEGY_EXPORTS
        with placed(chosen.experiment.where("profile" if is_guest else ""), ValueError):
            if self.target == _TRACE:
                study = source if isinstance(source, ReadStudy) else None
                files = _trace(chosen, study)
            else:
                files = _writer(self.target)(chosen)
        return replace(files, notes=(*not_read, *files.notes)), chosen.title

    def _chosen(self, source: Experiment | ReadStudy) -> tuple[Chosen, tuple[str, ...]]:
        """Return the chosen strategy with its predicted time, and keys that were not read."""
        not_read: tuple[str, ...] = ()
        if isinstance(source, ReadStudy):
            if self.strategies is None:
                strategy, predicted_s = source.strategy(self.position)
                study = source.experiment
                chosen = Chosen(experiment=study, strategy=strategy, predicted_s=predicted_s)
                return chosen, not_read
            source = source.experiment
        number = self.position or 1
        if self.strategies is None:
            is_study = self.study is not None
            named, changes = (source, ()) if is_study else (self.source, self.changes)
            planned = plan(named, changes=changes, cost_model=self.cost_model, num_rows=number)
            if (why_none := planned.why_none()) is not None:
                raise NotFeasibleError(f"no feasible strategy: {why_none}")
            results: Any = planned.feasible
        else:
            scores = score(source, self.strategies, cost_model=self.cost_model)
            results, not_read = scores, tuple(map(str, scores.not_read))
        if number > len(results):
            raise InputError(
                f"--position {number}: there are {counted(len(results), 'strategy', 'strategies')}"
            )
        result = results[number - 1]
        if not isinstance(result, Estimate):
            raise InputError(str(result.reason))
        predicted_s = result.iteration_time_s
        chosen = Chosen(experiment=source, strategy=result.strategy, predicted_s=predicted_s)
        return chosen, not_read


@checks_keywords
def export(
    source: Source,
    to: str,
    *,
    position: int | None = None,
    strategies: AnyPath | None = None,
    output: AnyPath | None = None,
    hostfile: AnyPath | None = None,
    cost_model: CostModel | None = None,
    changes: Sequence[str] = (),
) -> Exported:
    """Return a strategy, an experiment or a study as files of another program.

    What a program cannot express is refused, or stands in the notes and in the file.

    Args:
        source: An experiment, see `load`, or the folder of a study.
        to: The format, as ``amp-ray export --help`` lists them.
        position: Position of the strategy in the ranking, from 1; None is the first, and of a study
            what it recommends.
        strategies: File to take the strategy at that position from, without search.
        output: File to write, or folder for formats of several files; it must be new or empty.
        hostfile: Hosts of the nodes, in its order.
        cost_model: See `plan`.
        changes: See `load`.

    Raises:
        InputError: If something does not fit, or the program cannot run the strategy.
        NotFeasibleError: If no strategy can run.

    Example:
        >>> import amp_ray as amp
        >>> keys = dict(model="llama-3-8b", cluster="dgx-h100", nodes=2, batch=64)
        >>> script = amp.export(amp.load(**keys, runtime="megatron-core"), "megatron-lm")
        >>> "--tensor-model-parallel-size" in script.text
        True
    """
    if to not in TARGETS:
        raise InputError(f"--to: found {to!r}; expected one of {', '.join(TARGETS)}")
    path = None if output is None else Path(output)
    order = _Order(
        source=source,
        target=to,
        position=position,
        strategies=strategies,
        hostfile=hostfile,
        cost_model=cost_model,
        changes=tuple(changes),
        file="" if path is None else path.name,
    )
    read = order.read()
    if to in {*_OF_ONE, *guests.STRATEGY_EXPORTS, _TRACE}:
        files, title = order.one_strategy(read)
    elif position is not None or strategies is not None:
        message = f"--to {to} writes no single strategy: leave --position and --strategies out"
        raise InputError(message)
    elif to in guests.EXPERIMENT_EXPORTS:
        experiment = read.experiment if isinstance(read, ReadStudy) else read
        make = guests.load(guests.EXPERIMENT_EXPORTS[to], f"--to {to}")
        files, title = make(order.named(experiment))
    elif hostfile is not None:
        raise InputError(f"--to {to} tells no program its hosts: leave --hostfile out")
    else:
        files, title = order.all_strategies(read)
    if path is not None:
        _write(files, path, is_folder=to in FOLDERS)
    return Exported(title=title, files=files.files, notes=files.notes, path=path)


def _writer(target: str) -> Callable[[Chosen], Export]:
    """Return the function that writes one strategy for a program."""
    if target in _OF_ONE:
        return _OF_ONE[target]
    writer: Callable[[Chosen], Export] = guests.load(
        guests.STRATEGY_EXPORTS[target], f"--to {target}"
    )
    return writer


def _trace(chosen: Chosen, study: ReadStudy | None) -> Export:
    """Return the predicted timeline with the timeline of a study's last trial of the strategy."""
    experiment = chosen.experiment if study is None else study.calibrated()
    timeline = predicted_timeline(OurCostModel(experiment=experiment), chosen.strategy)
    measured = () if study is None else study.timeline(chosen.strategy)
    return trace(chosen, timeline, measured)


def _write(export: Export, output: Path, *, is_folder: bool) -> None:
    """Write a file or a folder."""
    if not is_folder:
        write_output(output, *export.files.values(), is_new=True)
        return
    make_empty(output)
    for folder in {(output / name).parent for name in export.files} - {output}:
        folder.mkdir(parents=True)
    for name, text in export.files.items():
        write_output(output / name, text)


def make_empty(folder: Path) -> None:
    """Make a folder; refuse one that is not empty."""
    where = Where(file=str(folder))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        names = sorted(path.name for path in folder.iterdir())
    except OSError as error:
        raise InputError(f"cannot be written: {error.strerror}", where=where) from error
    if names:
        raise InputError(f"holds {names[0]!r}; name a folder that is new or empty", where=where)
