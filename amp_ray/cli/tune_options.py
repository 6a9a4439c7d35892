"""Options of a study, which ``amp-ray tune`` and the scripts of experiments share."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

import click

_F = TypeVar("_F", bound=Callable[..., Any])

_REPLAY: Final = "replay:"
_POLICIES: Final = ("best", "predicted-order", "random", "amp-2022")

Backend = Literal["ssh", "local", "replay"]


class TrialsType(click.ParamType[tuple[Backend, Path | None]]):
    """``ssh``, ``local`` or ``replay:TABLE.csv``."""

    name = "ssh|local|replay:TABLE.csv"

    def convert(
        self,
        value: Any,  # noqa: ANN401 - as click calls it
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> tuple[Backend, Path | None]:
        """Read the text of the option."""
        if isinstance(value, tuple):
            return value
        if value == "ssh":
            return "ssh", None
        if value == "local":
            return "local", None
        if not value.startswith(_REPLAY) or value == _REPLAY:
            self.fail(f"{value!r} is none of ssh, local, replay:TABLE.csv", param, ctx)
        return "replay", Path(value.removeprefix(_REPLAY))


_OPTIONS: Final = (
    click.option(
        "--trials",
        "trials",
        type=TrialsType(),
        help="Where trials run: on the hosts by SSH, on this machine, or not at all: answered "
        "from a table of recorded measurements. Default: trials.backend of the experiment.",
    ),
    click.option(
        "--time-budget",
        "time_budget_s",
        metavar="SECONDS",
        type=click.FloatRange(min=0, min_open=True),
        help="Wall time that the study may take; what runs then is ended.",
    ),
    click.option(
        "--concurrency",
        type=click.IntRange(min=1),
        help="Trials side by side, one per host group (trials.host_groups). Default: all.",
    ),
    click.option(
        "--study",
        "study_path",
        metavar="DIR",
        type=click.Path(path_type=Path),
        help="Folder that everything is kept in. Default: NAME-study.",
    ),
    click.option("--resume", is_flag=True, help="Go on with the study in that folder."),
    click.option(
        "--salvage",
        is_flag=True,
        help="With --resume, of a damaged journal: keep the records before the damage and set the "
        "rest aside.",
    ),
    click.option(
        "--policy",
        type=click.Choice(_POLICIES),
        default=_POLICIES[0],
        show_default=True,
        help="Which strategy is tried next; all but the first are for comparison.",
    ),
    click.option("--seed", type=click.IntRange(min=0), default=0, help="Of --policy random."),
    click.option(
        "--pool",
        type=click.Choice(["auto", "threads", "ray"]),
        default="auto",
        show_default=True,
        help="What holds the hosts: threads of this process, or Ray actors. auto: actors over SSH "
        "where Ray is installed, and on a Ray cluster.",
    ),
    click.option("--doctor/--no-doctor", default=True, help="Whether hosts are checked before."),
)
"""In the order of the help text."""


def tune_options(command: _F) -> _F:
    """Take the options of a study, which ``tune`` and the scripts of experiments share."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command
