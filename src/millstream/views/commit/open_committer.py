"""Opens the sinks of a plan: one per database, one for the log, one per dataset, one per function.

Sinks that keep a fence come before functions of the user's, so that a failure of one of them does not
call the functions again.
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
from millstream.views.state_store.sqlite_store import SqliteStateStore


@contextmanager
def open_committer(plan: JobPlan, state_store: Path, log: Path | str) -> Iterator[BatchCommitter]:
    """Open all that a plan writes to, and close it when the block ends. No run has begun yet.

    Args:
        state_store: The file of the app's state store.
        log: The address of the log that the plan's topics are in.

    Raises:
        ConfigError: a sink cannot be written to, or two addresses lead to the same one.
        RetriableError: a database is away.
    """
    with ExitStack() as opened:
        others: list[Sink] = []
        for sink in _make_sinks(plan, log):
            others.append(opened.enter_context(closing(sink)))
            _check_distinct(others)
        yield BatchCommitter(plan, opened.enter_context(SqliteStateStore(state_store)), others)


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


def _check_distinct(sinks: list[Sink]) -> None:
    """Refuse one sink under two addresses: each batch would look like a repeated one to the second."""
    newest = sinks[-1]
    for other in sinks[:-1]:
        if other.identity == newest.identity:
            raise ConfigError(
                f"{other.name} and {newest.name} are the same. Give both outputs the same address."
            )
