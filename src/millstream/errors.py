"""Every exception that Millstream raises on purpose, in one tree.

The branch of an error says what the caller must do; the class says what happened; the attributes
carry the data. A message names the value seen, what is allowed, and the next step.

    MillstreamError
    ├── ConfigError             correct the call, the setting or the declaration (also a ValueError)
    │   ├── UnknownTopicError       create the topic, or mend the name
    │   ├── TopicExistsError        use the topic that is there, or choose another name
    │   ├── UnknownViewError        mend the name, or run the pipeline that fills the view
    │   ├── RecordTooLargeError     send a smaller record
    │   └── EnvironmentProblem      install or set what is missing; `millstream doctor` checks it
    ├── RetriableError          try again later, unchanged
    │   ├── FolderOwnedError        another process owns the folder; wait, or stop that process
    │   └── DiskFullError           nothing was appended; make room, then send again
    ├── FencedError             a newer writer has taken over: close, never retry
    ├── ConflictError           the state has moved on: reload, decide again
    ├── OffsetOutOfRangeError   the records are gone or not yet there: seek to the stated range
    ├── CorruptionError         stop and keep the bytes: what is on disk is not what was written
    │   ├── CorruptBatchError       one record batch; names file, position and offsets
    │   └── SyncFailedError         a write may not have reached the disk; check it, open again
    ├── UserCodeError           a function or expression of the user's failed: mend it
    └── JobFailedError          the running job stopped; the message says at which step and why
"""

from __future__ import annotations


class MillstreamError(Exception):
    """Root of the tree. Catch it to catch all that Millstream raises on purpose."""


class ConfigError(MillstreamError, ValueError):
    """A call, setting or declaration is wrong. Correct it; trying again changes nothing."""


class UnknownTopicError(ConfigError):
    """The topic does not exist. Create it, or mend the name."""


class TopicExistsError(ConfigError):
    """The topic exists already. Use it, or choose another name."""


class UnknownViewError(ConfigError):
    """The view does not exist. Mend the name, or run the pipeline that fills it."""


class RecordTooLargeError(ConfigError):
    """A record is larger than a batch may be. Send a smaller one."""


class EnvironmentProblem(ConfigError):
    """Something outside the program is missing or too old. ``millstream doctor`` checks it."""


class RetriableError(MillstreamError):
    """A passing fault. The same call may succeed later, unchanged."""


class FolderOwnedError(RetriableError):
    """Another living process owns the log folder. Wait for it, or stop it."""


class DiskFullError(RetriableError):
    """The disk did not take the records: none of them was appended. Make room, then send again."""


class FencedError(MillstreamError):
    """A newer writer has taken over. Close this one; never retry."""


class ConflictError(MillstreamError):
    """The state has moved on since it was read. Reload it and decide again."""


class OffsetOutOfRangeError(MillstreamError):
    """Records asked for are gone, or were never written.

    ``start`` and ``end`` are the offsets that the partition holds, as ``[start, end)``.
    """

    def __init__(self, message: str, *, start: int, end: int) -> None:
        super().__init__(message)
        self.start = start
        self.end = end


class CorruptionError(MillstreamError):
    """What is on disk is not what was written. Stop, and keep the bytes."""


class CorruptBatchError(CorruptionError):
    """One record batch is damaged. ``path`` and ``position`` say where it lies."""

    def __init__(self, message: str, *, path: str, position: int) -> None:
        super().__init__(message)
        self.path = path
        self.position = position


class SyncFailedError(CorruptionError):
    """The disk failed to keep a write. Check the disk, then open the folder again: it is verified."""


class UserCodeError(MillstreamError):
    """A function or expression of the user's failed. ``step`` names where in the pipeline."""

    def __init__(self, message: str, *, step: str) -> None:
        super().__init__(message)
        self.step = step


class JobFailedError(MillstreamError):
    """The running job stopped. The message says at which step and why."""
