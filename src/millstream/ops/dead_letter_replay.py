"""Lists the dead letters of an app, and replays them: appends them to their topics again.

A replay takes rows of the view ``dead_letters`` and appends the original bytes to the original
partition, with key, headers and timestamp, as records like any others. It goes through three steps,
so that each record is appended exactly once:

====================================  ==========================================================
step                                  after a crash there, the next replay
====================================  ==========================================================
1. the rows are given its number      finds rows with a number and no time: does steps 2 and 3
2. the records are appended, in one   finds the fence at the number: does step 3 alone
   transaction with the fence
3. the rows are marked as replayed    has nothing to finish
====================================  ==========================================================

Of two replays at a time, the older is fenced and can append nothing. It could still mark rows, as with a number that the
newer one uses, too: then these would count as appended. So step 1 is only done if no row was given a number since
the rows were chosen, in one transaction with that look.

A row that failed after a shuffle is kept without its record, so there is nothing to append again. A
replay leaves such rows out, and counts them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import polars as pl

from millstream.client import EventLog, connect
from millstream.errors import ConfigError, RetriableError
from millstream.kernels.errors.dead_letters import headers_from_text
from millstream.ops.replay_lateness import count_maybe_late
from millstream.record import to_timestamp_ms
from millstream.views.commit.committer import DEAD_LETTERS_VIEW
from millstream.views.dead_letters import RECORD_ID, SLICE_ROWS, send_once
from millstream.views.reader import find_state_store
from millstream.views.state_store.store import StateStore
from millstream.views.store_location import open_state_store


@dataclass(frozen=True)
class DeadLetterFilter:
    """Selects dead letters; by default all.

    ``reason`` is a part of the reason's text. ``record_ids`` are topic, partition and offset.
    """

    topic: str | None = None
    reason: str | None = None
    record_ids: Sequence[tuple[str, int, int]] = ()

    def apply(self, rows: pl.DataFrame) -> pl.DataFrame:
        """Return the selected rows."""
        if self.topic is not None:
            rows = rows.filter(pl.col("topic") == self.topic)
        if self.reason is not None:
            rows = rows.filter(pl.col("reason").str.contains(self.reason, literal=True))
        if self.record_ids:
            wanted = pl.DataFrame(
                list(self.record_ids),
                schema={name: rows.schema[name] for name in RECORD_ID},
                orient="row",
            )
            rows = rows.join(wanted, on=RECORD_ID, how="semi")
        return rows


@dataclass(frozen=True)
class ReplayResult:
    """What a replay did. ``finished``: records of an earlier replay that was interrupted."""

    records: int
    finished: int
    already_replayed: int  # selected records that were replayed before
    may_be_late: int = 0  # replayed records that may be late, judged by the app's last commit
    rows_without_record: int = 0  # selected rows without a record: left out


def dead_letters(
    log: Path | str,
    app: str,
    selection: DeadLetterFilter | None = None,
    *,
    store: str | None = None,
) -> pl.DataFrame:
    """Return the dead letters of an app, by topic, partition and offset.

    Raises:
        UnknownViewError: the folder has no views of such an app.
    """
    with open_state_store(find_state_store(log, app, store), readonly=True) as opened:
        return (selection or DeadLetterFilter()).apply(opened.scan(DEAD_LETTERS_VIEW))


def replay(
    log: Path | str,
    app: str,
    selection: DeadLetterFilter | None = None,
    *,
    again: bool = False,
    late_ok: bool = False,
    store: str | None = None,
) -> ReplayResult:
    """Append dead letters to their topics again, as they were.

    Args:
        selection: Which; by default all.
        again: Also those that were replayed before.
        late_ok: Also where some may come too late for the app: see :mod:`.replay_lateness`. The app then
            counts them as late, and leaves them out of closed windows.
        store: The URL of the database that is the app's state store, if the log's folder does not say so.

    Raises:
        ConfigError: some may come too late, or none has a record. Nothing of them was appended.
        UnknownViewError: the folder has no views of such an app.
        UnknownTopicError: the topic of a record is gone; nothing of its transaction was appended.
        FolderOwnedError: the owner of the log's folder accepts no connections. Nothing was appended.
        ProducerFencedError: another replay runs at the same time, and goes on with these records.
        RetriableError: another replay has begun since the records were chosen. Nothing of this one was appended by it.
    """
    location = find_state_store(log, app, store)
    # The transactional id is taken first: of two replays at a time one is fenced, and the fence of a
    # transaction lets each record pass once.
    with connect(log) as opened, open_state_store(location) as state_store:
        run = _Replay(opened, state_store, app)
        finished = run.finish()
        found = (selection or DeadLetterFilter()).apply(run.look())
        rows = found.filter(pl.col("headers").is_not_null())
        rows_alone = found.height - rows.height
        if rows_alone == found.height > 0:
            raise ConfigError(
                f"The {rows_alone:,} selected dead letters of {app} have a row and no record, as they failed "
                "after a shuffle. Correct the code, and have the app read all records again: "
                "`millstream reset`."
            )
        fresh = rows if again else rows.filter(pl.col("replayed_at").is_null())
        late = count_maybe_late(state_store, app, fresh)
        if late and not late_ok:
            raise ConfigError(
                f"{late:,} of the {_records(fresh):,} dead letters of {app} may come too late: windows "
                "that have closed since stay closed, and the records would be counted as late and left "
                "out. To include them, declare a longer lateness of the stream and rebuild the app; to "
                "append them all the same, late records included, use --late-ok (late_ok=True)."
            )
        records = sum(run.replay(part) for part in _transactions(fresh))
        already = 0 if again else _records(rows) - _records(fresh)
        return ReplayResult(records, finished, already, late, rows_alone)


class _Replay:
    """Takes rows through the three steps."""

    def __init__(self, log: EventLog, store: StateStore, app: str) -> None:
        self._log = log
        self._store = store
        self._app = app
        self._writer = f"dead-replay/{app}"
        self._producer = log.producer(transactional_id=self._writer)
        self._greatest: int | None = None  # number that any row has

    def finish(self) -> int:
        """Do the missing steps of a replay that was interrupted."""
        begun = self._store.scan(DEAD_LETTERS_VIEW).filter(
            pl.col("replay").is_not_null() & pl.col("replayed_at").is_null()
        )
        return sum(
            self._append(part, int(number[0]))
            for number, part in sorted(begun.partition_by("replay", as_dict=True).items())
        )

    def look(self) -> pl.DataFrame:
        """Return all dead letters as they are. Replays that begin after it are noticed."""
        rows = self._store.scan(DEAD_LETTERS_VIEW)
        self._greatest = rows.select(pl.col("replay").max()).item()
        return rows

    def replay(self, rows: pl.DataFrame) -> int:
        last = self._log.fence(self._writer)
        number = 0 if last is None else last + 1
        # The fence outlives a view that is rebuilt and knows no numbers, so the number is the fence's next.
        if not self._mark(rows, number, None, if_greatest=("replay", self._greatest)):
            raise RetriableError(
                f"Another replay of dead letters of {self._app} has begun meanwhile. It has "
                "appended what it was asked for; these were not appended. Send them again."
            )
        self._greatest = number
        return self._append(rows, number)

    def _append(self, rows: pl.DataFrame, number: int) -> int:
        records = rows.unique(RECORD_ID, keep="first", maintain_order=True)
        send_once(self._producer, self._writer, number, records, self._send)
        self._mark(rows, number, datetime.now(UTC))
        return records.height

    def _send(self, row: dict[str, Any]) -> None:
        self._producer.send(
            row["topic"],
            row["value"],
            key=row["key"],
            headers=headers_from_text(row["headers"]),
            partition=row["partition"],
            timestamp_ms=to_timestamp_ms(row["time"]),
        )

    def _mark(
        self,
        rows: pl.DataFrame,
        number: int,
        at: datetime | None,
        if_greatest: tuple[str, int | None] | None = None,
    ) -> bool:
        marks = rows.with_columns(
            pl.lit(number, pl.Int64).alias("replay"),
            pl.lit(at, rows.schema["replayed_at"]).alias("replayed_at"),
        )
        return self._store.amend(DEAD_LETTERS_VIEW, marks, if_greatest=if_greatest)


def _transactions(rows: pl.DataFrame) -> list[pl.DataFrame]:
    """Cut rows into transactions, the rows of one record always in one."""
    numbered = rows.with_columns((pl.struct(RECORD_ID).rle_id() // SLICE_ROWS).alias("part"))
    return numbered.partition_by("part", include_key=False, maintain_order=True)


def _records(rows: pl.DataFrame) -> int:
    return rows.select(RECORD_ID).n_unique() if rows.height else 0


def parse_record_id(text: str) -> tuple[str, int, int]:
    """Read TOPIC/PARTITION/OFFSET.

    Raises:
        ConfigError: it is not of that form.
    """
    topic, _, rest = text.partition("/")
    partition, _, offset = rest.partition("/")
    numbers = partition.isdecimal() and offset.isdecimal()
    if not topic or not numbers or int(partition) >= 1 << 31 or int(offset) >= 1 << 63:
        raise ConfigError(f"{text!r} is no record. Give TOPIC/PARTITION/OFFSET, as list prints it.")
    return topic, int(partition), int(offset)
