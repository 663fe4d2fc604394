"""What an edge has accepted, refused and lost since its start: nothing disappears uncounted."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class HttpCounters:
    """Counters of HTTP. Each only grows."""

    requests: int = 0
    events: int = 0
    duplicates: int = 0
    bad_events: int = 0
    not_appended: int = 0
    streams: int = 0
    streamed_bytes: int = 0
