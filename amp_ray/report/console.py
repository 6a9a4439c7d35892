"""The one place that makes consoles: nothing that comes from input is markup."""

import io
from typing import Any, Final

from rich.box import SIMPLE_HEAD
from rich.console import Console, RenderableType
from rich.table import Table

_HTML_WIDTH: Final = 180

_HTML: Final = '<pre style="line-height:1.25;overflow-x:auto"><code>{code}</code></pre>'
"""Without colours of its own: those of the page, light or dark, stay."""


def console(*, stderr: bool = False, width: int | None = None, quiet: bool = False) -> Console:
    """Return a console that prints text as it is."""
    return Console(
        stderr=stderr, width=width, quiet=quiet, markup=False, emoji=False, highlight=False
    )


def plain_table(**options: Any) -> Table:  # noqa: ANN401 - as rich has them
    """Return a table without lines around it."""
    return Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False, **options)


def html_of(drawn: RenderableType) -> str:
    """Return what a notebook shows of something that a console prints."""
    page = Console(
        record=True,
        file=io.StringIO(),
        width=_HTML_WIDTH,
        markup=False,
        emoji=False,
        highlight=False,
    )
    page.print(drawn)
    return page.export_html(inline_styles=True, code_format=_HTML)
