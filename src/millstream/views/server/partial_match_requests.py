"""Looking at the partial matches of an app's patterns: for the server's own pages, and for clients with a token.

What a pattern waits for is found by its program, which the server does not run: a command lists them in a process of its own
(:class:`~millstream.views.server.version_commands.VersionCommands`). So it is asked for by a button, one at a time, and by POST, which no
page of another site can send. It changes nothing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from millstream.errors import ConfigError
from millstream.http import json_response
from millstream.views.server.json_rows import EXACT_BELOW
from millstream.views.server.page_requests import json_body, read_only_response, refusal
from millstream.views.server.store_watcher import ReadExecutor
from millstream.views.server.version_commands import VersionCommands

ROWS_SHOWN = 5
"""Of the rows of a partial match, so many are in a response: the first one, and the last ones."""

_FORM = '{"step": "match(cart)", "key": ["user=anna"]}'
_KEY_COLUMNS_MAX = 100
_CHARS_MAX = 10_000


async def look_at_partial_matches(
    request: Request, commands: VersionCommands | None, executor: ReadExecutor
) -> Response:
    """Respond with the partial matches that a request asks for, as ``millstream why match`` lists them.

    Raises:
        ConfigError: the body is not understood; or see :meth:`VersionCommands.partial_matches`.
    """
    if commands is None:
        return read_only_response()
    refused = refusal(request)
    if refused is not None:
        return refused
    step, key = _parse(await json_body(request))
    app = request.path_params["app"]
    found = await executor.run(lambda: commands.partial_matches(app, step, key))
    shown = [_shown(one) for one in found["partial_matches"]]
    return json_response({**found, "partial_matches": shown})


def _shown(one: Mapping[str, Any]) -> dict[str, Any]:
    """Return a partial match with so many of its rows as a page shows, and how many there are."""
    rows: Sequence[Mapping[str, Any]] = one["rows"]
    shown = rows if len(rows) <= ROWS_SHOWN else [rows[0], *rows[1 - ROWS_SHOWN :]]
    made: dict[str, Any] = _exact({**one, "rows": shown, "row_count": len(rows)})
    return made


def _exact(value: Any) -> Any:
    """Return a value in which what a browser would round, or not read, is text, as in the rows of views."""
    if isinstance(value, dict):
        return {name: _exact(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_exact(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else f"{'-' if value < 0 else ''}Infinity"
    return str(value) if isinstance(value, int) and abs(value) >= EXACT_BELOW else value


def _parse(body: bytes) -> tuple[str | None, list[str]]:
    try:
        values = json.loads(body)
        step, key = values.get("step"), values.get("key", [])
    except (ValueError, AttributeError):
        raise ConfigError(f"The request is not of the form {_FORM}. Correct it.") from None
    words = [*([] if step is None else [step]), *(key if isinstance(key, list) else [None])]
    if (
        not all(isinstance(one, str) and _is_argument(one) for one in words)
        or len(key) > _KEY_COLUMNS_MAX
    ):
        raise ConfigError(
            f"The request is not of the form {_FORM}, with at most {_KEY_COLUMNS_MAX} columns of {_CHARS_MAX:,} characters each. "
            "Correct it."
        )
    return step, key


def _is_argument(text: str) -> bool:
    """Return whether a text can be given to a command."""
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        return False
    return len(text) <= _CHARS_MAX and "\0" not in text
