"""The console for output about a run: text of models, data files and other people's runs is escaped."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from tba_hpc.core.wording import printable


class Terminal(Console):
    """A console that escapes control characters in text, except those of its own styles and displays."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """As the base class."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)
