"""Options of commands that search: how many workers, and on which Ray cluster."""

from collections.abc import Callable
from typing import Any, TypeVar

import click

_F = TypeVar("_F", bound=Callable[..., Any])

_AUTO = "auto"


class _Number(click.ParamType[int | None]):
    """``auto``, which is None, or a number from 1."""

    name = "auto|N"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> int | None:
        """Read the text of the option."""
        if value == _AUTO:
            return None
        try:
            number = int(str(value))
        except ValueError:
            number = 0
        if number < 1:
            self.fail(f"{value!r} is neither auto nor a number of workers from 1", param, ctx)
        return number


def workers_options(command: _F) -> _F:
    """Take ``--workers auto|N`` and ``--address ADDR``."""
    number = click.option(
        "--workers",
        "num_workers",
        type=_Number(),
        default=_AUTO,
        show_default=True,
        help="Ray workers that search. auto: none, unless the search would take long.",
    )
    address = click.option(
        "--address",
        "ray_address",
        metavar="ADDR",
        help="Ray cluster to search on: host:port of its head, auto (one that runs on this "
        "machine) or local (a new one). Without it RAY_ADDRESS counts, then local.",
    )
    return number(address(command))
