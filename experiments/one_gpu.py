"""Measure what one GPU can show of the cost model, and print it beside the prediction.

    python experiments/one_gpu.py                      # eight minutes, on the first CUDA device
    python experiments/one_gpu.py --minutes 2          # what is worth most
    python experiments/one_gpu.py --device A100-80     # which board of the catalogue it is
    python experiments/one_gpu.py --recorded FILE      # no GPU: today's predictions of a result

=============  =================================================================================
part           measured, and predicted
=============  =================================================================================
``layer``      a pass of a layer, or of a tensor-parallel rank's shard of it, without all-reduces
``launch``     the host's time to launch both passes of that layer on an idle device
``attention``  a pass of the attention core
``memory``     the peak of memory of tensors; the predicted peak without the context
``step``       a training step of a single rank
``optimizer``  the optimizer step within it
=============  =================================================================================

The figures are written to a file after every measurement. A setting that runs out of memory is a
result. What the time is too short for is named. The exit code is 3 where torch finds no CUDA
device.
"""

import gc
import json
import re
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from functools import partial
from importlib.metadata import version
from operator import itemgetter
from pathlib import Path
from statistics import median
from typing import Any, Final

import click
import torch
import yaml

from amp_ray.clusters.device import CATALOGUE, find_device
from amp_ray.errors import InputError
from amp_ray.report import console
from amp_ray.runtime.files import write_text
from amp_ray.runtime.first_file import catalogued, preset
from amp_ray.training.clock import DeviceClock, HostClock
from amp_ray.trials.profile.points import fitting_tps
from amp_ray.units import GIB, MILLISECONDS_PER_SECOND
from gpu_measurements import (
    Bench,
    Figures,
    Row,
    Setting,
    Shape,
    measure_attention,
    measure_layer,
    measure_step,
)

BAD_INPUT_EXIT: Final = 2
NO_DEVICE_EXIT: Final = 3
SEED: Final = 0
TPS: Final = (1, 2, 4, 8)
PARTS: Final = ("layer", "launch", "attention", "memory", "step", "optimizer")

CHOSEN: Final = Path(__file__).with_suffix(".yaml")
RESULTS: Final = Path(__file__).with_name("results")

FACTS: Final = (
    *("driver_version", "power.limit", "power.max_limit", "clocks.max.sm", "clocks.max.memory"),
    *("clocks.current.sm", "clocks.current.memory"),
)
"""Fields of `nvidia-smi`, in watts and MHz."""


class CudaMachine:
    """The first CUDA device that this process sees."""

    def __init__(self) -> None:
        self.device = torch.device("cuda", 0)
        torch.cuda.set_device(self.device)

    def clock(self) -> HostClock:
        """Return a clock of events in the device's stream."""
        return DeviceClock()

    def begin_peak(self) -> None:
        """Give memory back that no tensor uses, and begin to record the peak."""
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()

    def peak(self) -> dict[str, int]:
        """Return bytes; those outside tensors include other processes on the device."""
        torch.cuda.synchronize()
        free_bytes, total_bytes = torch.cuda.mem_get_info()
        return {
            "reserved": int(torch.cuda.max_memory_reserved()),
            "allocated": int(torch.cuda.max_memory_allocated()),
            "outside": int(total_bytes - free_bytes - torch.cuda.memory_reserved()),
        }

    def facts(self) -> dict[str, str | None]:
        """Return name, driver, power limits and clocks."""
        uuid = torch.cuda.get_device_properties(self.device).uuid
        return {"name": torch.cuda.get_device_name(self.device), **driver_facts(f"GPU-{uuid}")}


def driver_facts(uuid: str) -> dict[str, str | None]:
    """Return `FACTS` of a GPU; None where `nvidia-smi` does not answer."""
    query = ["nvidia-smi", f"--query-gpu={','.join(FACTS)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(  # noqa: S603 - a fixed program
            [*query, "-i", uuid], capture_output=True, text=True, timeout=60, check=True
        )
        answers = [answer.strip() for answer in done.stdout.split(",")]
        return dict(zip(FACTS, answers, strict=True))
    except (OSError, subprocess.SubprocessError, ValueError):
        return dict.fromkeys(FACTS)


def software() -> dict[str, str | None]:
    """Return the versions that the figures depend on."""
    nccl = torch.cuda.nccl.version() if torch.distributed.is_nccl_available() else None
    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": None if nccl is None else ".".join(map(str, nccl)),
        "amp-ray": version("amp-ray"),
    }


# ----------------------------------------------------------------------------------- a run

Task = tuple[str, Callable[[], Iterable[Row]]]
"""What is measured, and the function that measures it."""


def tasks_of(bench: Bench, chosen: Figures) -> list[Task]:
    """Return all measurements in order of worth; too little time cuts all parts at one share.

    Args:
        bench: The machine.
        chosen: As in `CHOSEN`.
    """
    parts = list[list[Task]]()
    for part, measure, entries in (
        ("layer", measure_layer, chosen["layers"]),
        ("attention", measure_attention, chosen["attention"]),
    ):
        shapes = [Shape(**_with_figures(entry, chosen["models"])) for entry in entries]
        parts.append(
            [
                (f"{part} of {shape}, tp {tp}", partial(measure, bench, shape, tp))
                for shape in shapes
                for tp in fitting_tps(bench.experiment(shape.setting).model, TPS, TPS[-1])
            ]
        )
    settings = [Setting(**_with_figures(entry, chosen["models"])) for entry in chosen["steps"]]
    parts.append(
        [(f"step of {setting}", partial(measure_step, bench, setting)) for setting in settings]
    )
    placed = [(place / len(part), task) for part in parts for place, task in enumerate(part)]
    return [task for _, task in sorted(placed, key=itemgetter(0))]


def _with_figures(entry: Figures, models: Figures) -> dict[str, Any]:
    name = entry["model"]
    return {**entry, "figures": models[name] if name in models else preset("models", name)}


def run(
    tasks: Sequence[Task], seconds: float, keep: Callable[[Sequence[Row], Sequence[str]], None]
) -> None:
    """Measure until the time is over; hand on what there is, and what is left out, after each."""
    begin, rows = time.monotonic(), list[Row]()
    for index, (name, measure) in enumerate(tasks):
        if time.monotonic() - begin > seconds:
            break
        click.echo(f"{index + 1} of {len(tasks)}: {name}", err=True)
        rows += measure()
        keep(rows, [name for name, _ in tasks[index + 1 :]])


def medians(rows: Iterable[Row]) -> dict[str, dict[str, float]]:
    """Return, by part, the number of compared rows, the median error's size, and median error."""
    errors = defaultdict[str, list[float]](list)
    for row in rows:
        if row.error is not None:
            errors[row.part].append(row.error)
    return {
        part: {
            "rows": len(values),
            "size": median(abs(value) for value in values),
            "error": median(values),
        }
        for part, values in errors.items()
    }


def show(record: Figures, rows: Sequence[Row]) -> None:
    """Print the table, what was left out, and the medians by part."""
    screen = console.console(width=120)
    columns: list[tuple[str, console.Column]] = [("part", {}), ("what", {"overflow": "fold"})]
    columns += [(name, {"justify": "right"}) for name in ("measured", "predicted", "error")]
    cells = [
        console.Row(
            (
                *(row.part, row.what),
                row.outcome if row.measured is None else _text(row.part, row.measured),
                "" if row.predicted is None else _predicted(row, row.predicted),
                "" if row.error is None else f"{row.error:+.1%}",
            )
        )
        for row in sorted(rows, key=lambda row: PARTS.index(row.part))
    ]
    screen.print(console.table(columns, cells))
    if record["left_out"]:
        screen.print(f"left out: {'; '.join(record['left_out'])}")
    screen.print(f"{record['begin']['name']} as {record['board']}; {record['versions']}")
    line = (f"{part} {of['size']:.1%} ({of['rows']})" for part, of in record["medians"].items())
    screen.print(f"median error: {', '.join(line) or 'nothing was measured'}")


def _predicted(row: Row, value: float) -> str:
    fits = row.detail.get("predicted_to_fit", True)
    return _text(row.part, value) + ("" if fits else ", does not fit")


def _text(part: str, value: float) -> str:
    if part == "memory":
        return f"{value / GIB:.2f} GiB"
    return f"{value * MILLISECONDS_PER_SECOND:.3f} ms"


def board_of(device: str | None) -> str | Figures:
    """Return the board's name in the catalogue, or its description, from ``--device`` or torch.

    Raises:
        InputError: If torch's name for the board is none of the catalogue's.
    """
    if device is not None:
        described = yaml.safe_load(device)
        return described if isinstance(described, dict) else find_device(device).name
    board = torch.cuda.get_device_properties(0)
    name = catalogued(board.name, float(board.total_memory))
    if name is None:
        raise InputError(
            f"torch calls the board {board.name!r}, which is not in the catalogue: name one by "
            f"--device ({', '.join(CATALOGUE)}), or describe it as in an experiment file: --device "
            "'{name: X, memory_gib: 80, memory_gbyte_per_s: 3350, bf16_tflops: 989, "
            f"num_multiprocessors: {board.multi_processor_count}}}'"
        )
    return name


def measure_all(
    bench: Bench, tasks: Sequence[Task], target: Path, minutes: float, note: str | None = None
) -> None:
    """Run the tasks, keep the figures in a file after each, and print the table."""
    rows = list[Row]()
    record: dict[str, Any] = {
        "what": "one_gpu",
        "board": bench.board,
        "note": note,
        "minutes": minutes,
        "seed": SEED,
        "versions": software(),
        "begin": bench.machine.facts(),
        "end": None,
    }

    def keep(measured: Sequence[Row], left_out: Sequence[str]) -> None:
        rows[:] = measured
        record["left_out"], record["medians"] = list(left_out), medians(rows)
        record["rows"] = [{**asdict(row), "error": row.error} for row in rows]
        write_text(target, json.dumps(record, indent=1) + "\n")

    torch.manual_seed(SEED)
    gc.freeze()  # so that collections between measurements are short
    run(tasks, 60 * minutes, keep)
    gc.unfreeze()
    record["end"] = bench.machine.facts()
    write_text(target, json.dumps(record, indent=1) + "\n")
    show(record, rows)
    click.echo(f"{target}", err=True)


class RecordedMachine:
    """No device: a record has the measurements, and settings are only predicted."""

    @property
    def device(self) -> Any:  # noqa: ANN401 - torch's
        """Fail, as a device without memory does."""
        raise torch.OutOfMemoryError("CUDA out of memory")

    def clock(self) -> HostClock:
        """Return a clock that times nothing."""
        return HostClock()

    def begin_peak(self) -> None:
        """Record no peak."""

    def peak(self) -> dict[str, int]:
        """Return no bytes."""
        return {}

    def facts(self) -> dict[str, str | None]:
        """Return nothing."""
        return {}


def compare_again(path: Path) -> None:
    """Print the measurements of a record beside today's predictions."""
    record = json.loads(path.read_text(encoding="utf-8"))
    bench = Bench(machine=RecordedMachine(), board=record["board"])
    chosen = yaml.safe_load(CHOSEN.read_text(encoding="utf-8"))
    known = {(row["part"], row["what"]): row for row in record["rows"]}
    rows = list[Row]()
    for _, measure in tasks_of(bench, chosen):
        for row in measure():
            before = known.get((row.part, row.what))
            if before is not None:
                measured, outcome = before["measured"], before["outcome"]
                if row.part == "memory":  # first results compared what was reserved
                    measured = before["detail"].get("allocated", measured)
                rows.append(replace(row, measured=measured, outcome=outcome))
    show({**record, "left_out": [], "medians": medians(rows)}, rows)


@click.command()
@click.option(
    "--minutes", type=click.FloatRange(min=0, min_open=True), default=8.0, show_default=True
)
@click.option("--device", help="Name in the catalogue, or a mapping as in an experiment file.")
@click.option("--json", "path", type=click.Path(path_type=Path), help="Default: under results/.")
@click.option("--note", help="Kept with the figures.")
@click.option(
    "--recorded",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Measure nothing: print the measurements of this file beside today's predictions.",
)
def main(
    *,
    minutes: float,
    device: str | None,
    path: Path | None,
    note: str | None,
    recorded: Path | None,
) -> None:
    """Measure what one GPU can show of the cost model, and print it beside the prediction."""
    if recorded is not None:
        compare_again(recorded)
        return
    if not torch.cuda.is_available():
        click.echo("torch finds no CUDA device here, and there is nothing to measure.", err=True)
        sys.exit(NO_DEVICE_EXIT)
    try:
        bench = Bench(machine=CudaMachine(), board=board_of(device))
        chosen = yaml.safe_load(CHOSEN.read_text(encoding="utf-8"))
        tasks = tasks_of(bench, chosen)
    except (ValueError, yaml.YAMLError) as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(BAD_INPUT_EXIT)
    board = bench.board if isinstance(bench.board, str) else bench.board["name"]
    name = f"one-gpu-{re.sub('[^a-z0-9]+', '-', board.lower())}.json"
    measure_all(bench, tasks, path or RESULTS / name, minutes, note)


if __name__ == "__main__":
    main()
