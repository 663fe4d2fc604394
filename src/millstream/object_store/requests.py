"""Requests: one try of each thing that a client asks of an object store. The client adds retries and counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

Page = Sequence[tuple[str, int]]
"""Names with the sizes of their objects, in the order of names."""


class Pages(Protocol):
    """The pages of a listing. ``resumes``: after a failure the next page can be asked for; else the listing begins anew."""

    resumes: bool

    def next_page(self) -> Page:
        """Return the next names; an empty page at the end."""
        ...


class Requests(Protocol):
    """Requests to the objects under a URL. Threads may share it.

    Besides what is named, each raises an OSError of its library, or of :mod:`~millstream.object_store.retries`, which says what failed.
    """

    def put(self, name: str, data: memoryview) -> None:
        """Put an object, whole or not at all, if its name is free.

        Raises:
            FileExistsError: the name is taken, perhaps by an earlier try whose answer was lost.
            FileNotFoundError: there is no such container.
        """
        ...

    def get(self, name: str) -> memoryview:
        """Return an object.

        Raises:
            FileNotFoundError: there is none.
        """
        ...

    def size(self, name: str) -> int:
        """Return the size of an object.

        Raises:
            FileNotFoundError: there is none.
        """
        ...

    def delete(self, names: list[str]) -> None:
        """Delete objects, as many as there are. If it fails, those that it may have left are in the list."""
        ...

    def pages(self, prefix: str) -> Pages:
        """Return all that is under a prefix: every object whose put has been answered, and none whose delete has."""
        ...

    def delete_folders(self) -> None:
        """Delete the folders that objects were in, where a store has any, if they are empty."""
        ...
