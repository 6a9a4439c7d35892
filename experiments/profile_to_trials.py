"""Profile this machine, plan from the profile, and run the best strategies: is the plan right?

    python experiments/profile_to_trials.py --slots 2
    python experiments/profile_to_trials.py my.yaml --best 5 --rounds 3 --result result.json

Trials run in rounds, one after the other, so that other work on the machine hits all alike.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import click
import yaml
from rich.table import Table

from amp_ray.cost.estimate import Estimate
from amp_ray.inputs.experiment import Experiment, launchable_only
from amp_ray.report.console import console
from amp_ray.runtime.files import load_experiment, write_text
from amp_ray.runtime.planning import plan_experiment
from amp_ray.runtime.study.pool import Task, make_runner
from amp_ray.strategies.strategy import Strategy
from amp_ray.trials.outcome import Measured

DEMO = Path(__file__).with_name("demo.yaml")


def file_for_trials(path: Path, slots: int | None, folder: Path) -> Path:
    """Write an experiment for trials on this machine to a folder."""
    document = yaml.safe_load(path.read_text(encoding="utf-8"))
    if slots is not None:
        document["cluster"]["nodes"][0]["slots"] = slots
    document["trials"] = {**document.get("trials", {}), "backend": "local"}
    target = folder / "experiment.yaml"
    target.write_text(yaml.safe_dump(document), encoding="utf-8")
    return target


def profiled(
    path: Path,
    slots: int | None,
    folder: Path,
    seconds: float = 120.0,
    options: Sequence[str] = (),
) -> Experiment:
    """Profile an experiment on this machine and return it with everything that was measured."""
    target, report = file_for_trials(path, slots, folder), folder / "profile.json"
    document = yaml.safe_load(target.read_text(encoding="utf-8"))
    document["profile"] = {"source": "table", "path": "profile"}
    target.write_text(yaml.safe_dump(document), encoding="utf-8")
    command = [sys.executable, "-m", "amp_ray", "profile", str(target), *options, "-o"]
    limits = ["--seconds", str(seconds), "--json", str(report)]
    num_missing, result = -1, dict[str, Any]()
    while num_missing:
        subprocess.run([*command, str(folder / "profile"), *limits], check=False)  # noqa: S603
        if not report.exists():
            sys.exit("amp-ray profile failed")
        result, before = json.loads(report.read_text(encoding="utf-8")), num_missing
        num_missing = sum(part["num_missing"] for part in result["parts"])
        if num_missing == before:
            sys.exit(f"amp-ray profile measured nothing more in {seconds:g} s: see above")
    measured = yaml.safe_load(result["yaml"])
    document["cluster"] |= measured["cluster"]
    document["constants"] = {**document.get("constants", {}), **measured.get("constants", {})}
    target.write_text(yaml.safe_dump(document), encoding="utf-8")
    return load_experiment(target)


def alternate(
    chosen: Sequence[tuple[Experiment, Strategy]], rounds: int, folder: Path
) -> list[list[float]]:
    """Return the measured iteration times of every strategy, one per round."""
    times: list[list[float]] = [[] for _ in chosen]
    with contextlib.ExitStack() as stack:
        runners = {}
        for experiment, _ in chosen:
            if experiment.traits.name not in runners:
                runner = make_runner(experiment, 0)
                stack.callback(runner.close)
                runners[experiment.traits.name] = runner
        for attempt in range(rounds):
            for number, (experiment, strategy) in enumerate(chosen):
                name = f"{number + 1}-{attempt + 1}"
                task = Task(
                    number=number,
                    attempt=attempt,
                    trial_id=f"trial-{name}",
                    strategy=strategy,
                    folder=folder / name,
                )
                outcome = runners[experiment.traits.name].run(task)
                if isinstance(outcome, Measured):
                    times[number].append(outcome.mean_s)
                else:
                    click.echo(f"strategy {number + 1}: {outcome.reason}", err=True)
    return times


def compare(experiment: Experiment, best: int, rounds: int, folder: Path) -> dict[str, Any]:
    """Plan, run the best, and return predicted beside measured."""
    planned = plan_experiment(launchable_only(experiment), progress=lambda *_: None)
    feasible = [row for row in planned.ranking.results if isinstance(row, Estimate)]
    chosen = [row for row in feasible if row.feasible and row.launchable][:best]
    measured = alternate([(experiment, row.strategy) for row in chosen], rounds, folder)
    errors = [
        row.iteration_time_s / median(times_s) - 1 if times_s else None
        for row, times_s in zip(chosen, measured, strict=True)
    ]
    rows = [
        {
            "tp": row.strategy.stages[0].options.tp,
            "pp": len(row.strategy.stages),
            "dp": row.strategy.stages[0].options.dp,
            "micro_batch_size": row.strategy.micro_batch_size,
            "bounds": list(row.strategy.bounds),
            "predicted_s": row.iteration_time_s,
            "measured_s": times_s,
            "error": error,
        }
        for row, times_s, error in zip(chosen, measured, errors, strict=True)
    ]
    sizes = [abs(error) for error in errors if error is not None]
    return {"strategies": rows, "median_error": median(sizes) if sizes else None}


def show(result: dict[str, Any]) -> None:
    """Print a table of predicted and measured times."""
    table = Table("tp", "pp", "dp", "micro-batch", "bounds", "predicted", "measured", "error")
    for row in result["strategies"]:
        table.add_row(
            *(str(row[key]) for key in ("tp", "pp", "dp", "micro_batch_size")),
            " ".join(map(str, row["bounds"])),
            f"{row['predicted_s']:.4f} s",
            " ".join(f"{seconds:.4f}" for seconds in row["measured_s"]) or "failed",
            "" if row["error"] is None else f"{row['error']:+.1%}",
        )
    screen = console(width=120)
    screen.print(table)
    error = result["median_error"]
    text = "nothing measured" if error is None else f"median error {error:.1%}"
    screen.print(f"{text}; {result['hardware']}; load average {result['load_average']}")


@click.command(help="Profile this machine, plan, run the best strategies, and compare.")
@click.argument("experiment", type=click.Path(path_type=Path), default=DEMO)
@click.option("--slots", type=click.IntRange(min=1), help="Ranks, instead of the file's.")
@click.option("--best", type=click.IntRange(min=1), default=5, show_default=True)
@click.option("--rounds", type=click.IntRange(min=1), default=3, show_default=True)
@click.option(
    "--seconds", type=float, default=120.0, show_default=True, help="For a round of the profile."
)
@click.option("--result", type=click.Path(path_type=Path), help="Write the figures to FILE too.")
@click.option("--note", help="Kept with the figures: what else the machine did, for example.")
def main(  # noqa: PLR0913 - one per option
    *,
    experiment: Path,
    slots: int | None,
    best: int,
    rounds: int,
    seconds: float,
    result: Path | None,
    note: str | None,
) -> None:
    """Do it all in a folder that is removed at the end."""
    before = os.getloadavg()
    with tempfile.TemporaryDirectory(prefix="profile-to-trials-") as name:
        folder = Path(name)
        measured = profiled(experiment, slots, folder, seconds)
        comparison = compare(measured, best, rounds, folder / "trials")
        described = yaml.safe_load((folder / "profile/profile.yaml").read_text(encoding="utf-8"))
        about = {key: described[key] for key in ("hardware", "versions")}
        load = [[round(value, 2) for value in loads] for loads in (before, os.getloadavg())]
        document = yaml.safe_load((folder / "experiment.yaml").read_text(encoding="utf-8"))
    keys = ("model", "precision", "global_batch_size", "cluster", "constants")
    kept = {key: document[key] for key in keys if key in document}
    head = {"experiment": measured.name, **about, "date": str(described["date"]), "note": note}
    record = {**head, "load_average": load, **kept, **comparison}
    show(record)
    if result is not None:
        write_text(result, json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
