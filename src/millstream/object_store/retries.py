"""Tries a request again when the store or the way to it fails, and says so in one line.

Again: a status of 5xx, 408, 409 or 429, a time-out, a connection that was refused or cut, an answer that is not
whole. Not again: what would fail the same way, such as wrong credentials or a bucket that is not there.
"""

from __future__ import annotations

import logging
import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from millstream.errors import EnvironmentProblem, MillstreamError, ObjectStoreUnavailableError
from millstream.object_store.environment import environment_of, lacks_credentials

T = TypeVar("T")

_log = logging.getLogger(__name__)
_STATUS = re.compile(r"status code: (\d{3})([A-Za-z ]*)")
_CODE = re.compile(r"<Code>(\w{1,60})</Code>")
_KIND = re.compile(r"HttpError \{\s*kind: (\w+)")
_KINDS = {
    "Timeout": "no answer in time",
    "Connect": "no connection",
    "Interrupted": "the connection was cut",
    "Request": "the connection was cut",
}
TIMEOUT_S = 60  # of one request: an object has some 60 MB at most
CONNECT_TIMEOUT_S = 5
_CREDENTIALS_S = 20.0
_OTHER_REGION = (
    "incorrectly configured region"  # the library's words for a redirection that S3 gives then
)
_TOLD_AT_TRY = 5  # it goes on for some seconds: somebody may be waiting
_AGAIN = {408, 409, 425, 429}
_CONFLICTS = {"ConditionalRequestConflict", "OperationAborted"}
_REFUSALS = {
    "InvalidPathError",
    "NotSupportedError",
    "PermissionDeniedError",
    "UnauthenticatedError",
    "UnknownConfigurationKeyError",
}


class RequestError(OSError):
    """A request of ours that failed, and why, in words that may be shown. ``final``: another try would fail the same way."""

    def __init__(self, reason: str, *, final: bool = False) -> None:
        super().__init__(reason)
        self.final = final


@dataclass(frozen=True)
class RetryLimits:
    """For how long a request is tried, and how long the pauses are: each up to twice the one before."""

    total_s: float = 120.0
    first_pause_s: float = 0.1
    pause_s_max: float = 5.0


@dataclass
class Attempts:
    """The tries of one request. ``what`` and ``url`` are for messages."""

    what: str
    url: str
    policy: RetryLimits
    count: int = 0
    _began: float = field(default_factory=time.monotonic)
    _reason: str = ""

    def run(self, call: Callable[[], T]) -> T:
        """Return what the call returns, in the end.

        Raises:
            FileNotFoundError, FileExistsError: as the call does; they are answers.
            EnvironmentProblem: another try would fail, too.
            ObjectStoreUnavailableError: the last try failed, and time is over.
        """
        while True:
            self.count += 1
            try:
                result = call()
            except (FileNotFoundError, FileExistsError, MillstreamError):
                raise
            except Exception as error:
                if not _is_of_the_library(error):
                    raise
                self._reason = describe(error)
                failure = self._pause_or_give_up(error)
                if failure is not None:
                    raise failure from None
            else:
                self.report()
                return result

    def report(self) -> None:
        """Say in one line that it succeeded, if it took more than one try."""
        if self.count > 1:
            _log.warning(
                "%s %s succeeded at try %d, after %.1f s: %s",
                self.what,
                self.url,
                self.count,
                time.monotonic() - self._began,
                self._reason,
            )

    def _pause_or_give_up(self, error: Exception) -> MillstreamError | None:
        """Wait before the next try; return the error of the whole if there is to be none."""
        there, request = environment_of(self.url), f"{self.what} {self.url}"
        if lacks_credentials(error):
            # not for long: what gives a machine credentials is on that machine
            if not _is_final(error) and self._pause(min(self.policy.total_s, _CREDENTIALS_S)):
                return None
            return EnvironmentProblem(
                f"{request}: the environment has no credentials, and this machine's cloud gave none ({self._reason}). Set "
                f"{there.credentials}, for executors, too."
            )
        if _is_final(error):
            return EnvironmentProblem(
                f"{request} was refused: {self._reason}. Check in the environment where the {there.container} is "
                f"({there.where}), and the credentials ({there.credentials})."
            )
        if self._pause(self.policy.total_s):
            return None
        return ObjectStoreUnavailableError(
            f"{request} failed {self.count} times in {time.monotonic() - self._began:.0f} s, the last time by: "
            f"{self._reason}. Nothing of the batch was committed. Run the app again when the object store responds."
        )

    def _pause(self, total_s: float) -> bool:
        """Wait before the next try; return False if there is no time for one."""
        policy = self.policy
        longest = min(policy.pause_s_max, policy.first_pause_s * 2 ** min(self.count - 1, 16))
        pause_s = longest * random.uniform(0.5, 1.0)  # noqa: S311 - spreads the load
        if time.monotonic() - self._began + pause_s > total_s:
            return False
        if self.count == _TOLD_AT_TRY:
            _log.warning("%s %s fails, and is tried again: %s", self.what, self.url, self._reason)
        time.sleep(pause_s)
        return True


def is_conflict(error: BaseException) -> bool:
    """Return whether another request for the name was on its way: then nobody knows yet whether it is free.

    The library takes each 409 for a name that is taken, as that of Azure is. S3 asks to try again.
    """
    code = _CODE.search(str(error))
    return code is not None and code[1] in _CONFLICTS


def describe(error: BaseException) -> str:
    """Say in one line why a request failed.

    The store's own words are left out: some repeat the key id and what was signed.
    """
    text = str(error)
    if isinstance(error, RequestError):
        return text
    status, code, kind = _STATUS.search(text), _CODE.search(text), _KIND.search(text)
    if status is not None:
        said = f"status {status[1]}{status[2].rstrip()}"
        return f"{said} ({code[1]})" if code else said
    if _OTHER_REGION in text:
        return "the bucket is in another region"
    if kind is not None:
        return _KINDS.get(kind[1], "the connection failed")
    return type(error).__name__


def _is_of_the_library(error: Exception) -> bool:
    return type(error).__module__.partition(".")[0] == "obstore" or isinstance(error, OSError)


def _is_final(error: Exception) -> bool:
    """Return whether the same request would fail again for the same reason."""
    if isinstance(error, RequestError):
        return error.final
    status = _STATUS.search(str(error))
    if type(error).__name__ in _REFUSALS or _OTHER_REGION in str(error):
        return True
    return status is not None and int(status[1]) < 500 and int(status[1]) not in _AGAIN
