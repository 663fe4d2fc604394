"""The one thing that the page can change: sending dead letters again. Only for its own pages, on this machine.

A browser says from which page a request comes (``Origin``). Another site's page, or a form, cannot say that it is ours,
and cannot send JSON unasked. So a request needs our own origin, and JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response

from millstream.errors import ConfigError
from millstream.http import error_response, json_response
from millstream.views.server.store_watcher import ReadExecutor

_RECORDS_MAX = 1_000
_BODY_BYTES_MAX = 1 << 20


class ReplayDeadLetters(Protocol):
    """Appends dead letters of an app, given as TOPIC/PARTITION/OFFSET, to their topics again; returns what it did.

    ``late_ok``: as in :func:`millstream.ops.dead_letter_replay.replay`.
    """

    def __call__(self, app: str, records: Sequence[str], *, late_ok: bool) -> Mapping[str, Any]: ...


async def replay_dead_letters(
    request: Request, replay: ReplayDeadLetters | None, executor: ReadExecutor
) -> Response:
    """Send the dead letters that a request names again.

    Raises:
        ConfigError: its body is not understood, or some may come too late.
    """
    if replay is None:
        message = (
            "This server only reads: it was not started by `millstream ui` on this machine alone."
        )
        return error_response("ReadOnly", message, 403)
    refused = _refusal(request)
    if refused is not None:
        return refused
    records, late_ok = _parse(await _body(request))
    app = request.path_params["app"]
    return json_response(await executor.run(lambda: dict(replay(app, records, late_ok=late_ok))))


def _refusal(request: Request) -> Response | None:
    own = f"{request.url.scheme}://{request.headers.get('host', '')}"
    if request.headers.get("origin") != own:
        message = f"This may only be asked by a page of this server ({own}), which its browser confirms (Origin)."
        return error_response("OtherOrigin", message, 403)
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        return error_response("NotJson", "Send JSON (Content-Type: application/json).", 415)
    return None


async def _body(request: Request) -> bytes:
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > _BODY_BYTES_MAX:
            raise ConfigError(
                f"The request has more than {_BODY_BYTES_MAX:,} bytes. Name fewer records."
            )
    return body


def _parse(body: bytes) -> tuple[list[str], bool]:
    wanted = '{"records": ["TOPIC/PARTITION/OFFSET", …], "late_ok": false}'
    try:
        values = json.loads(body)
        records, late_ok = values["records"], values.get("late_ok", False)
    except (ValueError, TypeError, KeyError, AttributeError):
        raise ConfigError(f"The request is not of the form {wanted}. Correct it.") from None
    named = isinstance(records, list) and all(isinstance(one, str) for one in records)
    if not named or not isinstance(late_ok, bool) or not 0 < len(records) <= _RECORDS_MAX:
        raise ConfigError(
            f"The request is not of the form {wanted}, with 1 to {_RECORDS_MAX:,} records. Correct it."
        )
    return records, late_ok
