"""Calls of a lookup function: in threads, with a timeout, and repeated after growing waits.

A call that takes too long is abandoned: its thread cannot be ended, and what it gives is ignored. The wait
after a failed call doubles, and is randomly between half of that and all of it, so that workers which failed
together do not ask again together.

Source: "full jitter" and its variants in Brooker, "Exponential Backoff And Jitter", AWS Architecture Blog,
2015; this is its "equal jitter".
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

import polars as pl

from millstream.durations import format_us
from millstream.errors import UserCodeError
from millstream.threads import Threads

LookupFunction = Callable[[pl.DataFrame], pl.DataFrame]

CALLS_AT_ONCE = 8  # for each bucket; the buckets of a stage are worked on at once, too
_WAIT_S = 0.1  # after the first failed call
_WAIT_S_MAX = 10.0
_FAILURES = (Exception, pl.exceptions.PanicException)


@dataclass(frozen=True)
class CallPolicy:
    """How a lookup function is called: with how many keys, for how long, and how often again."""

    batch_rows: int
    timeout_s: float
    retries: int

    def wait_s(self, failed: int, random_unit: Callable[[], float]) -> float:
        """Return how long to wait after so many failed calls."""
        doubled_s: float = min(_WAIT_S * 2.0 ** min(failed - 1, 60), _WAIT_S_MAX)
        return doubled_s * (0.5 + 0.5 * random_unit())


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

    def ask(self, keys: pl.DataFrame) -> list[tuple[pl.DataFrame, pl.DataFrame | BaseException]]:
        """Return, for each part of the keys, the part and its answers, or the last error if it has none.

        Raises:
            UserCodeError: what the function gave is not what was declared.
        """
        parts = list(keys.iter_slices(self.policy.batch_rows))
        return list(zip(parts, self._ask_all(parts), strict=True))

    def _ask_all(self, parts: Sequence[pl.DataFrame]) -> list[pl.DataFrame | BaseException]:
        if len(parts) <= 1:
            return [self._ask(part) for part in parts]
        with Threads(min(len(parts), CALLS_AT_ONCE), "lookup") as threads:
            answers = [threads.submit(self._ask, part) for part in parts]
            return [answer.result() for answer in answers]

    def _ask(self, part: pl.DataFrame) -> pl.DataFrame | BaseException:
        failed = 0
        while True:
            try:
                given = self._call(part)
            except _FAILURES as error:
                failed += 1
                if failed > self.policy.retries:
                    return error
                self.sleep(self.policy.wait_s(failed, self.random_unit))
            else:
                return self.check(part, given)

    def _call(self, part: pl.DataFrame) -> Any:
        """Call the function in a thread of its own; return what it gives in time."""
        results: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()

        def run() -> None:
            try:
                results.put((self.function(part.clone()), None))
            except BaseException as error:  # noqa: BLE001 - raised again where it is waited for
                results.put((None, error))

        threading.Thread(target=run, name="lookup call", daemon=True).start()
        try:
            given, error = results.get(timeout=self.policy.timeout_s)
        except Empty:
            limit = format_us(round(self.policy.timeout_s * 1e6))
            raise TimeoutError(f"no answer within {limit}") from None
        if error is not None:
            raise error
        return given


def refuse(step: str, what: str) -> UserCodeError:
    """Return the error of a function whose answers are not as declared."""
    return UserCodeError(f"step {step!r}: its function {what}.", step=step)
