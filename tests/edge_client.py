"""An edge in this process, and requests to it over real sockets."""

from __future__ import annotations

import json
from contextlib import contextmanager
from http.client import HTTPConnection
from types import SimpleNamespace
from urllib.parse import urlsplit

from millstream.edge.server import EdgeSettings, serve


def ask(url, method, path, body=None, **headers):
    """Send one request, and return what came back."""
    place = urlsplit(url)
    connection = HTTPConnection(place.hostname, place.port, timeout=60)
    try:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, body, named)
        answer = connection.getresponse()
        text = answer.read()
    finally:
        connection.close()
    return SimpleNamespace(
        status=answer.status,
        headers={name.lower(): value for name, value in answer.getheaders()},
        json=json.loads(text) if text else None,
    )


@contextmanager
def serving_edge(log, *, statsd=None, failures=None, **settings):
    """Serve an edge while the block runs; ``post``, ``get`` and ``ask`` send it requests."""
    chosen = EdgeSettings(**settings)
    on_failure = (lambda: failures.append(1)) if failures is not None else (lambda: None)
    with serve(
        log, http="127.0.0.1:0", statsd=statsd, settings=chosen, on_failure=on_failure
    ) as serving:

        def post(path, body, kind="application/json", **headers):
            return ask(serving.url, "POST", path, body, Content_Type=kind, **headers)

        def get(path, **headers):
            return ask(serving.url, "GET", path, **headers)

        yield SimpleNamespace(
            serving=serving,
            url=serving.url,
            post=post,
            get=get,
            ask=lambda *words, **headers: ask(serving.url, *words, **headers),
        )
