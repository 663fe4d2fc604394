"""Sending dead letters again from the page: for its own pages, and for clients with a token."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response

from millstream.access.audit_log import Actor
from millstream.errors import ConfigError
from millstream.http import json_response
from millstream.views.server.page_requests import actor_of, json_body, read_only_response, refusal
from millstream.views.server.store_watcher import ReadExecutor

_RECORDS_MAX = 1_000


class ReplayDeadLetters(Protocol):
    """Appends dead letters of an app, given as TOPIC/PARTITION/OFFSET, to their topics again; returns what it did.

    ``who``: asks for it, for the audit log. ``late_ok``: as in :func:`millstream.ops.dead_letter_replay.replay`.
    """

    def __call__(
        self, app: str, records: Sequence[str], who: Actor, *, late_ok: bool
    ) -> Mapping[str, Any]: ...


async def replay_dead_letters(
    request: Request, replay: ReplayDeadLetters | None, executor: ReadExecutor
) -> Response:
    """Send the dead letters that a request names again.

    Raises:
        ConfigError: its body is not understood, or some may come too late.
    """
    if replay is None:
        return read_only_response()
    refused = refusal(request)
    if refused is not None:
        return refused
    records, late_ok = _parse(await json_body(request))
    app, who = request.path_params["app"], actor_of(request)
    return json_response(
        await executor.run(lambda: dict(replay(app, records, who, late_ok=late_ok)))
    )


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
