"""Why a job is behind: how much is unread, how fast it arrives and is read, and where the time goes.

The rules are in :mod:`millstream.views.server.behind`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from millstream.ops.why import why_open
from millstream.views.commit.batch_load import RECENT_BATCHES, BatchLoad
from millstream.views.server.behind import BehindCause, HeldWatermark, JobFacts, findings
from millstream.views.server.status import AppStatus
from millstream.views.state_store.store import StateStore


@dataclass(frozen=True)
class BehindReport:
    """How far a job is behind, and why. ``catch_up_s``: None if it does not catch up at this rate, or it is not known.

    ``causes`` are words of :data:`millstream.views.server.behind.BehindCause`, each once.
    """

    app: str
    running: bool
    unread: int
    behind_s: float | None
    catch_up_s: float | None
    load: BatchLoad
    partitions: Mapping[str, int]
    causes: tuple[BehindCause, ...]
    sentences: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        names = ("app", "running", "unread", "behind_s", "catch_up_s")
        plain = {name: getattr(self, name) for name in names}
        return {
            **plain,
            "partitions": dict(self.partitions),
            "load": self.load.to_dict(),
            "causes": list(self.causes),
            "sentences": list(self.sentences),
        }


def why_behind(
    store: StateStore, app: str, log: Path, *, now: datetime | None = None
) -> BehindReport:
    """Return how far a job is behind, and what takes its time. It need not run. ``now`` is the time, by default that."""
    status = AppStatus(app, log, log / "apps" / app).read(store)
    held = [
        HeldWatermark(one.step, one.since_batch_id, one.held_by) for one in why_open(store, app)
    ]
    records = store.batches(app, limit=RECENT_BATCHES)
    facts = JobFacts(app, status, records, now or datetime.now(UTC), held)
    found = findings(facts)
    unread = status["unread"]
    return BehindReport(
        app,
        status["running"],
        unread,
        status["behind_s"],
        facts.load.catch_up(unread).seconds if status["running"] else None,
        facts.load,
        facts.waiting,
        tuple(dict.fromkeys(one.cause for one in found if one.cause is not None)),
        tuple(one.sentence for one in found),
    )
