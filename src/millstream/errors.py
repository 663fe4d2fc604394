"""Every exception that Millstream raises on purpose, in one tree.

The branch of an error says what the caller must do; the class says what happened; the attributes
carry the data. A message names the value seen, what is allowed, and the next step.

    MillstreamError
    ├── ConfigError             correct the call, the setting or the declaration (also a ValueError)
    │   ├── UnknownTopicError       create the topic, or correct the name
    │   ├── TopicExistsError        use the topic that is there, or choose another name
    │   ├── UnknownViewError        correct the name, or run the pipeline that fills the view
    │   ├── RecordTooLargeError     send a smaller record
    │   ├── SqlError                correct the statement; has PostgreSQL's code of what is wrong
    │   └── EnvironmentProblem      install or set what is missing; `millstream doctor` checks it
    ├── RetriableError          retry later, unchanged
    │   ├── FolderOwnedError        another process owns the folder, alone; wait, or stop that process
    │   ├── DiskFullError           nothing was appended; make room, then send again
    │   ├── BrokerUnavailableError  no broker responds at the address; start it, or correct the address
    │   ├── ObjectStoreUnavailableError  the object store with the state fails; run again when it responds
    │   ├── DeadlineError           the answer did not come in time: ask again, or give it longer
    │   └── OverloadError           the producer's buffer is full; slow down, or choose what is dropped
    ├── FencedError             a newer writer has taken over: close, never retry
    │   └── ProducerFencedError     a newer producer of the same name has taken over
    ├── ConflictError           the state has moved on: reload, decide again
    │   ├── TopicRecreatedError     positions in the topic mean nothing any more: start over
    │   ├── DeletionsLostError      a table missed deletions that compaction removed: reset the app
    │   ├── StagedRowsLostError     rows that tasks had written are gone: run again, the batch is repeated
    │   ├── EndMovedError           the partition has grown: read on, decide again
    │   ├── VersionConflictError    the stream is at another version: load it, decide again
    │   ├── OutOfOrderSequenceError records before these are missing: send those first
    │   ├── TransactionAbortedError the transaction was aborted: begin another, send again
    │   └── FencePassedError        the work of this batch id is committed already: skip it
    ├── OffsetOutOfRangeError   the records are gone or not yet there: seek to the stated range
    ├── CorruptionError         stop and keep the bytes: what is on disk is not what was written
    │   ├── CorruptBatchError       one record batch; names file, position and offsets
    │   └── SyncFailedError         a write may not have reached the disk; check it, open again
    ├── CommandRejectedError    a decider refused the command: send another one
    ├── UserCodeError           a function or expression of the user's failed: correct it
    ├── BadRecordError          a record does not fit its schema: correct the schema, or the policy
    └── JobFailedError          the running job stopped; the message says at which step and why
"""

from __future__ import annotations

import linecache
import sys
import traceback

_OURS = __file__.removesuffix("errors.py")
_OF_LIBRARIES = ("site-packages", "dist-packages", "lib/python3")


class MillstreamError(Exception):
    """Root of the tree. Catch it to catch all that Millstream raises on purpose."""

    def _render_traceback_(self) -> list[str]:
        """Return what IPython shows: the caller's own lines, and the message. With ``%xmode Verbose``, all lines."""
        shell = sys.modules["IPython"].get_ipython()
        if shell.InteractiveTB.mode == "Verbose":
            whole: list[str] = shell.InteractiveTB.structured_traceback(
                type(self), self, self.__traceback__
            )
            return whole
        lines = []
        for frame, number in traceback.walk_tb(self.__traceback__):
            path = frame.f_code.co_filename
            if path.startswith(_OURS) or any(part in path for part in _OF_LIBRARIES):
                continue
            _, name = shell.compile.format_code_name(path) or ("", path)
            lines.append(f"{name}, line {number}: {linecache.getline(path, number).strip()}")
        return [*lines, f"{type(self).__name__}: {self}"]


class ConfigError(MillstreamError, ValueError):
    """A call, setting or declaration is wrong. Correct it; a retry changes nothing."""


class UnknownTopicError(ConfigError):
    """The topic does not exist. Create it, or correct the name."""


class TopicExistsError(ConfigError):
    """The topic exists already. Use it, or choose another name."""


class UnknownViewError(ConfigError):
    """The view does not exist. Correct the name, or run the pipeline that fills it."""


class RecordTooLargeError(ConfigError):
    """A record is larger than a batch may be. Send a smaller one."""


class SqlError(ConfigError):
    """A statement of SQL is wrong, or may not be run. ``sqlstate`` is PostgreSQL's code of the kind of error."""

    def __init__(self, message: str, *, sqlstate: str) -> None:
        super().__init__(message)
        self.sqlstate = sqlstate


class EnvironmentProblem(ConfigError):
    """Something outside the program is missing or too old. ``millstream doctor`` checks it."""


class RetriableError(MillstreamError):
    """A passing fault. The same call may succeed later, unchanged: after ``retry_after_s``, if that was asked for."""

    retry_after_s: float = 0.0


class FolderOwnedError(RetriableError):
    """Another process owns the log folder, and accepts no connections. Wait for it, or stop it."""


class DiskFullError(RetriableError):
    """The disk has no room for the records: none of them was appended. Make room, then send again."""


class BrokerUnavailableError(RetriableError):
    """No broker responds at the log's address, or not in time. Start it, or correct the address."""


class ObjectStoreUnavailableError(RetriableError):
    """The object store with the state failed, every time that it was tried. Run again when it responds."""


class DeadlineError(RetriableError):
    """A question was not answered by its deadline. Ask again, or give it longer."""


class OverloadError(RetriableError):
    """The producer's buffer is full: the record was not accepted, or was dropped. Slow down, or spill."""


class FencedError(MillstreamError):
    """A newer writer has taken over. Close this one; never retry."""


class ProducerFencedError(FencedError):
    """A newer producer of the same transactional id has taken over. Close this one."""


class ConflictError(MillstreamError):
    """The state has moved on since it was read. Reload it and decide again."""


class TopicRecreatedError(ConflictError):
    """The topic was deleted and created again: positions in the old one mean nothing in the new.

    Delete the positions, and start over; ``millstream reset`` does this for an app.
    """


class DeletionsLostError(ConflictError):
    """Compaction removed deletions that an app had not read, so its table would keep deleted rows.

    Reset the app: ``millstream reset`` has it built again from what the log holds today.
    """


class OutOfOrderSequenceError(ConflictError):
    """Records before these are missing. Send those first, or start over with a new producer."""


class StagedRowsLostError(ConflictError):
    """Rows that tasks had written for a commit are gone. Nothing was committed: run again."""


class EndMovedError(ConflictError):
    """The partition has grown since it was read to its end: nothing was appended. Read on, decide again.

    ``end`` is where it ends now.
    """

    def __init__(self, message: str, *, end: int) -> None:
        super().__init__(message)
        self.end = end


class VersionConflictError(ConflictError):
    """The stream is not at the expected version: nothing was appended. Load it, and decide again.

    ``stream_id`` is the stream, ``version`` where it is, ``expected`` where it was expected to be.
    """

    def __init__(self, message: str, *, stream_id: str, version: int, expected: int) -> None:
        super().__init__(message)
        self.stream_id, self.version, self.expected = stream_id, version, expected


class TransactionAbortedError(ConflictError):
    """The transaction was aborted, by its timeout or a failure. Begin another, send again.

    ``timed_out`` says that it was open for longer than its timeout.
    """

    def __init__(self, message: str, *, timed_out: bool = False) -> None:
        super().__init__(message)
        self.timed_out = timed_out


class FencePassedError(ConflictError):
    """The fence is at this batch id or a later one: its work is committed already. Skip it.

    ``batch_id`` is the position of the fence.
    """

    def __init__(self, message: str, *, batch_id: int) -> None:
        super().__init__(message)
        self.batch_id = batch_id


class OffsetOutOfRangeError(MillstreamError):
    """The requested records are gone, or were never written.

    ``start`` and ``end`` are the offsets that the partition holds, as ``[start, end)``.
    """

    def __init__(self, message: str, *, start: int, end: int) -> None:
        super().__init__(message)
        self.start = start
        self.end = end


class CorruptionError(MillstreamError):
    """What is on disk is not what was written. Stop, and keep the bytes."""


class CorruptBatchError(CorruptionError):
    """Bytes of a segment are damaged. ``path`` and ``position`` say where.

    ``start`` and ``end`` are the offsets that cannot be read, as ``[start, end)``; -1 if they are not known.
    Records after them can be read from ``end`` on.
    """

    def __init__(
        self, message: str, *, path: str, position: int, start: int = -1, end: int = -1
    ) -> None:
        super().__init__(message)
        self.path = path
        self.position = position
        self.start = start
        self.end = end


class SyncFailedError(CorruptionError):
    """The disk failed to keep a write. Check the disk, then open the folder again: it is verified."""


class CommandRejectedError(MillstreamError):
    """A decider refuses a command, for the reason in the message: no event was appended.

    Raise it in ``decide``; a message that says what would be accepted helps the caller most.
    """


class UserCodeError(MillstreamError):
    """A function or expression of the user's failed. ``step`` is the step in the pipeline, if known."""

    # ``step`` has a default, as polars makes a new error from the message of the one that a function raised.
    def __init__(self, message: str, *, step: str = "") -> None:
        super().__init__(message)
        self.step = step


class BadRecordError(MillstreamError):
    """A record cannot be decoded, and its topic was declared with ``bad="stop"``.

    ``topic``, ``partition`` and ``offset`` identify it, ``reason`` says what is wrong with it.
    """

    def __init__(
        self, message: str, *, topic: str, partition: int, offset: int, reason: str
    ) -> None:
        super().__init__(message)
        self.topic = topic
        self.partition = partition
        self.offset = offset
        self.reason = reason


class JobFailedError(MillstreamError):
    """The running job stopped. The message says at which step and why."""
