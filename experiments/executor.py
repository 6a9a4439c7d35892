"""Runtime ``torch`` on this machine's CPU: what it is measured against, one command each.

    python experiments/executor.py slices       # planned token slices against whole sequences
    python experiments/executor.py runtimes     # the same grids beside the DeepSpeed program
    python experiments/executor.py timeline     # what ranks did in a step, and when they should

What is compared takes turns in one run, so that other work on the machine hits all alike.
"""

import importlib.metadata
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import click

from amp_ray.cost.estimate import Estimate
from amp_ray.cost.model import CostModel
from amp_ray.cost.timeline import predicted_timeline
from amp_ray.inputs.experiment import Experiment
from amp_ray.runtime.files import load_experiment, write_text
from amp_ray.runtime.planning import plan_experiment
from amp_ray.search.ranking import Ranking
from amp_ray.strategies.strategy import Strategy
from profile_to_trials import DEMO, alternate, file_for_trials, profiled

LONG = Path(__file__).with_name("long_sequence.yaml")

Compare = Callable[[Path, Path, int | None, int], dict[str, Any]]


def compare_slices(path: Path, folder: Path, slots: int | None, rounds: int) -> dict[str, Any]:
    """Run the plan with token slices and the best without, as a profile of both has them."""
    experiment = profiled(path, slots, folder, options=["--token-slices"])
    whole = replace(experiment, limits=replace(experiment.limits, token_slices=False))
    sliced, plain = (best(ranking_of(variant)) for variant in (experiment, whole))
    chosen = [(experiment, sliced.strategy), (experiment, plain.strategy)]
    sliced_s, plain_s = alternate(chosen, rounds, folder / "trials")
    return {
        "token_slices": sliced.strategy.token_slices,
        "bounds": {"sliced": sliced.strategy.bounds, "whole": plain.strategy.bounds},
        "measured_s": {"sliced": sliced_s, "whole": plain_s},
        "predicted_s": {"sliced": sliced.iteration_time_s, "whole": plain.iteration_time_s},
        "predicted_ratio": plain.iteration_time_s / sliced.iteration_time_s,
        "measured_ratio": median(plain_s) / median(sliced_s),
    }


def compare_runtimes(path: Path, folder: Path, slots: int | None, rounds: int) -> dict[str, Any]:
    """Run the best strategy of every grid under both programs."""
    target = file_for_trials(path, slots, folder)
    programs = [
        load_experiment(target, changes=[f"runtime={name}", "search.token_slices=false"])
        for name in ("torch", "deepspeed")
    ]
    grids = dict[tuple[int, ...], Strategy]()
    for row in ranking_of(programs[1]).results:
        if isinstance(row, Estimate) and row.feasible and row.launchable:
            options = row.strategy.stages[0].options
            grids.setdefault((options.tp, row.strategy.pp, options.dp), row.strategy)
    chosen = [(program, strategy) for strategy in grids.values() for program in programs]
    times = alternate(chosen, rounds, folder / "trials")
    if not grids:
        sys.exit("no grid that both programs launch")
    ratios = [
        median(torch_s) / median(deepspeed_s)
        for torch_s, deepspeed_s in zip(times[::2], times[1::2], strict=True)
    ]
    rows = [
        {
            **dict(zip(("tp", "pp", "dp"), grid, strict=True)),
            "micro_batch_size": strategy.micro_batch_size,
            "bounds": strategy.bounds,
            "torch_s": torch_s,
            "deepspeed_s": deepspeed_s,
            "ratio": ratio,
        }
        for (grid, strategy), torch_s, deepspeed_s, ratio in zip(
            grids.items(), times[::2], times[1::2], ratios, strict=True
        )
    ]
    return {"grids": rows, "worst_ratio": max(ratios)}


def compare_timelines(path: Path, folder: Path, slots: int | None, rounds: int) -> dict[str, Any]:
    """Run the best pipeline, and lay each rank's last step beside the predicted one."""
    experiment = profiled(path, slots, folder, options=["--token-slices"])
    estimates = [row for row in ranking_of(experiment).results if isinstance(row, Estimate)]
    strategy = next(row.strategy for row in estimates if row.feasible and row.strategy.pp > 1)
    predicted = predicted_timeline(CostModel(experiment=experiment), strategy)
    alternate([(experiment, strategy)], rounds, folder / "trials")
    files = sorted(folder.glob("trials/*/hosts/*/timeline.json"))
    steps = [json.loads(file.read_text(encoding="utf-8"))["ranks"] for file in files]
    ends_s = [max(rank["instructions"][-1][2] for rank in ranks) for ranks in steps]
    predicted_s = predicted[0][-1].end_s
    return {
        "strategy": {"bounds": strategy.bounds, "token_slices": strategy.token_slices},
        "order_identical": all(
            [name for name, _, _ in rank["instructions"]]
            == [str(timed.instruction) for timed in predicted[rank["stage"]]]
            for ranks in steps
            for rank in ranks
        ),
        "passes_in_predicted_order": [passes_in_order(predicted, ranks) for ranks in steps],
        "predicted_s": predicted_s,
        "measured_s": ends_s,
        "error": predicted_s / median(ends_s) - 1,
    }


def passes_in_order(predicted: Sequence[Any], ranks: Sequence[dict[str, Any]]) -> float:
    """Return in how many neighbours, by predicted begin, the earlier pass of all began earlier."""
    began = {name: begin for rank in ranks for name, begin, _ in rank["instructions"]}
    passes = sorted(
        (timed.begin_s, str(timed.instruction))
        for order in predicted
        for timed in order
        if timed.instruction.kind in {"F", "B"}
    )
    right = [began[first] <= began[second] for (_, first), (_, second) in pairwise(passes)]
    return float(sum(right) / len(right))


def ranking_of(experiment: Experiment) -> Ranking:
    """Plan."""
    return plan_experiment(experiment, progress=lambda *_: None).ranking


def best(ranking: Ranking) -> Estimate:
    """Return the best plan."""
    if ranking.best is None:
        sys.exit("no feasible strategy")
    return ranking.best


def about() -> dict[str, Any]:
    """Name what the figures depend on."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    cpus = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    versions = {name: importlib.metadata.version(name) for name in ("torch", "deepspeed")}
    return {
        "hardware": f"{len(cpus)} x {next(iter(cpus), 'unknown')}",
        "versions": versions,
        "load_average": [round(load, 2) for load in os.getloadavg()],
    }


COMMANDS: dict[str, tuple[Compare, Path]] = {
    "slices": (compare_slices, LONG),
    "runtimes": (compare_runtimes, DEMO),
    "timeline": (compare_timelines, LONG),
}


@click.command(help=__doc__)
@click.argument("what", type=click.Choice(list(COMMANDS)))
@click.option("--experiment", type=click.Path(path_type=Path), help="Another experiment file.")
@click.option("--slots", type=click.IntRange(min=1), help="Ranks, instead of the file's.")
@click.option("--rounds", type=click.IntRange(min=1), default=3, show_default=True)
@click.option("--result", type=click.Path(path_type=Path), help="Write the figures to FILE too.")
@click.option("--note", help="Kept with the figures: what else the machine did, for example.")
def main(
    *,
    what: str,
    experiment: Path | None,
    slots: int | None,
    rounds: int,
    result: Path | None,
    note: str | None,
) -> None:
    """Compare in a folder that is removed at the end, and print the figures as JSON."""
    compare, default = COMMANDS[what]
    path = experiment or default
    before = about()
    with tempfile.TemporaryDirectory(prefix="executor-") as name:
        figures = compare(path, Path(name), slots, rounds)
    record = {"what": what, "experiment": path.name, **before, "note": note, **figures}
    text = json.dumps(record, indent=1) + "\n"
    click.echo(text)
    if result is not None:
        write_text(result, text)


if __name__ == "__main__":
    main()
