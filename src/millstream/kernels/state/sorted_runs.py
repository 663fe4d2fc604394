"""State as immutable sorted runs under a manifest: a batch costs what it touches, not what is held.

A run is a table sorted by key hash, written once. A slot of state (one span of event time) is a list of runs, oldest
first; the value of a key is the merge of its rows in all runs of the slot. A batch adds one run per slot that it touches,
and folds the newest runs into it while each is at most half as large again as the rows in hand, so that a slot holds a
few runs and a row is rewritten a few times (a size-tiered log-structured merge: O'Neil et al., "The Log-Structured
Merge-Tree", 1996). Where rows are wide, a family may wait for four runs of a size (as Cassandra's compaction does).

A fold of many rows goes by ranges of hashes, and makes one part of a run for each, so that it takes no
more memory than a few parts do. The parts of a run stand one behind the other.

A family of runs may be *counted*: then the manifest says how many events each run stands for, summed from
the table that was stored, and how many of a slot have been emitted but are still in its runs. A fold
merges live rows, which keeps their events; rows that it leaves out must have been emitted before. So a
row that a look-up misses or a fold loses leaves a number that does not fit
(:mod:`millstream.kernels.state.ledger`).

Where buckets were divided or put together (:mod:`millstream.kernels.state.rescale`), a bucket may have a *share* of a
run: the rows whose keys are in a range of hashes. Reading leaves out the others, and a fold of the run writes those
that are read; so nothing is written for a rescale. How many events a share stands for is known once it was folded.

The manifest is all that changes. It is committed together with the runs that it names; a run's
name is unique to the attempt that wrote it, so that a copy left behind by an attempt that failed
can never be mistaken for another's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, BinaryIO, NamedTuple, Protocol

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from millstream.errors import CorruptionError
from millstream.kernels.arrays import Bools
from millstream.kernels.columns import filter_rows
from millstream.kernels.frames import HASH, arrow_table, in_one_chunk, polars_table
from millstream.kernels.state.hash_order import sort_by_hash
from millstream.kernels.state.hash_search import cuts, even_starts, positions_of
from millstream.kernels.state.keyhash import Hashes

# An older run is folded into what is in hand while it is at most this many times as large. Not a whole
# number: then batches of one size would meet it by a hair, and buckets fold at different times, so that each
# of two tasks waits for the other in turn.
FOLD_RATIO = 1.5
# Of tiers: the oldest run that is at most this part of all that is newer is folded, with all of that. So about three
# runs of a size stay, and a slot has at most as many as the logarithm to the base 1.36 of its rows.
TIER_RATIO = 0.36
PART_ROWS = 1_000_000  # about; some 60 MB, of which a fold has a handful in hand at a time
EACH_ROW = "each row"  # instead of a column that says how many events a row stands for
_NONE: Mapping[str, int] = {}
_REFUSED = (
    "Nothing of this batch was committed. Please report this; the log still holds every event."
)


class Share(NamedTuple):
    """What of a stored run is a bucket's: the rows whose keys have hashes in ``[low, high)``.

    ``stored_rows`` are those of the whole run, whose keys have hashes in ``[whole_low, whole_high)``; both are 0 where
    that is not known any more. ``counted``: the events of the share are known. ``renumbered`` is added to
    the numbers of its rows, where rows of several buckets with numbers of their own are together now. ``stored_events``
    are those of the whole run.
    """

    low: int
    high: int
    stored_rows: int
    counted: bool
    renumbered: int = 0
    whole_low: int = 0
    whole_high: int = 0
    stored_events: int = 0

    @property
    def is_complete(self) -> bool:
        """Whether all rows of the run are in it, as those who had the others are put together again."""
        return self.low <= self.whole_low < self.whole_high <= self.high

    def has(self, hashes: Hashes) -> Bools:
        """Return which hashes are in the range."""
        last = np.uint64(self.high - 1)  # 2⁶⁴ is none itself
        inside: Bools = (hashes >= np.uint64(self.low)) & (hashes <= last)
        return inside


Newest = Callable[[Sequence[pl.DataFrame]], pl.DataFrame]
"""Returns what a fold keeps of the rows of runs, oldest first, each with all that it has of some hashes."""

Owned = Callable[[pl.DataFrame, Share], Bools]
"""Says which rows of a run are in a share of it."""


def every_row(rows: pl.DataFrame, _share: Share) -> Bools:
    """Return that all rows are in a share: of runs in which others than a bucket's own do no harm."""
    return np.ones(rows.height, np.bool_)


def _by_hash(rows: pl.DataFrame, share: Share) -> Bools:
    return share.has(rows[HASH].to_numpy())


@dataclass(frozen=True)
class Run:
    """One run, or a part of one, as the manifest names it.

    A part with a number above 0 goes on with higher hashes where the one before it ends; ``first`` is then the lowest
    of its hashes, if runs of the family are sorted by that of the key.
    ``events`` is how many events its rows stand for, where its family is counted. Of a share, ``rows`` and ``events`` are
    about those that it has; those of all shares of a run add up to the run's.
    """

    name: str
    slot: int
    rows: int
    size_bytes: int
    events: int = 0
    part: int = 0
    first: int = 0
    share: Share | None = None

    @property
    def stored_rows(self) -> int:
        return self.rows if self.share is None else self.share.stored_rows

    @property
    def stored_events(self) -> int:
        return self.events if self.share is None else self.share.stored_events

    @property
    def is_counted(self) -> bool:
        return self.share is None or self.share.counted

    @property
    def is_whole(self) -> bool:
        """Whether no other bucket has rows of it."""
        return self.share is None or self.share.is_complete

    @property
    def own_bytes(self) -> int:
        """About how much of the stored run is the bucket's."""
        return self.size_bytes * self.rows // max(1, self.stored_rows)

    def to_message(self) -> list[Any]:
        message = [self.name, self.slot, self.rows, self.size_bytes, self.events]
        if self.part or self.first or self.share:
            message += [self.part, self.first]
        return [*message, list(self.share)] if self.share else message

    @classmethod
    def from_message(cls, message: list[Any]) -> Run:
        if not isinstance(message[-1], list):
            return cls(*message)
        name, slot, rows, size_bytes, events, part, first, share = message
        return cls(name, slot, rows, size_bytes, events, part, first, Share(*share))


class RunStore(Protocol):
    """Storage of runs: files of the app's folder in production, a dict in tests."""

    def load(self, run: Run) -> pa.Table:
        """Return a run's rows, sorted by ``__hash``, in one chunk; memory-mapped where possible."""
        ...

    def save(self, slot: int, table: pa.Table) -> Run:
        """Keep a table as a run under a name that nothing else has."""
        ...

    def drop(self, run: Run) -> None:
        """Forget a run that the manifest no longer names."""
        ...


@dataclass
class SortedRuns:
    """The runs of one operator in one bucket while a batch is worked on.

    ``counted`` is the column that says how many events a row stands for; in a table without it, as with
    ``EACH_ROW``, each stands for one. None: they are not counted. ``spent`` says how many of a slot have been emitted, and are still in its runs.
    ``signed``: a row may count for less than nothing, and sums go round at 2⁶⁴.
    ``sort_column`` is the UInt64 column by which runs are sorted and searched, ``__hash`` if nothing else
    is said.

    ``numbered`` is a column of numbers that the rows of a bucket have each for itself. ``owned`` says which rows are
    in a share, if that is not to be seen by their ``__hash``. ``unsettled`` are the slots with shares of runs, of
    which is not known what was spent: their events are right but for a constant. ``restated``: such a constant has
    changed, so the numbers before this batch and after it can't be compared.
    """

    store: RunStore
    slots: dict[int, list[Run]] = field(default_factory=dict)
    spent: dict[int, int] = field(default_factory=dict)
    counted: str | None = None
    signed: bool = False
    sort_column: str = HASH
    numbered: str | None = None
    owned: Owned | None = None
    unsettled: set[int] = field(default_factory=set)
    restated: bool = False

    @classmethod
    def from_message(
        cls,
        message: Iterable[list[Any]],
        store: RunStore,
        spent: Mapping[str, int] = _NONE,
        unsettled: Iterable[int] = (),
    ) -> SortedRuns:
        runs = cls(store, spent={int(slot): events for slot, events in spent.items()})
        runs.unsettled.update(unsettled)
        for entry in message:
            run = Run.from_message(entry)
            runs.slots.setdefault(run.slot, []).append(run)
        return runs

    def to_message(self) -> list[list[Any]]:
        return [run.to_message() for slot in sorted(self.slots) for run in self.slots[slot]]

    @property
    def rows(self) -> int:
        """Rows held, counting a key once per run that knows it."""
        return sum(run.rows for runs in self.slots.values() for run in runs)

    @property
    def size_bytes(self) -> int:
        return sum(run.own_bytes for runs in self.slots.values() for run in runs)

    @property
    def events(self) -> int:
        """Events held: those that the runs stand for, less those that have been given out."""
        stored = sum(run.events for runs in self.slots.values() for run in runs)
        return stored - sum(self.spent.values())

    def spend(self, slot: int, events: int) -> None:
        """Note that events of a slot have been given out, though the runs have them still."""
        if events:
            self.spent[slot] = self.spent.get(slot, 0) + events

    def scan(self, slot: int) -> Iterator[pl.DataFrame]:
        """Yield all rows of a slot, run by run, oldest first."""
        for run in self.slots.get(slot, ()):
            rows = self._whole(run)
            if rows.height:
                yield rows

    def look_up(
        self, slot: int, hashes: Hashes, columns: Sequence[str] | None = None
    ) -> Iterator[pl.DataFrame]:
        """Yield, run by run, the rows of a slot whose hash is among ``hashes`` (sorted, distinct).

        Rows of another key with the same hash come along: compare the key columns. ``columns`` are those to be read,
        with those by which shares are told; by default all.
        Cost: a binary search per hash and run; only the rows found are read.
        """
        for run in self.slots.get(slot, ()):
            table = self.table(run)
            found = positions_of(self._sorted_values(table), hashes)
            table = table if columns is None else table.select(list(columns))
            rows = self.own_rows(run, table.take(pa.array(found))) if len(found) else None
            if rows is not None and rows.height:
                yield rows

    def between(self, run: Run, after: int, until: int) -> pl.DataFrame:
        """Return the rows of a run with a value of the sort column in ``(after, until]``."""
        table = self._stored(run)
        bounds = np.array([after, until], np.uint64)
        first, end = np.searchsorted(self._sorted_values(table), bounds, side="right")
        return self.own_rows(run, table.slice(first, end - first))

    def add(
        self,
        slot: int,
        rows: pl.DataFrame,
        merge: Callable[[pl.DataFrame], pl.DataFrame],
        *,
        alive: Callable[[pl.DataFrame], pl.DataFrame] | None = None,
        all_spent_goes: bool = True,
        tiered: bool = False,
    ) -> None:
        """Add rows (with ``__hash``) to a slot as its newest run, folding small runs into it.

        ``alive`` and then ``merge`` see the rows oldest first, all of a hash together, and meanwhile the
        slot holds only the runs that are older than all of them. What they give may be no rows at all.

        Args:
            slot: Which slot.
            rows: What is added.
            merge: Makes the rows of a fold into fewer that stand for the same events.
            alive: Leaves out, before that, rows whose events have been given out.
            all_spent_goes: Whether it leaves out all such rows that it sees.
            tiered: Four runs of a size are folded, instead of two: a row is written half as often, and looked
                for in more runs.

        Raises:
            CorruptionError: a fold lost events, or made more of them; nothing was committed.
        """

        def fold(pieces: Sequence[pl.DataFrame]) -> tuple[pl.DataFrame, int]:
            return self._folded(in_one_chunk(pieces), merge, alive)

        self._add(slot, rows, fold, all_spent_goes=all_spent_goes, tiered=tiered)

    def replace(self, slot: int, rows: pl.DataFrame, newest: Newest) -> None:
        """Add rows to a slot as :meth:`add` does; a fold keeps what ``newest`` does.

        Raises:
            CorruptionError: a fold left out other events than those that were given out; nothing was committed.
        """

        def fold(pieces: Sequence[pl.DataFrame]) -> tuple[pl.DataFrame, int]:
            kept = newest(pieces)
            return kept, sum(map(self.count, pieces)) - self.count(kept)

        self._add(slot, rows, fold)

    def _add(
        self,
        slot: int,
        rows: pl.DataFrame,
        fold: Callable[[Sequence[pl.DataFrame]], tuple[pl.DataFrame, int]],
        *,
        all_spent_goes: bool = True,
        tiered: bool = False,
    ) -> None:
        """Add rows; ``fold`` returns those that stay of the rows of runs, and how many events it left out."""
        runs = self.slots.setdefault(slot, [])
        folded = _to_fold(runs, rows.height, tiered=tiered)
        size = rows.height + sum(map(_rows, folded))
        del runs[len(runs) - sum(map(len, folded)) :]
        self.restated |= not all(part.is_counted for run in folded for part in run)
        made: list[Run] = []
        gone = 0
        for pieces in self._ranges(folded, rows, size):
            kept = pieces[0]
            if folded:
                kept, left_out = fold(pieces)
                gone += left_out
            if kept.height:
                made.append(self._saved(slot, kept, len(made)))
        self._forget(slot, gone, exact=bool(folded) and not runs and all_spent_goes)
        runs += made
        for part in (part for run in folded for part in run):
            self.store.drop(part)

    def _saved(self, slot: int, rows: pl.DataFrame, part: int) -> Run:
        table = to_arrow(sort_by_hash(rows, self.sort_column))
        first = int(self._sorted_values(table)[0]) if part and self._is_sliced else 0
        events = self._events_in(table)
        return replace(self.store.save(slot, table), events=events, part=part, first=first)

    def _events_in(self, table: pa.Table) -> int:
        if self.counted is None or self.counted not in table.column_names:
            return table.num_rows if self.counted else 0
        return int(pc.sum(table.column(self.counted)).as_py() or 0)

    def count(self, rows: pl.DataFrame) -> int:
        """Count the events that rows stand for."""
        if self.counted is None or self.counted not in rows.columns:
            return rows.height if self.counted else 0
        return int(rows[self.counted].sum())

    def _folded(
        self,
        rows: pl.DataFrame,
        merge: Callable[[pl.DataFrame], pl.DataFrame],
        alive: Callable[[pl.DataFrame], pl.DataFrame] | None,
    ) -> tuple[pl.DataFrame, int]:
        """Return the rows of a fold, and how many events were left out."""
        kept = rows if alive is None else alive(rows)
        merged = merge(kept)
        before, after = self.count(kept), self.count(merged)
        if before != after:
            raise CorruptionError(
                f"The ledger of the state does not balance: {before} events were folded into "
                f"{after}. {_REFUSED}"
            )
        return merged, 0 if alive is None else self.count(rows) - before

    def _forget(self, slot: int, gone: int, *, exact: bool) -> None:
        """Take note that events went with a fold; ``exact``: all that were spent have gone now."""
        if self.counted is None:
            return
        spent = self.spent.pop(slot, 0) - gone
        if slot in self.unsettled:
            if exact:  # from here on it is known: none
                self.unsettled.remove(slot)
                self.restated = True
            self.spend(slot, 0 if exact else spent)
            return
        if (spent < 0 and not self.signed) or (exact and spent % 2**64):
            raise CorruptionError(
                f"The ledger of the state does not balance: a fold left out {gone} events, and "
                f"{spent + gone} had been given out. {_REFUSED}"
            )
        self.spend(slot, 0 if exact else spent)

    def _ranges(
        self, folded: list[list[Run]], rows: pl.DataFrame, size: int
    ) -> Iterator[list[pl.DataFrame]]:
        """Yield the rows of runs (oldest first) and the new ones, by ranges of hashes, rising."""
        parts = -(-size // PART_ROWS)
        if parts <= 1:
            yield [*(self._whole(part) for run in folded for part in run), rows]
            return
        tables = [[self._whole(part) for part in run] for run in folded]
        tables.append([sort_by_hash(rows, self.sort_column)])
        longest = max(tables, key=lambda run: sum(part.height for part in run))
        starts = even_starts([part[self.sort_column] for part in longest], parts)
        ranges: list[list[pl.DataFrame]] = [[] for _ in range(len(starts) + 1)]
        for part in (part for run in tables for part in run):
            for number, first, end in cuts(part[self.sort_column].to_numpy(), starts):
                ranges[number].append(part.slice(first, end - first))
        yield from filter(None, ranges)

    def _sorted_values(self, table: pa.Table) -> Hashes:
        values: Hashes = table.column(self.sort_column).chunk(0).to_numpy()
        return values

    def table(self, run: Run) -> pa.Table:
        """Return a run's rows, sorted by ``__hash``: of a share its own, if the rows are sorted by what tells them.

        Raises:
            CorruptionError: they are not as many as the manifest says.
        """
        table = self._stored(run)
        if run.share is None or not self._is_sliced:
            return table
        hashes = self._sorted_values(table)
        first = int(np.searchsorted(hashes, np.uint64(run.share.low)))
        end = int(np.searchsorted(hashes, np.uint64(run.share.high - 1), side="right"))
        return table.slice(first, end - first)

    @property
    def _is_sliced(self) -> bool:
        """Whether the rows of a share stand together in its run."""
        return self.sort_column == HASH and self.owned is None

    def _stored(self, run: Run) -> pa.Table:
        table = self.store.load(run)
        if table.num_rows != run.stored_rows:
            raise _wrong_run(run.name, f"{table.num_rows} rows", run.stored_rows)
        return table

    def own_rows(self, run: Run, table: pa.Table) -> pl.DataFrame:
        """Return the rows of a run's table that are the bucket's, under the numbers that they have there."""
        rows = polars_table(table)
        if run.share is None:
            return rows
        if not self._is_sliced:
            rows = filter_rows(rows, (self.owned or _by_hash)(rows, run.share))
        if self.numbered is not None and run.share.renumbered:
            rows = rows.with_columns(pl.col(self.numbered) + run.share.renumbered)
        return rows

    def _whole(self, run: Run) -> pl.DataFrame:
        """Return a run's rows, all of which are to be read, so that their events can be counted, too."""
        rows = self.own_rows(run, self.table(run))
        events = self.count(rows)
        if self.counted and run.is_counted and events != run.events:
            raise _wrong_run(run.name, f"rows for {events} events", run.events)
        return rows

    def check_slot(
        self,
        slot: int,
        alive: Callable[[pl.DataFrame], pl.DataFrame],
        last: pl.DataFrame | None = None,
    ) -> None:
        """Look through a slot as a fold of all its runs would, without keeping what that gives.

        Before a slot is dropped this finds what no fold has come to. ``last`` are rows that came too
        late to be stored. A single run, and nothing after it, is not read.

        Raises:
            CorruptionError: what ``alive`` leaves out is not what had been given out.
        """
        if slot in self.unsettled:
            return  # that is not known
        runs = list(self.slots.get(slot, ()))
        folded: list[list[Run]] = []
        while runs:
            folded.insert(0, newest := newest_run(runs))
            del runs[-len(newest) :]
        gone = 0
        if len(folded) > 1 or (folded and last is not None):
            last = self._whole(folded[0][0]).clear() if last is None else last
            for pieces in self._ranges(folded, last, sum(map(_rows, folded))):
                rows = pl.concat(pieces)
                gone += self.count(rows) - self.count(alive(rows))
        spent = self.spent.get(slot, 0)
        self._forget(slot, gone, exact=True)
        self.spend(slot, spent)  # the runs have them still

    def drop_slot(self, slot: int) -> int:
        """Forget a whole slot: its time has passed. Give how many events of it were held."""
        dropped = self.slots.pop(slot, [])
        self.restated |= slot in self.unsettled
        self.unsettled.discard(slot)
        for run in dropped:
            self.store.drop(run)
        return sum(run.events for run in dropped) - self.spent.pop(slot, 0)


def _wrong_run(name: str, found: str, expected: int) -> CorruptionError:
    return CorruptionError(
        f"The run {name!r} of the state has {found}, and its manifest says {expected}: it is another "
        "one. Restore the app's whole folder from where you keep copies of it, or reset the app to "
        "rebuild it from the log."
    )


def newest_run(runs: list[Run]) -> list[Run]:
    """Return the parts of the newest run."""
    first = len(runs) - 1
    while runs[first].part:
        first -= 1
    return runs[first:]


def _to_fold(runs: list[Run], height: int, *, tiered: bool) -> list[list[Run]]:
    """Return the runs that are folded into so many new rows, oldest first, each as its parts."""
    older, newer_rows = list(runs), height
    newest_first: list[list[Run]] = []
    count = 0
    while older:
        newest_first.append(parts := newest_run(older))
        del older[-len(parts) :]
        if _rows(parts) <= (TIER_RATIO if tiered else FOLD_RATIO) * newer_rows:
            count = len(newest_first)
        elif not tiered:
            break
        newer_rows += _rows(parts)
    return newest_first[:count][::-1]


def _rows(parts: list[Run]) -> int:
    return sum(part.rows for part in parts)


def to_arrow(rows: pl.DataFrame) -> pa.Table:
    """Return rows as a table that a store of runs takes."""
    # The oldest layout (offsets and bytes, no string views) is the one every Arrow can gather from.
    return arrow_table(rows, pl.CompatLevel.oldest()).combine_chunks()


def encode_run(table: pa.Table) -> bytes:
    """Encode a run as an Arrow IPC file of one record batch, so that it can be memory-mapped."""
    sink = pa.BufferOutputStream()
    write_run(table, sink)
    return bytes(sink.getvalue())


def write_run(table: pa.Table, sink: pa.NativeFile | BinaryIO) -> None:
    """Write into a file what :func:`encode_run` gives."""
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=max(1, table.num_rows))


def decode_run(source: pa.Buffer | pa.NativeFile) -> pa.Table:
    """Decode what :func:`encode_run` made, without copying when ``source`` is memory-mapped."""
    return pa.ipc.open_file(source).read_all()


@dataclass
class MemoryRunStore:
    """Runs in a dict: for tests, and for pipelines run in process. They go through bytes, as in a job.

    Its names begin with ``prefix``. ``keeps_all``: what is dropped stays, as it may be a share of what others have.
    """

    tables: dict[str, pa.Table] = field(default_factory=dict)
    saved: int = 0
    prefix: str = "m"
    keeps_all: bool = False

    def load(self, run: Run) -> pa.Table:
        return self.tables[run.name]

    def save(self, slot: int, table: pa.Table) -> Run:
        self.saved += 1
        run = Run(f"{self.prefix}{self.saved}", slot, table.num_rows, table.nbytes)
        self.tables[run.name] = decode_run(encode_run(table))
        return run

    def drop(self, run: Run) -> None:
        if not self.keeps_all:
            del self.tables[run.name]
