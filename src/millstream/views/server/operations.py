"""What the page for operators shows of an app besides its status: load, batches, dead letters, versions."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from millstream.errors import MillstreamError
from millstream.kernels.errors.dead_letters import text_or_base64
from millstream.views.commit.batch_history import PHASES, with_commits
from millstream.views.commit.batch_load import RECENT_BATCHES
from millstream.views.commit.committer import DEAD_LETTERS_VIEW
from millstream.views.query import Query
from millstream.views.schema import JOB
from millstream.views.server.behind import JobFacts, findings
from millstream.views.state_store.batch_tables import BATCHES_KEPT
from millstream.views.state_store.definition_comparison import same_definition, whole_definition
from millstream.views.state_store.program import StoredProgram
from millstream.views.state_store.reader import StateStoreReader
from millstream.views.store_location import STATE_STORE_FILE, open_state_store

VERSION_FOLDERS = ("next", "previous")
"""The folders of an app in which a deployment computes, and in which it keeps what the app was before."""

_POINTS = 120  # of the history, on a page
_DEAD_LETTERS_SHOWN = 50
_CHARS_SHOWN = 2_000
_PATTERNS = ("PatternMatch", "RowPatternMatch")  # the classes of steps that have partial matches
_SUMS = ("read", "late", "dead", "filtered", "duplicate")


class AppOperations:
    """Reads what operators see of one app. Thread-safe."""

    def __init__(self, app: str, folder: Path) -> None:
        self._app = app
        self._folder = folder
        self._lock = threading.Lock()
        self._store: StateStoreReader | None = None
        # Of each batch only what is drawn: a record also has its steps.
        self._batches: deque[dict[str, Any]] = deque(maxlen=BATCHES_KEPT)

    def read(self, store: StateStoreReader, status: Mapping[str, Any]) -> dict[str, Any]:
        """Return it as it is now, by a status. The store may be another one than in the last call."""
        with self._lock:
            if store is not self._store:
                self._store = store
                self._batches.clear()
            since = self._batches[-1]["batch_id"] + 1 if self._batches else 0
            newest = store.batches(self._app, since=max(0, since - 1))
            if self._batches and not _goes_on(self._batches[-1], newest):
                self._batches.clear()  # the app was reset in a database, or computed anew: other batches
                newest = store.batches(self._app)
            for one in with_commits(newest):
                if self._batches and one["batch_id"] == self._batches[-1]["batch_id"]:
                    self._batches.pop()  # its commit is known now
                self._batches.append(_drawn(one))
            points = list(_points(list(self._batches)))
        facts = JobFacts(
            self._app, status, store.batches(self._app, limit=RECENT_BATCHES), datetime.now(UTC)
        )
        return {
            "findings": [one.sentence for one in findings(facts)],
            "load": facts.load.to_dict(),
            "batches": points,
            "dead_letters": _dead_letters(store),
            "versions": list(self._versions(store)),
            "patterns": _patterns(store.program(self._app, JOB)),
        }

    def _versions(self, store: StateStoreReader) -> Iterator[dict[str, Any]]:
        live = store.program(self._app, JOB)
        if live is None:
            return
        yield {**_version("live", live, live), "position": store.position(self._app)}
        for kind in VERSION_FOLDERS:
            path = self._folder / kind / STATE_STORE_FILE
            with suppress(MillstreamError, OSError), open_state_store(path, readonly=True) as kept:
                program = kept.program(self._app, JOB)
                if program is not None:
                    position = kept.position(self._app)
                    yield {**_version(kind, program, live), "position": position}


def _patterns(program: StoredProgram | None) -> list[str]:
    """Return the names of the steps that have partial matches."""
    steps = () if program is None else program.steps.values()
    return sorted(one["name"] for one in steps if one["definition"]["class"] in _PATTERNS)


def _goes_on(last: Mapping[str, Any], newest: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether batches begin with the one that was read last."""
    names = ("batch_id", "at", "duration_ms")
    return bool(newest) and all(newest[0][name] == last[name] for name in names)


def _drawn(record: Mapping[str, Any]) -> dict[str, Any]:
    names = ("batch_id", "at", "duration_ms", "phases", "unread", "behind_s", *_SUMS)
    return {name: record[name] for name in names}


def _points(batches: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield points to draw: a batch each, or several in one, of which phases are means and counts are sums."""
    if not batches:
        return
    size = -(-len(batches) // _POINTS)
    for start in range(0, len(batches), size):
        some = batches[start : start + size]
        phases = Counter[str]()
        for one in some:
            phases.update(one["phases"])
        last = some[-1]
        yield {
            "at": last["at"],
            "first_batch_id": some[0]["batch_id"],
            "last_batch_id": last["batch_id"],
            "batches": len(some),
            "duration_ms_max": max(one["duration_ms"] for one in some),
            "phases_ms": {name: phases[name] / len(some) for name in PHASES},
            "unread": last["unread"],
            "behind_s": last["behind_s"],
            **{name: sum(one[name] for one in some) for name in _SUMS},
        }


def _dead_letters(store: StateStoreReader) -> dict[str, Any]:
    """Return the newest dead letters, each with its record, and how many there are."""
    if all(schema.name != DEAD_LETTERS_VIEW for schema in store.views()):
        return {"count": 0, "rows": []}
    query = Query(order=("-time",), limit=_DEAD_LETTERS_SHOWN)
    rows = store.select(DEAD_LETTERS_VIEW, query).rows
    return {
        "count": store.count(DEAD_LETTERS_VIEW),
        "rows": [_dead_letter(row) for row in rows.iter_rows(named=True)],
    }


def _dead_letter(row: Mapping[str, Any]) -> dict[str, Any]:
    is_record = row["headers"] is not None  # after a shuffle there is a row only
    return {
        "record": f"{row['topic']}/{row['partition']}/{row['offset']}" if is_record else None,
        "number": row["number"],
        "step": row["step"],
        "reason": row["reason"],
        "time": None if row["time"] is None else row["time"].isoformat(),
        "replayed_at": None if row["replayed_at"] is None else row["replayed_at"].isoformat(),
        "key": _shown(row["key"]),
        "value": _shown(row["value"]),
        "headers": row["headers"],
    }


def _shown(value: bytes | None) -> str | None:
    """Return the beginning of a key or value, as text."""
    shown = text_or_base64(None if value is None else value[:_CHARS_SHOWN])
    text = shown if shown is None or isinstance(shown, str) else str(shown)
    cut = value is not None and len(value) > _CHARS_SHOWN
    return f"{text} … ({len(value or b''):,} bytes)" if cut else text


def _version(kind: str, program: StoredProgram, live: StoredProgram) -> dict[str, Any]:
    """Describe a version: its steps with state and its outputs, and which of them differ from the live ones."""
    return {
        "kind": kind,
        "steps": len(program.steps),
        "outputs": sorted(program.outputs),
        "versions": dict(program.versions),
        "differs": sorted(_differing(program, live)),
    }


def _differing(program: StoredProgram, live: StoredProgram) -> Iterable[str]:
    mine, other = (
        {step["name"]: whole_definition(step) for step in one.steps.values()} | one.outputs
        for one in (program, live)
    )
    return (
        name for name in {*mine, *other} if not same_definition(mine.get(name), other.get(name))
    )
