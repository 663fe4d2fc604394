"""Runs the ads demo from end to end: feed, pipeline, page, display, and the comparison at the end.

What was interrupted goes on: the feed from the ends of the log, the pipeline from its checkpoint.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import polars as pl
from rich.console import Console
from rich.table import Table

from millstream.client import EventLog, connect
from millstream.client.address import log_folder, shown
from millstream.client.open import open_reader
from millstream.demo import ads_expected
from millstream.demo.ads_disorder import DisorderedRecords
from millstream.demo.ads_events import TOPIC
from millstream.demo.ads_input import AdsInput
from millstream.demo.ads_pipeline import (
    AD_CTR,
    AD_STOPS,
    APP,
    BUDGET_EVENTS,
    DECISIONS,
    SPEND_BY_DAY,
    build,
)
from millstream.demo.display import Display
from millstream.demo.feed import FeedThread, create_topic, remaining
from millstream.demo.folder import DemoRun, mark_completed, prepare
from millstream.errors import ConfigError, EnvironmentProblem
from millstream.pipeline.engine_choice import EngineName, choose_engine
from millstream.views.dead_letter_relay import dead_letter_topic
from millstream.views.reader import state_store_path
from millstream.views.runs.progress import Progress
from millstream.views.server.server import serve
from millstream.views.state_store.sqlite_store import SqliteStateStore

EXIT_DIFFERENT = 1
EXIT_STOPPED = 130
NO_PAGE = "none"


@dataclass(frozen=True)
class AdsOptions:
    """What the command line says.

    ``folder`` holds the mark, state and views, and is the log itself where that is no address of
    brokers. ``page``: where to serve it, or ``"none"``. ``master``: the Spark cluster, if not here.
    ``engine`` is that of :meth:`millstream.App.run`.
    """

    log: Path | str
    folder: Path
    input: AdsInput
    speed: float
    fresh: bool = False
    master: str | None = None
    page: str = NO_PAGE
    stay: bool = False
    engine: EngineName | None = None


def run_ads(options: AdsOptions, console: Console) -> int:
    """Run the demo to its end; return the exit code: 0 if all is equal to the other computation.

    Raises:
        ConfigError: The folder is somebody else's, or holds a run with other input.
        FolderOwnedError: Another process, perhaps another demo, is at work in the folder.
        JobFailedError: The job failed; the message says why.
    """
    options.input.check()
    folder = log_folder(options.log)
    if folder not in (None, options.folder):
        raise ConfigError(
            f"The log is the folder {options.log}, which holds state and views as well, and --folder is "
            f"{options.folder}. Leave --folder out, or give --log kafka://…"
        )
    elsewhere = {"log": shown(options.log)} if folder is None else {}
    run = DemoRun("ads", {**options.input.options, **elsewhere})
    if elsewhere:
        with connect(options.log) as log:
            goes_on = prepare(
                options.folder, run, fresh=options.fresh, clear=partial(clear_log, log)
            )
    else:
        goes_on = prepare(options.folder, run, fresh=options.fresh)
    travel = options.input.disorder()
    with connect(options.log) as log:
        ends = create_topic(log)
    waiting = remaining(travel, ends).height
    if goes_on:
        total = travel.order.height
        console.print(f"Going on: {total - waiting:,} of {total:,} records are in the log.")
    with serve_page(options.folder, options.page, console) as url:
        if not _Pipeline(options, travel, console, waits=waiting > 0).run(url):
            console.print("Stopped. Start it again and it goes on from here.")
            return EXIT_STOPPED
        equal = compare(options.log, options.input, console, state=options.folder)
        mark_completed(options.folder, run)
        if equal:
            console.print(f"Look around: millstream view show {AD_CTR} --log {options.folder}")
        if options.stay and url:
            wait_for_interrupt(url, console)
    return 0 if equal else EXIT_DIFFERENT


def clear_log(log: EventLog, ours: bool) -> None:  # noqa: FBT001 - its one option
    """Remove the demo's topics and fences, if they are those of its own runs.

    Raises:
        ConfigError: there are topics that this folder's demo has not made.
    """
    there = sorted(
        {TOPIC, DECISIONS, BUDGET_EVENTS, AD_STOPS, dead_letter_topic(APP)} & log.topics().keys()
    )
    if there and not ours:
        raise ConfigError(
            f"The log has the topics {', '.join(there)} already, and the demo that works in this folder has "
            "not made them. Give the --folder of the demo that did, or another --log, or delete them."
        )
    for name in there:
        log.delete_topic(name)
    for writer in (f"{APP}/", f"dead-relay/{APP}/"):
        log.delete_fences(writer)


def wait_for_interrupt(url: str, console: Console) -> None:
    """Wait for Ctrl-C, while the page is served."""
    console.print(f"The page stays at {url} until Ctrl-C.")
    with suppress(KeyboardInterrupt):
        while True:  # a wait without an end could miss a signal that comes just before it
            time.sleep(0.1)


@contextmanager
def serve_page(folder: Path, listen: str, console: Console) -> Iterator[str]:
    """Serve the page until the block ends; give its address, "" where there is none.

    A port that is taken is no reason to stop: another one is used.
    """
    with ExitStack() as opened:
        url = _serve(opened, folder, listen, console)
        if url:
            console.print(f"The page: {url}")
        yield url


def _serve(opened: ExitStack, folder: Path, listen: str, console: Console) -> str:
    if listen == NO_PAGE:
        return ""
    try:
        return opened.enter_context(serve(folder, listen=listen)).url
    except EnvironmentProblem as problem:
        console.print(f"Without the page: {problem}")
        return ""
    except ConfigError:
        host, _, port = listen.rpartition(":")
        if port == "0":
            raise
        return opened.enter_context(serve(folder, listen=f"{host}:0")).url


class _Pipeline:
    """One run of the app beside its feed, shown on a console."""

    def __init__(
        self, options: AdsOptions, travel: DisorderedRecords, console: Console, *, waits: bool
    ) -> None:
        self._options = options
        self._travel = travel
        self._console = console
        self._waits = waits  # for records that the feed has still to write
        self._lengths = travel.lengths
        self._reader = open_reader(options.log)

    def run(self, url: str) -> bool:
        """Run until all records are read; return False if Ctrl-C came first."""
        chosen = self._options
        given = chosen.input
        app = build(chosen.log, given.clients, given.stop_rule, state=chosen.folder)
        with (
            Display(self._console, url=url, engine=choose_engine(chosen.engine)) as display,
            FeedThread(chosen.log, self._travel, chosen.speed) as feeding,
        ):
            try:
                report = app.run(
                    until=self._all_read if self._waits else "caught-up",
                    engine=chosen.engine,
                    master=chosen.master,
                    on_progress=lambda progress: self._take(display, feeding, progress),
                )
            finally:
                feeding.check()  # an interrupt may have been its own
        return report.reason != "stopped"

    def _ends(self) -> list[int]:
        return [end for _, end in self._reader.offsets(TOPIC)]

    def _all_read(self, _: Progress) -> bool:
        # Not by the lag of the progress: the feed may have added the last records since it was measured.
        with SqliteStateStore(state_store_path(self._options.folder, APP), readonly=True) as store:
            position = store.position(APP).get(TOPIC, {})
        return [
            position.get(str(number), 0) for number in range(len(self._lengths))
        ] == self._lengths

    def _take(self, display: Display, feeding: FeedThread, progress: Progress) -> None:
        feeding.start()
        with SqliteStateStore(state_store_path(self._options.folder, APP), readonly=True) as store:
            spend = store.scan(SPEND_BY_DAY)
            ledger = store.ledger(APP)
        exits = ("late", "duplicate", "dead")
        display.show(
            progress,
            spend,
            records=sum(self._lengths),
            arrived=sum(self._ends()),
            left_out={name: sum(int(line[name]) for line in ledger) for name in exits},
        )


@dataclass(frozen=True)
class DemoComparison:
    """How the results differ from the independent computation: rows that are too many, or missing."""

    outputs: int
    rows: int
    too_many: int
    missing: int

    @property
    def equal(self) -> bool:
        return self.too_many == self.missing == 0


def compare(
    log: Path | str, given: AdsInput, console: Console, *, state: Path | None = None
) -> bool:
    """Compare views and topics with the independent computation; print it, True if all are equal.

    ``state`` is the folder of state and views; the log's own, if not given.
    """
    with connect(log) as opened:
        wanted = ads_expected.expected_results(opened, given.clients, given.stop_rule)
        return compare_results(
            opened, wanted, console, state=Path(log if state is None else state)
        ).equal


def compare_results(
    log: EventLog, wanted: ads_expected.ExpectedResults, console: Console, *, state: Path
) -> DemoComparison:
    """Compare views and topics with what they must hold; print it."""
    console.print("Comparing with one batch computation over the raw log:")
    found = {name: topic_rows(log, name, rows) for name, rows in wanted.topics.items()}
    with SqliteStateStore(state_store_path(state, APP), readonly=True) as store:
        views = {name: store.scan(name) for name in wanted.views}
    kinds = {"view": (views, wanted.views), "topic": (found, wanted.topics)}
    outputs = rows = 0
    wrong = {"found": 0, "expected": 0}
    for kind, (tables, expected) in kinds.items():
        for name, those in expected.items():
            differing = ads_expected.difference(tables[name], those)
            _print_comparison(f"{kind} {name}", differing, those.height, console)
            outputs, rows = outputs + 1, rows + those.height
            for only in wrong:
                wrong[only] += int(differing.filter(pl.col("only") == only)["times"].sum())
    return DemoComparison(outputs, rows, too_many=wrong["found"], missing=wrong["expected"])


def topic_rows(log: EventLog, topic: str, like: pl.DataFrame) -> pl.DataFrame:
    """Read the JSON objects of a topic, with the columns and types of a table."""
    values = [
        pl.DataFrame(log.read(topic, number))["value"].cast(pl.String)
        for number in range(log.topics()[topic].partitions)
    ]
    times = [name for name, dtype in like.schema.items() if dtype == pl.Datetime("us", "UTC")]
    texts = {**like.schema, **dict.fromkeys(times, pl.String())}
    rows = pl.concat(values).str.json_decode(pl.Struct(texts)).struct.unnest()
    return rows.with_columns(
        pl.col(times).str.to_datetime("%Y-%m-%dT%H:%M:%S%.fZ", time_unit="us", time_zone="UTC")
    )


def _print_comparison(what: str, differing: pl.DataFrame, rows: int, console: Console) -> None:
    if differing.is_empty():
        console.print(f"  {what}: equal: {rows:,} rows", highlight=False)
        return
    console.print(f"  {what}: {differing.height:,} rows differ from {rows:,} expected:")
    console.print(_as_table(differing))


def _as_table(rows: pl.DataFrame, rows_max: int = 20) -> Table:
    table = Table(*rows.columns)
    for row in rows.head(rows_max).iter_rows():
        table.add_row(*(str(value) for value in row))
    return table
