"""The log as the broker uses it: one writer, a reader for each thread, and threads for what may block."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from millstream.broker.protocol.error_codes import StorageError
from millstream.errors import MillstreamError, SyncFailedError
from millstream.log.batch_reader import BatchReader
from millstream.log.clocks import wall_clock_ms
from millstream.log.writer import LogWriter
from millstream.threads import Threads

READ_THREADS, WRITE_THREADS = 4, 2
T = TypeVar("T")
_log = logging.getLogger(__name__)


@contextmanager
def storage_errors() -> Iterator[None]:
    """Log an OSError of the log's files, and make it an error that a response can have.

    Raises:
        StorageError: the system refused an operation.
    """
    try:
        yield
    except OSError as error:
        _log.error("a request failed, as the system refused an operation on files: %s", error)
        raise StorageError(f"the broker could not use its files: {error}") from error


class LogAccess:
    """The log, and the threads that read and change it. Lives in one event loop.

    Args:
        on_failure: Called when the log accepts no more appends.
    """

    def __init__(
        self,
        writer: LogWriter,
        loop: asyncio.AbstractEventLoop,
        *,
        on_failure: Callable[[MillstreamError], None],
    ) -> None:
        self.writer = writer
        self.loop = loop
        self.clock_ms = wall_clock_ms
        self._fail = on_failure
        self._readers = threading.local()
        # Separate pools: work that waits for the one lock of control.db must not keep reads waiting.
        self._read_threads = Threads(READ_THREADS, "millstream-broker-read")
        self._write_threads = Threads(WRITE_THREADS, "millstream-broker-write")

    def close(self) -> None:
        """End the threads."""
        self._write_threads.close()
        self._read_threads.close()

    def reader(self) -> BatchReader:
        """Return the reader of the calling thread."""
        found: BatchReader | None = getattr(self._readers, "reader", None)
        if found is None:
            found = BatchReader(self.writer.folder, control=self.writer.control)
            self._readers.reader = found
        return found

    async def run_read(self, work: Callable[[], T]) -> T:
        """Run ``work``, which reads and may wait for the disk, in a thread; return its result.

        Raises:
            StorageError: it raised an OSError.
        """
        with storage_errors():
            return await asyncio.wrap_future(self._read_threads.submit(work))

    async def run_write(self, work: Callable[[], T]) -> T:
        """Run ``work``, which changes something besides records, in a thread; return its result.

        Raises:
            StorageError: it raised an OSError.
        """
        try:
            with storage_errors():
                return await asyncio.wrap_future(self._write_threads.submit(work))
        except SyncFailedError as error:
            self._fail(error)
            raise
