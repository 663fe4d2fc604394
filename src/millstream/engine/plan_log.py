"""The plans of batches in an app's checkpoint, in Spark's format, for an engine without Spark.

Both engines write one log, so an app moves from one to the other at any batch, also at one that was begun and not
committed. A plan is written once: of two runs that plan a batch of one number, the first one's plan counts. That may be
one of a run that was replaced; nobody has acted on it, as a run reads the log after it has its number.

===============================================  ===================================================================
a crash after                                    leaves
===============================================  ===================================================================
1. a draft is written                            a hidden file, which nobody reads; the next run removes it
2. the draft has the batch's name                the plan of a batch without effects: the next run runs that batch
3. the state store has committed the batch       a plan whose batch the next run passes over, as it starts behind it
4. the batch is marked as committed              everything is done
===============================================  ===================================================================
"""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millstream.engine.checkpoint_copy import COMMITTED
from millstream.engine.source.offsets import SourceOffset, planned_offset
from millstream.errors import CorruptionError
from millstream.log.files import DISK, replace_file

PLANS_KEPT = 100
"""How many plans stay in the log, as Spark keeps them."""

_DRAFT = ".draft"


@dataclass(frozen=True)
class PlanLog:
    """The log of plans in the folder of a checkpoint."""

    checkpoint: Path

    def create(self) -> None:
        """Make what a checkpoint has besides its plans, unless it is there; remove drafts of earlier runs."""
        for name in ("offsets", "commits"):
            (self.checkpoint / name).mkdir(parents=True, exist_ok=True)
        if not (self.checkpoint / "metadata").exists():
            query = json.dumps({"id": str(uuid.uuid4())}, separators=(",", ":"))
            replace_file(DISK, self.checkpoint / "metadata", query.encode())
        for draft in self.checkpoint.glob(f"*/.*{_DRAFT}"):
            draft.unlink(missing_ok=True)

    def plan(self, batch_id: int) -> dict[str, Any] | None:
        """Return the source offset at which a batch ends; None if it is not planned.

        Raises:
            CorruptionError: there is a plan that cannot be read.
        """
        path = self._path(batch_id)
        found = planned_offset(self.checkpoint, batch_id)
        if found is None and path.exists():
            raise CorruptionError(
                f"{path} has no plan of the log's records in it. Restore the checkpoint and the state store of one "
                "time, or start over from the log: `millstream reset`."
            )
        return None if found is None else SourceOffset.from_json(found).to_json()

    def add(self, batch_id: int, end: Mapping[str, Any]) -> dict[str, Any]:
        """Write down durably where a batch ends; return the plan that counts, which may be another run's."""
        path = self._path(batch_id)
        draft = path.with_name(f".{batch_id}.{uuid.uuid4().hex}{_DRAFT}")
        with draft.open("xb") as file:
            file.write(self._text(batch_id, end).encode())
            file.flush()
            os.fsync(file.fileno())  # step 1
        try:
            os.link(draft, path)  # step 2
        except FileExistsError:
            pass
        except OSError:  # a file system without links: of two runs at once the last one counts
            if not path.exists():
                draft.replace(path)
        draft.unlink(missing_ok=True)
        DISK.sync_folder(path.parent)
        plan = self.plan(batch_id)
        assert plan is not None, "it was written just now"
        return plan

    def mark_committed(self, batch_id: int) -> None:
        """Note that a batch is committed, and remove the oldest plans.

        It need not be durable: a run begins where the state store says. But it is whole or not there, however this
        process ends: Spark does not begin behind a mark without its text.
        """
        mark = self.checkpoint / "commits" / str(batch_id)
        draft = mark.with_name(f".{batch_id}.{uuid.uuid4().hex}{_DRAFT}")
        draft.write_text(COMMITTED)
        draft.replace(mark)
        for name in ("offsets", "commits"):
            for old in (f"{batch_id - PLANS_KEPT}", f".{batch_id - PLANS_KEPT}.crc"):
                (self.checkpoint / name / old).unlink(missing_ok=True)

    def _path(self, batch_id: int) -> Path:
        return self.checkpoint / "offsets" / str(batch_id)

    def _text(self, batch_id: int, end: Mapping[str, Any]) -> str:
        """Return a plan as Spark writes it: a version, settings of its own, and the offset of each source."""
        settings = {
            "batchWatermarkMs": 0,
            "batchTimestampMs": time.time_ns() // 1_000_000,
            "conf": {},
        }
        head = ["v1", json.dumps(settings, separators=(",", ":"))]
        with suppress(OSError):  # what Spark has frozen stays frozen
            head = self._path(batch_id - 1).read_text().splitlines()[:2]
        return "\n".join([*head, json.dumps(end)])  # in the form that Spark compares as a text
