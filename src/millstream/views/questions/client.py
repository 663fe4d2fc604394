"""Asks an app on another machine, or in another process, over HTTP."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import quote, urlencode, urlsplit
from urllib.request import Request, urlopen

from millstream.durations import Duration
from millstream.errors import (
    ConfigError,
    DeadlineError,
    MillstreamError,
    RetriableError,
    UserCodeError,
)
from millstream.views.questions.answer import Answer, json_of
from millstream.views.questions.deadline import Deadline

_LISTING_S = 10.0
_SPARE_S = 2.0  # for the way there and back
_BY_KIND = {
    error.__name__: error for error in (ConfigError, DeadlineError, RetriableError, UserCodeError)
}
_BY_STATUS: Mapping[int, type[MillstreamError]] = {
    400: ConfigError,
    401: ConfigError,
    403: ConfigError,
    404: ConfigError,
    421: ConfigError,
    503: RetriableError,
    504: DeadlineError,
}


def ask(
    url: str,
    name: str,
    keys: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
    /,
    *,
    deadline: Duration = "5 seconds",
    at_least: Mapping[str, Any] | None = None,
    token: str | None = None,
    **key: Any,
) -> Answer:
    """Ask an app whose questions are served at a URL. The value of the answer is what JSON has of it.

    Args:
        url: What :meth:`millstream.App.serve_questions`, ``millstream ask --listen`` or ``millstream run --ask`` serves.
        name: A step, a view or a question: see :meth:`millstream.App.ask`.
        keys: Many keys, as a list of dicts; or one, or the arguments of a question, as a dict.
        deadline: How long the answer may take there.
        at_least: A position that the answer must reflect.
        token: What the server requires.
        key: One key, or the arguments of a question.

    Raises:
        ConfigError: the server refuses the question; the message says why.
        DeadlineError: the answer did not come in time.
        RetriableError: nothing responds at the URL, or it is overloaded.
        UserCodeError: the question's function failed.

    Example::

        ms.ask("http://127.0.0.1:8402", "per_minute", ad=7).value
    """
    if urlsplit(url).scheme not in ("http", "https"):
        raise ConfigError(
            f"{url!r} is no http:// address. Give that of an app's questions; with the program itself, say app.ask(…)."
        )
    if keys is not None and key:
        raise ConfigError("Keys are given twice: in one argument, and by name. Give them once.")
    deadline_s = Deadline.given(deadline, "The deadline").seconds
    params = {"deadline": f"{deadline_s:.6f} seconds"}
    if at_least is not None:
        params["at_least"] = json.dumps(at_least)
    address = f"{url.rstrip('/')}/ask/{quote(name, safe='')}?{urlencode(params)}"
    given = key if key or keys is None else keys
    found = request_json(address, json_of(given, name).encode(), token, deadline_s + _SPARE_S)
    return Answer(
        found["name"], found["answer"], found["position"], found["batch_id"], found["running"]
    )


def list_questions(url: str, token: str | None = None) -> list[dict[str, Any]]:
    """Return what can be asked at a URL: see :meth:`millstream.App.what_can_be_asked`."""
    found = request_json(f"{url.rstrip('/')}/ask", None, token, _LISTING_S)
    listing: list[dict[str, Any]] = found["can_be_asked"]
    return listing


def request_json(address: str, body: bytes | None, token: str | None, timeout_s: float) -> Any:
    """Return what a server of questions responds, as JSON values."""
    headers = {"Content-Type": "application/json"}
    if token is not None:
        headers["Authorization"] = f"Bearer {token}"
    request = Request(address, body, headers)  # noqa: S310 - the scheme was checked
    try:
        with urlopen(request, timeout=timeout_s) as response:  # noqa: S310 - the same
            return json.loads(response.read())
    except HTTPError as error:
        raise _error_of(error) from None
    except (
        HTTPException,
        ValueError,
    ) as error:  # the address, or what responds is no server of questions
        raise ConfigError(
            f"{address} is no address of an app's questions, or another server responds there ({error}). Correct it."
        ) from error
    except TimeoutError as error:
        raise DeadlineError(
            f"{address} did not respond within {timeout_s:g} s. Ask again, or give it longer (deadline=)."
        ) from error
    except (URLError, OSError) as error:
        raise RetriableError(
            f"Nothing responds at {address} ({error}). Serve the app's questions there, or correct the address."
        ) from error


def _error_of(response: HTTPError) -> MillstreamError:
    try:
        error = json.loads(response.read())["error"]
        kind, message = error["kind"], error["message"]
    except (ValueError, KeyError, TypeError):
        kind, message = "", f"{response.url} responds {response.code} {response.reason}."
    found = _BY_KIND.get(kind) or _BY_STATUS.get(response.code, MillstreamError)
    return found(message)
