"""A full-text index as a target: a document for each row, committed with the state.

The index has few fields, which are the same for every table: ``table`` and ``key`` say which row a document is,
``text`` is what is searched (all columns that are text, one after the other), and ``row`` is the row as JSON. The state
is a document, too: tantivy makes all of a commit durable, or nothing of it.

1. Deletions and documents are given to the writer. A crash leaves segments that no commit names; they are removed.
2. The commit replaces ``meta.json``, synced. A crash before it leaves the last commit; after it the batch is there.

tantivy lets one writer at a time open an index: the lock is the fence.

Source: tantivy, "Architecture": segments, commits, ``meta.json``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Any

import tantivy

from millstream.capture.apply.applied_table import AppliedTable, Row, RowBatch
from millstream.capture.apply.captured_types import text_of
from millstream.capture.envelope import to_json
from millstream.errors import ConfigError, RetriableError

BATCH_S = 1.0  # each commit is a segment, which are merged in the background
_MEMORY_BYTES = 64 << 20
_ID_BYTES_MAX = 32_768  # tantivy's terms have up to 65,530
_STATE_TABLE = "_millstream_apply"


def index_schema() -> Any:
    """Return the schema of every index that is applied to."""
    return (
        tantivy.SchemaBuilder()
        .add_text_field("id", stored=True, tokenizer_name="raw", index_option="basic")
        .add_text_field("table", stored=True, tokenizer_name="raw", index_option="basic")
        .add_text_field("key", stored=True, tokenizer_name="raw", index_option="basic")
        .add_text_field("text", stored=False)
        .add_text_field("row", stored=True, tokenizer_name="raw", index_option="basic")
        .build()
    )


class TantivyTarget:
    """Applies to an index; see :class:`millstream.capture.apply.target.ApplyTarget` for the methods."""

    batch_s = BATCH_S

    def __init__(self, folder: Path) -> None:
        self.shown = str(folder)
        with self._translated():
            folder.mkdir(parents=True, exist_ok=True)
            self._index = tantivy.Index(index_schema(), path=str(folder))
            self._writer: Any = self._index.writer(heap_size=_MEMORY_BYTES, num_threads=1)
        self._pending: dict[str, dict[str, Row | None]] = {}
        self._truncated: set[str] = set()

    def close(self) -> None:
        self._writer = None  # which lets go of the lock

    # ── the state ───────────────────────────────────────────────────────────────────────────

    def acquire(self, name: str, token: str, *, again: bool) -> str | None:  # noqa: ARG002 - the lock is the fence
        self._name = name
        with self._translated():
            found = next(self._documents("id", _id(_STATE_TABLE, name)), None)
        return None if found is None else found["row"][0]

    def _documents(self, field: str, value: str, limit: int = 1) -> Iterator[dict[str, list[Any]]]:
        self._index.reload()
        searcher = self._index.searcher()
        query = tantivy.Query.term_query(self._index.schema, field, value)
        for _, address in searcher.search(query, limit).hits:
            yield searcher.doc(address).to_dict()

    # ── a batch ─────────────────────────────────────────────────────────────────────────────

    def begin(self) -> None:
        self.rollback()

    def rollback(self) -> None:
        self._pending.clear()
        self._truncated.clear()

    def commit(self, state: str) -> None:
        with self._translated():
            try:
                for table in self._truncated:
                    self._writer.delete_documents_by_term("table", table)
                for table, rows in self._pending.items():
                    for key, row in rows.items():
                        self._writer.delete_documents_by_term("id", _id(table, key))
                        if row is not None:
                            self._writer.add_document(_document(table, key, row))
                self._writer.delete_documents_by_term("id", _id(_STATE_TABLE, self._name))
                self._writer.add_document(
                    tantivy.Document(
                        id=_id(_STATE_TABLE, self._name),
                        table=_STATE_TABLE,
                        key=self._name,
                        row=state,
                    )
                )
                self._writer.commit()
            except BaseException:
                self._writer.rollback()
                raise
        self.rollback()

    def define(self, table: AppliedTable, before: AppliedTable | None) -> None:
        with self._translated():
            there = next(self._documents("table", table.collection), None)
        if before is None and there is not None:
            raise ConfigError(
                f"{self.shown} has documents of {table.collection}, which another capture has applied. Apply into "
                "another folder."
            )

    def truncate(self, table: AppliedTable) -> None:
        self._pending.pop(table.collection, None)
        self._truncated.add(table.collection)

    def write(self, batch: RowBatch) -> None:
        rows = self._pending.setdefault(batch.table.collection, {})
        for key in batch.deletes:
            rows[_key(batch.table, key)] = None
        for row in batch.upserts:
            rows[_key(batch.table, row)] = row

    def rows(self, table: AppliedTable, keys: Sequence[Row]) -> Iterator[Row]:
        pending = self._pending.get(table.collection, {})
        with self._translated():
            for wanted in keys:
                key = _key(table, wanted)
                if key in pending:
                    row = pending[key]
                    if row is not None:
                        yield row
                elif table.collection not in self._truncated:
                    for found in self._documents("id", _id(table.collection, key)):
                        yield _row_of(table, found)

    def scan(self, table: AppliedTable) -> Iterator[Row]:
        with self._translated():
            self._index.reload()
            limit = max(1, self._index.searcher().num_docs)
            for found in self._documents("table", table.collection, limit):
                yield _row_of(table, found)

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except (ValueError, OSError) as error:
            said = str(error)
            if "Lock" in said:
                raise RetriableError(
                    f"another program writes to the index {self.shown}. It is tried again."
                ) from error
            raise ConfigError(
                f"the index {self.shown} refused what was applied: {said}. Apply into a new folder."
            ) from error


def _key(table: AppliedTable, row: Row) -> str:
    return to_json({name: row[name] for name in table.key}).decode()


def _id(table: str, key: str) -> str:
    """Return the term of a row. Longer ones are not indexed by tantivy, without a word: they are hashed."""
    found = json.dumps([table, key], ensure_ascii=False)
    if len(found.encode(errors="surrogatepass")) <= _ID_BYTES_MAX:
        return found
    digest = blake2b(key.encode(errors="surrogatepass"), digest_size=32).hexdigest()
    return json.dumps([table, digest, "blake2b"], ensure_ascii=False)


def _document(table: str, key: str, row: Row) -> Any:
    searched = "\n".join(text_of(value) for value in row.values() if isinstance(value, (str, list)))
    return tantivy.Document(
        id=_id(table, key), table=table, key=key, text=searched, row=to_json(row).decode()
    )


def _row_of(table: AppliedTable, found: dict[str, list[Any]]) -> Row:
    row: Row = json.loads(found["row"][0])
    return {**dict.fromkeys(table.types), **row}
