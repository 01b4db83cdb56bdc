"""Prints values and tables on the terminal, without obeying control characters in them, or as JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from tba_hpc.core.wording import printable

NOTHING = "–"
"""Text shown if there is no value yet."""

UNWRAPPED = 100_000
"""Width of output that goes to a file or another program, in characters."""

MIN_TITLE = 12
"""Smallest width of the titles that ``print_lines`` prints, in characters."""

Cell = str | int | float | bool | None


class Terminal(Console):
    """A console that makes control characters in text visible instead of sending them to the terminal.

    The text may come from models, data files and other people's runs. Styles and live displays still work.
    Output that goes to no terminal is not wrapped, unless the environment variable COLUMNS gives a width.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        if not (self.is_terminal or "width" in options or "COLUMNS" in os.environ):
            self.width = UNWRAPPED

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render as the base class does, with text escaped."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)

    def on_broken_pipe(self) -> None:
        """Raise the present error again, where the base class would end the process."""
        raise


class Indented:
    """Text with ``indent`` spaces before each line and, unlike rich's Padding, no spaces after it."""

    def __init__(self, text: Text, indent: int = 2) -> None:
        self._text, self._indent = text, indent

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        """Yield the segments of all lines."""
        narrower = options.update(width=options.max_width - self._indent)
        for line in console.render_lines(self._text, narrower, pad=False):
            yield Segment(" " * self._indent)
            yield from line
            yield Segment.line()


def print_lines(lines: Iterable[tuple[str, Cell]], console: Console | None = None) -> None:
    """Print a title and a value per line, without wrapping, because a path cut in two cannot be copied."""
    out, known = console or Terminal(), list(lines)
    width = max([MIN_TITLE, *(len(title) for title, _ in known)])
    for title, value in known:
        out.print(Text.assemble((f"{title:<{width}} ", "dim"), cell_text(value)), soft_wrap=True)


def print_rows(
    rows: Sequence[Mapping[str, Cell]], *, as_json: bool = False, console: Console | None = None
) -> None:
    """Print rows that all have the same keys, as a table with these columns or as a JSON list of objects."""
    if as_json:
        print(json.dumps([dict(row) for row in rows], indent=2))
        return
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    for name, value in (rows[0] if rows else {}).items():
        # Long texts are folded, not cut, because paths mostly differ at their ends.
        table.add_column(name, justify="left" if isinstance(value, str) else "right", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell_text(value)) for value in row.values()))
    (console or Terminal()).print(table)


def cell_text(value: Cell) -> str:
    """Format a value for tables; floats below 1000 get four significant digits."""
    if value is None:
        return NOTHING
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
