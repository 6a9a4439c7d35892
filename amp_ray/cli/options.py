"""Options that several commands share, and writers of results."""

import contextlib
import json
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import click
from rich.console import RenderableType
from rich.progress import Progress

from amp_ray.cli.exits import table_console
from amp_ray.cost.estimate import Estimate
from amp_ray.redaction import redact, redact_values
from amp_ray.report.console import console
from amp_ray.runtime.files import write_result_text
from amp_ray.search.planner import AMP_RAY, BUILT_IN
from amp_ray.search.rows import shown_bound_s
from amp_ray.units import figure_text

_F = TypeVar("_F", bound=Callable[..., Any])

STDOUT: Final = "-"
_PATH: Final = click.Path(path_type=Path)
_AUTO: Final = "auto"


def together(*options: Callable[[_F], _F]) -> Callable[[_F], _F]:
    """Combine options into one decorator, in the order of the help text."""

    def decorate(command: _F) -> _F:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


class _Number(click.ParamType[int | None]):
    """Option type for ``auto``, which becomes None, or a number from 0."""

    name = "auto|N"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> int | None:
        if value == _AUTO:
            return None
        try:
            number = int(str(value))
        except ValueError:
            number = -1
        if number < 0:
            self.fail(f"{value!r} is neither auto nor a number of workers from 0", param, ctx)
        return number


file_argument = partial(click.argument, type=_PATH)
file_option = partial(click.option, type=_PATH, metavar="FILE")


def output_option(
    metavar: str,
    text: str = "File to write.",
    *,
    required: bool = True,
    **settings: Any,  # noqa: ANN401 - further ones of click
) -> Callable[[_F], _F]:
    """Return the option for a command's output file; ``text`` is its help."""
    names = ("-o", "--output")
    return file_option(*names, metavar=metavar, required=required, help=text, **settings)


set_option = click.option(
    "--set",
    "changes",
    multiple=True,
    metavar="KEY=VALUE",
    help="Set a key of the experiment, such as search.space=placement or "
    "cluster.nodes.0.count=8; may be given several times.",
)

experiment_argument = together(
    file_argument("experiment_path", metavar="EXPERIMENT.yaml"), set_option
)

hostfile_option = file_option(
    "--hostfile", help="Hosts to use, instead of the experiment's own hostfile."
)

json_option = click.option(
    "--json",
    "json_target",
    metavar="[FILE]",
    is_flag=False,
    flag_value=STDOUT,
    help="Machine-readable result, alone on stdout or in FILE.",
)

wide_option = click.option(
    "--wide",
    is_flag=True,
    help="All columns, however narrow the terminal, with the breakdown of the time.",
)


class _ResearchOption(click.Option):
    """An option that the help shows below `amp-ray research` alone."""

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        above = ctx.parent
        is_shown = above is not None and above.info_name == "research"
        return super().get_help_record(ctx) if is_shown else None


cost_model_option = click.option(
    "--cost-model",
    "cost_model",
    cls=_ResearchOption,
    metavar=f"[{'|'.join(BUILT_IN)}|...]",
    help="Whose predictions: ours, a published planner's formulas, or an installed planner's.  "
    f"[default: search.planner of the experiment, else {AMP_RAY}]",
)

calibration_options = together(
    file_option(
        "--calibration",
        help="Constants that amp-ray calibrate has fitted to this experiment's trials.",
    ),
    click.option(
        "--transfer-calibration",
        "transfer",
        is_flag=True,
        help="Use what still holds of a calibration of another model, cluster or runtime.",
    ),
)

workers_options = together(
    click.option(
        "--workers",
        type=_Number(),
        default=_AUTO,
        show_default=True,
        help="Ray workers that search. 0: no Ray. auto: none, unless the search would take long.",
    ),
    click.option(
        "--address",
        metavar="ADDR",
        help="Ray cluster to search on: host:port of its head, auto (one that runs on this "
        "machine) or local (a new one). Without it RAY_ADDRESS counts, then local.",
    ),
)


class _Formatter(logging.Formatter):
    """Log formatter that removes secrets."""

    def format(self, record: logging.LogRecord) -> str:
        return redact(super().format(record))


def _configure_logging(_context: click.Context, _option: click.Parameter, verbose: Any) -> Any:  # noqa: ANN401 - as click calls it
    """Send log lines to stderr; without the option only warnings and errors."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO if verbose else logging.WARNING)
    for handler in logging.getLogger().handlers:
        handler.setFormatter(_Formatter("%(message)s"))
    return verbose


def _verbose(*, for_command: bool) -> Callable[[_F], _F]:
    return click.option(
        *("-v", "--verbose"),
        is_flag=True,
        expose_value=for_command,
        callback=_configure_logging,
        help="Say more, on stderr.",
    )


verbose_option = _verbose(for_command=False)  # changes only the log lines
verbose_flag = _verbose(for_command=True)  # also a parameter of the command

result_options = together(json_option, verbose_option)


def write_result(
    to_json: Callable[[], Mapping[str, Any]],
    drawn: RenderableType,
    target: str | None,
    *,
    wide: bool = False,
) -> None:
    """Write a result as JSON to ``target``, or show it as a table without a target."""
    if target is not None:
        write_json(to_json(), target)
    else:
        table_console(wide=wide).print(drawn)


def write_json(record: Mapping[str, Any], target: str) -> None:
    """Write JSON to stdout, or to a file in one step; refuse to overwrite an input file."""
    record = redact_values(record)
    write_json_text(json.dumps(record, indent=1, allow_nan=False) + "\n", target)


def write_json_text(text: str | Iterable[str], target: str) -> None:
    """Write JSON text, possibly in pieces; see `write_json`."""
    if target == STDOUT:
        for piece in [text] if isinstance(text, str) else text:
            click.echo(piece, nl=False)
        return
    write_result_text(text, Path(target))


class SearchProgress:
    """Shows the progress of a search on a terminal, with the fastest strategy so far."""

    def __init__(self, bar: Progress) -> None:
        self._bar, self._task = bar, bar.add_task("searching", total=None, start=True)

    def __call__(self, done: int, total: int) -> None:
        """Show the number of finished candidates and their total."""
        self._bar.update(self._task, completed=done, total=total)

    def leading(self, best: Estimate) -> None:
        """Show the fastest strategy so far; the bound holds for its micro-batch size."""
        bound_s = shown_bound_s(best.lower_bound_s, best.iteration_time_s)
        text = f"searching, best {figure_text(best.iteration_time_s)} s"
        if bound_s is not None:
            text += f" (at least {figure_text(bound_s)} s)"
        self._bar.update(self._task, description=text)


@contextlib.contextmanager
def search_progress() -> Iterator[SearchProgress]:
    """Show the progress of a search on a terminal."""
    with Progress(
        console=console(stderr=True), transient=True, disable=not sys.stderr.isatty()
    ) as bar:
        yield SearchProgress(bar)
