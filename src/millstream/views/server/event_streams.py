"""Server-sent events: the changes of a view from any number on, and what an app is doing, live.

Each event with an ``id`` can be gone on from: a browser sends it by itself, as ``Last-Event-ID``, when
it connects again. A line without meaning goes out now and then, so that either end notices when
the other is gone.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Hashable
from dataclasses import dataclass
from typing import Any

from millstream.errors import MillstreamError, OffsetOutOfRangeError
from millstream.views.panels import from_plain
from millstream.views.query import check_view_id
from millstream.views.server.catalog import ViewCatalog, ViewRef
from millstream.views.server.json_rows import objects
from millstream.views.server.panel_data import panel_data
from millstream.views.server.status import AppStatus
from millstream.views.server.store_watcher import ReadExecutor, StoreWatcher

HEARTBEAT_S = 15.0
_CHANGES_AT_ONCE = 1000
_LIVE_EVERY_S = 0.5
_LIVE_AT_LEAST_EVERY_S = 2.0  # lag and freshness move without a commit
_AWAY_S = 10.0  # how long a store may be away: one that is made anew is, for a moment
_PANEL_KEPT_S = 60.0
_PANEL_REST_FACTOR = 10.0
_BEGIN = b"retry: 1000\n\n"
_HEARTBEAT = b": still here\n\n"


def change_id(number: int, made: str) -> str:
    """Return how a change is called: its number, and what tells the view from one made anew."""
    return f"{number}-{made}" if made else str(number)


def event(data: str, *, kind: str | None = None, name: str | None = None) -> bytes:
    """Return one server-sent event; the data must be on one line."""
    head = ("" if kind is None else f"event: {kind}\n") + ("" if name is None else f"id: {name}\n")
    return f"{head}data: {data}\n\n".encode()


@dataclass(frozen=True)
class _CachedPanel:
    """A panel as it was drawn last, and until when that will do."""

    panel: dict[str, Any]
    fresh_until: float


class ViewStreams:
    """Makes the streams. What several subscribers need at the same time is read once."""

    def __init__(self, catalogue: ViewCatalog, reading: ReadExecutor, watch: StoreWatcher) -> None:
        self._catalogue = catalogue
        self._reading = reading
        self._watch = watch
        self._statuses: dict[str, AppStatus] = {}
        self._drawn: dict[Hashable, _CachedPanel] = {}

    async def changes(self, place: ViewRef, since: int, made: str = "") -> AsyncIterator[bytes]:
        """Give the changes of a view after ``since``, and go on as they are committed.

        Ends with the event ``gone`` when some of them are no longer kept, or the view is not the one that
        it was (``made``, if that is known) and with ``failed`` when the store cannot be read for a while.
        """
        yield _BEGIN
        seen: tuple[int, ...] = ()
        read_at = time.monotonic()
        while not self._watch.closing.is_set():
            try:
                text, last, made = await self._chunk(place, since, made)
                read_at = time.monotonic()
            except OffsetOutOfRangeError as error:
                told = {"message": str(error), "start": error.start, "end": error.end}
                yield event(json.dumps(told, ensure_ascii=False), kind="gone")
                return
            except MillstreamError as error:
                if time.monotonic() < read_at + _AWAY_S and await self._watch.pause(_LIVE_EVERY_S):
                    continue
                yield event(json.dumps({"message": str(error)}, ensure_ascii=False), kind="failed")
                return
            if text:
                yield text
                since = last
                continue
            version = await self._watch.wait_for_newer(place.store_name, seen, HEARTBEAT_S)
            if version == seen:
                yield _HEARTBEAT
            seen = version

    async def _chunk(self, place: ViewRef, since: int, made: str) -> tuple[bytes, int, str]:
        """Return the next changes as events, the number of the last of them, and what the view is."""
        store = self._catalogue.store(place.store_name)
        version = await self._watch.version(place.store_name)

        def read() -> tuple[bytes, int, str]:
            name = place.schema.name
            frame = store.changes(name, since=since, limit=_CHANGES_AT_ONCE)
            found = check_view_id(store, name, since, made)
            numbers = frame["_seq"].to_list()
            lines = zip(objects(frame, place.schema), numbers, strict=True)
            events = b"".join(event(text, name=change_id(number, found)) for text, number in lines)
            return events, numbers[-1] if numbers else since, found or made

        key = ("changes", store, place.schema.name, since, made, version)
        return await self._reading.shared(key, read)

    async def status(self, app: str, stamp: Hashable = None) -> dict[str, Any]:
        """Return what an app is doing now; see :class:`AppStatus`.

        Those who ask with the same ``stamp`` get the same.
        """
        catalogue = self._catalogue
        known = self._statuses.get(app)
        if known is None:
            catalogue.state_store(app)  # there is such an app
            known = self._statuses[app] = AppStatus(app, catalogue.log, catalogue.folder(app))
        chosen = known

        def read() -> dict[str, Any]:
            return chosen.read(catalogue.state_store(app))

        if stamp is None:
            return await self._reading.run(read)
        return await self._reading.shared(("status", app, stamp), read)

    async def panels(self, app: str) -> list[dict[str, Any]]:
        """Return the panels of an app's dashboard, each with what it shows now."""
        store = self._catalogue.state_store(app)
        declared = await self._reading.run(lambda: store.description(app, "dashboard") or [])
        changes = await self._reading.run(store.newest_changes)
        return [await self._panel(app, plain, changes.get(plain["view"], 0)) for plain in declared]

    async def _panel(self, app: str, plain: dict[str, Any], change: int) -> dict[str, Any]:
        """Return a panel; one that takes long is drawn anew only after ten times as long."""
        store = self._catalogue.state_store(app)
        key = ("panel", store, json.dumps(plain, sort_keys=True))
        drawn = self._drawn.get(key)
        if drawn is not None and time.monotonic() < drawn.fresh_until:
            return drawn.panel

        def read() -> dict[str, Any]:
            return {**plain, **panel_data(store, from_plain(plain)), "change": change}

        began = time.monotonic()
        try:
            panel = await self._reading.shared((*key, change), read, _PANEL_KEPT_S)
        except MillstreamError as error:  # one that cannot be drawn must not hide the others
            return {**plain, "labels": [], "units": [], "rows": [], "failed": str(error)}
        took = time.monotonic() - began
        self._drawn[key] = _CachedPanel(panel, began + took * _PANEL_REST_FACTOR)
        return panel

    async def live(self, app: str, *, panels: bool = True) -> AsyncIterator[bytes]:
        """Give the status of an app whenever it changes, at most twice a second.

        With ``panels``, those of its dashboard whose views have changed come before it.
        """
        yield _BEGIN
        seen: tuple[int, ...] = ()
        shown: dict[int, bytes] = {}
        while True:
            try:
                for number, panel in enumerate(await self.panels(app) if panels else ()):
                    drawn = event(json.dumps({"number": number, **panel}), kind="panel")
                    if shown.get(number) != drawn:
                        shown[number] = drawn
                        yield drawn
                stamp = (seen, int(time.monotonic() / _LIVE_EVERY_S))
                told = json.dumps(await self.status(app, stamp), ensure_ascii=False)
                yield event(told, kind="status")
            except MillstreamError as error:  # its folder is being made anew, as a demo does
                yield event(json.dumps({"message": str(error)}, ensure_ascii=False), kind="failed")
            if not await self._watch.pause(_LIVE_EVERY_S):
                return
            seen = await self._watch.wait_for_newer(f"app:{app}", seen, _LIVE_AT_LEAST_EVERY_S)
