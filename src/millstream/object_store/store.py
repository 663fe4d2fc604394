"""ObjectStore: what runs of state are kept in, whether that is a folder or an object store.

An object never changes: it is put once, under a name that nothing else has, and read, whole or in part, until
it is deleted. Names are made of segments with ``/`` between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from typing import BinaryIO, Protocol

import pyarrow as pa

Write = Callable[["pa.NativeFile | BinaryIO"], object]
"""Writes the content of an object into a file that is open for it."""


@dataclass(frozen=True)
class RequestCounts:
    """How often, and with how many bytes, an object store was asked. A try that failed is a request, too.

    ``cache_hits`` are the reads that its cache answered, so that it was not asked. ``wait_us`` is for how long
    those who use the store have waited for its answers: what went on beside their work is not in it.
    """

    puts: int = 0
    gets: int = 0
    lists: int = 0
    deletes: int = 0
    retries: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    cache_hits: int = 0
    wait_us: int = 0

    def __add__(self, other: RequestCounts) -> RequestCounts:
        return RequestCounts(
            *(getattr(self, each.name) + getattr(other, each.name) for each in fields(self))
        )

    def __sub__(self, other: RequestCounts) -> RequestCounts:
        return RequestCounts(
            *(getattr(self, each.name) - getattr(other, each.name) for each in fields(self))
        )


@dataclass(frozen=True)
class Stored:
    """An object that was put. ``checksum`` is None where the store keeps no checksums."""

    size_bytes: int
    checksum: int | None = None


@dataclass(frozen=True)
class Extent:
    """Which bytes of an object are wanted. ``whole``: they are all that it has."""

    start: int
    size_bytes: int
    whole: bool
    checksum: int | None = None

    @property
    def end(self) -> int:
        return self.start + self.size_bytes


@dataclass(frozen=True)
class Loaded:
    """Bytes of an object. ``mapped``: they are those of a file, and take no memory of their own."""

    data: pa.Buffer
    mapped: bool


class ObjectStore(Protocol):
    """A place for immutable objects. One task uses it at a time."""

    @property
    def url(self) -> str:
        """Where the objects are, as text without credentials; two places have two."""
        ...

    @property
    def checksums(self) -> bool:
        """Whether readers say which checksum an extent must have."""
        ...

    def put(self, name: str, write: Write) -> Stored:
        """Keep what is written under a name. It is durable once :meth:`sync` has returned.

        Raises:
            FileExistsError: the name is taken; :meth:`sync` may raise it instead.
        """
        ...

    def sync(self) -> None:
        """Return when all that was put is durable.

        Raises:
            ObjectStoreUnavailableError: it may not be; nothing may name it.
        """
        ...

    def read(self, name: str, extent: Extent) -> Loaded:
        """Return bytes of an object, mapped into memory where that is possible.

        Raises:
            CorruptionError: they are not there, or are others.
        """
        ...

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects; those that are not there are no error. It may happen later, or not at all."""
        ...

    def delete_all(self) -> None:
        """Delete all objects, and return when they are gone.

        Raises:
            ObjectStoreUnavailableError: some may be left.
        """
        ...

    def names(self, prefix: str = "") -> Iterator[str]:
        """Yield the names that begin with some segments (``a/b/``), or all."""
        ...

    def close(self) -> None:
        """Wait a little for what is still to be deleted."""
        ...

    @property
    def requests(self) -> RequestCounts:
        """What this object has asked the store for so far."""
        ...
