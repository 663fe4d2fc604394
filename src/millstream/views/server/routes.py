"""The routes of the server, and what each responds.

======================================  ===========================================================
``/``                                   the page
``/operate``                            the page for operators
``/views``                              all views: app, columns, key, rows, newest change
``/views/NAME``                         rows; parameters as in `query_params.py`; JSON, or CSV if accepted
``/views/NAME/changes``                 server-sent events: changes after ``since=``
``/apps``                               the apps there are
``/apps/NAME/status``                   what an app is doing
``/apps/NAME/status/changes``           ... as server-sent events
``/apps/NAME/graph``                    its pipeline: nodes and edges
``/apps/NAME/dashboard``                its panels, with what they show
``/apps/NAME/live``                     status and panels as server-sent events, for the page
``/apps/NAME/operate``                  status, load, batches, dead letters and versions, for operators
``/apps/NAME/dead-letters/replay``      POST: sends dead letters again, see `dead_letter_requests.py`
``/apps/NAME/versions/ACTION``          POST: begins a command on the edited program, see `version_requests.py`
``/apps/NAME/partial-matches``          POST: those of its patterns, see `partial_match_requests.py`
``/login``, ``/logout``, ``/who``       see `login_routes.py`
``/metrics``                            the figures of all apps and of the log, for Prometheus
``/healthz``, ``/readyz``               whether the server lives; whether all stores can be read
======================================  ===========================================================

But for the first two POSTs, which need the role ``operate``, the server only reads. Errors: `millstream/http.py`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import anyio
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response

from millstream.access.tokens import Tokens
from millstream.errors import (
    ConfigError,
    ConflictError,
    MillstreamError,
    OffsetOutOfRangeError,
    RetriableError,
    UnknownViewError,
)
from millstream.http import (
    NO_STORE,
    AllowedHosts,
    StatusTable,
    event_stream_response,
    exception_handlers,
    json_response,
)
from millstream.http_access import Access, AccessRoute, access_of
from millstream.http_sessions import LoginSessions
from millstream.metrics.exposition import Exposition
from millstream.metrics.routes import metric_routes
from millstream.views.coverage import partial_note, spans_to_json
from millstream.views.position import is_reached
from millstream.views.query import Query
from millstream.views.server.assets import Assets
from millstream.views.server.catalog import ViewCatalog, ViewRef
from millstream.views.server.dead_letter_requests import (
    ReplayDeadLetters,
    replay_dead_letters,
)
from millstream.views.server.event_streams import ViewStreams, change_id
from millstream.views.server.json_rows import csv, objects
from millstream.views.server.login_routes import LOGIN_PATHS, LoginRoutes
from millstream.views.server.operations import AppOperations
from millstream.views.server.partial_match_requests import look_at_partial_matches
from millstream.views.server.query_params import (
    parse_change_id,
    parse_position,
    parse_query,
    parse_timeout,
)
from millstream.views.server.store_watcher import ReadExecutor, StoreWatcher
from millstream.views.server.version_commands import VersionCommands
from millstream.views.server.version_requests import start_command

_log = logging.getLogger(__name__)
_ADDRESSES = "Addresses are /views, /apps and the page at /."
_STATUS: StatusTable = (
    (UnknownViewError, 404),
    (OffsetOutOfRangeError, 410),
    (ConfigError, 400),
    (ConflictError, 409),
    (RetriableError, 503),
    (MillstreamError, 500),
)


def application(
    catalog: ViewCatalog,
    exposition: Exposition,
    *,
    hosts: frozenset[str] | None,
    replay: ReplayDeadLetters | None = None,
    commands: VersionCommands | None = None,
    tokens: Tokens | None = None,
    origins: Iterable[str] = (),
) -> tuple[Starlette, StoreWatcher]:
    """Return the server as an ASGI application, and the watcher that wakes its streams.

    Args:
        exposition: What ``/metrics`` and ``/readyz`` respond.
        hosts: The host names that requests may name; None: any. See :class:`AllowedHosts`.
        replay: Sends dead letters again; None: nothing does.
        commands: Runs commands on edited programs; None: nothing does.
        tokens: The tokens of which requests must carry one; None: they need none.
        origins: Origins of pages that may send requests, beside the server's own.
    """
    sessions = None if tokens is None else LoginSessions(tokens)
    server = ViewRoutes(catalog, replay, commands)
    login = LoginRoutes(sessions, server.assets)
    app = Starlette(
        routes=[*server.routes(), *login.routes(), *metric_routes(exposition)],
        exception_handlers=exception_handlers(_STATUS, _ADDRESSES, _log),
        lifespan=server.lifespan,
    )
    app.add_middleware(
        Access,
        tokens=tokens,
        origins=origins,
        open_paths=("/healthz", "/readyz", *LOGIN_PATHS),
        sessions=sessions,
        own_origin=True,
    )
    if hosts is not None:
        app.add_middleware(AllowedHosts, hosts=hosts)
    return app, server.watcher


class ViewRoutes:
    """Handles requests, from the stores of a catalog."""

    def __init__(
        self,
        catalog: ViewCatalog,
        replay: ReplayDeadLetters | None = None,
        commands: VersionCommands | None = None,
    ) -> None:
        self._catalog = catalog
        self._replay = replay
        self._commands = commands
        self._replaying = anyio.Lock()  # of two replays at a time, one would be fenced
        self._operations: dict[str, AppOperations] = {}
        self._executor = ReadExecutor()
        self.watcher = StoreWatcher(catalog, self._executor)
        self._streams = ViewStreams(catalog, self._executor, self.watcher)
        self.assets = Assets()

    def routes(self) -> list[AccessRoute]:
        handlers: dict[str, Callable[[Request], Awaitable[Response]]] = {
            "/": self.page,
            "/operate": self.operate_page,
            "/views": self.views,
            "/views/{view}": self.rows,
            "/views/{view}/changes": self.changes,
            "/apps": self.apps,
            "/apps/{app}/status": self.status,
            "/apps/{app}/status/changes": self.status_changes,
            "/apps/{app}/graph": self.graph,
            "/apps/{app}/dashboard": self.dashboard,
            "/apps/{app}/live": self.live,
            "/apps/{app}/operate": self.operate,
        }
        changing = {
            "/apps/{app}/dead-letters/replay": self.replay,
            "/apps/{app}/versions/{action}": self.command,
        }
        return [
            AccessRoute("/assets/{name}", self.asset, role=None),
            *(AccessRoute(path, handler, role="read") for path, handler in handlers.items()),
            *(
                AccessRoute(path, handler, role="operate", methods=["POST"], changes=True)
                for path, handler in changing.items()
            ),
            AccessRoute(
                "/apps/{app}/partial-matches",
                self.partial_matches,
                role="read",
                methods=["POST"],
                changes=True,  # it begins a process
            ),
        ]

    @asynccontextmanager
    async def lifespan(self, _: Starlette) -> AsyncIterator[None]:
        """Watch the stores while the server runs."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.watcher.run)
            yield
            tasks.cancel_scope.cancel()

    # The page.

    async def page(self, request: Request) -> Response:
        return self.assets.response("index.html", request.headers.get("if-none-match"))

    async def operate_page(self, request: Request) -> Response:
        return self.assets.response("operate.html", request.headers.get("if-none-match"))

    async def asset(self, request: Request) -> Response:
        name = request.path_params["name"]
        return self.assets.response(name, request.headers.get("if-none-match"))

    # Views.

    async def views(self, _: Request) -> Response:
        def read() -> list[dict[str, Any]]:
            return [_view_json(view) for view in self._catalog.views()]

        return json_response({"views": await self._executor.run(read)})

    async def rows(self, request: Request) -> Response:
        view = await self._view(request)
        query = parse_query(request.query_params.multi_items(), view.schema)
        if "at_least" in request.query_params:
            await self._wait(view, request)
        assert query.limit is not None, "there is a default"
        one_more = Query(query.where, query.between, query.order, query.limit + 1)
        found = await self._executor.run(lambda: view.store.select(view.schema.name, one_more))
        rows = found.rows.head(query.limit)
        if "text/csv" in request.headers.get("accept", ""):
            text = await self._executor.run(lambda: csv(rows, found.schema))
            return Response(text, media_type="text/csv; charset=utf-8", headers=NO_STORE)
        head = {
            **_schema_json(view),
            "change": found.newest_change,
            "change_id": change_id(found.newest_change, found.view_id),
            "batch_id": found.batch_id,
            "position": found.position,
            "coverage": spans_to_json(found.coverage),
            "note": partial_note(found.coverage),
            "more": found.rows.height > query.limit,
        }
        lines = ",\n".join(await self._executor.run(lambda: objects(rows, found.schema)))
        text = f'{json.dumps(head, ensure_ascii=False)[:-1]}, "rows": [\n{lines}\n]}}\n'
        return Response(text, media_type="application/json", headers=NO_STORE)

    async def _view(self, request: Request) -> ViewRef:
        view, app = request.path_params["view"], request.query_params.get("app")
        return await self._executor.run(lambda: self._catalog.find(view, app))

    async def _wait(self, view: ViewRef, request: Request) -> None:
        """Wait until a view reflects the position ``at_least`` of the request.

        Raises:
            ConfigError: it never can, as its app does not read that topic or partition.
            RetriableError: it did not in time.
        """
        wanted = parse_position(request.query_params["at_least"])
        timeout_s = parse_timeout(request.query_params.get("timeout"))
        end = anyio.current_time() + timeout_s
        seen: tuple[int, ...] = ()
        while True:
            position = await self._executor.run(lambda: view.store.position(view.schema.name))
            if is_reached(position, wanted):
                return
            if not seen:
                await self._executor.run(partial(self._catalog.check_position, view, wanted))
            left = end - anyio.current_time()
            if left <= 0 or self.watcher.closing.is_set():
                break
            seen = await self.watcher.wait_for_newer(view.store_name, seen, left)
        raise RetriableError(
            f"The view {view.schema.name!r} has not reached {json.dumps(wanted)} within "
            f"{timeout_s:g} s; it is at {json.dumps(position)}. Ask again, wait longer with timeout=, "
            "or see whether the app runs."
        )

    async def changes(self, request: Request) -> Response:
        view = await self._view(request)
        resumed = request.headers.get("last-event-id")
        view_id = ""
        if resumed is not None:
            since, view_id = parse_change_id(resumed, "Last-Event-ID")
        elif "since" in request.query_params:
            since, view_id = parse_change_id(request.query_params["since"], "since")
        else:
            newest = await self._executor.run(view.store.newest_changes)
            since = newest[view.schema.name]
        return event_stream_response(self._streams.changes(view, since, view_id))

    # Apps.

    async def apps(self, _: Request) -> Response:
        return json_response({"apps": await self._executor.run(self._catalog.apps)})

    async def status(self, request: Request) -> Response:
        return json_response(await self._streams.status(request.path_params["app"]))

    async def status_changes(self, request: Request) -> Response:
        app = request.path_params["app"]
        self._catalog.state_store(app)
        return event_stream_response(self._streams.live(app, panels=False))

    async def live(self, request: Request) -> Response:
        app = request.path_params["app"]
        self._catalog.state_store(app)
        return event_stream_response(self._streams.live(app))

    async def operate(self, request: Request) -> Response:
        app = request.path_params["app"]
        status = await self._streams.status(app)
        store = self._catalog.state_store(app)
        known = self._operations.get(app)
        if known is None:
            known = self._operations[app] = AppOperations(app, self._catalog.folder(app))
        reading = known
        found = await self._executor.run(lambda: reading.read(store, status))
        operates = access_of(request).principal.may("operate")
        program = None if self._commands is None else self._commands.read(app)
        return json_response(
            {
                "status": status,
                **found,
                "can_replay": operates and self._replay is not None,
                "can_look": program is not None,
                "program": program if operates else None,
            }
        )

    async def replay(self, request: Request) -> Response:
        self._catalog.state_store(request.path_params["app"])  # there is such an app
        async with self._replaying:
            return await replay_dead_letters(request, self._replay, self._executor)

    async def command(self, request: Request) -> Response:
        self._catalog.state_store(request.path_params["app"])  # there is such an app
        return await start_command(request, self._commands)

    async def partial_matches(self, request: Request) -> Response:
        self._catalog.state_store(request.path_params["app"])  # there is such an app
        return await look_at_partial_matches(request, self._commands, self._executor)

    async def graph(self, request: Request) -> Response:
        app = request.path_params["app"]
        store = self._catalog.state_store(app)
        found = await self._executor.run(lambda: store.description(app, "graph"))
        return json_response({"app": app, **(found or {"nodes": [], "edges": []})})

    async def dashboard(self, request: Request) -> Response:
        app = request.path_params["app"]
        return json_response({"app": app, "panels": await self._streams.panels(app)})


def _schema_json(view: ViewRef) -> dict[str, Any]:
    columns = [{"name": name, "type": kind} for name, kind in view.schema.columns]
    return {
        "app": view.app,
        "view": view.schema.name,
        "key": view.schema.key,
        "columns": columns,
    }


def _view_json(view: ViewRef) -> dict[str, Any]:
    name = view.schema.name
    return {
        **_schema_json(view),
        "rows": view.store.count(name),
        "change": view.store.newest_changes().get(name, 0),
        "position": view.store.position(name),
        "note": partial_note(view.store.coverage(name)),
    }
