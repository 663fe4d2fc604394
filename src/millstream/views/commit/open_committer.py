"""Opens the sinks of a plan: one per database, one for the log, one per dataset, one per function.

Sinks that keep a fence come before functions of the user's, so that a failure of one of them does not
call the functions again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
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
from millstream.views.store_location import StoreLocation, open_state_store

_log = logging.getLogger(__name__)


@contextmanager
def open_committer(
    plan: JobPlan,
    state_store: StoreLocation,
    log: Path | str,
    on_wait: Callable[[str], None] = _log.warning,
    *,
    tasks_write: bool = False,
) -> Iterator[BatchCommitter]:
    """Open all that a plan writes to, and close it when the block ends. No run has begun yet.

    Args:
        state_store: Where the app's state store is.
        log: The address of the log that the plan's topics are in.
        on_wait: Called with one line when the state store's server is away, and is waited for; and with what
            else there is to know of the sinks.
        tasks_write: There are tasks that can write large outputs.

    Raises:
        ConfigError: a sink cannot be written to, or two addresses lead to the same one.
        RetriableError: a database is away.
    """
    with ExitStack() as opened:
        others: list[Sink] = []
        for sink in _make_sinks(plan, log, on_wait, tasks_write=tasks_write):
            others.append(opened.enter_context(closing(sink)))
            _check_distinct(others)
        store = opened.enter_context(open_state_store(state_store, on_wait=on_wait))
        yield BatchCommitter(plan, store, others)


def _make_sinks(
    plan: JobPlan, log: Path | str, on_notice: Callable[[str], None], *, tasks_write: bool
) -> Iterator[Sink]:
    topics = [sink for sink in plan.sinks if isinstance(sink.spec, TopicSinkSpec)]
    if topics:
        yield TopicsSink(log, topics, tasks_write=tasks_write, on_notice=on_notice)
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
