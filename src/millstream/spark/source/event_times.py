"""How far the partitions have been read in event time, told by the sink to the planner.

The two are different processes, and only the batches know event times. So the sink writes, after
each commit, the largest event time read of every partition into a small file, and the planner reads
it before it shares out the next batch. The file is a hint: what is decided by it goes into the
source's offset, so a batch that is run again is the same batch; and without it, or with an old one,
partitions are read in other proportions, and nothing else changes.
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
        """Read what the sink wrote last; nothing if there is no such file, or no whole one."""
        try:
            written = json.loads(self.path.read_bytes())
        except (OSError, ValueError):
            return {}
        return {
            topic: {int(number): at_us for number, at_us in times.items()}
            for topic, times in written.items()
        }

    def add(self, rows: Iterable[FrameRow]) -> None:
        """Add what a batch's reports tell, and write it all."""
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
