"""All figures by table: what `experiments/accuracy.py` prints and the golden copy holds."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from amp_ray.calibration.calibration import Calibration
from amp_ray.calibration.observation import Observation
from amp_ray.runtime.files import load_experiment, load_observations
from published import a100_jobs, amp, interval_widths, today_jobs
from published.interval_widths import TableErrors, table_errors
from published.tables import Published, amp_strategies, read_rows, read_table

Figures = Mapping[str, Mapping[str, float | str]]
"""Figures by what was measured before, by name."""


DECIMALS: Final = 4


REPOSITORY: Final = Path(__file__).resolve().parents[2]

PUBLISHED: Final = Path(__file__).resolve().parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """What figures are computed from.

    Args:
        data: Folder of the tables.
        num_draws: Draws of each band, and of each choice of trials; 0 leaves them out.
    """

    data: Path = PUBLISHED
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


@cache
def _calibrated() -> tuple[list[Observation], dict[str, Calibration]]:
    """Return the published trials, which the package ships, and the calibrations on them."""
    experiment = load_experiment(REPOSITORY / "experiments" / "homogeneous.yaml")
    table = REPOSITORY / "amp_ray" / "data" / "tables" / "amp-2022-homogeneous.csv"
    observations = load_observations(table, experiment)
    return observations, amp.calibrations(observations)


def _homogeneous(sources: Sources) -> Figures:
    """Return the figures of the homogeneous experiment."""
    return amp.homogeneous(*_calibrated(), sources.num_draws)


def _transferred(name: str) -> Callable[[Sources], Figures]:
    """Return what computes the figures of a heterogeneous experiment."""

    def compute(sources: Sources) -> Figures:
        experiment = load_experiment(REPOSITORY / "experiments" / f"{name}.yaml")
        strategies = amp_strategies(sources.data, experiment)
        return amp.transferred(experiment, strategies, _calibrated()[1])

    return compute


def _peaks(table: Published) -> Figures:
    """Return the figures of a table's peaks beside those of its times."""
    return {"peaks": today_jobs.memory_figures(table.rows, "largest")["no measurement"]}


def _of_table(name: str, *parts: Callable[[Published], Figures]) -> Callable[[Sources], Figures]:
    """Return what computes the figures of a table, part by part."""

    def compute(sources: Sources) -> Figures:
        table = read_table(sources.data, name)
        return {label: row for part in parts for label, row in part(table).items()}

    return compute


TIMED: Final = (
    *("vtrain", "bloom", "megatron"),
    *("playbook", "llm_foundry", "simumax", "megatron_bridge", "megatron_bridge_gb", "mlperf"),
)
"""Tables with times that are compared."""


def _comparable(sources: Sources, name: str) -> list[Observation]:
    """Return the timed rows of a table, those of a second population of pipelines left out."""
    rows = [row for row in read_rows(sources.data, name) if row.tells_time]
    second = today_jobs.pipeline_populations(rows)[1] if name == "playbook" else []
    return [row.observation for row in rows if row not in second]


def timed_errors(sources: Sources) -> dict[str, TableErrors]:
    """Return the errors of all predicted times, nothing measured, by table."""
    tables = {name: _comparable(sources, name) for name in TIMED}
    tables["amp_homogeneous"] = [each for each in _calibrated()[0] if each.measured_s is not None]
    return {name: table_errors(rows) for name, rows in tables.items()}


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
        compute=lambda sources: a100_jobs.vtrain_blind(
            read_rows(sources.data, "vtrain"), sources.num_draws
        ),
    ),
    "vtrain_tuned": Section(
        title="vTrain, best predicted next (target: regret 0.1 % within 5 trials of each group)",
        compute=lambda sources: a100_jobs.vtrain_tuned(read_rows(sources.data, "vtrain")),
    ),
    "bloom_time": Section(
        title="BLOOM, 63 iteration times (target: error 13 %)",
        compute=lambda sources: a100_jobs.bloom_time(
            read_rows(sources.data, "bloom"), sources.num_draws
        ),
    ),
    "bloom_calibrated": Section(
        title="BLOOM, the rest after 5 trials (target: error 7.1 %)",
        compute=lambda sources: a100_jobs.bloom_calibrated(
            read_rows(sources.data, "bloom"), max(1, sources.num_draws // 10)
        ),
        is_slow=True,
    ),
    "bloom_memory": Section(
        title="BLOOM, 46 peaks and 6 out of memory (target: median 12 %; 4.5 % on other widths "
        "with 2 constants; 5 of 6 found, at most 2 false alarms)",
        compute=lambda sources: a100_jobs.bloom_memory(
            read_rows(sources.data, "bloom"), sources.num_draws
        ),
    ),
    "megatron": Section(
        title="Megatron-LM, 8 jobs with full and selective recompute (target: error 10 %)",
        compute=lambda sources: a100_jobs.megatron_jobs(
            read_rows(sources.data, "megatron"), sources.num_draws
        ),
    ),
    "playbook": Section(
        title="Playbook, llama 1B and 8B on 8 to 128 H100 (target: pp = 1 error 14 %, tau .85, "
        "regret 4 %, 8 % worst after 5 trials; pp > 1, clean: error 10 %, tau .70)",
        compute=_of_table("playbook", today_jobs.playbook),
        is_slow=True,
    ),
    "playbook_memory": Section(
        title="Playbook, peaks of rank 0 and failures (target: median 12 %; failures .93 / .85)",
        compute=_of_table(
            "playbook",
            lambda table: today_jobs.memory_figures(table.rows, "first"),
            lambda table: today_jobs.failure_figures(table.rows),
        ),
    ),
    "megatron_golden": Section(
        title="Megatron-LM's functional tests, peaks of the last rank (target: 6 %, 15 % at p90)",
        compute=_of_table(
            "megatron_golden",
            lambda table: today_jobs.memory_figures(table.rows, "last"),
            lambda table: {
                "attention as stated": today_jobs.memory_figures(
                    [row for row in table.rows if row.doubt != "attention"], "last"
                )["no measurement"]
            },
            today_jobs.not_expressible,
        ),
    ),
    "llm_foundry": Section(
        title="LLM Foundry, FSDP on 8 to 128 A100 (target: error 12 %)",
        compute=_of_table(
            "llm_foundry",
            lambda table: today_jobs.time_figures(table.rows),
            today_jobs.not_expressible,
        ),
    ),
    "simumax": Section(
        title="SimuMax, dense models on 8 B200 (target: error 10 %, memory 6 %)",
        compute=_of_table(
            "simumax",
            lambda table: today_jobs.time_figures(table.rows),
            _peaks,
            today_jobs.not_expressible,
        ),
    ),
    "megatron_bridge": Section(
        title="Megatron-Bridge, dense and MoE on H100, B200, B300 (target: error 20 %)",
        compute=_of_table(
            "megatron_bridge",
            lambda table: today_jobs.time_figures(table.rows),
            today_jobs.not_expressible,
        ),
    ),
    "megatron_bridge_gb": Section(
        title="Megatron-Bridge on GB200 and GB300 (target: error 14 %, .03 of the rows refused)",
        compute=_of_table(
            "megatron_bridge_gb",
            lambda table: today_jobs.time_figures(table.rows),
            lambda table: today_jobs.by_model(table.rows),
            lambda table: today_jobs.refusals(table.rows),
            today_jobs.not_expressible,
        ),
    ),
    "deepseek": Section(
        title="DeepSeek-V3's training on 2,048 H800 (target: error 10 %)",
        compute=_of_table(
            "deepseek",
            lambda table: today_jobs.time_figures(table.rows),
            lambda table: today_jobs.refusals(table.rows),
        ),
    ),
    "mlperf": Section(
        title="MLPerf training 4.1 and 5.0, 405B and 175B on H100, H200, GB200 (target: error 7 %, "
        "memory 15 %, none refused)",
        compute=_of_table(
            "mlperf",
            lambda table: today_jobs.time_figures(table.rows),
            _peaks,
            lambda table: today_jobs.refusals(table.rows),
            today_jobs.not_expressible,
        ),
    ),
    "coverage": Section(
        title="Measured times within their 95 % interval, nothing measured (target: .90 to .98, "
        "within 3 median errors); held: intervals as wide as the other tables ask for",
        compute=lambda sources: interval_widths.coverage(timed_errors(sources)),
        is_slow=True,
    ),
}


def rounded(figures: Figures) -> dict[str, dict[str, float | str]]:
    """Return figures as the golden copy holds them: four decimals."""
    return {
        label: {
            name: value if isinstance(value, str) else round(float(value), DECIMALS)
            for name, value in row.items()
        }
        for label, row in figures.items()
    }
