"""What people see: text that can't play tricks on a terminal, tables, and outputs that may close.

Everything that is printed goes through here. Rich is imported on first use, so that `--help` and
`import deepmoe` stay quick.
"""

import contextlib
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from deepmoe.errors import OutputClosed

if TYPE_CHECKING:
    from rich.console import Console

LOG_WIDTH = 200  # a log has no edge to keep to
FIGURE = re.compile(r"[-+]?\.?\d|-?$")  # how cells of a column of figures begin


def printable(text: object) -> str:
    """The text with control characters, and what no terminal could show, as escapes."""
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in str(text)
    )


def fill_closed_outputs() -> None:
    """Lets what is printed go nowhere where a standard output was closed before the start.

    Its number would else be that of the next file that is opened, which would get all of it.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # it gets the lowest one free
        if getattr(sys, name) is None:
            mode = "r" if name == "stdin" else "w"
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115


def say(text: object = "", *, end: str = "\n") -> None:
    """Prints text, of one line or several, to standard output."""
    with noticing_closed_output():
        sys.stdout.write("\n".join(map(printable, str(text).split("\n"))) + end)
        sys.stdout.flush()


def complain(text: object) -> None:
    """Prints a line to standard error; it can't matter if nobody reads it."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(printable(text) + "\n")
        sys.stderr.flush()


def print_table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Prints rows under a header: words to the left, figures to the right."""
    say(table_text(header, rows))


def table_text(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Rows under a header as lines of text, as wide as the terminal if there is one."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(
        box=box.SIMPLE_HEAD,
        show_header=any(header),
        header_style="none",
        pad_edge=False,
        padding=(0, 1),
    )
    cells = [[printable(cell) for cell in row] for row in rows]
    for i, title in enumerate(header):
        figures = i > 0 and all(FIGURE.match(cell) for row in cells for cell in row[i : i + 1])
        table.add_column(title, justify="right" if figures else "left", overflow="fold")
    for row in cells:
        table.add_row(*(Text(cell) for cell in row))  # texts have no markup
    console = make_console()
    with console.capture() as drawn:
        console.print(table, highlight=False)
    return "\n".join(line.rstrip() for line in drawn.get().splitlines() if line.strip())


def make_console(*, stderr: bool = False) -> "Console":
    """A console of Rich's; nothing on it is taken for markup, and a log is as wide as it likes."""
    from rich.console import Console

    class QuietConsole(Console):
        def on_broken_pipe(self) -> None:
            raise OutputClosed

    def make(width: int | None) -> Console:
        return QuietConsole(
            stderr=stderr, width=width, soft_wrap=True, markup=False, highlight=False, emoji=False
        )

    console = make(None)
    return console if console.is_terminal else make(LOG_WIDTH)


def drop_output() -> None:
    """Sends what is still to be printed nowhere: the interpreter would complain at its end."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())


@contextmanager
def noticing_closed_output() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError as error:
        raise OutputClosed from error
    except OSError as error:
        raise OutputClosed(f"the output can't be written: {error.strerror}") from error
