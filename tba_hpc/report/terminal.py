"""The console for all that is shown of a run: what a model, a data file or a stranger's run says is text."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from tba_hpc.core.wording import printable


class Terminal(Console):
    """A console that shows control characters of texts; those of its own styles and displays it obeys."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """As the base class."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)
