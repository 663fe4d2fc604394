"""Fields that every line of a run's structured log has: app, job, run, and the batch that is worked on.

They are of the process: it has one run at a time that logs.
"""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from typing import Any

_fields: dict[str, Any] = {}


def set_log_fields(**fields: Any) -> None:
    """Set some of the fields, for all lines from now on."""
    _fields.update(fields)


class JsonFormatter(logging.Formatter):
    """Formats log records as JSON, one in a line, in ASCII: so it is JSON whatever the encoding of the stream.

    Fields: ``at`` (RFC 3339, UTC), ``level``, ``logger``, ``message``, ``error`` with its traceback if there is one, and
    the run's ``app``, ``job``, ``run``, ``batch_id`` as far as they are known.
    """

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line = {
            "at": at.replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields,
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)
