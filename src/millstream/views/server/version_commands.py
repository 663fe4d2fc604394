"""What can be done with the program of an app from the page, and who does it; no server is needed to name it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Protocol

from millstream.access.audit_log import Actor

VersionAction = Literal["plan", "compare", "deploy", "rollback"]


class VersionCommands(Protocol):
    """Runs commands on the program of an app, beside the server. From any thread."""

    def start(self, app: str, action: VersionAction, who: Actor, *, stop: bool) -> None:
        """Begin a command, which ``who`` asks for; ``stop``: it may stop the app.

        Raises:
            ConfigError: it is not known which file has the app's program.
            ConflictError: one runs.
        """

    def read(self, app: str) -> Mapping[str, Any] | None:
        """Return of an app whose file is known ``file``, and of its last command ``action``, ``running``,
        ``exit_code`` and ``output``, each None before the first; None of others.
        """
