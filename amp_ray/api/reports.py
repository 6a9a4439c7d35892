"""Plans and studies as one page."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from amp_ray.api.functions import AnyPath, CostModel, Progress, Source, plan
from amp_ray.api.functions import load as load_source
from amp_ray.calibration import Calibration
from amp_ray.errors import InputError
from amp_ray.report.page import page, plan_record, study_record
from amp_ray.runtime.files import write_output
from amp_ray.runtime.study.reading import read_study


def write_report(
    source: Source,
    output: AnyPath,
    *,
    changes: Sequence[str] = (),
    cost_model: CostModel | None = None,
    calibration: Calibration | AnyPath | None = None,
    transfer: bool = False,
    progress: Progress | None = None,
) -> None:
    """Write an experiment's plan, or a study, as one static page that needs no network.

    Args:
        source: The folder of a study, or an experiment; see `amp_ray.load`.
        output: The page, an ``.html`` file.
        changes: See `amp_ray.load`.
        cost_model: See `plan`; a study's is ours.
        calibration: See `amp_ray.load`; a study has its own.
        transfer: See `amp_ray.load`.
        progress: Told how far the search is.

    Raises:
        InputError: If something does not fit, or the page cannot be written.
    """
    target = Path(output)
    if target.suffix not in {".html", ".htm"}:
        raise InputError(f"{target}: the report is a page; name it .html")
    if isinstance(source, str | os.PathLike) and Path(source).is_dir():
        if changes or calibration is not None or cost_model is not None:
            raise InputError(
                "a study has its own experiment, cost model and calibration: no options go with it"
            )
        record = study_record(read_study(Path(source)), source=str(source))
    else:
        experiment = load_source(source, changes=changes)
        found = plan(
            experiment,
            cost_model=cost_model,
            calibration=calibration,
            transfer=transfer,
            progress=progress,
        )
        name = "EXPERIMENT.yaml" if isinstance(source, Mapping) else str(experiment.source.file)
        record = plan_record(found.planned, source=name)
    write_output(target, page(record))
