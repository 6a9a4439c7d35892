"""Consoles and tables; text from input is never read as markup."""

import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from itertools import zip_longest
from textwrap import wrap
from typing import Any, Final, NamedTuple

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.segment import Segment
from rich.style import Style
from rich.table import Table
from rich.text import Text

Column = Mapping[str, Any]  # rich's keywords for a column

FIGURE: Final[Column] = {"justify": "right", "no_wrap": True}
WORD: Final[Column] = {"no_wrap": True}
TEXT: Final[Column] = {"overflow": "fold"}
"""Settings of columns that keep their width, and of the one that wraps its lines."""

_UNBREAKABLE: Final = "\N{NO-BREAK SPACE}"

_HTML_WIDTH: Final = 180

_LEAST_WIDTH: Final = 20

_MANY_ROWS: Final = 200  # from so many on, a table is drawn line by line


class Row(NamedTuple):
    """Cells of a table row, and their style."""

    cells: Sequence[str | Text]
    style: str | None = None


def console(*, stderr: bool = False, width: int | None = None, quiet: bool = False) -> Console:
    """Return a console that never reads text as markup, and draws nothing narrower than a word."""
    made = Console(
        stderr=stderr, width=width, quiet=quiet, markup=False, emoji=False, highlight=False
    )
    made.width = max(made.width, _LEAST_WIDTH)
    return made


class _Table(Table):
    """A table that draws many rows by itself, to the same lines.

    Rich takes about a millisecond for a row, since it renders each cell as a document.
    """

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw the table; by itself if no line is wider than the console and no cell has styles."""
        cells = [(one.header, *one.cells) for one in self.columns]
        is_plain = all(isinstance(cell, Text) and not cell.spans for one in cells for cell in one)
        lines = [[str(cell).split("\n") for cell in one] for one in cells]
        widths = [max(cell_len(line) for cell in one for line in cell) for one in lines]
        width = sum(widths) + len(self._gap) * len(widths) - 1
        if self.row_count < _MANY_ROWS or width > options.max_width or not is_plain or self.title:
            yield from super().__rich_console__(console, options)
            return
        head, *rows = zip(*lines, strict=True)
        yield from self._row(head, widths, [console.get_style("bold")] * len(widths))
        yield Segment("─" * width + "\n")
        of_columns = [console.get_style(column.style) for column in self.columns]
        for row, cells_of_row in zip(self.rows, rows, strict=True):
            style = console.get_style(row.style or "")
            yield from self._row(cells_of_row, widths, [style + one for one in of_columns])

    @property
    def _gap(self) -> str:
        """Blanks behind a cell: its padding and the line between columns."""
        return " " * (self.padding[1] + 1)

    def _row(
        self, cells: Sequence[Sequence[str]], widths: Sequence[int], styles: Sequence[Style]
    ) -> Iterator[Segment]:
        is_right = [column.justify == "right" for column in self.columns]
        ends = [self._gap] * (len(widths) - 1) + [self._gap[1:]]
        for line in zip_longest(*cells, fillvalue=""):
            for text, width, right, end, style in zip(
                line, widths, is_right, ends, styles, strict=True
            ):
                blank = " " * (width - cell_len(text))
                yield Segment((blank + text if right else text + blank) + end, style)
            yield Segment.line()


def table(
    columns: Iterable[tuple[str | Text, Column]],
    rows: Iterable[Row],
    *,
    title: str | None = None,
    caption: str | None = None,
    padding: int = 1,
) -> Table:
    """Return a table without lines around cells, which are never read as markup."""
    drawn = _Table(
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
    """Return the HTML of a printable object, for a notebook: tables, and lines of text."""
    page = Console(
        file=io.StringIO(), width=_HTML_WIDTH, markup=False, emoji=False, highlight=False
    )
    return "".join(_html_parts(drawn, page))


def _html_parts(drawn: Any, page: Console) -> Iterator[str]:  # noqa: ANN401 - what rich can print
    if isinstance(drawn, Table):
        yield _html_table(drawn)
    elif isinstance(drawn, str | Text):
        yield f"<div>{_html_text(drawn)}</div>"
    elif isinstance(drawn, Group):
        for part in drawn.renderables:
            yield from _html_parts(part, page)
    elif hasattr(drawn, "__rich__"):
        yield from _html_parts(drawn.__rich__(), page)
    else:
        for part in drawn.__rich_console__(page, page.options):
            yield from _html_parts(part, page)


def _html_table(drawn: Table) -> str:
    """Return a table of HTML; columns of figures are aligned right."""

    def row(tag: str, cells: Iterable[object]) -> str:
        aligned = zip(cells, drawn.columns, strict=True)
        texts = (
            f'<{tag} style="text-align:{column.justify}">{_html_text(cell)}</{tag}>'
            for cell, column in aligned
        )
        return f"<tr>{''.join(texts)}</tr>"

    head = row("th", (column.header for column in drawn.columns))
    rows = zip(*(column.cells for column in drawn.columns), strict=True)
    body = "".join(row("td", cells) for cells in rows)
    title, caption = (
        f"<div>{_html_text(text)}</div>" if text else "" for text in (drawn.title, drawn.caption)
    )
    return f"{title}<table><thead>{head}</thead><tbody>{body}</tbody></table>{caption}"


def _html_text(text: object) -> str:
    return escape(str(text)).replace("\n", "<br>")
