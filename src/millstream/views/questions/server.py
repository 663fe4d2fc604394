"""Answers questions over HTTP, in a thread of this process, until a block ends.

======================  ===========================================================================
``GET /ask``            what can be asked: steps and views with their keys, and questions
``POST /ask/NAME``      an answer. The body is a key as a JSON object, or a list of keys; of a
                        question its arguments. ``?deadline=2s`` and ``?at_least={…}`` as in
                        :meth:`millstream.App.ask`
``GET /healthz``        whether the server lives
======================  ===========================================================================

Errors: `millstream/http.py`; a deadline that passed is 504.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from millstream.access.tls import Certificate
from millstream.access.tokens import Tokens
from millstream.errors import (
    ConfigError,
    DeadlineError,
    MillstreamError,
    RetriableError,
)
from millstream.listen_address import (
    bind,
    check_web_libraries,
    is_loopback,
    parse_listen_address,
)
from millstream.views.questions.answer import Answer
from millstream.views.questions.deadline import Deadline
from millstream.views.questions.service import GRACE_S, AnswerService

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

QUESTIONS_DEFAULT = "127.0.0.1:8402"
_BACKLOG = 128
_BODY_BYTES_MAX = 1 << 20
_DEADLINE_DEFAULT = "5 seconds"
_STATUS = (
    (ConfigError, 400),
    (DeadlineError, 504),
    (RetriableError, 503),
    (MillstreamError, 500),
)
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class QuestionServer:
    """A running server. ``url`` is what :func:`millstream.ask` takes."""

    url: str


@contextmanager
def serve_questions(
    service: AnswerService,
    listen: str,
    *,
    tokens: Tokens | None,
    certificate: Certificate | None,
    insecure: bool,
) -> Iterator[QuestionServer]:
    """Serve until the block ends. See :meth:`millstream.App.serve_questions`."""
    host, port = parse_listen_address(listen, QUESTIONS_DEFAULT)
    local = is_loopback(host)
    if not local and tokens is None and not insecure:
        raise ConfigError(
            f"{listen} can be reached from other machines, and requests need no token: whoever reaches it reads the state. "
            "Give a token, listen on 127.0.0.1, or use insecure=True (--insecure)."
        )
    check_web_libraries("Questions over HTTP need")
    from millstream import http  # noqa: PLC0415 - needs an extra
    from millstream.http_access import Access  # noqa: PLC0415 - the same

    with closing(bind(host, port, "server of questions")) as listener:
        listener.listen(_BACKLOG)
        app = _application(service)
        app.add_middleware(Access, tokens=tokens, origins=())
        if local and tokens is None:
            app.add_middleware(http.AllowedHosts, hosts=http.LOCAL_NAMES | {host})
        with http.serve_in_thread(
            app,
            listener,
            what="server of questions",
            ending=lambda: None,
            certificate=certificate,
        ):
            yield QuestionServer(http.url_of(host, listener, certificate))


def _application(service: AnswerService) -> Any:
    from starlette.applications import Starlette  # noqa: PLC0415 - needs an extra

    from millstream.http import exception_handlers  # noqa: PLC0415 - the same
    from millstream.http_access import AccessRoute  # noqa: PLC0415 - the same

    routes = _QuestionRoutes(service)
    return Starlette(
        routes=[
            AccessRoute("/ask", routes.list, role="read"),
            AccessRoute("/ask/{name}", routes.ask, role="read", methods=["POST"]),
            AccessRoute("/healthz", routes.healthz, role=None),
        ],
        exception_handlers=exception_handlers(
            _STATUS, "Addresses are GET /ask and POST /ask/NAME.", _log
        ),
    )


@dataclass(frozen=True)
class _QuestionRoutes:
    service: AnswerService

    async def healthz(self, _: Request) -> Response:
        from millstream.http import json_response  # noqa: PLC0415 - needs an extra

        return json_response({"ok": True})

    async def list(self, _: Request) -> Response:
        from millstream.http import json_response  # noqa: PLC0415 - needs an extra

        found = await asyncio.get_running_loop().run_in_executor(None, self.service.listing)
        return json_response({"app": self.service.app, "can_be_asked": found})

    async def ask(self, request: Request) -> Response:
        from starlette.responses import Response  # noqa: PLC0415 - needs an extra

        from millstream.http import NO_STORE, read_body  # noqa: PLC0415 - the same

        name, params = request.path_params["name"], request.query_params
        unknown = {*params} - {"deadline", "at_least"}
        if unknown:
            raise ConfigError(
                f"The parameter {min(unknown)!r} is none of deadline and at_least. Give the key in the body, as JSON."
            )
        deadline = Deadline.given(params.get("deadline", _DEADLINE_DEFAULT), "The deadline")
        at_least = _parsed(params["at_least"], "at_least") if "at_least" in params else None
        if at_least is not None and not isinstance(at_least, dict):
            raise ConfigError("at_least is no JSON object. Give topic → partition → offset.")
        keys = _keys(await read_body(request, _BODY_BYTES_MAX, "Ask for fewer keys at a time."))
        future = self.service.submit(
            name, keys, {}, deadline=deadline, at_least=at_least, then=Answer.to_json
        )
        text = await _awaited(future, deadline)
        return Response(text + "\n", media_type="application/json", headers=NO_STORE)


async def _awaited(future: Future[str], deadline: Deadline) -> str:
    try:
        return await asyncio.wait_for(
            asyncio.wrap_future(future), max(0.0, deadline.left_s) + GRACE_S
        )
    except TimeoutError:
        deadline.check("it is still being worked on")
        raise


def _keys(body: bytes) -> Any:
    """Return the keys, or arguments, that a body has."""
    found = _parsed(body, "The body") if body.strip() else None
    if found is None or isinstance(found, dict):
        return found or None
    if isinstance(found, list) and found and all(isinstance(one, dict) for one in found):
        return found
    raise ConfigError(
        'The body is no key. Give a JSON object with the columns of the key, such as {"ad": 7}, or a list of such objects.'
    )


def _parsed(text: str | bytes, what: str) -> Any:
    try:
        return json.loads(text if isinstance(text, str) else text.decode())
    except (ValueError, RecursionError) as error:  # not UTF-8 is a ValueError, too
        raise ConfigError(
            f'{what} is not JSON ({error}). Give JSON, such as {{"ad": 7}}.'
        ) from None
