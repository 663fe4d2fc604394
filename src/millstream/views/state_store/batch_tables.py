"""What batches leave beside their views: a job's history, where its source was, and the manifests of its state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from millstream.views.schema import Fence
from millstream.views.state_store.database import Database
from millstream.views.state_store.reader import to_json

BATCHES_KEPT = 10_000
"""Of how many batches a job's history has a record: about 8 MB."""


def add_record(db: Database, fence: Fence, record: Mapping[str, Any]) -> None:
    """Add a batch to the history, and remove what is no longer kept."""
    job = (fence.app, fence.job)
    db.execute("INSERT INTO _batches VALUES (?, ?, ?, ?)", (*job, fence.batch_id, to_json(record)))
    db.execute(
        "DELETE FROM _batches WHERE app = ? AND job = ? AND batch_id <= ?",
        (*job, fence.batch_id - BATCHES_KEPT),
    )


def add_source_offsets(
    db: Database, fence: Fence, offsets: Mapping[int, Mapping[str, Any]]
) -> None:
    """Note where the source was before some batches, and forget what is no longer kept."""
    job = (fence.app, fence.job)
    db.executemany(
        "INSERT INTO _source_offsets VALUES (?, ?, ?, ?) ON CONFLICT (app, job, batch_id) "
        "DO UPDATE SET source_offset = excluded.source_offset",
        [(*job, batch_id, to_json(offset)) for batch_id, offset in offsets.items()],
    )
    db.execute(
        "DELETE FROM _source_offsets WHERE app = ? AND job = ? AND batch_id <= ?",
        (*job, fence.batch_id - BATCHES_KEPT),
    )


def put_state(db: Database, app: str, job: str, manifests: Mapping[tuple[int, int], bytes]) -> None:
    """Replace all manifests of a job."""
    db.execute("DELETE FROM _state WHERE app = ? AND job = ?", (app, job))
    db.executemany(
        "INSERT INTO _state VALUES (?, ?, ?, ?, ?)",
        [(app, job, stage, bucket, one) for (stage, bucket), one in manifests.items()],
    )
