"""What people see: text that can't play tricks on a terminal, tables, and outputs that may close.

Everything that is printed goes through here. Rich is imported on first use, so that `--help` and
`import deepmoe` stay quick.
"""

import contextlib
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from deepmoe.errors import OutputClosed

if TYPE_CHECKING:
    from rich.console import Console

LOG_WIDTH = 200  # a log has no edge to keep to


def printable(text: object) -> str:
    """The text with control characters, and what no terminal could show, as escapes."""
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in str(text)
    )


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
    """Prints rows under a header, the first column to the left."""
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
    for i, title in enumerate(header):
        table.add_column(title, justify="left" if i == 0 else "right", overflow="fold")
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))  # texts have no markup
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
