"""Spans of batches for OpenTelemetry: one for each batch, with a child for each phase.

The program says where they go, by its tracer provider; so does ``opentelemetry-instrument``. Without a provider, or
without OpenTelemetry, nothing is made.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from millstream.views.runs.batch_figures import BatchPhase

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

_PREFIX = "millstream."
_log = logging.getLogger(__name__)


def emit_batch_spans(
    attributes: Mapping[str, Any], phases: Sequence[BatchPhase], error: BaseException | None = None
) -> None:
    """Emit the spans of a batch that has ended, with ``error`` if it has failed.

    What the program's provider raises is logged: it must not fail a batch that is committed, nor hide its error.

    Args:
        attributes: Of the batch's span, by their names without ``millstream.``.
    """
    tracer = _tracer()
    if tracer is None or not phases:
        return
    try:
        _emit(tracer, attributes, phases, error)
    except Exception:  # noqa: BLE001 - the program's own code, such as a span processor
        _log.exception("the spans of a batch could not be emitted")


def _emit(
    tracer: Tracer,
    attributes: Mapping[str, Any],
    phases: Sequence[BatchPhase],
    error: BaseException | None,
) -> None:
    from opentelemetry.trace import Status, StatusCode, set_span_in_context  # noqa: PLC0415 - an extra

    offset_ns = time.time_ns() - time.monotonic_ns()  # phases are in seconds of the monotonic clock
    batch = tracer.start_span(
        "millstream batch",
        attributes={_PREFIX + name: value for name, value in attributes.items()},
        start_time=_ns(phases[0].began_s, offset_ns),
    )
    parent = set_span_in_context(batch)
    for phase in phases:
        span = tracer.start_span(
            f"millstream {phase.name}", parent, start_time=_ns(phase.began_s, offset_ns)
        )
        span.end(_ns(phase.ended_s, offset_ns))
    if error is not None:
        batch.set_status(Status(StatusCode.ERROR, type(error).__name__))
    batch.end(_ns(phases[-1].ended_s, offset_ns))


def _tracer() -> Tracer | None:
    try:
        trace = import_module("opentelemetry.trace")
    except ModuleNotFoundError:
        return None
    tracer: Tracer = trace.get_tracer("millstream")
    return tracer


def _ns(seconds: float, offset_ns: int) -> int:
    return int(seconds * 1e9) + offset_ns
