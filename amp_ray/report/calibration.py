"""A calibration as tables for people."""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from amp_ray.calibration import Calibration, TrialRecord
from amp_ray.report.console import FIGURE, WORD, Row, table
from amp_ray.units import counted


def calibration_view(calibration: Calibration) -> RenderableType:
    """Draw fitted and refused constants, and the errors of trials before and after."""
    return Group(
        _constants(calibration),
        *(
            Text(f"{constant.name}: {constant.reason}", style="dim")
            for constant in calibration.refused
        ),
        _trials(calibration),
        _summary(calibration),
    )


def _constants(calibration: Calibration) -> Table:
    """Draw every fitted constant with its ratio to the prior."""
    figures = ("prior", "fitted", "ratio", "sigma", "prior sigma")
    rows = [
        Row(
            (
                constant.name,
                f"{constant.prior:.4g}",
                f"{constant.value:.4g}",
                f"{constant.ratio:.3f}",
                f"{constant.sigma:.3f}",
                f"{constant.prior_sigma:.2f}",
            )
        )
        for constant in calibration.constants
    ]
    title = f"{calibration.experiment}: {counted(calibration.num_constants, 'constant')} fitted"
    return table([("constant", WORD), *((name, FIGURE) for name in figures)], rows, title=title)


def _trials(calibration: Calibration) -> Table:
    names = ("tp", "dp", "pp", "micro-batch", "measured", "before", "after", "left out")
    keys = ("tp", "dp", "pp", "micro_batch_size")
    rows = [
        Row((*(str(trial.strategy.get(key) or "*") for key in keys), *_residuals(trial)))
        for trial in calibration.trials
    ]
    return table([(name, FIGURE) for name in names], rows, title="trials")


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
    errors = {
        "before": calibration.mean_error("before_s"),
        "after": calibration.mean_error("after_s"),
        "leave-one-out": calibration.mean_error("left_out_s"),
    }
    parts = [f"{name} {100 * error:.2f} %" for name, error in errors.items() if error is not None]
    return Text(
        f"mean absolute error: {', '.join(parts)}; "
        f"{counted(calibration.num_constants, 'constant')}, "
        f"{counted(sum(trial.tells_time for trial in calibration.trials), 'timed trial')}"
    )
