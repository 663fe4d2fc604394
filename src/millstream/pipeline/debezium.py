"""Tables of captured changes: topics with Debezium's envelope, and the transactions that their records are of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

import polars as pl

from millstream.choices import choose
from millstream.client.start_position import LogStart
from millstream.errors import ConfigError
from millstream.kernels.decode import Field
from millstream.kernels.decode.captured import COMMITTED
from millstream.kernels.decode.debezium_records import (
    TRANSACTION_FIELDS,
    DebeziumFormat,
    TransactionFormat,
)
from millstream.kernels.decode.debezium_values import (
    PLACEHOLDER,
    ColumnEncoding,
    DecimalMode,
    TimeUnit,
)
from millstream.kernels.decode.formats import JsonFormat
from millstream.kernels.errors.user_code import UserCode
from millstream.kernels.tables.captured_table import CapturedTable
from millstream.kernels.tables.transactions import Transactions
from millstream.kernels.time.watermarks import WatermarkRule
from millstream.pipeline.checks import check_time
from millstream.pipeline.declaration import AppDeclaration
from millstream.pipeline.expressions import Column, as_expression
from millstream.pipeline.graph import GraphNode, OperatorNode, SharedOperatorNode, SourceNode
from millstream.pipeline.schema import columns_of
from millstream.pipeline.shape import StreamShape
from millstream.pipeline.table import Table
from millstream.pipeline.topic import Topic
from millstream.pipeline.upserts import table_shape
from millstream.pipeline.versions import TableOrigin
from millstream.pipeline.watermarks import IN_ORDER, check_topic_watermark


@dataclass(frozen=True)
class Debezium:
    """How a connector of Debezium's writes a table: made with :func:`millstream.debezium`."""

    transactions: str | None = None
    collection: str | None = None
    decimals: DecimalMode | None = None
    scale: int | Mapping[str, int] | None = None
    time_unit: TimeUnit | Mapping[str, TimeUnit] | None = None
    placeholder: str = PLACEHOLDER


Envelope = Literal["debezium"] | Debezium


def debezium(
    *,
    transactions: str | None = None,
    collection: str | None = None,
    decimals: DecimalMode | None = None,
    scale: int | Mapping[str, int] | None = None,
    time_unit: TimeUnit | Mapping[str, TimeUnit] | None = None,
    placeholder: str = PLACEHOLDER,
) -> Debezium:
    """Say how a connector of Debezium's writes a table, for ``app.table(…, envelope=…)``.

    Args:
        transactions: The connector's topic of transactions, such as ``"shop.transaction"`` (its
            ``provide.transaction.metadata``). Then transactions are applied whole, in the order of their
            ENDs: nothing shows a part of one. Tables of an app that name the same topic change together.
            Neither their topics nor this one may be compacted, or have lost records of transactions that
            are still to be applied.
        collection: The table's name in that topic; by default the table's topic without the prefix of the
            topic of transactions: ``"public.users"``.
        decimals: What text in a column of decimals is, in the words of Debezium's ``decimal.handling.mode``:
            ``"string"``: digits. ``"precise"``: base64 of the unscaled number; needs ``scale``.
            ``"double"``: a JSON number.
        scale: The number of decimal places, of all such columns or by column.
        time_unit: What a number in a column of datetimes or times of day counts: ``"ms"``, ``"us"`` or
            ``"ns"``, for all such columns or by column. Durations count microseconds, unless all is in
            ``"ns"``, or one is given for the column.
        placeholder: What stands for a value that the connector did not get: its ``unavailable.value.placeholder``.

    Records that carry their schema (``schemas.enable``) say these themselves, and need none of the last
    three but the placeholder.

    Raises:
        ConfigError: an option is not known.
    """
    if decimals is not None:
        choose("debezium's decimals", decimals, get_args(DecimalMode))
    units = time_unit.values() if isinstance(time_unit, Mapping) else [time_unit]
    for unit in units:
        if unit is not None:
            choose("debezium's time_unit", unit, get_args(TimeUnit))
    for places in scale.values() if isinstance(scale, Mapping) else [scale]:
        if places is not None and (isinstance(places, bool) or not isinstance(places, int)):
            raise ConfigError(
                f"debezium's scale is {places!r}. Give a number of decimal places, or one by column."
            )
    for what, text in (("transactions", transactions), ("collection", collection)):
        if text is not None and (not isinstance(text, str) or not text):
            raise ConfigError(f"debezium's {what} is {text!r}. Give a name.")
    if not isinstance(placeholder, str) or not placeholder:
        raise ConfigError(
            f"debezium's placeholder is {placeholder!r}. Give the text that connectors write."
        )
    if collection is not None and transactions is None:
        raise ConfigError(
            "debezium has a collection and no transactions, in whose topic it would be the table's name. Give "
            "both, or none."
        )
    return Debezium(transactions, collection, decimals, scale, time_unit, placeholder)


@dataclass
class TransactionGroup:
    """The tables of an app that change with one topic of transactions, and the step that they share."""

    source: SourceNode
    name: str
    tables: list[SourceNode] = field(default_factory=list)
    collections: list[str] = field(default_factory=list)
    node: SharedOperatorNode = field(init=False)
    kernel: Transactions = field(init=False)

    def __post_init__(self) -> None:
        self.kernel = Transactions(self.name, ())
        self.node = SharedOperatorNode(self)

    @property
    def inputs(self) -> tuple[GraphNode, ...]:
        return (self.source, *self.tables)

    def add(self, table: SourceNode, collection: str) -> int:
        """Add a table, or put it in the place of one that its cell declares again; return its number."""
        for number, known in enumerate(self.tables):
            if known.is_replaced and self.collections[number] == collection:
                self.tables[number] = table
                return number
        self.tables.append(table)
        self.collections.append(collection)
        self.kernel = replace(self.kernel, collections=tuple(self.collections))
        return len(self.tables) - 1


def envelope_options(given: object, name: str) -> Debezium:
    """Return the options of a table's envelope.

    Raises:
        ConfigError: there is no such envelope.
    """
    if isinstance(given, Debezium):
        return given
    if not isinstance(given, str):
        raise ConfigError(
            f'The envelope of table {name!r} is {given!r}. Give "debezium" or ms.debezium(…).'
        )
    choose(f"the envelope of table {name!r}", given, ("debezium",))
    return Debezium()


def group_of(
    app: AppDeclaration,
    topic: str | None,
    topics: dict[str, Topic],
    groups: dict[str, TransactionGroup],
) -> TransactionGroup | None:
    """Return the step of the tables that change with a topic of transactions, which the first of them declares.

    Raises:
        ConfigError: the topic is declared as something else.
    """
    if topic is None:
        return None
    if topic in groups and not groups[topic].node.is_replaced:
        return groups[topic]
    app.drop_replaced()
    if topic in topics:
        raise ConfigError(
            f"The topic of transactions {topic!r} is declared as a topic, too. A job reads it once: leave "
            "that declaration out, or read it in another app."
        )
    topics[topic] = Topic(app, topic, TRANSACTION_FIELDS, None, 1, TransactionFormat())
    app.partitions[topic] = 1
    source = SourceNode(
        app.names.unique(topic), topic, TRANSACTION_FIELDS, None, IN_ORDER, TransactionFormat()
    )
    groups[topic] = TransactionGroup(source, app.names.unique(f"order of {topic}"))
    return groups[topic]


def build_captured_table(
    topic: Topic,
    key: tuple[str, ...],
    options: Debezium,
    group: TransactionGroup | None,
    *,
    time: Column | None,
    watermark: WatermarkRule,
    code: UserCode,
    captured: bool = False,
) -> Table:
    """Make the table of a topic whose records are Debezium's envelopes.

    Args:
        captured: They are written by our own capture, with the time of the change.

    Raises:
        ConfigError: the options do not fit the table.
    """
    names, columns = topic.app.names, columns_of(topic.fields)
    shape = StreamShape(columns, names=names)
    _check_table(topic, key, shape)
    if topic.start != LogStart():
        raise ConfigError(
            f"The table {topic.name!r} is one of a database, and has a start. Its rows are those of all its records: leave "
            "the start out, or read the topic as a stream."
        )
    event_time = None
    if not captured or time is not None:
        event_time = _event_time(topic, time, watermark, by_transactions=group is not None)
    values = DebeziumFormat(
        tuple(one for name in key for one in topic.fields if one.name == name),
        _encodings(topic.fields, options, topic.name),
        group is not None,
        options.placeholder,
        strict_key=captured,
    )
    source = SourceNode(
        names.unique(topic.name),
        topic.name,
        topic.fields,
        event_time,
        watermark,
        values,
        topic.bad,
        key[0],
        topic.cell,
    )
    name = names.unique(f"table by {', '.join(key)}")
    kernel = CapturedTable(name, key, tuple(columns.items()))
    table = table_shape(shape, key, not_null=True)
    origin: TableOrigin | None = None
    if group is None or (captured and topic.partitions == 1):  # offsets order all records
        versions = replace(kernel, name=names.unique(f"versions of {topic.name}"), versions=True)
        node = OperatorNode((source,), versions)
        code = replace(code, step=kernel.name)
        origin = TableOrigin(node, columns, None, by_offset=True, lateness_us=0, code=code)
    if group is None:
        return Table(topic.app, OperatorNode((source,), kernel), table, origin=origin)
    number = group.add(source, _collection(topic.name, options))
    kernel = replace(kernel, transactions=True, number=number)
    return Table(topic.app, OperatorNode((source, group.node), kernel), table, origin=origin)


def _check_table(topic: Topic, key: tuple[str, ...], shape: StreamShape) -> None:
    """Make sure that the rows of a topic can be in an envelope."""
    if not isinstance(topic.values, JsonFormat) or topic.values.model is not None:
        raise ConfigError(
            f"The table {topic.name!r} has an envelope, and values that are not plain JSON: a format, or a "
            "model with validators. Give a dataclass or a mapping; check values in a step."
        )
    if any(one.meta is not None for one in topic.fields):
        raise ConfigError(
            f"The table {topic.name!r} has an envelope and metadata. A row is not one record's: leave "
            "metadata out."
        )
    if not key:
        raise ConfigError(
            f'The table {topic.name!r} has no key. Say which columns identify a row: key="id".'
        )
    shape.key_columns(key, f"the key of table {topic.name!r}")


def _event_time(
    topic: Topic, time: Column | None, watermark: WatermarkRule, *, by_transactions: bool
) -> pl.Expr | None:
    """Return the event time of changes: by default when they were made; None is the record's time."""
    if by_transactions:
        if time is not None or watermark is not IN_ORDER:
            raise ConfigError(
                f"The table {topic.name!r} changes by transactions, in their order, and not by event time. Leave "
                "time and watermark out, or transactions."
            )
        return None
    columns = columns_of(topic.fields)
    check_topic_watermark(watermark, columns, topic.name)
    if time is None:
        return pl.col(COMMITTED)
    expression = as_expression(time, what="table's time")
    check_time(expression, columns, topic.name)
    return expression


def _collection(topic: str, options: Debezium) -> str:
    """Return a table's name in the topic of transactions."""
    if options.collection is not None:
        return options.collection
    assert options.transactions is not None
    prefix, dot, last = options.transactions.rpartition(".")
    if dot and last == "transaction" and topic.startswith(f"{prefix}."):
        return topic[len(prefix) + 1 :]
    raise ConfigError(
        f"The name of table {topic!r} in the topic of transactions {options.transactions!r} does not follow from "
        'these. Give it, as an END has it: debezium(collection="public.users").'
    )


def _encodings(
    fields: Sequence[Field], options: Debezium, name: str
) -> tuple[tuple[str, ColumnEncoding], ...]:
    """Return how each column is written, as far as that was said."""
    known = {one.name for one in fields}
    for what, given in (("scale", options.scale), ("time_unit", options.time_unit)):
        for column in given if isinstance(given, Mapping) else ():
            if column not in known:
                raise ConfigError(
                    f"debezium's {what} names {column!r}. The columns of {name!r} are {', '.join(sorted(known))}."
                )

    def of(given: object, column: str) -> object:
        return given.get(column) if isinstance(given, Mapping) else given

    encodings = (
        (
            one.name,
            ColumnEncoding(
                options.decimals,
                of(options.scale, one.name),  # type: ignore[arg-type]
                of(options.time_unit, one.name),  # type: ignore[arg-type]
                _duration_unit(options.time_unit, one.name),
            ),
        )
        for one in fields
    )
    return tuple(pair for pair in encodings if pair[1] != ColumnEncoding())


def _duration_unit(given: TimeUnit | Mapping[str, TimeUnit] | None, column: str) -> TimeUnit:
    """Return what a column of durations counts: intervals are in microseconds where times are in milliseconds."""
    if isinstance(given, Mapping):
        return given.get(column) or "us"
    return "ns" if given == "ns" else "us"
