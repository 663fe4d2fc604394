"""BatchNote: what a connector of the guarantee "transaction" stores outside, in the transaction of a batch's rows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from millstream.connectors.sinks.connector import RecordsToWrite, RefusedRecord, WrittenBatch


@dataclass(frozen=True)
class BatchNote:
    """The last batch that was written, and the records of it that were refused."""

    batch: WrittenBatch
    refused: tuple[RefusedRecord, ...] = ()

    @classmethod
    def of(cls, batch: RecordsToWrite, refused: Sequence[RefusedRecord]) -> Self:
        """Return the note of a batch."""
        return cls(WrittenBatch(batch.number, batch.positions), tuple(refused))

    @classmethod
    def from_json(cls, text: str | bytes | None) -> Self | None:
        """Return what :meth:`to_json` has made; None of None."""
        if text is None:
            return None
        said = json.loads(text)
        positions = {int(partition): offset for partition, offset in said["positions"]}
        refused = tuple(RefusedRecord(*one) for one in said["refused"])
        return cls(WrittenBatch(said["number"], positions), refused)

    def to_json(self) -> str:
        """Return it as text."""
        return json.dumps(
            {
                "number": self.batch.number,
                "positions": sorted(self.batch.positions.items()),
                "refused": [(one.partition, one.offset, one.reason) for one in self.refused],
            }
        )
