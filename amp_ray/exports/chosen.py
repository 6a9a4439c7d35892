"""A strategy as flat settings for export; unsupported settings are refused by name."""

import shlex
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final

from amp_ray.inputs.experiment import Experiment
from amp_ray.strategies.candidate import StageOptions
from amp_ray.strategies.recompute import NO_RECOMPUTE
from amp_ray.strategies.strategy import Strategy, degrees_text
from amp_ray.units import figure_text

_OFF: Final[Mapping[str, object]] = {
    **dict.fromkeys(("tp", "pp", "dp", "virtual_stages"), 1),
    "zero_stage": 0,
    "shard_ranks": 0,
    "keeps_weights": False,
    "offloaded_blocks": 0,
    "recompute_modules": (),
    "loss_chunks": 1,
    "recompute": NO_RECOMPUTE,
}
"""Values at which these settings are off; any other setting is off at its default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """A strategy of an experiment, chosen for export."""

    experiment: Experiment
    strategy: Strategy
    predicted_s: float | None = None  # seconds per iteration; None without an estimate
    file: str = ""  # name of the file to write; empty for a folder or standard output

    @property
    def title(self) -> str:
        """Title in one line; the experiment's name may contain any printable text."""
        time = "" if self.predicted_s is None else f", {figure_text(self.predicted_s)} s predicted"
        return f"{self.experiment.name}: {degrees_text(self.strategy)}{time}"

    def file_word(self, usual: str) -> str:
        """Return the name of the file to write, quoted for a shell; ``usual`` if it has none."""
        return shlex.quote(self.file or usual)


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A training program of which every rank is a process.

    Whoever starts it sets RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.
    """

    words: tuple[str, ...]  # arguments of the interpreter: the script, or ``-m`` and the module
    head: str  # lines for people, at the top of a script
    # Variable with the folder of the script; empty for a module, and for one in the current folder
    home: str = ""
    files: Mapping[str, str] = field(default_factory=dict)  # text by name, in the current folder
    variables: Mapping[str, str] = field(default_factory=dict)  # environment of every rank
    notes: tuple[str, ...] = ()  # steps left to the user
    result: str = ""  # JSON file that rank 0 leaves in the current folder; empty for none


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """Exported files for another program."""

    files: Mapping[str, str]  # text by name; the first file is the one to start with
    # Settings that the program cannot express, and steps left to the user
    notes: tuple[str, ...] = ()


def settings_of(chosen: Chosen, program: str, supported: Collection[str]) -> dict[str, Any]:
    """Return the settings that all stages share, by our names for them.

    Args:
        chosen: The strategy.
        program: Name of the program in messages.
        supported: Names of the settings that the program has.

    Raises:
        ValueError: If stages differ, or use a setting that the program lacks.
    """
    strategy, experiment = chosen.strategy, chosen.experiment
    options = strategy.options
    if options is None or not strategy.is_uniform:
        message = f"{program} has one tp, dp and recompute for all stages; those here differ"
        raise ValueError(message)
    if strategy.is_sliced:
        message = f"{program} passes on whole micro-batches; this strategy cuts them into slices"
        raise ValueError(message)
    settings = {
        "tp": options.tp,
        "pp": strategy.pp,
        "dp": options.dp,
        "recompute": options.recompute,
        "virtual_stages": strategy.virtual_stages,
        "zero_stage": strategy.zero.stage,
        "shard_ranks": strategy.zero.shard_ranks,
        "keeps_weights": strategy.zero.keeps_weights,
        **options.others,
        **experiment.traits.formats.kept,
        "offloaded_blocks": experiment.traits.offloaded_blocks,
        "recompute_modules": experiment.traits.recompute_modules,
        "loss_chunks": experiment.traits.loss_chunks,
    }
    wrong = [
        f"{name} {value}"
        for name, value in settings.items()
        if name not in supported and value != _off(name)
    ]
    if wrong:
        message = f"{program} cannot be told {', '.join(wrong)}; choose a strategy without it"
        raise ValueError(message)
    return {
        **settings,
        "micro_batch_size": strategy.micro_batch_size,
        "num_micro_batches": strategy.num_micro_batches,
        "global_batch_size": strategy.global_batch_size,
        "precision": experiment.precision,
        "sequence_length": experiment.model.shape.sequence_length,
    }


def _off(name: str) -> object:
    return _OFF.get(name, getattr(StageOptions(tp=1, dp=1), name, None))


def check_even(chosen: Chosen, program: str) -> None:
    """Refuse stages with different numbers of blocks, for a program that cuts evenly."""
    bounds, blocks = chosen.strategy.bounds, chosen.experiment.model.indices("block")
    counts = {sum(first <= block < end for block in blocks) for first, end in pairwise(bounds)}
    if len(counts) > 1 or 0 in counts:
        raise ValueError(
            f"{program} gives every stage the same number of blocks; this strategy cuts at "
            f"{' '.join(map(str, bounds))}"
        )


def check_family(
    chosen: Chosen, program: str, families: Collection[str], optional: Collection[str] = ()
) -> None:
    """Refuse a model that a program does not train.

    Args:
        chosen: The strategy, with its model.
        program: Name of the program in messages.
        families: The families that the program trains.
        optional: Rare figures of a model that the program supports; a model with others is refused.
    """
    shape = chosen.experiment.model.shape
    if shape.family not in families:
        message = f"{program} is told {', '.join(families)} here, not model family {shape.family!r}"
        raise ValueError(message)
    wrong = [name for name in shape.rare_figures() if name not in optional and getattr(shape, name)]
    wrong += shape.differs
    if wrong:
        raise ValueError(f"{program} is not told {', '.join(wrong)} of a model here")
