"""Consoles and tables; text from input is never read as markup."""

import io
from collections.abc import Iterable, Mapping, Sequence
from textwrap import wrap
from typing import Any, Final, NamedTuple

from rich.box import SIMPLE_HEAD
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

Column = Mapping[str, Any]  # rich's keywords for a column

FIGURE: Final[Column] = {"justify": "right", "no_wrap": True}
WORD: Final[Column] = {"no_wrap": True}
TEXT: Final[Column] = {"overflow": "fold"}
"""Settings of columns that keep their width, and of the one that wraps its lines."""

_UNBREAKABLE: Final = "\N{NO-BREAK SPACE}"

_HTML_WIDTH: Final = 180

_HTML: Final = '<pre style="line-height:1.25;overflow-x:auto"><code>{code}</code></pre>'
"""Has no colours of its own, so that the light or dark colours of the page apply."""


class Row(NamedTuple):
    """Cells of a table row, and their style."""

    cells: Sequence[str | Text]
    style: str | None = None


def console(*, stderr: bool = False, width: int | None = None, quiet: bool = False) -> Console:
    """Return a console that never reads text as markup."""
    return Console(
        stderr=stderr, width=width, quiet=quiet, markup=False, emoji=False, highlight=False
    )


def table(
    columns: Iterable[tuple[str | Text, Column]],
    rows: Iterable[Row],
    *,
    title: str | None = None,
    caption: str | None = None,
    padding: int = 1,
) -> Table:
    """Return a table without lines around cells.

    Args:
        columns: Name and settings of each column.
        rows: Rows, whose cells are never read as markup.
        title: Title above the table, aligned left.
        caption: Caption below the table.
        padding: Number of blanks between columns.
    """
    drawn = Table(
        box=SIMPLE_HEAD,
        padding=(0, padding, 0, 0),
        show_edge=False,
        title=None if title is None else Text(title),
        title_justify="left",
        caption=None if caption is None else Text(caption),
        caption_justify="left",
        header_style="bold",
    )
    for name, settings in columns:
        drawn.add_column(name if isinstance(name, Text) else Text(name), **settings)
    for cells, style in rows:
        texts = (cell if isinstance(cell, Text) else Text(cell) for cell in cells)
        drawn.add_row(*texts, style=style)
    return drawn


def phrase_lines(text: str, room: int) -> list[str]:
    """Break a list of phrases into lines, between phrases if possible."""
    phrases = (
        phrase.replace(" ", _UNBREAKABLE) if len(phrase) < room else phrase
        for phrase in text.split(", ")
    )
    return [
        line.replace(_UNBREAKABLE, " ")
        for line in wrap(", ".join(phrases), room, break_on_hyphens=False)
    ]


def html_of(drawn: RenderableType) -> str:
    """Return the HTML of a printable object, for a notebook."""
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
