"""Which transactions of captured tables are complete: one after the other, in the order of their ENDs.

The inputs are the connector's topic of transactions, and of each table that is read with it the rows of
:mod:`millstream.kernels.decode.captured`, without the user's columns. A transaction is complete once its END
and, of each table, as many of its records as the END says were read. Then all its rows are due; so they are in
one batch, in all tables. One that is complete waits for those whose END is before its own.

Records bear the id of the BEGIN. Debezium's END may have another behind the colon, so an END belongs to the BEGIN
of the same id, or else to the last one that has the same number of the transaction (such as PostgreSQL's), or, if
there is none, to the records that have.

Connectors send again what they did not know to be written: the same record, with the same place in its
transaction. Within a transaction no place counts twice; a record of a transaction that was applied is dropped. The ids of about a million transactions are remembered.

A record outside of a transaction is due once all records before it in its partition are. For each partition the
runs of records that are not decided are kept, a few numbers each.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import polars as pl

from millstream.errors import UserCodeError
from millstream.kernels.decode.captured import TOTAL, TRANSACTION
from millstream.kernels.frames import EXTRA, HASH, KIND, ORDER, TIME
from millstream.kernels.operator import BatchContext, OperatorResult, Prepared
from millstream.kernels.operator_base import OperatorBase
from millstream.kernels.state.keyhash import hash_columns
from millstream.kernels.state.operator_state import OperatorState
from millstream.kernels.time.log_order import offset_in, partition_in

DECISIONS: Mapping[str, pl.DataType] = {
    "table": pl.Int64(),
    "transaction": pl.String(),
    "partition": pl.Int64(),
    "floor": pl.Int64(),
    "commit": pl.Int64(),
    "total": pl.Int64(),
    TIME: pl.Int64(),
}
"""What :mod:`millstream.kernels.tables.waiting_changes` reads; of a transaction all tables do."""

_NUMBERED = re.compile(r"(\d+):\d+")
_ID = "id"
_TABLES = "tables"  # String: the numbers of those that the END counts records of
_REMEMBERED_SLOTS = 16
_SLOT_WIDTH = 1 << 17  # places of ENDs; every other record is a BEGIN
_FAMILY = "applied"
_BEGUN_MAX = 1000


@dataclass(frozen=True)
class Transactions(OperatorBase):
    """The operator. ``collections`` are the tables' names in the ENDs, in the order of the inputs from 1 on."""

    name: str
    collections: tuple[str, ...]
    by: tuple[str, ...] = ()

    @property
    def ordered(self) -> bool:
        return True

    def columns_read(self, number: int) -> set[str]:
        return set() if number else {"status", "id", "counts"}

    def prepare(self, rows: pl.DataFrame, number: int) -> Prepared:
        """Take BEGINs and ENDs, and of each record its place and transaction."""
        if not number:
            return Prepared(rows[["status", "id", "counts", ORDER]], counts={"held": rows.height})
        # Of a record that became several rows, one stands for it: those that are not extra, or have no other.
        # What is outside of transactions and changes nothing, as a tombstone, is waited for by nobody.
        own = ~rows[EXTRA] | rows[KIND].is_in(["mark", "spoil"])
        idle = (rows[KIND] == "mark") & rows[TRANSACTION].is_null()
        kept = rows.filter(own & ~idle)[[ORDER, TRANSACTION, TOTAL]]
        counts = {"held": kept.height, "filtered": rows.height - kept.height}
        return Prepared(kept, counts=counts)

    def process(
        self,
        state: OperatorState,
        inputs: Mapping[int, Sequence[pl.DataFrame]],
        context: BatchContext,  # noqa: ARG002
    ) -> OperatorResult:
        """Say which transactions are complete, and which records outside of them are due."""
        batch = _TransactionBatch(self, state)
        if inputs.get(0):
            batch.read_boundaries(pl.concat(inputs[0]).sort(ORDER, maintain_order=True))
        for number in range(1, len(self.collections) + 1):
            if inputs.get(number):
                rows = pl.concat(inputs[number]).sort(ORDER, maintain_order=True)
                batch.read_records(number - 1, rows)
        batch.decide()
        batch.store()
        rows = pl.DataFrame(batch.decisions, schema=DECISIONS, orient="row")
        gauges = {
            "transactions_complete_waiting": float(len(batch.pending)),
            "transactions_open": float(len(batch.counts)),
        }
        return OperatorResult(rows=rows, counts=Counter(), gauges=gauges)


# A run of records of a partition, of one transaction: [id or None, place of the last, next offset, commit or None].
_Run = list[Any]


@dataclass
class _TransactionBatch:
    """What is known of transactions, while a batch is worked on."""

    operator: Transactions
    state: OperatorState
    decisions: list[
        tuple[int | None, str | None, int | None, int | None, int | None, int | None, int]
    ] = field(default_factory=list)

    def __post_init__(self) -> None:
        values = self.state.values
        # BEGINs without an END, in their order.
        self.begun: list[str] = values.get("begun", [])
        # The last ones that have one.
        self.ended: list[str] = values.get("ended", [])
        # ENDs whose transactions are not applied: [id, place, count by table].
        self.pending: list[list[Any]] = values.get("pending", [])
        # transaction → the places of its records that were read, as runs, and how many there are by table.
        self.counts: dict[str, dict[str, Any]] = values.get("counts", {})
        # "table/partition" → its runs, and the version of the last record that was applied.
        self.runs: dict[str, list[_Run]] = values.get("runs", {})
        self.last: dict[str, list[int]] = values.get("last", {})
        self.dropped: dict[str, None] = {}
        # The names in `counts` by their stems.
        self.counted_by_stem: dict[str | None, list[str]] = {}

    def store(self) -> None:
        """Keep what is known."""
        self.state.values.update(
            begun=self.begun[-_BEGUN_MAX:],
            ended=self.ended[-_BEGUN_MAX:],
            pending=self.pending,
            counts=self.counts,
            runs={place: runs for place, runs in self.runs.items() if runs},
            last=self.last,
        )

    # ── what was applied ────────────────────────────────────────────────────────────────────

    def _applied(self, names: Sequence[str]) -> dict[str, frozenset[str]]:
        """Return which transactions were applied, and of which tables their ENDs named records."""
        frame = pl.DataFrame({_ID: list(dict.fromkeys(names))}, schema={_ID: pl.String})
        hashes = np.unique(hash_columns(frame, (_ID,)))
        kept = self.state.runs(_FAMILY)
        found: dict[str, frozenset[str]] = {}
        for slot in kept.slots:
            for rows in kept.look_up(slot, hashes):
                for name, tables in rows[[_ID, _TABLES]].iter_rows():
                    found[name] = frozenset(tables.split())
        wanted = set(names)
        return {name: tables for name, tables in found.items() if name in wanted}

    def _remember(self, applied: Sequence[tuple[str, int, str]]) -> None:
        kept = self.state.runs(_FAMILY)
        by_slot: dict[int, list[tuple[str, str]]] = {}
        for name, commit, tables in applied:
            by_slot.setdefault(commit // _SLOT_WIDTH, []).append((name, tables))
        for slot, names in by_slot.items():
            rows = pl.DataFrame(names, schema={_ID: pl.String, _TABLES: pl.String}, orient="row")
            rows = rows.hstack([pl.Series(HASH, hash_columns(rows, (_ID,)))])
            kept.add(slot, rows, lambda rows: rows)
        newest = max(kept.slots, default=0)
        for slot in [slot for slot in kept.slots if slot <= newest - _REMEMBERED_SLOTS]:
            kept.drop_slot(slot)

    def _check_counted(self, name: str, table: str, counted: Collection[str]) -> None:
        """Make sure that the END of a transaction counts the records of a table that has some.

        Raises:
            UserCodeError: it does not, so it names the table otherwise.
        """
        if table in counted:
            return
        collection = self.operator.collections[int(table)]
        raise UserCodeError(
            f"step {self.operator.name!r} has a record of transaction {name!r} whose END counts none of "
            f"{collection!r}, so nothing says when that table has all of it. Give the table's name as an END has "
            "it in data_collections: debezium(collection=…).",
            step=self.operator.name,
        )

    # ── what comes ──────────────────────────────────────────────────────────────────────────

    def read_boundaries(self, rows: pl.DataFrame) -> None:
        """Read BEGINs and ENDs, in the order of the log."""
        self._check_one_partition(rows)
        applied = self._applied(rows["id"].to_list() + self.begun + self.ended)
        waiting = {name for name, _, _ in self.pending}
        places = offset_in(rows[ORDER].to_numpy()).tolist()
        columns = zip(rows["status"], rows["id"], rows["counts"].to_list(), places, strict=True)
        for status, name, counts, place in columns:
            if status == "BEGIN":
                if name not in self.begun:
                    self.begun.append(name)
                continue
            begun = self._begun(name)
            if begun in applied or begun in waiting:
                continue
            waiting.add(begun)
            found = self._counts_of_tables(counts)
            self.pending.append([begun, place, found])

    def _check_one_partition(self, rows: pl.DataFrame) -> None:
        found = set(partition_in(rows[ORDER].to_numpy()).tolist())
        found.add(self.state.values.setdefault("partition", min(found)))
        if len(found) > 1:
            raise UserCodeError(
                f"step {self.operator.name!r} has records of transactions in the partitions "
                f"{', '.join(map(str, sorted(found)))}. Their order is that of the transactions, so all must "
                "be in one: give the topic one partition, as Debezium's documentation says.",
                step=self.operator.name,
            )

    def _begun(self, name: str) -> str:
        """Return the id of the BEGIN that an END belongs to, which is over then."""
        if name not in self.begun:
            stem = _stem(name)
            alike = [one for one in self.begun if stem is not None and _stem(one) == stem]
            if not alike:  # one that was sent again, unless its BEGIN is not in the log
                again = [one for one in self.ended if stem is not None and _stem(one) == stem]
                return again[-1] if again else name
            name = alike[-1]
        self.begun.remove(name)
        self.ended.append(name)
        return name

    def _counts_of_tables(self, counts: Sequence[Mapping[str, Any]]) -> dict[str, int]:
        found: Counter[str] = Counter()
        for one in counts:
            for table, collection in enumerate(self.operator.collections):
                if one["name"] == collection and one["n"]:
                    found[str(table)] += one["n"]
        return dict(found)

    def read_records(self, table: int, rows: pl.DataFrame) -> None:
        """Count the records of a table, and note their runs."""
        stretches = _stretches(rows)
        applied = self._applied([one.name for one in stretches if one.name is not None])
        for name, total, count, partition, end in stretches:
            if name is not None and name in applied:
                self._check_counted(name, str(table), applied[name])
                self.dropped[name] = None
                continue
            if name is not None:
                self._count(name, str(table), total, count)
            last = total + count - 1 if name is not None else 0
            runs = self.runs.setdefault(f"{table}/{partition}", [])
            if runs and runs[-1][0] == name and runs[-1][3] is None:
                runs[-1][1:3] = [max(last, runs[-1][1]), end]
            else:
                runs.append([name, last, end, None])

    def _count(self, name: str, table: str, total: int, count: int) -> None:
        known = self.counts.setdefault(name, {"seen": [], "n": {}})
        new = _add_places(known["seen"], total, count)
        if new:
            known["n"][table] = known["n"].get(table, 0) + new

    # ── what follows ────────────────────────────────────────────────────────────────────────

    def decide(self) -> None:
        """Say which transactions are due, and which records outside of them."""
        for name in self.dropped:
            self._say(transaction=name)
        for name in self.counts:
            self.counted_by_stem.setdefault(_stem(name), []).append(name)
        due: dict[str, int] = {}
        applied: list[tuple[str, int, str]] = []
        while self.pending and (complete := self._complete(self.pending[0])) is not None:
            end, commit, wanted = self.pending.pop(0)
            for table in self.counts.pop(complete, {"n": ()})["n"]:
                self._check_counted(complete, table, wanted)
            if complete != end:  # an END that is sent again is known by this
                self.ended.append(complete)
            due[complete] = commit
            applied.append((complete, commit, " ".join(wanted)))
        for name, commit in due.items():
            self._say(transaction=name, commit=commit)
        self._remember(applied)
        for place in list(self.runs):
            self._pass(place, due)

    def _complete(self, end: list[Any]) -> str | None:
        """Return the id of a transaction by its records, if all of them were read."""
        name: str = end[0]
        wanted: dict[str, int] = end[2]
        if name not in self.counts and (stem := _stem(name)) is not None:
            alike = self.counted_by_stem.get(stem, ())
            name = next((known for known in alike if known in self.counts), name)
        counts = self.counts[name]["n"] if name in self.counts else {}
        complete = all(counts.get(table, 0) >= n for table, n in wanted.items())
        return name if complete else None

    def _pass(self, place: str, due: Mapping[str, int]) -> None:
        """Pass the runs of a partition that are decided; say up to where records outside of transactions are."""
        table, partition = map(int, place.split("/"))
        runs = self.runs[place]
        for run in runs:
            if run[0] in due:
                run[3] = due[run[0]]
        while runs and (runs[0][0] is None or runs[0][3] is not None):
            name, total, floor, commit = runs.pop(0)
            last = self.last.setdefault(place, [-1, -1])
            if name is None:
                self._say(
                    table=table, partition=partition, floor=floor, commit=last[0], total=last[1]
                )
            else:
                self.last[place] = max(last, [commit, total])

    def _say(
        self,
        *,
        table: int | None = None,
        transaction: str | None = None,
        partition: int | None = None,
        floor: int | None = None,
        commit: int | None = None,
        total: int | None = None,
    ) -> None:
        self.decisions.append((table, transaction, partition, floor, commit, total, 0))


class _Stretch(NamedTuple):
    """Records of one transaction, or outside of any, whose places in it follow one another, up to an offset."""

    name: str | None
    total: int
    records: int
    partition: int
    end: int


def _stretches(rows: pl.DataFrame) -> list[_Stretch]:
    """Divide records, in the order of the log, into stretches."""
    if not rows.height:
        return []
    order = rows[ORDER].to_numpy()
    partitions, offsets = partition_in(order), offset_in(order)
    totals = rows[TOTAL].fill_null(0).to_numpy()
    runs = rows[TRANSACTION].rle_id().to_numpy()
    inside = rows[TRANSACTION].is_not_null().to_numpy()
    same = (runs[1:] == runs[:-1]) & (partitions[1:] == partitions[:-1])
    same &= ~inside[1:] | (totals[1:] == totals[:-1] + 1)
    starts = np.flatnonzero(np.concatenate([[True], ~same]))
    ends = np.append(starts[1:], rows.height)
    columns = (
        rows[TRANSACTION][starts].to_list(),
        totals[starts].tolist(),
        (ends - starts).tolist(),
        partitions[starts].tolist(),
        (offsets[ends - 1] + 1).tolist(),
    )
    return [_Stretch(*values) for values in zip(*columns, strict=True)]


def _add_places(runs: list[list[int]], first: int, count: int) -> int:
    """Add places that follow one another; return how many of them are new."""
    if runs and runs[-1][1] == first:  # as almost always
        runs[-1][1] = first + count
        return count
    if not runs or first > runs[-1][1]:
        runs.append([first, first + count])
        return count
    return sum(_add_place(runs, place) for place in range(first, first + count))


def _add_place(runs: list[list[int]], place: int) -> bool:
    """Add a place to runs ``[first, behind the last]`` of places; return whether it is new."""
    at = bisect_right(runs, place, key=itemgetter(0))
    if at and place < runs[at - 1][1]:
        return False
    joins_before = at > 0 and runs[at - 1][1] == place
    joins_behind = at < len(runs) and runs[at][0] == place + 1
    if joins_before and joins_behind:
        runs[at - 1][1] = runs.pop(at)[1]
    elif joins_before:
        runs[at - 1][1] = place + 1
    elif joins_behind:
        runs[at][0] = place
    else:
        runs.insert(at, [place, place + 1])
    return True


def _stem(name: str) -> str | None:
    """Return the number of a transaction that an id begins with, where it is one such as PostgreSQL's."""
    found = _NUMBERED.fullmatch(name)
    return None if found is None else found[1]
