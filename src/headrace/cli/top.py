"""`headrace top`: the overview of a server in a terminal, worst queue first; q leaves.

It asks and draws at most twice a second. When the server does not answer, the last good picture stays, greyed, under a
strip that says since when. With --once, or into a pipe, one picture is printed as text.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import urlsplit

from headrace import notation
from headrace.cli import workers
from headrace.cli.output import (
    Cell,
    Column,
    Styled,
    console,
    count_cell,
    is_terminal,
    print_json,
    print_line,
    print_table,
    state_cell,
    table_of,
)
from headrace.cli.session import UsageError, add_client_flags, connected, url_of
from headrace.errors import HeadraceError

if TYPE_CHECKING:
    from headrace.cli.judgement import Judged, Sentence
    from headrace.client.client import Client
    from headrace.commands.dashboard import HistoryView, Overview

_FASTEST_S: Final = 0.5
_PATIENCE_S: Final = 2.0
_TREND: Final = 10
_MAX_WORKERS: Final = 5
_FRAME_LINES: Final = 8
"""Lines around the rows of the queues: sentence, two sparklines, header, footer and the gaps between them."""


def prepare(parser: argparse.ArgumentParser) -> None:
    parser.description = "Watch queues, rates and workers in the terminal. q quits."
    parser.add_argument("--once", action="store_true", help="print once and exit")
    parser.add_argument(
        "--interval", metavar="SPAN", default="1s", help="refresh interval (default: 1s, at least 0.5s)"
    )
    add_client_flags(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from headrace.durations import seconds

    interval = seconds(arguments.interval, "--interval")
    if interval < _FASTEST_S:
        raise UsageError("--interval must be at least 500ms: nobody reads faster")
    with connected(arguments) as client:
        picture = look(client)
        if arguments.as_json:
            print_json({"overview": picture.overview, "history": picture.history})
        elif arguments.once or not is_terminal():
            _print(picture)
        else:
            _watch(client, picture, interval, urlsplit(url_of(arguments)))
    return 0


class Picture(NamedTuple):
    """The server at one moment."""

    overview: Overview
    history: HistoryView
    queues: list[Judged]
    sentence: Sentence
    unit: str


def look(client: Client) -> Picture:
    from headrace.cli.judgement import judge, sentence, worst_first
    from headrace.commands.dashboard import DashboardHistory, DashboardOverview

    overview = client.ask_blocking(DashboardOverview(), _PATIENCE_S).data
    history = client.ask_blocking(DashboardHistory(window="15m", top=50), _PATIENCE_S).data
    queues = worst_first([judge(row, history) for row in overview.queues])
    fastest = max((max(queue.in_per_sec, queue.out_per_sec) for queue in queues), default=0.0)
    unit = notation.rate_unit(max(fastest, history.rates.in_per_sec, history.rates.out_per_sec))
    return Picture(overview, history, queues, sentence(queues, overview, unit), unit)


# -- rows --------------------------------------------------------------------------------------------------------------


def _columns(unit: str) -> list[Column]:
    return [
        Column("QUEUE", gives_way=16),
        Column("WAITING", is_number=True),
        Column("TREND", spared=5),
        Column("ACTIVE", is_number=True, spared=3),
        Column("DELAYED", is_number=True, spared=8),
        Column("FAILED", is_number=True, spared=1),
        Column(f"IN/{unit}", is_number=True, spared=7),
        Column(f"OUT/{unit}", is_number=True, spared=6),
        Column("OLDEST", is_number=True, spared=4),
    ]


def _row(queue: Judged, unit: str) -> list[Cell]:
    row = queue.row
    name = f"‖ {row.name}" if row.paused else f"! {row.name}" if queue.trouble else row.name
    return [
        Styled(name, state_cell("paused").style if row.paused else "bold" if queue.trouble else ""),
        count_cell(row.waiting, "waiting"),
        Styled(notation.sparkline(queue.depths, _TREND) if any(queue.depths) else "", state_cell("waiting").style),
        count_cell(row.active, "active"),
        count_cell(row.delayed, "delayed"),
        count_cell(row.dlq, "failed"),
        notation.rate(queue.in_per_sec, unit),
        notation.rate(queue.out_per_sec, unit),
        Styled(notation.duration(queue.oldest_ms) if row.waiting else "", "red" if queue.is_late else ""),
    ]


def _sparks(picture: Picture, width: int) -> Iterator[tuple[str, str, str]]:
    """Name, bars and newest figure of the two lines over time."""
    rates, series = picture.history.rates, picture.history.series
    for name, values, newest in (("in", series.pushed, rates.in_per_sec), ("out", series.out, rates.out_per_sec)):
        yield name, notation.sparkline(values, width), f"{notation.rate(newest, picture.unit)}/{picture.unit}"


# -- as text -----------------------------------------------------------------------------------------------------------


def _print(picture: Picture) -> None:
    print_line(f"{picture.sentence.glyph} {picture.sentence.text}", picture.sentence.style)
    for name, bars, newest in _sparks(picture, min(60, console().width - 16) if is_terminal() else 60):
        print_line(f"{name:4}{bars}  {newest}")
    print_line()
    print_table(_columns(picture.unit), [_row(queue, picture.unit) for queue in picture.queues])
    found = picture.overview.workers.workers
    if found:
        print_line()
        print_table(workers.COLUMNS, [workers.row_of(worker, picture.overview.timestamp) for worker in found])


# -- live --------------------------------------------------------------------------------------------------------------


def _watch(client: Client, picture: Picture, interval: float, url: Any) -> None:
    from rich.live import Live

    place = f"{url.hostname}:{url.port or 6789}" if url.hostname else url.path
    trouble: str | None = None
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the terminal has to be put back
    with _keys() as pressed, Live(console=console(), screen=True, auto_refresh=False) as live:
        while True:
            live.update(_drawn(picture, place, trouble), refresh=True)
            if _is_over(pressed, interval):
                return
            try:
                picture, trouble = look(client), None
            except HeadraceError as error:
                trouble = notation.one_line(str(error))


def _drawn(picture: Picture, place: str, trouble: str | None) -> Any:
    """The picture as rich draws it, cut to the size of the terminal."""
    from rich.console import Group
    from rich.styled import Styled as Dyed
    from rich.text import Text

    parts = list(_parts(picture, place, bool(trouble)))
    if trouble is None:
        return Group(*parts)
    since = notation.clock_time(picture.overview.timestamp)[:-4]
    strip = Text(f" No answer: {trouble}. These figures are of {since}. ", "bold white on red", no_wrap=True)
    return Group(strip, Dyed(Group(*parts), "dim"))


def _parts(picture: Picture, place: str, has_strip: bool) -> Iterator[Any]:
    from rich.text import Text

    width, height = console().size
    found = picture.overview.workers.workers[:_MAX_WORKERS]
    glyph, text, style = picture.sentence
    told = Text(text, style).wrap(console(), width - 2)  # what matters most is not cut
    room = max(1, height - _FRAME_LINES - (len(found) + 2 if found else 0) - has_strip - (len(told) - 1))
    for number, line in enumerate(told):
        yield Text.assemble((f"{' ' if number else glyph} ", style), line, no_wrap=True)
    for name, bars, newest in _sparks(picture, max(10, width - 16)):
        yield Text.assemble((f"{name:4}", "bright_black"), (bars, "cyan"), f" {newest:>10}", no_wrap=True)
    yield ""
    yield table_of(_columns(picture.unit), [_row(queue, picture.unit) for queue in picture.queues[:room]])
    if found:
        yield ""
        yield table_of(workers.COLUMNS, [workers.row_of(worker, picture.overview.timestamp) for worker in found])
    yield ""
    yield _footer(picture, place, picture.overview.total_queues - min(room, len(picture.queues)))


def _footer(picture: Picture, place: str, hidden: int) -> Any:
    from rich.text import Text

    stats = picture.overview.workers.stats
    more = f"{notation.counted(hidden, 'more queue')}  " if hidden > 0 else ""
    told = (
        f"{more}{notation.counted(stats.total, 'worker')}, {stats.active_jobs} of {stats.concurrency_slots} slots busy"
    )
    at = notation.clock_time(picture.overview.timestamp)[:-4]
    return Text(f"q quits  {at}  {told}  {place}", "bright_black", overflow="ellipsis", no_wrap=True)


def _is_over(pressed: Callable[[float], str | None], seconds: float) -> bool:
    """Wait until the next picture is due or q is pressed; other keys change nothing."""
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        if pressed(left) == "q":
            return True
    return False


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], str | None]]:
    """A function that waits for a key for so many seconds; keys come at once and unseen while this lasts."""
    if not sys.stdin.isatty():
        yield lambda seconds: time.sleep(seconds)
        return
    import termios
    import tty

    before = termios.tcgetattr(sys.stdin)

    def pressed(seconds: float) -> str:
        ready, _, _ = select.select([sys.stdin], [], [], seconds)
        return os.read(sys.stdin.fileno(), 1).decode(errors="replace") if ready else ""

    tty.setcbreak(sys.stdin)
    try:
        yield pressed
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
