"""What can be done with the program of an app from the page, and who does it; no server is needed to name it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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

    def partial_matches(self, app: str, step: str | None, key: Sequence[str]) -> Mapping[str, Any]:
        """Return what ``millstream why match --json`` says of an app: of one step, and of keys with these ``COLUMN=VALUE``, if given.

        Raises:
            ConfigError: it is not known which file has the app's program, or the command refuses what is asked, and says why.
            ConflictError: one is being looked for.
            RetriableError: it takes too long.
        """
