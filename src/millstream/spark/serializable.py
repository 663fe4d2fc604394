"""Checks that a plan can be serialized for the worker processes.

Functions and all that they refer to are serialized by value. What cannot be (a lock, a connection, an open
file) is found here, before Spark starts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from pyspark import cloudpickle

from millstream.errors import ConfigError
from millstream.kernels.plan import JobPlan


def check_serializable(plan: JobPlan) -> None:
    """Make sure that the parts of a plan that go to workers can be serialized.

    Raises:
        ConfigError: something cannot; the message names the step and the cause.
    """
    for part in (*plan.sources, *plan.stages):
        error = _failure(part)
        if error is not None:
            name, error = _innermost(part, "the pipeline", error)
            raise ConfigError(
                f"{name} cannot be sent to the processes that run it: {_reason(error)}. A function "
                "takes with it all that it refers to; make locks, connections and open files inside "
                "of it, when it is called."
            ) from error


def _failure(part: Any) -> Exception | None:
    try:
        cloudpickle.dumps(part)  # type: ignore[no-untyped-call]
    except Exception as error:  # noqa: BLE001 - any object may raise anything
        return error
    return None


def _innermost(part: Any, name: str, error: Exception) -> tuple[str, Exception]:
    """Follow the failure down to the innermost part; return the last name on the way."""
    own = getattr(part, "name", None)
    name = repr(own) if isinstance(own, str) else name
    for inner in _parts_of(part):
        failure = _failure(inner)
        if failure is not None:
            return _innermost(inner, name, failure)
    return name, error


def _parts_of(part: Any) -> Iterator[Any]:
    if isinstance(part, tuple):
        yield from part
    elif is_dataclass(part) and not isinstance(part, type):
        yield from (getattr(part, field.name) for field in fields(part))


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__).rstrip(".")
