"""A calibration as tables for people."""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from amp_ray.calibration import Calibration, TrialRecord
from amp_ray.units import counted


def calibration_view(calibration: Calibration) -> RenderableType:
    """Draw what was fitted, what was not, and how well trials are met before and after."""
    return Group(
        _constants(calibration),
        *(Text(f"{each.name}: {each.reason}", style="dim") for each in calibration.refused),
        _trials(calibration),
        _summary(calibration),
    )


def _constants(calibration: Calibration) -> Table:
    """Draw every fitted constant with its ratio to the prior."""
    title = f"{calibration.experiment}: {counted(calibration.num_constants, 'constant')} fitted"
    table = Table(title=title, title_justify="left", header_style="bold", pad_edge=False)
    for name in ("constant", "prior", "fitted", "ratio", "sigma", "prior sigma"):
        table.add_column(name, justify="left" if name == "constant" else "right", no_wrap=True)
    for constant in calibration.constants:
        table.add_row(
            constant.name,
            f"{constant.prior:.4g}",
            f"{constant.value:.4g}",
            f"{constant.ratio:.3f}",
            f"{constant.sigma:.3f}",
            f"{constant.prior_sigma:.2f}",
        )
    return table


def _trials(calibration: Calibration) -> Table:
    """Draw every trial with its residuals."""
    table = Table(title="trials", title_justify="left", header_style="bold", pad_edge=False)
    for name in ("tp", "dp", "pp", "micro-batch", "measured", "before", "after", "left out"):
        table.add_column(name, justify="right", no_wrap=True)
    for trial in calibration.trials:
        degrees = (trial.strategy.get(key) for key in ("tp", "dp", "pp", "micro_batch_size"))
        table.add_row(*(str(degree or "*") for degree in degrees), *_residuals(trial))
    return table


def _residuals(trial: TrialRecord) -> tuple[str, ...]:
    """Return the measured time and how far each prediction is off."""
    if trial.measured_s is None:
        return trial.outcome, "-", "-", "-"
    predictions = (trial.before_s, trial.after_s, trial.left_out_s)
    return f"{trial.measured_s:.4g} s", *(
        "-" if predicted is None else f"{100 * (predicted / trial.measured_s - 1):+.1f} %"
        for predicted in predictions
    )


def _summary(calibration: Calibration) -> Text:
    """Sum the errors up in one line."""
    parts = [
        f"{label} {100 * error:.2f} %"
        for label, which in (
            ("before", "before_s"),
            ("after", "after_s"),
            ("leave-one-out", "left_out_s"),
        )
        for error in [calibration.mean_error(which)]  # type: ignore[arg-type]
        if error is not None
    ]
    return Text(
        f"mean absolute error: {', '.join(parts)}; "
        f"{counted(calibration.num_constants, 'constant')}, "
        f"{counted(sum(trial.tells_time for trial in calibration.trials), 'timed trial')}"
    )
