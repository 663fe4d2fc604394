"""``/metrics``, ``/healthz`` and ``/readyz`` for the servers that are Starlette applications.

Needs starlette, the extra ``ui``.
"""

from __future__ import annotations

from anyio import to_thread
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from millstream.http_access import AccessRoute
from millstream.metrics.exposition import CONTENT_TYPE, Exposition

_NO_STORE = {"Cache-Control": "no-store"}


def metric_routes(exposition: Exposition) -> list[AccessRoute]:
    """Return the routes of a server's figures and health."""

    async def metrics(_: Request) -> Response:
        text = await to_thread.run_sync(exposition.text)
        return Response(text, headers={**_NO_STORE, "Content-Type": CONTENT_TYPE})

    async def healthz(_: Request) -> Response:
        return PlainTextResponse("alive\n", headers=_NO_STORE)

    async def readyz(_: Request) -> Response:
        answer = await to_thread.run_sync(exposition.readiness)
        return PlainTextResponse(answer.text, answer.status, headers=_NO_STORE)

    return [
        AccessRoute("/metrics", metrics, role="read"),
        AccessRoute("/healthz", healthz, role=None),
        AccessRoute("/readyz", readyz, role=None),
    ]
