"""Server-sent events: the changes of a view from any number on, and what an app is doing, live.

A client resumes after any event that has an ``id``: a browser that reconnects sends the last one as
``Last-Event-ID``.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Hashable
from dataclasses import dataclass
from typing import Any

from millstream.errors import MillstreamError, OffsetOutOfRangeError
from millstream.http import EVENT_STREAM_START, HEARTBEAT, json_event, server_sent_event
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
_AWAY_S = 10.0  # how long a store may be away: one that is created again is, for a moment
_PANEL_KEPT_S = 60.0
_PANEL_REST_FACTOR = 10.0


def change_id(number: int, view_id: str) -> str:
    """Return the id of a change: its number, and the id of the view (see ``query.view_id_of``)."""
    return f"{number}-{view_id}" if view_id else str(number)


@dataclass(frozen=True)
class _CachedPanel:
    """A panel as it was computed last, and until when it may be shown."""

    panel: dict[str, Any]
    fresh_until: float


class ViewStreams:
    """Creates the streams. What several subscribers need at the same time is read once."""

    def __init__(self, catalog: ViewCatalog, executor: ReadExecutor, watcher: StoreWatcher) -> None:
        self._catalog = catalog
        self._executor = executor
        self._watcher = watcher
        self._statuses: dict[str, AppStatus] = {}
        self._cached: dict[Hashable, _CachedPanel] = {}

    async def changes(self, view: ViewRef, since: int, view_id: str = "") -> AsyncIterator[bytes]:
        """Yield the changes of a view after ``since``, and further ones as they are committed.

        Ends with the event ``gone`` when some of them are no longer kept, or when the view is not the one
        with this ``view_id`` (empty: not known), and with ``failed`` when the store cannot be read for a
        while.
        """
        yield EVENT_STREAM_START
        seen: tuple[int, ...] = ()
        read_at = time.monotonic()
        while not self._watcher.closing.is_set():
            try:
                events, last, view_id = await self._next_events(view, since, view_id)
                read_at = time.monotonic()
            except OffsetOutOfRangeError as error:
                content = {"message": str(error), "start": error.start, "end": error.end}
                yield json_event(content, kind="gone")
                return
            except MillstreamError as error:
                if time.monotonic() < read_at + _AWAY_S and await self._watcher.pause(
                    _LIVE_EVERY_S
                ):
                    continue
                yield json_event({"message": str(error)}, kind="failed")
                return
            if events:
                yield events
                since = last
                continue
            version = await self._watcher.wait_for_newer(view.store_name, seen, HEARTBEAT_S)
            if version == seen:
                yield HEARTBEAT
            seen = version

    async def _next_events(self, view: ViewRef, since: int, view_id: str) -> tuple[bytes, int, str]:
        """Return the next changes as events, the number of the last of them, and the view's id."""
        store = self._catalog.store(view.store_name)
        version = await self._watcher.version(view.store_name)

        def read() -> tuple[bytes, int, str]:
            name = view.schema.name
            frame = store.changes(name, since=since, limit=_CHANGES_AT_ONCE)
            found = check_view_id(store, name, since, view_id)
            numbers = frame["_seq"].to_list()
            rows = zip(objects(frame, view.schema), numbers, strict=True)
            events = b"".join(
                server_sent_event(text.encode(), event_id=change_id(number, found))
                for text, number in rows
            )
            return events, numbers[-1] if numbers else since, found or view_id

        key = ("changes", store, view.schema.name, since, view_id, version)
        return await self._executor.shared(key, read)

    async def status(self, app: str, stamp: Hashable = None) -> dict[str, Any]:
        """Return what an app is doing now; see :class:`AppStatus`.

        Calls with the same ``stamp`` share one result.
        """
        catalog = self._catalog
        known = self._statuses.get(app)
        if known is None:
            catalog.state_store(app)  # there is such an app
            known = self._statuses[app] = AppStatus(app, catalog.log, catalog.folder(app))
        chosen = known

        def read() -> dict[str, Any]:
            return chosen.read(catalog.state_store(app))

        if stamp is None:
            return await self._executor.run(read)
        return await self._executor.shared(("status", app, stamp), read)

    async def panels(self, app: str) -> list[dict[str, Any]]:
        """Return the panels of an app's dashboard, each with what it shows now."""
        store = self._catalog.state_store(app)
        declared = await self._executor.run(lambda: store.description(app, "dashboard") or [])
        changes = await self._executor.run(store.newest_changes)
        return [await self._panel(app, plain, changes.get(plain["view"], 0)) for plain in declared]

    async def _panel(self, app: str, plain: dict[str, Any], change: int) -> dict[str, Any]:
        """Return a panel. One that took long is computed again only after ten times as long."""
        store = self._catalog.state_store(app)
        key = ("panel", store, json.dumps(plain, sort_keys=True))
        cached = self._cached.get(key)
        if cached is not None and time.monotonic() < cached.fresh_until:
            return cached.panel

        def read() -> dict[str, Any]:
            return {**plain, **panel_data(store, from_plain(plain)), "change": change}

        began = time.monotonic()
        try:
            panel = await self._executor.shared((*key, change), read, _PANEL_KEPT_S)
        except MillstreamError as error:  # one that cannot be computed must not hide the others
            return {**plain, "labels": [], "units": [], "rows": [], "failed": str(error)}
        took = time.monotonic() - began
        self._cached[key] = _CachedPanel(panel, began + took * _PANEL_REST_FACTOR)
        return panel

    async def live(self, app: str, *, panels: bool = True) -> AsyncIterator[bytes]:
        """Yield the status of an app whenever it changes, at most twice a second.

        With ``panels``, each status follows the panels of the app's dashboard that have changed.
        """
        yield EVENT_STREAM_START
        seen: tuple[int, ...] = ()
        shown: dict[int, bytes] = {}
        while True:
            try:
                for number, panel in enumerate(await self.panels(app) if panels else ()):
                    text = json.dumps({"number": number, **panel})
                    event = server_sent_event(text.encode(), kind="panel")
                    if shown.get(number) != event:
                        shown[number] = event
                        yield event
                stamp = (seen, int(time.monotonic() / _LIVE_EVERY_S))
                yield json_event(await self.status(app, stamp), kind="status")
            except MillstreamError as error:  # its folder is being created again, as a demo does
                yield json_event({"message": str(error)}, kind="failed")
            if not await self._watcher.pause(_LIVE_EVERY_S):
                return
            seen = await self._watcher.wait_for_newer(f"app:{app}", seen, _LIVE_AT_LEAST_EVERY_S)
