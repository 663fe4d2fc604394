"""The text of ``/metrics``, and the answers of ``/healthz`` and ``/readyz``, of one server.

Figures are read when they are asked for, from what the server keeps anyway; so they cost nothing between two
scrapes. A text that took a tenth of a CPU second to make is given out again for ten seconds: whoever scrapes, and
however often, figures take at most ``CPU_SHARE_MAX`` of a CPU. But no text is older than ``AGE_MAX_S``: figures that
were expensive once, as the first ones of a long ledger are, must not hide for an hour what happens meanwhile.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import version

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from millstream.errors import MillstreamError
from millstream.metrics.histogram import SYNC_TIMES
from millstream.metrics.readings import Readings

CPU_SHARE_MAX = 0.01
AGE_MAX_S = 60.0
CONTENT_TYPE = CONTENT_TYPE_LATEST
_log = logging.getLogger(__name__)
_version = cache(partial(version, "millstream"))  # of a file with all that a package says of itself

ReadFigures = Callable[[Readings], None]
"""Adds the figures of one source."""

ReadinessCheck = Callable[[], str | None]
"""Returns why a server is not ready, as a sentence; None if it is. What it raises is such a reason, too."""


@dataclass(frozen=True)
class HealthAnswer:
    """What a server says of its readiness. ``reasons`` is empty if it is ready."""

    reasons: Sequence[str]

    @property
    def status(self) -> int:
        """The status of the response: 200, or 503 while it is not ready."""
        return 503 if self.reasons else 200

    @property
    def text(self) -> str:
        return "".join(f"{reason}\n" for reason in self.reasons) or "ready\n"


class Exposition:
    """The figures and the readiness of one server. Thread-safe.

    Args:
        sources: By the name that ``millstream_metrics_failed`` has for it, what adds figures. One that fails is
            counted there and logged; the others are exposed.
        checks: What makes the server ready, all of it.
        cpu_share_max: How much of a CPU figures may take, where that makes them no older than AGE_MAX_S; 1: they are
            read with each scrape.
    """

    def __init__(
        self,
        sources: Mapping[str, ReadFigures],
        checks: Sequence[ReadinessCheck] = (),
        *,
        cpu_share_max: float = CPU_SHARE_MAX,
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self._sources = dict(sources)
        self._checks = tuple(checks)
        self._cpu_share_max = cpu_share_max
        self._clock, self._cpu_clock = clock, cpu_clock
        self._lock = threading.Lock()
        self._text = b""
        self._valid_until_s = float("-inf")
        self._cpu_s = 0.0
        self._failed: set[str] = set()
        self._process = CollectorRegistry(auto_describe=False)
        ProcessCollector(registry=self._process)

    def text(self) -> bytes:
        """Return all figures, as Prometheus reads them (:data:`CONTENT_TYPE`)."""
        with self._lock:
            if self._clock() >= self._valid_until_s:
                began_s = self._cpu_clock()
                self._text = self._generate()
                took_s = self._cpu_clock() - began_s
                self._cpu_s += took_s
                wait_s = took_s / self._cpu_share_max if self._cpu_share_max < 1 else 0.0
                self._valid_until_s = self._clock() + min(wait_s, AGE_MAX_S)
            return self._text

    def readiness(self) -> HealthAnswer:
        """Return whether the server is ready, and if not, all reasons."""
        reasons = []
        for check in self._checks:
            try:
                reason = check()
            except (MillstreamError, OSError) as error:
                reason = str(error)
            if reason is not None:
                reasons.append(reason)
        return HealthAnswer(reasons)

    def _generate(self) -> bytes:
        readings = Readings()
        readings.add("info", 1, version=_version())
        readings.add("metrics_cpu_seconds_total", self._cpu_s)
        if SYNC_TIMES.writes:
            readings.add_histogram("log_sync_seconds", SYNC_TIMES)
        for name, read in self._sources.items():
            readings.add("metrics_failed", float(not self._read(name, read, readings)), source=name)
        return readings.text().encode() + generate_latest(self._process)

    def _read(self, name: str, read: ReadFigures, readings: Readings) -> bool:
        """Read a source; False if it failed. Of one that keeps failing, the first error is logged."""
        try:
            read(readings)
        except (MillstreamError, OSError) as error:
            if name not in self._failed:
                _log.warning("figures of %s cannot be read, and are missing: %s", name, error)
            self._failed.add(name)
            return False
        except Exception:  # noqa: BLE001 - a defect in one source must not hide the others
            if name not in self._failed:
                _log.exception("figures of %s cannot be read, and are missing", name)
            self._failed.add(name)
            return False
        self._failed.discard(name)
        return True
