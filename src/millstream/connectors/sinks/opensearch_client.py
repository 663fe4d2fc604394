"""OpenSearchClient: requests to a server of OpenSearch, and what its responses mean.

==============================  ==========================================================================
response                        what follows
==============================  ==========================================================================
2xx, 404, 409, 413              they are given to who asked
429, 5xx, none                  RetriableError: it is tried again, not before ``Retry-After``
any other                       ConfigError: the address is wrong, or the user may not do it
==============================  ==========================================================================

Source: OpenSearch 2.19, "REST API reference".
"""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote, urlsplit

from millstream.connectors.sinks.sink_password import SINK_PASSWORD_VARIABLE, sink_password
from millstream.errors import ConfigError, RetriableError
from millstream.kernels.enrichment.calls import LookupCallError
from millstream.lookups.http_client import HttpRequest, Origin, exchange, retry_after_s

SCHEMES = {"opensearch": "http", "opensearchs": "https"}
_PORT = 9200
_FOR_WHO_ASKED = frozenset({404, 409, 413})
_RETRY_AFTER_S_MAX = 3600.0
_ANSWER_BYTES_MAX = 64 << 20


@dataclass(frozen=True)
class OpenSearchClient:
    """Asks one server; for one thread."""

    url: str = field(repr=False)  # it may have a password
    timeout_s: float

    @property
    def shown(self) -> str:
        """The address, without user and password."""
        parts = urlsplit(self.url)
        host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
        return f"{parts.scheme}://{host}:{parts.port or _PORT}"

    def ask(
        self, method: str, target: str, body: bytes | None = None
    ) -> tuple[int, Mapping[str, Any]]:
        """Return the status of the response, and the JSON of one of 2xx; see the module.

        Raises:
            RetriableError: the server does not respond, or has no room.
            ConfigError: it refuses the request.
        """
        parts = urlsplit(self.url)
        origin = Origin(SCHEMES[parts.scheme], parts.hostname or "", parts.port or _PORT)
        headers = {"Content-Type": "application/x-ndjson", **self._authorization()}
        request = HttpRequest(method, origin, target, headers, body, self.shown)
        try:
            answer = exchange(request, self.timeout_s, _ANSWER_BYTES_MAX)
        except LookupCallError as error:
            if error.retriable:
                raise RetriableError(f"{error}. It is tried again.") from None
            raise ConfigError(f"{error}. Correct the address, and start the sink again.") from None
        if 200 <= answer.status < 300 or answer.status in _FOR_WHO_ASKED:
            return answer.status, _json(answer.body)
        where = f"{self.shown} responded {answer.status}"
        if answer.status == 429 or answer.status >= 500:
            later = RetriableError(f"{where}. It is tried again.")
            asked_s = retry_after_s(answer.headers.get("retry-after"), time.time())
            later.retry_after_s = min(asked_s, _RETRY_AFTER_S_MAX)
            raise later
        raise ConfigError(
            f"{where}. Correct the address, the user or the password (${SINK_PASSWORD_VARIABLE}), or what the user may do."
        )

    def _authorization(self) -> dict[str, str]:
        user = urlsplit(self.url).username
        if user is None:
            return {}
        text = f"{unquote(user)}:{sink_password(self.url) or ''}"
        return {"Authorization": f"Basic {base64.b64encode(text.encode()).decode()}"}


def reason_of(found: Mapping[str, Any]) -> str:
    """Return what the JSON of a response says of an error, as the end of a sentence; "" if nothing."""
    error = found.get("error")
    if not isinstance(error, Mapping):
        return f": {error}" if error else ""
    inner = reason_of({"error": error.get("caused_by")}).removeprefix(": ")
    return f": {error.get('type')}, {error.get('reason')}" + (f" ({inner})" if inner else "")


def _json(body: bytes) -> Mapping[str, Any]:
    try:
        found = json.loads(body or b"{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
