"""What commands print: tables, cards, lines and JSON on stdout; progress, questions and notes on stderr.

On a terminal rich draws (colours of states, columns that shrink to the width); into a pipe the same rows go as plain
aligned text, uncut and without colour, and rich is not even imported. Text that came from outside must pass through
`headrace.notation` before it gets here.
"""

from __future__ import annotations

import functools
import json
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from headrace import notation
from headrace.cli.session import UsageError, advised
from headrace.errors import Refused

if TYPE_CHECKING:
    from msgspec import Raw
    from rich.console import Console
    from rich.progress import Progress

# The same colours on dashboard, terminal and report. A colour never stands alone: the word is there too.
STATE_STYLES: Final = {
    "waiting": "yellow",
    "prioritized": "yellow",
    "active": "bright_blue",
    "completed": "green",
    "failed": "red",
    "delayed": "magenta",
    "waiting-children": "magenta",
    "paused": "bright_black",
}


_GAP: Final = 2
"""Spaces between columns."""


class Styled(NamedTuple):
    text: str
    style: str


Cell = str | Styled


class Column(NamedTuple):
    title: str
    is_number: bool = False
    gives_way: int = 0
    """Is cut when the terminal is too narrow, but not below so many characters while other columns can be spared."""
    spared: int = 0
    """Is left out when cutting is not enough, the highest number first; 0: never."""


def state_cell(state: str) -> Styled:
    return Styled(state, STATE_STYLES.get(state, ""))


def count_cell(value: int, state: str) -> Cell:
    """How many jobs are in a state, in its colour unless there are none."""
    return Styled(notation.count(value), STATE_STYLES.get(state, "")) if value else "0"


def is_terminal(stream: IO[str] | None = None) -> bool:
    return (stream or sys.stdout).isatty()


@functools.cache
def console() -> Console:
    from rich.console import Console

    return Console(highlight=False, markup=False, emoji=False)


# -- stdout ------------------------------------------------------------------------------------------------------------


def print_line(text: str = "", style: str = "") -> None:
    if is_terminal() and style:
        console().print(text, style=style, soft_wrap=True)
    else:
        print(text)


def print_table(columns: Sequence[Column], rows: Sequence[Sequence[Cell]]) -> None:
    if is_terminal():
        console().print(table_of(columns, rows))
        shown = _fitting(columns, rows)
        if left_out := [column.title for column in columns if column not in shown]:
            note(f"left out, as the terminal is narrow: {', '.join(left_out)}")
        return
    cells = _texts(columns, rows)
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        fitted = [
            text.rjust(width) if column.is_number else text.ljust(width)
            for text, width, column in zip(line, widths, columns, strict=True)
        ]
        print("  ".join(fitted).rstrip())


def _fitting(columns: Sequence[Column], rows: Sequence[Sequence[Cell]]) -> list[Column]:
    """Those columns for which there is room."""
    from rich.cells import cell_len

    wide = [max(map(cell_len, column)) for column in zip(*_texts(columns, rows), strict=True)]
    least = {c: min(width, c.gives_way or width) for c, width in zip(columns, wide, strict=True)}
    shown = list(columns)
    while sum(least[c] for c in shown) + _GAP * (len(shown) - 1) > console().width:
        spared = max(shown, key=lambda column: column.spared)
        if not spared.spared:
            break
        shown.remove(spared)
    return shown


def _texts(columns: Sequence[Column], rows: Sequence[Sequence[Cell]]) -> list[list[str]]:
    return [[column.title for column in columns], *([_text(cell) for cell in row] for row in rows)]


def table_of(columns: Sequence[Column], rows: Sequence[Sequence[Cell]]) -> Any:
    """The table as rich draws it, with the columns for which the terminal has room."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bright_black")
    shown = _fitting(columns, rows)
    for column in shown:
        justify: Any = "right" if column.is_number else "left"
        table.add_column(column.title, justify=justify, no_wrap=not column.gives_way, overflow="ellipsis")
    for row in rows:
        cells = [cell for column, cell in zip(columns, row, strict=True) if column in shown]
        table.add_row(*(Text(_text(cell), _style(cell), no_wrap=True, overflow="ellipsis") for cell in cells))
    return table


def _text(cell: Cell) -> str:
    return cell.text if isinstance(cell, Styled) else cell


def _style(cell: Cell) -> str:
    return cell.style if isinstance(cell, Styled) else ""


def print_fields(fields: Iterable[tuple[str, Cell]]) -> None:
    """A card: names on the left, values on the right; fields without a value are left out."""
    shown = [(name, value) for name, value in fields if _text(value)]
    width = max((len(name) for name, _ in shown), default=0)
    for name, value in shown:
        if is_terminal():
            from rich.text import Text

            console().print(Text.assemble((name.ljust(width), "bright_black"), "  ", (_text(value), _style(value))))
        else:
            print(f"{name.ljust(width)}  {_text(value)}")


def print_findings(facts: Sequence[str], problems: Sequence[str], all_well: str) -> None:
    for fact in facts:
        print(f"  {fact}")
    for problem in problems:
        print(f"! {problem}")
    print(f"{notation.counted(len(problems), 'problem')} found" if problems else all_well)


def print_json(value: Any) -> None:
    """One JSON document: indented for eyes, on one line for pipes."""
    if is_terminal():
        print_payload(value)
    else:
        print_json_line(value)


def print_json_line(value: Any) -> None:
    """Anything a server may answer, payloads included."""
    from headrace.server.jsonwire import to_json

    text = to_json(value).decode()
    sys.stdout.write(f"{_visible(text) if is_terminal() else text}\n")


def payload_of(encoded: bytes | Raw) -> Any:
    """What a job carries, as JSON can show it: other clients write what Python cannot hold, such as maps as keys."""
    from headrace.server.jsonwire import packed_to_json

    return json.loads(packed_to_json(bytes(encoded))) if encoded else None


def print_payload(value: Any, indent: str = "") -> None:
    """Data or a result of a job, as readable as JSON can be."""
    from headrace.server.jsonwire import to_json

    text = json.dumps(json.loads(to_json(value)), indent=2, ensure_ascii=False)
    for line in text.split("\n"):
        print(f"{indent}{_visible(line)}")


def _visible(text: str) -> str:
    """The same JSON with everything escaped that a terminal might obey."""
    return text if text.isprintable() else "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in text)


# -- stderr ------------------------------------------------------------------------------------------------------------


def note(text: str) -> None:
    print(text, file=sys.stderr)


def confirm(question: str, is_sure: bool) -> None:
    """Ask before something cannot be undone. Without a terminal to ask at, `--yes` has to say it."""
    if is_sure:
        return
    if not sys.stdin.isatty():
        raise advised(UsageError(f"{question}: this cannot be undone, and there is no terminal to ask at"), "add --yes")
    print(f"{question}? [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise Refused("nothing was done")


_LABEL: Final = 28


class Advance(Protocol):
    def __call__(self, done: float, jobs: int | None = None, /) -> None: ...


@contextmanager
def progress(what: str, total: float | None, *, is_quiet: bool = False) -> Iterator[Advance]:
    """A bar with rate and time left while stderr is a terminal.

    The function it gives takes how much of `total` is done and, where it is jobs that are counted, how many.
    """
    if is_quiet or not is_terminal(sys.stderr):
        yield lambda done, jobs=None: None
        return
    bar = _bar()
    began = time.monotonic()
    with bar:
        task = bar.add_task(notation.one_line(what, _LABEL), total=total, told="")

        def advance(done: float, jobs: int | None = None) -> None:
            per_second = (jobs or 0) / max(0.001, time.monotonic() - began)
            told = "" if jobs is None else f"{notation.jobs(jobs)}  {notation.count(per_second)}/s"
            bar.update(task, completed=done, told=told)

        yield advance


def _bar() -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        TextColumn("{task.fields[told]}"),
        TimeRemainingColumn(compact=True),
        console=Console(stderr=True, highlight=False, markup=False),
        refresh_per_second=4,
        expand=True,
        transient=True,
    )
