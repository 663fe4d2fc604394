"""Translates Spark's failures: the Python error that a worker raised, without the JVM's part."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from millstream import errors
from millstream.errors import FencedError, JobFailedError, MillstreamError, UserCodeError
from millstream.spark.runtime.internals import explain_failure

# Spark's own log of batches found another writer before our fence did: the batch was committed, and the
# newer run began before Spark recorded that.
_ANOTHER_RUN = "[CONCURRENT_STREAM_LOG_UPDATE]"
_STREAM_FAILED = re.compile(r"^\[STREAM_FAILED\] Query .*? terminated with exception: ")
_OURS = re.compile(r"millstream\.errors\.(\w+): (.*)", re.DOTALL)


def to_millstream_error(failure: BaseException, app: str, log: Path) -> MillstreamError:
    """Return one of our errors for a failed query: the error of the worker if it is one of ours."""
    python = explain_failure(failure)
    text = python or str(failure)
    if python is None and _ANOTHER_RUN in text:
        return FencedError(
            f"A newer run of the app {app!r} has begun, and goes on in place of this one. What this "
            "run had committed stands; let the newer one go on."
        )
    match = _OURS.search(text)
    if match is None:
        return JobFailedError(
            f"The job of the app {app!r} stopped: {_reason(text, python=python is not None)} "
            f"The whole report is in {log}."
        )
    name, message = match.group(1), match.group(2).strip()
    kind = getattr(errors, name)
    if kind is UserCodeError:
        # The message begins with the step's name, as Python writes strings.
        step = re.match(r"""step ('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")""", message)
        return UserCodeError(message, step=ast.literal_eval(step.group(1)) if step else "")
    try:
        ours = kind(message)
    except TypeError:  # an error that carries more than a message
        ours = JobFailedError(message)
    assert isinstance(ours, MillstreamError)
    return ours


def _reason(text: str, *, python: bool) -> str:
    """Return the line that says why: the last one of Python's traceback, the first of the JVM's report."""
    lines = text.strip().splitlines()
    reason = lines[-1] if python else _STREAM_FAILED.sub("", lines[0])
    return reason if reason.endswith(".") else f"{reason}."
