"""Words for numbers, against English, and texts of strangers, against a terminal."""

import io

from rich.table import Table
from rich.text import Text

from tba_hpc.core.wording import count, printable
from tba_hpc.report.tables import Terminal, print_values


def test_one_is_singular_and_none_and_many_are_plural() -> None:
    assert [count(n, "shard") for n in (0, 1, 2, 3000)] == ["0 shards", "1 shard", "2 shards", "3,000 shards"]
    assert [count(n, "trajectory") for n in (1, 2)] == ["1 trajectory", "2 trajectories"]


HOSTILE = "\x1b]0;owned\x07\x1b[2J\x9b31m\r\u202e[/]tab\tend"


def test_no_text_commands_a_terminal() -> None:
    seen = r"\x1b]0;owned\x07\x1b[2J\x9b31m\r\u202e[/]tab" + "\tend"
    assert printable(HOSTILE) == seen
    assert printable("Grüße, ⌈½⌉\n") == "Grüße, ⌈½⌉\n"

    for console in (
        Terminal(file=io.StringIO(), width=200),
        Terminal(file=io.StringIO(), width=200, no_color=True),
    ):
        print_values({HOSTILE: HOSTILE}, console=console)
        table = Table()
        table.add_column(Text(HOSTILE))
        console.print(table)
        console.print(HOSTILE, markup=False)
        assert isinstance(console.file, io.StringIO)
        assert r"\x1b]0;owned" in console.file.getvalue()
        assert not set(console.file.getvalue()) & set("\x1b\x07\x9b\r\u202e")


def test_a_terminal_still_has_its_own_colours() -> None:
    console = Terminal(file=io.StringIO(), force_terminal=True, color_system="standard")
    console.print(Text("\x1b[1m", style="red"))
    assert isinstance(console.file, io.StringIO) and console.file.getvalue() == "\x1b[31m\\x1b[1m\x1b[0m\n"
