"""Published tables as observations; each row is a strategy with what came of it."""

import csv
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Final, TypedDict

from amp_ray.calibration import Observation
from amp_ray.errors import InputError, Where
from amp_ray.partition import even_bounds
from amp_ray.runtime.files import read_text
from amp_ray.search.cuts import even_block_bounds
from amp_ray.spec.candidate import Candidate
from amp_ray.spec.experiment import Experiment
from amp_ray.spec.model import Model
from amp_ray.spec.strategy import StageOptions, Strategy
from amp_ray.spec.traits import RUNTIMES
from amp_ray.testing.accuracy.sites import Job
from amp_ray.units import GIB

VTRAIN_VOCABULARY: Final = 51_200
BLOOM_VOCABULARY: Final = 250_000
SELENE_VOCABULARY: Final = 51_200
"""As the tables' authors state them, before padding."""

BLOOM_HEADS: Final = 64
"""Of rows that do not tell: the value of the rows around them."""

Cells = Mapping[str, str]


class Figures(TypedDict):
    """The figures of a `Job` that every table has."""

    hidden_size: int
    num_heads: int
    num_layers: int
    sequence_length: int
    num_gpus: int
    global_batch_size: int
    micro_batch_size: int
    tp: int
    dp: int
    pp: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row of a table.

    Args:
        observation: The strategy and what came of it.
        group: Rows of one group are alternatives to each other.
        tells_time: Whether its time is fit for comparison.
    """

    observation: Observation
    group: str
    tells_time: bool = True


def amp_strategies(path: Path, experiment: Experiment) -> list[Strategy]:
    """Read the strategies of a published AMP experiment, measured or not."""
    strategies = []
    for cells in _cells(path):
        size, tp, dp, pp = (int(cells[key]) for key in ("mbs", "mp", "dp", "pp"))
        candidate = Candidate(
            micro_batch_size=size,
            options=StageOptions(tp=tp, dp=dp),
            pp=pp,
            num_micro_batches=experiment.global_batch_size // (size * dp),
        )
        bounds = tuple(int(cell) for cell in cells["partition"].split())
        strategies.append(Strategy.uniform(candidate, bounds))
    return strategies


def vtrain(folder: Path) -> list[Row]:
    """Read vTrain's measured iterations of two models on 64 and 256 A100 (arXiv:2312.12391)."""
    rows = []
    for cells in _cells(folder / "vtrain" / "multi_node_3.6B_18.4B.csv"):
        job = Job(
            **_figures(cells, "hidden heads layers seq_len num_gpus global_batch micro_batch"),
            vocab_size=VTRAIN_VOCABULARY,
            traits=RUNTIMES["megatron"],
        )
        experiment = job.experiment("vtrain")
        strategy = job.strategy(even_block_bounds(experiment.model, job.pp))
        group = f"{cells['params_b']}B on {cells['num_gpus']}"
        measured_s = float(cells["iter_time_ms"]) / 1e3
        rows.append(_row(experiment, strategy, measured_s, group))
    return rows


def bloom(folder: Path) -> list[Row]:
    """Read the trials of BLOOM's preparation (BigScience chronicles); the group is the width.

    A row tells its time unless the table's own check calls it suspect. Out of memory counts
    whatever the check says.
    """
    rows = []
    for cells in _cells(folder / "bloom" / "a100_hidden_12288_14336.csv"):
        job = Job(
            **_figures(
                {**cells, "heads": cells["heads"] or str(BLOOM_HEADS)},
                "hidden heads layers seq_len gpus gbs mbs",
            ),
            vocab_size=BLOOM_VOCABULARY,
            traits=RUNTIMES["megatron"],
            precision="bf16" if cells["dtype"] == "bf16" else "fp16",
            zero_stage=int(cells["zero_stage"]),
        )
        experiment = job.experiment("jean-zay")
        counted = "emb" in cells["pp_partition"]
        cut = counted_bounds if counted else even_block_bounds
        strategy = job.strategy(cut(experiment.model, job.pp))
        if cells["oom"] == "1":
            failed = Observation(experiment=experiment, strategy=strategy, outcome="oom")
            rows.append(Row(observation=failed, group=cells["hidden"], tells_time=False))
            continue
        peak = cells["mem_gb_max"]
        row = _row(experiment, strategy, float(cells["sec_per_iter"]), cells["hidden"])
        observation = replace(
            row.observation, peak_memory_bytes=(float(peak) * GIB,) if peak else ()
        )
        rows.append(replace(row, observation=observation, tells_time=not cells["suspect"]))
    return rows


def selene(folder: Path) -> list[Row]:
    """Read the four jobs with full recompute of arXiv:2205.05198."""
    rows = []
    for cells in _cells(folder / "megatron" / "seqpar_2205.05198.csv"):
        if cells["recompute"] != "full":
            continue
        job = Job(
            **_figures(cells, "hidden heads layers seq gpus global_batch micro_batch"),
            vocab_size=SELENE_VOCABULARY,
            traits=replace(RUNTIMES["megatron-lm"], virtual_stages=int(cells["interleave"])),
        )
        experiment = job.experiment("selene")
        strategy = job.strategy(even_block_bounds(experiment.model, job.pp))
        rows.append(_row(experiment, strategy, float(cells["iter_time_s"]), cells["model"]))
    return rows


def counted_bounds(model: Model, pp: int) -> tuple[int, ...]:
    """Return bounds that share out the blocks and, as one more each, embedding and head.

    Megatron-DeepSpeed's ``type:transformer|embedding``; larger stages stand in the middle.

    Args:
        model: Its blocks stand in a row.
        pp: Number of stages.
    """
    blocks = model.indices("block")
    ends = even_bounds(len(blocks) + 2, pp)
    sizes = sorted(end - start for start, end in pairwise(ends))
    ordered = [sizes[0], *sizes[2:], sizes[1]] if pp > 1 else sizes
    inner, position = [], blocks[0] - 1
    for size in ordered[:-1]:
        position += size
        inner.append(position)
    return (0, *inner, model.num_layers)


def _row(experiment: Experiment, strategy: Strategy, measured_s: float, group: str) -> Row:
    """Return a measured row."""
    observation = Observation(
        experiment=experiment, strategy=strategy, outcome="measured", measured_s=measured_s
    )
    return Row(observation=observation, group=group)


def _figures(cells: Cells, names: str) -> Figures:
    """Return a job's figures; ``names`` are the table's own columns, in the order of `Figures`."""
    hidden, heads, layers, length, gpus, batch, size = (int(cells[name]) for name in names.split())
    return Figures(
        hidden_size=hidden,
        num_heads=heads,
        num_layers=layers,
        sequence_length=length,
        num_gpus=gpus,
        global_batch_size=batch,
        micro_batch_size=size,
        tp=int(cells["tp"]),
        dp=int(cells["dp"]),
        pp=int(cells["pp"]),
    )


def _cells(path: Path) -> Iterator[Cells]:
    """Yield the rows of a table.

    Raises:
        InputError: If there is no such table.
    """
    if not path.is_file():
        message = "this table is absent"
        raise InputError(message, where=Where(file=str(path)))
    yield from csv.DictReader(read_text(path).splitlines())
