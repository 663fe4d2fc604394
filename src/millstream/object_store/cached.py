"""Objects of an object store, read through a cache on this machine's disk, and uploaded while work goes on.

1. An object is written into memory and into the cache, and its upload begins. A crash here leaves nothing, or
   an object that nothing names; a put is one request, so a torn one leaves nothing.
2. ``sync`` waits for all uploads. Only after it does a manifest name the objects.

The uploads hold a bounded number of bytes. An object that the cache could not take is read back from the store.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import islice
from pathlib import Path

import google_crc32c
import pyarrow as pa

from millstream.errors import CorruptionError, MillstreamError
from millstream.object_store.cache import LocalCache
from millstream.object_store.client import ObjectClient
from millstream.object_store.folder import read_extent, wrong_size
from millstream.object_store.store import Extent, Loaded, RequestCounts, Stored, Write
from millstream.threads import Threads

UPLOAD_BYTES_MAX = 128 << 20  # in hand at a time; or one object, if it has more
_THREADS = {"uploads": 4, "deletes": 1}
_DELETE_WAIT_S = 10.0
_KNOWN_MAX = 65536
_CHECKED_AT_A_TIME = 1 << 20
_DELETED_AT_A_TIME = 10_000

_known: OrderedDict[tuple[object, ...], None] = OrderedDict()  # extents of files that were checked
_knowing = threading.Lock()


@dataclass
class CachedObjectStore:
    """The objects under a URL."""

    client: ObjectClient
    cache: LocalCache
    checksums: bool = True
    _uploads: OrderedDict[str, tuple[pa.Buffer, Future[None]]] = field(default_factory=OrderedDict)
    _deletes: list[Future[None]] = field(default_factory=list)
    _hits: int = 0
    _waited_s: float = 0.0

    @classmethod
    def open(cls, url: str, folder: Path, size_max: int) -> CachedObjectStore:
        """Open the objects under a URL, with a cache in a folder."""
        prefix = hashlib.sha256(url.encode()).hexdigest()[:16]
        return cls(ObjectClient(url), LocalCache(folder, size_max, prefix))

    @property
    def url(self) -> str:
        return self.client.url

    @property
    def requests(self) -> RequestCounts:
        wait_us = round(self._waited_s * 1_000_000)
        return replace(self.client.counts, cache_hits=self._hits, wait_us=wait_us)

    def put(self, name: str, write: Write) -> Stored:
        sink = pa.BufferOutputStream()
        write(sink)
        data = sink.getvalue()
        while self._uploads and self._uploading() + data.size > UPLOAD_BYTES_MAX:
            self._finish(next(iter(self._uploads)))
        future = _threads("uploads", os.getpid()).submit(self.client.put, name, _view(data))
        self._uploads[name] = data, future
        extent = Extent(0, data.size, whole=True, checksum=checksum_of(data))
        if self.cache.put(name, _view(data)):
            _remember(self.cache.path(name), extent)
        return Stored(data.size, extent.checksum)

    def sync(self) -> None:
        while self._uploads:
            self._finish(next(iter(self._uploads)))

    def read(self, name: str, extent: Extent) -> Loaded:
        found = self._read_cached(name, extent)
        if found is not None:
            self._hits += 1
            return found
        if name in self._uploads:
            return Loaded(_cut(self._uploads[name][0], extent), mapped=False)
        return self._read_stored(name, extent)

    def delete(self, names: Iterable[str]) -> None:
        given = list(names)
        if not given:
            return
        for name in given:
            self.cache.remove(name)
        self._deletes = [each for each in self._deletes if not each.done()]
        self._deletes.append(_threads("deletes", os.getpid()).submit(self._delete, given))

    def delete_all(self) -> None:
        while names := list(islice(self.client.names(), _DELETED_AT_A_TIME)):
            self.client.delete(names)
            for name in names:
                self.cache.remove(name)
        self.client.delete_folders()

    def names(self, prefix: str = "") -> Iterator[str]:
        return self.client.names(prefix)

    def close(self) -> None:
        wait(self._deletes, timeout=_DELETE_WAIT_S)

    def _delete(self, names: list[str]) -> None:
        try:
            self.client.delete(names)
        except MillstreamError:  # told by then, and the next run's sweep removes them
            return

    def _uploading(self) -> int:
        return sum(data.size for data, _ in self._uploads.values())

    def _finish(self, name: str) -> None:
        _data, future = self._uploads[name]
        try:
            with self._waiting():
                future.result()
        finally:
            del self._uploads[name]

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """Count the time of a block, in which a caller waits for the store."""
        began = time.monotonic()
        try:
            yield
        finally:
            self._waited_s += time.monotonic() - began

    def _read_cached(self, name: str, extent: Extent) -> Loaded | None:
        """Return an extent of a cached file; None if it is not there, or not what it must be."""
        path = self.cache.path(name)
        try:
            about = path.stat()
            found = read_extent(path, extent)
        except OSError:  # removed just now
            return None
        if isinstance(found, int):
            self.cache.remove(name)
            return None
        # A file that was checked is not checked again when it is opened again.
        known = (str(path), about.st_ino, about.st_mtime_ns, extent)
        if known not in _known and not _is_intact(found.data, extent):
            self.cache.remove(name)
            return None
        self.cache.touch(name)
        _remember(path, extent)
        return found

    def _read_stored(self, name: str, extent: Extent) -> Loaded:
        whole = self._get(name, extent)
        if not _is_intact(_cut(whole, extent), extent):
            whole = self._get(name, extent)  # it may have been damaged on its way
        found = _cut(whole, extent)
        if not _is_intact(found, extent):
            raise CorruptionError(
                f"{self.url}/{name} is not what was written: its checksum is another one. Restore the object, "
                "or start over from the log: `millstream reset` with the app's name."
            )
        if self.cache.put(name, _view(whole)):
            mapped = self._read_cached(name, extent)
            if mapped is not None:
                return mapped
        return Loaded(found, mapped=False)

    def _get(self, name: str, extent: Extent) -> pa.Buffer:
        try:
            with self._waiting():
                whole = self.client.get(name)
        except FileNotFoundError:
            raise wrong_size(f"{self.url}/{name}", extent, 0) from None
        if not (whole.size == extent.end if extent.whole else whole.size >= extent.end):
            raise wrong_size(f"{self.url}/{name}", extent, whole.size)
        return whole


@cache
def _threads(what: str, _process: int) -> Threads:
    """Return threads of this process: after a fork, the parent's are not there."""
    return Threads(_THREADS[what], f"object store: {what}")


def _cut(whole: pa.Buffer, extent: Extent) -> pa.Buffer:
    return whole.slice(extent.start, extent.size_bytes)


def checksum_of(data: pa.Buffer) -> int:
    """Return the CRC-32C of some bytes."""
    value, view = 0, _view(data)
    for first in range(0, len(view), _CHECKED_AT_A_TIME):  # the library takes nothing but bytes
        value = google_crc32c.extend(value, bytes(view[first : first + _CHECKED_AT_A_TIME]))
    return value


def _view(data: pa.Buffer) -> memoryview:
    return memoryview(data).cast("B") if data.size else memoryview(b"")


def _is_intact(data: pa.Buffer, extent: Extent) -> bool:
    return extent.checksum is None or checksum_of(data) == extent.checksum


def _remember(path: Path, extent: Extent) -> None:
    try:
        about = path.stat()
    except OSError:
        return
    with _knowing:
        _known[str(path), about.st_ino, about.st_mtime_ns, extent] = None
        while len(_known) > _KNOWN_MAX:
            _known.popitem(last=False)
