"""From Spark's failures to ours: the Python error that a worker raised, without the JVM around it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from millstream import errors
from millstream.errors import JobFailedError, MillstreamError, UserCodeError
from millstream.spark.internals import explain_failure

_OURS = re.compile(r"millstream\.errors\.(\w+): (.*)", re.DOTALL)


def as_ours(failure: BaseException, app: str, log: Path) -> MillstreamError:
    """Give an error of our tree for a failed query: the worker's own where it was one of ours."""
    text = explain_failure(failure) or str(failure)
    last = text.strip().splitlines()[-1]
    match = _OURS.search(text)
    if match is None:
        return JobFailedError(
            f"The job of the app {app!r} stopped: {last} The whole of it is in {log}."
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
