"""Calls of a lookup function: in threads, with a timeout, and repeated after growing waits.

A call that takes too long is abandoned: its thread cannot be ended, and what it gives is ignored. The wait
after a failed call doubles, and is randomly between half of that and all of it, so that workers which failed
together do not ask again together. A service that asks for a longer wait, of up to a minute, gets it; one that
asks for more has failed. After many failures in a row the rest of a batch's keys have failed, too, without
being asked: a service that is down must not hold a batch for hours. Of abandoned calls that go on a process has
a limited number: above it, keys have failed without being asked until some of these calls end.

Source: "full jitter" and its variants in Brooker, "Exponential Backoff And Jitter", AWS Architecture Blog,
2015; this is its "equal jitter".
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any

import polars as pl

from millstream.durations import format_us
from millstream.errors import UserCodeError
from millstream.kernels.errors.user_code import UnusableRowError, error_reason
from millstream.threads import Threads

LookupFunction = Callable[[pl.DataFrame], pl.DataFrame]

RETRY_AFTER_S_MAX = 60.0  # the longest wait that a service may ask for; a batch waits for it
_WAIT_S = 0.1  # after the first failed call
_WAIT_S_MAX = 10.0
_HANGING_MAX = 500  # abandoned calls that go on in this process, each with its thread
_FAILURES = (Exception, pl.exceptions.PanicException)


class LookupCallError(UnusableRowError):
    """A call failed, and whether and when to repeat it is known.

    ``retry_after_s``: not before so many seconds, as the service asks.
    """

    def __init__(self, reason: str, *, retriable: bool = True, retry_after_s: float = 0.0) -> None:
        super().__init__(reason)
        self.retriable = retriable
        self.retry_after_s = retry_after_s


@dataclass(frozen=True)
class CallPolicy:
    """How a lookup function is called: with how many keys, for how long, and how often again."""

    batch_rows: int
    timeout_s: float
    retries: int
    concurrency: int = 8  # for each bucket; the buckets of a stage are worked on at once, too
    failures_max: int = 20  # in a row; after these the service is down, and the batch asks no more
    stops: bool = False  # after the first failure: the job stops anyway

    def wait_s(
        self, failed: int, error: BaseException, random_unit: Callable[[], float]
    ) -> float | None:
        """Return how long to wait after so many failed calls; None: it is not called again."""
        if failed > self.retries:
            return None
        doubled_s: float = min(_WAIT_S * 2.0 ** min(failed - 1, 60), _WAIT_S_MAX)
        wait_s = doubled_s * (0.5 + 0.5 * random_unit())
        if not isinstance(error, LookupCallError):
            return wait_s
        if not error.retriable or error.retry_after_s > RETRY_AFTER_S_MAX:
            return None
        return max(wait_s, error.retry_after_s)


@dataclass(frozen=True)
class FailedLookup:
    """What failed to the end: the last error, and after how many calls; 0: it was not called at all."""

    error: BaseException
    calls: int


@dataclass
class _Health:
    """What all threads know of the service: how many parts in a row failed to the end."""

    policy: CallPolicy
    failures: int = 0
    over: bool = False
    last: BaseException | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def note_answer(self) -> None:
        with self._lock:
            self.failures = 0

    def note_failure(self, error: BaseException, *, fatal: bool) -> None:
        """Take note of a failure; one that says nothing of other keys counts only if the job stops."""
        of_key = isinstance(error, LookupCallError) and not error.retriable
        with self._lock:
            self.failures += not of_key
            self.over = self.over or fatal or self.failures >= self.policy.failures_max
            self.last = error

    def refusal(self) -> FailedLookup | None:
        """Return why nothing more is asked, if so."""
        with self._lock:
            if not self.over or self.last is None:
                return None
            reason = error_reason(self.last)
        return FailedLookup(LookupCallError(f"not asked, as others failed: {reason}"), 0)


class _HangingCalls:
    """The calls of this process that were abandoned, as long as they go on."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []

    def add(self, thread: threading.Thread) -> None:
        with self._lock:
            self._threads.append(thread)

    def require_few(self) -> None:
        with self._lock:
            if len(self._threads) >= _HANGING_MAX:
                self._threads = [thread for thread in self._threads if thread.is_alive()]
            if len(self._threads) < _HANGING_MAX:
                return
        raise LookupCallError(
            f"not asked, as {_HANGING_MAX} earlier calls did not answer in time and still go on. Let the "
            "function give up by itself, with a timeout of its own",
            retriable=False,
        )


_HANGING = _HangingCalls()


@dataclass(frozen=True)
class LookupCalls:
    """Calls a function for parts of the keys.

    ``check`` takes a part and what the function gave for it; what it raises (a ``UserCodeError``) is raised
    at once. ``sleep`` and ``random_unit`` (which gives a number in [0, 1)) are passed in by tests.
    """

    function: LookupFunction
    policy: CallPolicy
    check: Callable[[pl.DataFrame, object], pl.DataFrame]
    sleep: Callable[[float], None] = time.sleep
    random_unit: Callable[[], float] = random.random

    def ask(self, keys: pl.DataFrame) -> list[tuple[pl.DataFrame, pl.DataFrame | FailedLookup]]:
        """Return, for each part of the keys, the part and its answers, or the last error if it has none.

        Raises:
            UserCodeError: what the function gave is not what was declared, or the function raised it.
        """
        parts = list(keys.iter_slices(self.policy.batch_rows))
        return list(zip(parts, self._ask_all(parts), strict=True))

    def _ask_all(self, parts: Sequence[pl.DataFrame]) -> list[pl.DataFrame | FailedLookup]:
        health = _Health(self.policy)
        if len(parts) <= 1 or self.policy.concurrency == 1:
            return [self._ask(part, health) for part in parts]
        with Threads(min(len(parts), self.policy.concurrency), "lookup") as threads:
            answers = [threads.submit(self._ask, part, health) for part in parts]
            return [answer.result() for answer in answers]

    def _ask(self, part: pl.DataFrame, health: _Health) -> pl.DataFrame | FailedLookup:
        failed = health.refusal()
        while failed is None or failed.calls:
            try:
                answers = self.check(part, self._call(part))
            except UserCodeError as error:
                health.note_failure(error, fatal=True)
                raise
            except _FAILURES as error:
                failed = FailedLookup(error, 1 if failed is None else failed.calls + 1)
                wait_s = self.policy.wait_s(failed.calls, error, self.random_unit)
                if wait_s is None:
                    health.note_failure(error, fatal=self.policy.stops)
                    return failed
                self.sleep(wait_s)
                if health.refusal() is not None:
                    return failed
            else:
                health.note_answer()
                return answers
        return failed

    def _call(self, part: pl.DataFrame) -> Any:
        """Call the function in a thread of its own; return what it gives in time."""
        results: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()

        def run() -> None:
            try:
                results.put((self.function(part.clone()), None))
            except BaseException as error:  # noqa: BLE001 - raised again where it is waited for
                results.put((None, error))

        _HANGING.require_few()
        thread = threading.Thread(target=run, name="lookup call", daemon=True)
        thread.start()
        try:
            given, error = results.get(timeout=self.policy.timeout_s)
        except Empty:
            _HANGING.add(thread)
            limit = format_us(round(self.policy.timeout_s * 1e6))
            raise TimeoutError(f"no answer within {limit}") from None
        if error is not None:
            raise error
        return given


def refuse(step: str, what: str) -> UserCodeError:
    """Return the error of a function whose answers are not as declared."""
    return UserCodeError(f"step {step!r}: its function {what}.", step=step)
