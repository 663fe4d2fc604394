"""Looking at an edited program from the page, and switching to it: for its own pages, and for clients with a token.

Which file has the program of an app is said where the server is started, and never by a request. What is done with it,
and how, is given to the server, too (:class:`~millstream.views.server.version_commands.VersionCommands`): views know nothing of programs.
"""

from __future__ import annotations

import json
from typing import get_args

from starlette.requests import Request
from starlette.responses import Response

from millstream.choices import choose
from millstream.errors import ConfigError
from millstream.http import json_response
from millstream.views.server.page_requests import actor_of, json_body, read_only_response, refusal
from millstream.views.server.version_commands import VersionAction, VersionCommands


async def start_command(request: Request, commands: VersionCommands | None) -> Response:
    """Begin what a request asks for, and respond with what :meth:`VersionCommands.read` returns.

    Raises:
        ConfigError: the action, or the body, is not understood; or see :class:`VersionCommands`.
    """
    if commands is None:
        return read_only_response()
    refused = refusal(request)
    if refused is not None:
        return refused
    app, action = request.path_params["app"], request.path_params["action"]
    choose("the action", action, get_args(VersionAction))
    commands.start(app, action, actor_of(request), stop=_parse(await json_body(request)))
    return json_response(dict(commands.read(app) or {}))


def _parse(body: bytes) -> bool:
    try:
        stop = json.loads(body).get("stop", False)
    except (ValueError, AttributeError):
        stop = None
    if not isinstance(stop, bool):
        raise ConfigError('The request is not of the form {"stop": false}. Correct it.')
    return stop
