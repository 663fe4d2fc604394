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
    DatasetEnd,
    ForeachEnd,
    JobPlan,
    SinkPlan,
    TopicEnd,
    ViewEnd,
)
from millstream.views.commit import Targets
from millstream.views.dataset import DatasetTarget
from millstream.views.foreach import ForeachTarget
from millstream.views.postgres_target import PostgresTarget
from millstream.views.store import ViewStore
from millstream.views.target import Target
from millstream.views.topics import TopicsTarget


@contextmanager
def open_targets(plan: JobPlan, home: Path, log: Path | str) -> Iterator[Targets]:
    """Open all that a plan writes to; close it at the end. No run has begun yet.

    Args:
        home: The file of the app's own view store.
        log: The address of the log that the plan's topics are in.

    Raises:
        ConfigError: a target cannot be written to, or two addresses lead to the same one.
        RetriableError: a database is away.
    """
    with ExitStack() as opened:
        others: list[Target] = []
        for target in _others(plan, log):
            others.append(opened.enter_context(closing(target)))
            _check_twice(others)
        yield Targets(plan, opened.enter_context(ViewStore(home)), others)


def _others(plan: JobPlan, log: Path | str) -> Iterator[Target]:
    topics = [sink for sink in plan.sinks if isinstance(sink.end, TopicEnd)]
    if topics:
        yield TopicsTarget(log, topics)
    databases: dict[str, list[SinkPlan]] = {}
    for sink in plan.sinks:
        if isinstance(sink.end, ViewEnd) and sink.end.store is not None:
            databases.setdefault(sink.end.store, []).append(sink)
    for url, sinks in databases.items():
        yield PostgresTarget(url, sinks)
    for sink in plan.sinks:
        if isinstance(sink.end, DatasetEnd):
            yield DatasetTarget(sink)
    for sink in plan.sinks:
        if isinstance(sink.end, ForeachEnd):
            yield ForeachTarget(sink)


def _check_twice(targets: list[Target]) -> None:
    """Refuse the same target under two addresses: the second would take its batches for repeated."""
    newest = targets[-1]
    for other in targets[:-1]:
        if other.identity == newest.identity:
            raise ConfigError(
                f"{other.name} and {newest.name} are the same. Give both outputs the same address."
            )
