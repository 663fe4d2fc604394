"""The ledger of a batch: an entry for each step, and the equations that must hold before the commit.

Each equation finds a loss of rows that the others do not find:

- at a step, read = the sum of the exits: rows that a step read and did not account for;
- along an edge, rows_out of a step = read of the next steps: rows lost, or read twice, between two steps;
- on a port, rows and messages sent = arrived: a frame lost or duplicated between two processes;
- of a partition, the batch begins where the last one ended, and its ranges meet: records skipped, or read
  again;
- of an output, rows given = rows written (:func:`millstream.views.sink.check_written`): rows that a database,
  a topic or a file did not keep;
- of a source, records read = the sum over its ranges, none with more than it has offsets: records lost
  between reading and counting;
- of a range, records read = records by the headers of the log's batches
  (:meth:`millstream.kernels.ingest.SplitInput.check`): records lost in decoding, or on the way to the source.

Operators check a further equation over their state, held before + came in = went out + held after: see
:mod:`millstream.kernels.state.ledger` for what it counts, kind by kind.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from millstream.errors import CorruptionError
from millstream.kernels.plan import ConsumerEdge, JobPlan, PlanEdge
from millstream.kernels.routing import LEDGER_EXITS, SIDE_OUTPUT, OffsetRange

StepCounts = Mapping[str, Mapping[str, int]]
# source → partition → what was read
SourceRanges = Mapping[str, Mapping[str, Sequence[OffsetRange]]]
Position = Mapping[str, Mapping[str, int]]  # topic → partition → the offset that comes next

_REFUSED = (
    "Nothing of this batch was committed. Please report this; the log still holds every event."
)


def check_exits(lines: StepCounts) -> None:
    """Make sure that at every step the rows read are the sum of the exits.

    Raises:
        CorruptionError: it is not; the batch must not be committed.
    """
    for step, line in lines.items():
        exits = sum(line.get(name, 0) for name in LEDGER_EXITS)
        if exits != line.get("read", 0):
            raise CorruptionError(
                f"The ledger of step {step!r} does not balance: it read {line.get('read', 0)} "
                f"events and accounts for {exits} ({dict(line)}). {_REFUSED}"
            )


def check_edges(plan: JobPlan, ranges: SourceRanges, lines: StepCounts) -> None:
    """Make sure that each step read what its upstream steps gave on, and a source what its ranges have.

    An output may have the name of a source or a step, and shares its entry then.

    Raises:
        CorruptionError: it did not; the batch must not be committed.
    """
    none: Mapping[str, int] = {}
    given = {
        step: sum(
            lines.get(upstream, none).get(count, 0) * times
            for (upstream, count), times in upstreams.items()
        )
        for step, upstreams in _upstreams(plan).items()
    }
    for source in plan.sources:
        read = sum(n for parts in ranges.get(source.name, {}).values() for _, _, n in parts)
        given[source.name] = given.get(source.name, 0) + read
    frames = {frame.name for frame in plan.frames}  # what Spark gives is counted by itself alone
    for step, rows in given.items():
        read = lines.get(step, none).get("read", 0)
        if rows != read and step not in frames:
            raise CorruptionError(
                f"The ledger does not balance: {rows} rows were given on to step {step!r}, and it "
                f"read {read}. {_REFUSED}"
            )


def check_ports(sent: Mapping[str, int], arrived: Mapping[str, int]) -> None:
    """Make sure that all rows and messages between processes arrived, once.

    Raises:
        CorruptionError: it did not; the batch must not be committed.
    """
    for port in sorted({*sent, *arrived}):
        if sent.get(port, 0) != arrived.get(port, 0):
            raise CorruptionError(
                f"The ledger does not balance: {sent.get(port, 0)} rows or messages were sent to "
                f"port {port}, and {arrived.get(port, 0)} arrived. {_REFUSED}"
            )


def check_ranges(plan: JobPlan, ranges: SourceRanges, before: Position) -> None:
    """Make sure that each source began where the last batch ended, and read all up to its own end.

    Offsets without a record, such as markers of transactions, are checked elsewhere: the reader refuses a
    range in which it misses some, and a split is compared with the headers of the batches.

    Raises:
        CorruptionError: records were skipped or read again; the batch must not be committed.
    """
    for source in plan.sources:
        for partition, parts in ranges.get(source.name, {}).items():
            at = before.get(source.topic, {}).get(partition)
            for start, end, records in sorted(parts):
                if (at is not None and start != at) or not 0 <= records <= end - start:
                    raise CorruptionError(
                        f"The ledger of source {source.name!r} does not balance: the batch read "
                        f"{records} records at offsets [{start}, {end}) of {source.topic}/{partition}, "
                        f"where it was to go on from {at}. {_REFUSED}"
                    )
                at = end


Upstream = tuple[str, str]
"""A step, and one of its counts: ``rows_out``, or the rows of its side output."""


def _upstreams(plan: JobPlan) -> dict[str, Counter[Upstream]]:
    """Return for each step whose rows it reads, and how many times."""
    found: dict[str, Counter[Upstream]] = {}
    for upstream, edges in _roots(plan):
        _follow(upstream, edges, found)
    return found


def _roots(plan: JobPlan) -> Iterator[tuple[Upstream, tuple[PlanEdge, ...]]]:
    for source in plan.sources:
        yield (source.name, "rows_out"), source.edges
    for frame in plan.frames:
        yield (frame.name, "rows_out"), frame.edges
    for native in plan.natives:
        yield (native.name, "rows_out"), native.edges
    for stage in plan.stages:
        for operator in stage.operators:
            yield (operator.kernel.name, "rows_out"), operator.edges
            yield (operator.kernel.name, SIDE_OUTPUT), operator.late_edges


def _follow(
    upstream: Upstream, edges: Iterable[PlanEdge], found: dict[str, Counter[Upstream]]
) -> None:
    # A step below a union is below each of its inputs; it is one step, with one entry.
    here = Counter(
        edge.step if isinstance(edge, ConsumerEdge) else edge.step.name for edge in edges
    )
    for step, times in here.items():
        upstreams = found.setdefault(step, Counter())
        upstreams[upstream] = max(upstreams[upstream], times)
    for edge in edges:
        if not isinstance(edge, ConsumerEdge):
            _follow((edge.step.name, "rows_out"), edge.downstream, found)


def count_late_once(graph: Mapping[str, Any], late: Mapping[str, int]) -> int:
    """Count the late events of a graph once each, as far as the steps' own counts allow.

    Parallel steps judge the same events: the largest of their counts is taken. Steps that follow one
    another judge different events, as late events go no further: their counts add up.
    """
    below: dict[str, list[str]] = {}
    for edge in graph["edges"]:
        if not edge["late"]:
            below.setdefault(edge["from"], []).append(edge["to"])
    steps = {node["id"]: node["step"] for node in graph["nodes"]}
    counted: set[str] = set()
    left = dict(late)  # an output may have the name of its step, and shares its entry then

    def most(node: str) -> int:
        if node in counted:  # below a union: its events were counted with another input's
            return 0
        counted.add(node)
        own = left.pop(steps[node], 0)
        return own + max([most(next_node) for next_node in below.get(node, ())], default=0)

    with_input = {node for nodes in below.values() for node in nodes}
    return sum(most(node["id"]) for node in graph["nodes"] if node["id"] not in with_input)
