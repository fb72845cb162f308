"""Console: text of files is shown as escapes, and the console's own control codes still work."""

from __future__ import annotations

import io
import re
from pathlib import Path

from rich.live import Live
from rich.table import Table
from rich.text import Text
from tunedgemm.text.console import Console
from tunedgemm.text.printable import PrintableStream

ROOT = Path(__file__).parents[2]

#: rich drops the \x07
HOSTILE = "k\x1b[2J\x07\u202e\x9b"
SEEN = r"k\x1b[2J\u202e\x9b"


def output(width: int = 120, **options: object) -> tuple[Console, io.StringIO]:
    """Return a console below a printable stream, and the text that reaches the terminal."""
    below = io.StringIO()
    return Console(file=PrintableStream(below), width=width, **options), below


def test_text_in_any_renderable_is_printable():
    """A line, a cell, a heading and a title show escapes."""
    console, below = output()
    table = Table(title=HOSTILE)
    table.add_column(f"column {HOSTILE}" + " " * 40)
    table.add_row(Text(f"text {HOSTILE}"))
    table.add_row(f"cell {HOSTILE}")
    console.print(table)
    console.print(HOSTILE, soft_wrap=True)
    assert below.getvalue().count(SEEN) >= 3
    assert not {"\x1b", "\x07", "\u202e", "\x9b"} & set(below.getvalue())


def test_markup_in_a_name_is_text():
    """Brackets and colons in a name are shown, and not obeyed or an error."""
    console, below = output()
    table = Table("heading")
    table.add_row("no: [/red] [bold]b[/] :smile:")
    console.print(table)
    console.print("[/x] :smile:")
    assert "no: [/red] [bold]b[/] :smile:" in below.getvalue()
    assert "[/x] :smile:" in below.getvalue()


def test_a_terminal_keeps_its_colours_and_its_live_display():
    """The console's own escapes reach the terminal, and those of a text do not."""
    console, below = output(force_terminal=True, color_system="standard")
    console.print(Text(HOSTILE, style="red"))
    assert below.getvalue() == f"\x1b[31m{SEEN}\x1b[0m\n"
    with Live(Text(HOSTILE), console=console, transient=True, redirect_stdout=False, redirect_stderr=False):
        console.print(HOSTILE)
    assert "\x1b[?25l" in below.getvalue()
    assert "\x1b[2J" not in below.getvalue()


def test_only_this_module_makes_a_console():
    """All output through rich is printable: no other module makes rich's own console."""
    made = re.compile(r"from rich\.console import [^\n]*\bConsole\b|rich\.console\.Console\(")
    files = [file for folder in ("core/tunedgemm", "plugins") for file in (ROOT / folder).rglob("*.py") if "tests" not in file.parts]
    assert [file.name for file in files if made.search(file.read_text())] == []
