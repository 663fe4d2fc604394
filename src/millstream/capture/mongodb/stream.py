"""The change stream of a database as groups: the events of one cluster time, or of one transaction, whole.

A group ends with the first event of another one, or where the server has nothing more at the moment: it has given the
whole of a commit by then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from millstream.capture.mongodb.events import (
    ChangeEvent,
    ClusterTime,
    Document,
    merged,
    read_event,
    token_time,
)

NextDocument = Callable[[], Document | None]


class EventReader:
    """Reads events one after another, and looks one ahead. For one thread.

    Args:
        next_document: Gives the next document of the stream; None where there is none at the moment.
        resume_token: Gives what reading goes on after where there is nothing at the moment.

    Attributes:
        token: What reading goes on after: behind the last event that was taken, or the place where there was nothing.
    """

    def __init__(
        self, next_document: NextDocument, resume_token: Callable[[], Document | None]
    ) -> None:
        self._next_document = next_document
        self._resume_token = resume_token
        self._ahead: ChangeEvent | None = None
        self.token: Document = dict(resume_token() or {})

    def peek(self) -> ChangeEvent | None:
        """Return the next event, and leave it to be taken; None where there is none at the moment."""
        if self._ahead is None:
            self._ahead = self._read()
            if self._ahead is None:  # all that was given was taken: so the place may move on
                self.token = dict(self._resume_token() or self.token)
        return self._ahead

    def take(self) -> ChangeEvent:
        """Return the event that was last looked at."""
        event, self._ahead = self._ahead, None
        assert event is not None
        self.token = event.token
        return event

    def with_event(self, event: ChangeEvent) -> Iterator[ChangeEvent]:
        """Yield the other events that belong to one that was taken."""
        while (ahead := self.peek()) is not None and ahead.is_with(event):
            event = self.take()
            yield event

    @property
    def time(self) -> ClusterTime | None:
        """The time up to which the stream has been read; None where it cannot be told."""
        return token_time(self.token)

    def _read(self) -> ChangeEvent | None:
        document = self._next_document()
        if document is None:
            return None
        fragments = [document]
        while _is_unfinished(fragments[-1]):
            more = self._next_document()
            if more is not None:
                fragments.append(more)
        return read_event(merged(fragments) if len(fragments) > 1 else document)


def _is_unfinished(document: Document) -> bool:
    split: dict[str, Any] | None = document.get("splitEvent")
    return split is not None and bool(split["fragment"] < split["of"])
