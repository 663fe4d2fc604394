"""The event times that partitions have been read to: a file from the sink to the planner.

The two are different processes, and only the batches know event times. So after each commit the sink writes
the largest event time read of every partition into a small file, and the planner reads it before it divides
the next batch. The file is a hint: the decision goes into the source's offset, so a repeated batch is the
same batch. Without the file, or with an old one, partitions are read in other proportions, and nothing else
changes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from millstream.kernels.frames import PORT_LEDGER, FrameRow, decode_message


@dataclass
class EventTimesFile:
    """The file, and what is in it: topic → partition → the largest event time, microseconds."""

    path: Path
    known: dict[str, dict[int, int]] = field(init=False)

    def __post_init__(self) -> None:
        self.known = self.read()

    def read(self) -> dict[str, dict[int, int]]:
        """Read what the sink wrote last; nothing if the file is missing or incomplete."""
        try:
            written = json.loads(self.path.read_bytes())
        except (OSError, ValueError):
            return {}
        return {
            topic: {int(number): at_us for number, at_us in times.items()}
            for topic, times in written.items()
        }

    def add(self, rows: Iterable[FrameRow]) -> None:
        """Add the event times of a batch's reports, and write the file."""
        before = {topic: dict(times) for topic, times in self.known.items()}
        for row in rows:
            if row.port == PORT_LEDGER:
                for topic, times in decode_message(row.frame).get("event_times", {}).items():
                    known = self.known.setdefault(topic, {})
                    for number, at_us in times.items():
                        known[int(number)] = max(known.get(int(number), at_us), at_us)
        if self.known != before:
            new = self.path.with_suffix(".new")
            new.write_text(json.dumps(self.known, separators=(",", ":")))
            new.replace(self.path)
