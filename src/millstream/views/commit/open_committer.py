"""From the outputs of a plan to open targets: one per database, one for the log, one per dataset.

Targets that keep a fence come before functions of the user's, which are then called again as seldom
as can be.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from millstream.errors import ConfigError
from millstream.kernels.plan import (
    DatasetSinkSpec,
    ForeachSinkSpec,
    JobPlan,
    SinkPlan,
    TopicSinkSpec,
    ViewSinkSpec,
)
from millstream.views.commit.committer import BatchCommitter
from millstream.views.sink import Sink
from millstream.views.sinks.dataset import DatasetSink
from millstream.views.sinks.foreach import ForeachSink
from millstream.views.sinks.postgres import PostgresSink
from millstream.views.sinks.topics import TopicsSink
from millstream.views.state_store.store import StateStore


@contextmanager
def open_committer(plan: JobPlan, state_store: Path, log: Path | str) -> Iterator[BatchCommitter]:
    """Open all that a plan writes to; close it at the end. No run has begun yet.

    Args:
        state_store: The file of the app's state store.
        log: The address of the log that the plan's topics are in.

    Raises:
        ConfigError: a target cannot be written to, or two addresses lead to the same one.
        RetriableError: a database is away.
    """
    with ExitStack() as opened:
        others: list[Sink] = []
        for target in _make_sinks(plan, log):
            others.append(opened.enter_context(closing(target)))
            _check_distinct(others)
        yield BatchCommitter(plan, opened.enter_context(StateStore(state_store)), others)


def _make_sinks(plan: JobPlan, log: Path | str) -> Iterator[Sink]:
    topics = [sink for sink in plan.sinks if isinstance(sink.spec, TopicSinkSpec)]
    if topics:
        yield TopicsSink(log, topics)
    databases: dict[str, list[SinkPlan]] = {}
    for sink in plan.sinks:
        if isinstance(sink.spec, ViewSinkSpec) and sink.spec.store is not None:
            databases.setdefault(sink.spec.store, []).append(sink)
    for url, sinks in databases.items():
        yield PostgresSink(url, sinks)
    for sink in plan.sinks:
        if isinstance(sink.spec, DatasetSinkSpec):
            yield DatasetSink(sink)
    for sink in plan.sinks:
        if isinstance(sink.spec, ForeachSinkSpec):
            yield ForeachSink(sink)


def _check_distinct(targets: list[Sink]) -> None:
    """Refuse the same target under two addresses: the second would take its batches for repeated."""
    newest = targets[-1]
    for other in targets[:-1]:
        if other.identity == newest.identity:
            raise ConfigError(
                f"{other.name} and {newest.name} are the same. Give both outputs the same address."
            )
