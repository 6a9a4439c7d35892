"""All figures by table: what `experiments/accuracy.py` prints and the golden copy holds."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from amp_ray.calibration import Calibration, Observation
from amp_ray.errors import InputError
from amp_ray.runtime.calibrating import load_observations
from amp_ray.runtime.files import load_experiment
from amp_ray.testing.accuracy import amp, megatron
from amp_ray.testing.accuracy.tables import bloom, selene, vtrain

Figures = Mapping[str, Mapping[str, float | str]]
"""Figures by what was measured before, by name."""


DECIMALS: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Where tables lie.

    Args:
        repository: Root of the checkout: experiment files and the shipped table.
        data: Folder of the published tables that are not shipped.
        num_draws: Draws of each band, and of each choice of trials; 0 leaves them out.
    """

    repository: Path
    data: Path
    num_draws: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """One table of figures.

    Args:
        title: What it is about, with the target.
        compute: Its figures; raises an InputError where a table is absent.
        is_slow: Whether it takes more than a few seconds.
    """

    title: str
    compute: Callable[[Sources], Figures]
    is_slow: bool = False


def _homogeneous_trials(sources: Sources) -> list[Observation]:
    """Return the published trials that the package ships."""
    experiment = load_experiment(sources.repository / "experiments" / "homogeneous.yaml")
    table = sources.repository / "amp_ray" / "data" / "tables" / "amp-2022-homogeneous.csv"
    return load_observations(table, experiment)


@cache
def _calibrated(sources: Sources) -> tuple[list[Observation], dict[str, Calibration]]:
    """Return the published trials and the calibrations on them."""
    observations = _homogeneous_trials(sources)
    return observations, amp.calibrations(observations)


def _homogeneous(sources: Sources) -> Figures:
    """Return the figures of the homogeneous experiment."""
    return amp.homogeneous(*_calibrated(sources), sources.num_draws)


def _transferred(name: str) -> Callable[[Sources], Figures]:
    """Return what computes the figures of a heterogeneous experiment."""

    def compute(sources: Sources) -> Figures:
        experiment = load_experiment(sources.repository / "experiments" / f"{name}.yaml")
        table = sources.data / "amp" / f"{name}_strategies.csv"
        return amp.transferred(experiment, table, _calibrated(sources)[1])

    return compute


SECTIONS: Final[Mapping[str, Section]] = {
    "amp_homogeneous": Section(
        title="AMP homogeneous, 47 measured and 5 failed trials (target: rho .985, tau .91, error "
        "6 %, failures 1 / .8; leave-one-out 2.5 % with 3, 2 % with 8 constants, failures 1 / 1)",
        compute=_homogeneous,
    ),
    "amp_het_cluster": Section(
        title="AMP het_cluster, predicted (measurements are not here; 10 of 53 have no result)",
        compute=_transferred("het_cluster"),
    ),
    "amp_het_model": Section(
        title="AMP het_model, predicted (measurements are not here; 46 of 65 have no result)",
        compute=_transferred("het_model"),
    ),
    "vtrain": Section(
        title="vTrain, 41 jobs on 64 and 256 A100 (target: error 9 %, tau .69, .80 over pairs "
        "more than 5 % apart, regret 1.3 %)",
        compute=lambda sources: megatron.vtrain_blind(vtrain(sources.data), sources.num_draws),
    ),
    "vtrain_tuned": Section(
        title="vTrain, best predicted next (target: regret 0.1 % within 5 trials of each group)",
        compute=lambda sources: megatron.vtrain_tuned(vtrain(sources.data)),
    ),
    "bloom_time": Section(
        title="BLOOM, 63 iteration times (target: error 13 %)",
        compute=lambda sources: megatron.bloom_time(bloom(sources.data), sources.num_draws),
    ),
    "bloom_calibrated": Section(
        title="BLOOM, the rest after 5 trials (target: error 7.1 %)",
        compute=lambda sources: megatron.bloom_calibrated(
            bloom(sources.data), max(1, sources.num_draws // 10)
        ),
        is_slow=True,
    ),
    "bloom_memory": Section(
        title="BLOOM, 46 peaks and 6 out of memory (target: median 12 %; 4.5 % on other widths "
        "with 2 constants; 5 of 6 found, at most 2 false alarms)",
        compute=lambda sources: megatron.bloom_memory(bloom(sources.data), sources.num_draws),
    ),
    "megatron": Section(
        title="Megatron-LM, 4 jobs with full recompute (target: error 10 %)",
        compute=lambda sources: megatron.megatron_jobs(selene(sources.data), sources.num_draws),
    ),
}


def compute(name: str, sources: Sources) -> Figures | str:
    """Return the figures of a section, or why it is left out: its table is absent."""
    try:
        return SECTIONS[name].compute(sources)
    except InputError as error:
        return str(error)


def rounded(figures: Figures) -> dict[str, dict[str, float | str]]:
    """Return figures as the golden copy holds them: four decimals."""
    return {
        label: {
            name: value if isinstance(value, str) else round(float(value), DECIMALS)
            for name, value in row.items()
        }
        for label, row in figures.items()
    }
