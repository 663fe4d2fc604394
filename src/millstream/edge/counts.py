"""What an edge has taken, refused and lost since it began: so that nothing disappears uncounted."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counts:
    """Of HTTP. Each number only grows."""

    requests: int = 0
    events: int = 0
    duplicates: int = 0
    bad_events: int = 0
    not_appended: int = 0
    streams: int = 0
    streamed_bytes: int = 0
