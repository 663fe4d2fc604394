"""App: a named pipeline over one log. Its name is the identity of its state, views and progress."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from millstream.choices import choose
from millstream.client.start_position import LogStart, StartPosition, asked_start
from millstream.durations import Duration, to_us
from millstream.engine.job import Job, RunOptions
from millstream.errors import ConfigError
from millstream.kernels.errors.dead_letters import BadRecordPolicy
from millstream.kernels.errors.user_code import UserCode
from millstream.kernels.frames import polars_table
from millstream.kernels.plan import JobPlan
from millstream.kernels.state.keyhash import Buckets
from millstream.kernels.tables.upserts import VersionOrder
from millstream.kernels.time.watermarks import WatermarkRule
from millstream.notebook.cells import declared_by
from millstream.object_store.address import ObjectUrl, state_url
from millstream.pipeline.app_run import AppRun
from millstream.pipeline.avro import AvroSchema
from millstream.pipeline.captured import CapturedTopic, captured_topic, declared_columns
from millstream.pipeline.checks import (
    at_least_one,
    check_places,
    check_plan,
    check_time,
    checked_on_error,
    declared_at,
)
from millstream.pipeline.compiler import compile_plan
from millstream.pipeline.debezium import (
    Envelope,
    TransactionGroup,
    build_captured_table,
    envelope_options,
    group_of,
)
from millstream.pipeline.engine_choice import EngineName, choose_engine
from millstream.pipeline.expressions import Column, as_expression
from millstream.pipeline.graph import DataFrameNode, GraphNode, OperatorNode, Output
from millstream.pipeline.progress_table import shown_on
from millstream.pipeline.schema import ColumnTypes
from millstream.pipeline.shape import StreamShape
from millstream.pipeline.spark_extra import spark_extra
from millstream.pipeline.stream import Stream
from millstream.pipeline.table import Table
from millstream.pipeline.topic import Topic
from millstream.pipeline.topic_declaration import (
    FormatName,
    Metadata,
    TopicDeclaration,
    check_policy,
    check_topic_key,
)
from millstream.pipeline.upserts import build_static_table
from millstream.pipeline.view_table import build_view_table
from millstream.pipeline.watched_app import WatchedApp
from millstream.pipeline.watermarks import IN_ORDER, check_dataframe_watermark
from millstream.views.address import StateStoreAddress, parse_store
from millstream.views.panels import to_plain
from millstream.views.reader import View
from millstream.views.runs.dead_letter_share import check_dead_letter_max
from millstream.views.runs.late_alarm import LateAlarm, check_late_share
from millstream.views.runs.progress import UNTIL_OPTIONS, Progress, Report, Until
from millstream.views.schema import check_app_name
from millstream.views.store_location import STATE_STORE_FILE, StoreLocation, parse_state_store

if TYPE_CHECKING:
    from millstream.capture.run import Capture
    from millstream.spark.job import DataFrame, SparkSession


@dataclass(repr=False)
class App(WatchedApp):
    """A pipeline: declare topics, streams and views on it, then :meth:`run` it.

    Args:
        name: The identity of the app's state and views: lower-case letters, digits, ``-``, ``_``.
        log: The folder of the log, or ``kafka://host:port``: see docs/kafka.md. By default what the
            environment variable MILLSTREAM_LOG says, or ``./data``.
        state: The folder in which state and views are kept, as ``apps/<name>``: the log's own, if it is
            a folder. Where the log is behind ``kafka://`` it must be given, and is what ``log=`` is to
            whatever reads views (``ms.view``, ``millstream view``, ``millstream ui``). Or a URL for the
            runs of state, ``s3://bucket/prefix``, ``gs://…``, ``az://…``, ``hdfs://…`` or ``file:///…``: then every
            executor reads and writes them there, through a cache on its own disk, and needs no folder of the
            driver's. Views and position stay in the log's folder, or in ``local``, unless ``store`` says where; then
            the app may go on in any folder, on any machine. Endpoint, region and credentials come from the
            environment (``AWS_ENDPOINT_URL``, ``AWS_REGION``, ``AWS_ACCESS_KEY_ID``, …). See docs/cluster.md.
        local: The folder for the rest where ``state`` is a URL; the log's own by default, if it is a folder.
        store: Where position, ledger, views and all else that a batch commits are kept: by default a SQLite
            file in the app's folder, for one machine. Or the URL of a PostgreSQL database, such as
            ``"postgresql://user@host/database"``, where they are in one schema for each app
            (``?schema=NAME``; by default ``millstream_<app>``) and any machine reads them by the URL. When
            the server is away, a run tries again for two minutes (``?wait=SECONDS``). Leave the password to
            PGPASSWORD or ~/.pgpass.
        buckets: Into how many hash ranges keys are divided when the app's state is created; later ``millstream rescale``
            divides it otherwise, and this stays as it was.
            As many cores at most can share a stage of a large batch, and as many partitions the app
            can be rescaled to. Each has a cost in every batch, however small. Two are
            for a laptop; for a cluster give as many as it may have cores one day.
        views: Where views are kept unless they say otherwise: the app's own store in its
            folder, or the URL of a PostgreSQL database. See :meth:`Stream.view`.
        on_error: What happens to a row on which an expression or function of yours fails:
            ``"dead-letter"`` sends it to the dead letters, with step and reason, and ``"stop"`` stops the
            job. A step can override it.
        dead_max: The share of the rows that a step reads which may become dead letters. When a run
            exceeds it at any step, the run raises an alarm and has failed: ``report.ok`` is
            False, and `millstream run` ends with the exit code 1. What was committed is kept. With
            1 no run fails for this reason.
        late_alarm: A share of late events, such as 0.01. When a larger share of the events in the last 20
            batches was late, the run raises one alarm: in the log, to ``run``'s on_alarm, and in the
            report.

    Example::

        app = ms.App("ads", log="./data")
        events = app.topic("ad-events", AdEvent, key="user")
        rate = events.stream(time="at").window(ms.tumbling("1 hour"), by="ad").agg(n=ms.count())
        rate.view("events_by_hour")
        print(app.run(until="caught-up"))
    """

    late_alarm: float | None = None
    state: str | Path | None = None
    local: str | Path | None = field(default=None, kw_only=True)
    dead_max: float = 0.5
    _store_address: StateStoreAddress | None = field(default=None, init=False, repr=False)
    transactions: dict[str, TransactionGroup] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        check_app_name(self.name)
        if not 1 <= self.buckets <= 4096:
            raise ConfigError(f"buckets is {self.buckets}. Allowed are 1 to 4096.")
        checked_on_error(self.on_error)
        parse_store(self.views, what="The app's views")
        self._store_address = parse_state_store(self.store, self.name, what="The app's store")
        check_late_share(self.late_alarm)
        check_dead_letter_max(self.dead_max)
        check_places(self.log, self.state, self.local)

    def use_log(self, log: str | Path) -> None:
        """Read and write another log than the app was declared with: `millstream run --log`.

        Raises:
            ConfigError: it is ``kafka://``, and the app has no ``state=``.
        """
        self.log = log
        check_places(self.log, self.state, self.local)

    @property
    def folder(self) -> Path:
        """Where the app keeps its state, views and log file: ``<state>/apps/<name>``, or under ``local``."""
        return self._state_folder / "apps" / self.name

    @property
    def state_store(self) -> StoreLocation:
        """Where the app's state store is: a SQLite file, or an address without credentials in its text."""
        return self._store_address or self.folder / STATE_STORE_FILE

    @property
    def _state_folder(self) -> Path:
        given = self.state if self._state_url is None else self.local
        return Path(self.log if given is None else given)

    @property
    def _state_url(self) -> ObjectUrl | None:
        return state_url(self.state)

    def topic(
        self,
        name: str,
        schema: type | Mapping[str, Any] | None = None,
        *,
        key: str | None = None,
        partitions: int = 4,
        format: FormatName = "json",  # noqa: A002 - what it is called everywhere
        avro_schema: AvroSchema | None = None,
        avro_schemas: Mapping[int, AvroSchema] | str | Path | None = None,
        registry: str | None = None,
        metadata: Metadata = (),
        bad: BadRecordPolicy = "dead-letter",
        start: StartPosition = "earliest",
    ) -> Topic:
        """Declare a topic: the fields of its values, and how they are written.

        A run creates the topic, with that many partitions, where the log has none of the name.

        Args:
            schema: A dataclass, a pydantic model, a TypedDict, or a mapping of names to types. By default
                all fields of the newest Avro schema; with ``format="bytes"`` the columns are ``value`` and
                ``key``.
            key: The field that chooses the partition.
            format: How the values are written: ``"json"`` objects, ``"avro"``, or ``"bytes"``, as
                they are.
            avro_schema: What the values were written with: a mapping, JSON text or a file's path.
            avro_schemas: For values in Confluent's form, schemas by number: a mapping, or a folder
                of files such as ``17.avsc``.
            registry: The address of a schema registry, for values in Confluent's form: Avro, Protobuf, JSON.
            metadata: The record's metadata that become columns: any of ``"key"``,
                ``"partition"``, ``"offset"``, ``"timestamp"``, ``"headers"``.
            bad: What happens to a record that cannot be decoded. ``"dead-letter"``: it is kept in the
                view ``dead_letters`` and forwarded to the topic ``<app>.dead``, and the stream goes
                on. ``"stop"``: the job stops, with nothing of the batch committed. ``"skip"``: it
                is counted, and that is all.
            start: Where an app that has no state yet begins to read the topic: ``"earliest"``, its first record;
                ``"latest"``, the next one; a datetime or its ISO text, the first record at it or later, by its
                timestamp; or offsets by partition, ``{0: 1700}``, the others begin at their start. Then the app's
                position counts, and another start is ignored, and said to be. See docs/guide/positions.md.

        Raises:
            ConfigError: a type or an option is not known, or they do not fit together.
        """
        declared = TopicDeclaration(
            name, schema, format, avro_schema, avro_schemas, metadata, registry
        )
        fields, values = declared.read()
        check_policy(name, bad)
        if key is not None:
            check_topic_key(name, key, fields)
        self.drop_replaced()
        if name in self.topics:
            raise ConfigError(
                f"Topic {name!r} is declared twice{declared_by(self.topics[name].cell)}. Use the first declaration."
            )
        begin = LogStart.of_topic(name, start, f"The start of topic {name!r}")
        self.topics[name] = Topic(self, name, fields, key, partitions, values, bad, begin)
        self.partitions[name] = partitions
        return self.topics[name]

    def table(
        self,
        name: str,
        schema: type | Mapping[str, Any] | None = None,
        *,
        key: str | Sequence[str] | None = None,
        order: VersionOrder = "offset",
        deleted: Column | None = None,
        time: Column | None = None,
        watermark: WatermarkRule = IN_ORDER,
        ttl: Duration | None = None,
        envelope: Envelope | None = None,
        capture: Capture | str | None = None,
        **topic: Any,
    ) -> Table:
        """Declare a topic that is a table, and read it as one: of each key its latest record is a row.

        A record without a value (a tombstone) deletes the row of its key. The topic may be compacted.

        Args:
            name: The topic's name.
            schema: As in :meth:`topic`, which also takes the other options in ``topic``.
            key: The column that identifies a row, and is the record's key; with an envelope also several. With a
                capture it is that of the table in its database, and may be left out, as may ``schema``, once the
                capture has run: then they are the database's. Columns of decimals, times and JSON are text then.
            order: See :meth:`Topic.table`, as for ``deleted``, ``time``, ``watermark`` and ``ttl``.
            envelope: ``"debezium"``, or :func:`millstream.debezium` with options: the records are changes
                of a database's table. ``schema`` has the columns of that table that are wanted; event time is
                that of the change, by default. See docs/joins.md.
            capture: What :func:`millstream.capture` returns, the URL of its database, or its name: ``name`` is a
                table of that database, ``"orders"`` or ``"public.orders"``. It changes as the database does, by
                whole transactions. A record that cannot be read stops the app (``bad="stop"``), unless
                ``bad`` says otherwise.

        Raises:
            ConfigError: an option is not known, or does not go with the envelope or the capture.

        Example::

            users = app.table("users", User, key="id")
            orders = app.table("shop.public.orders", Order, key="id", envelope="debezium")
            shop = ms.capture("postgresql://reader@db.example/shop", tables="orders")
            orders = app.table("orders", Order, key="id", capture=shop)
        """
        if envelope is not None or capture is not None:
            if order != "offset" or deleted is not None or ttl is not None:
                raise ConfigError(
                    f"The table {name!r} has {'a capture' if envelope is None else 'an envelope'}, and order=, deleted= "
                    "or ttl=. The records say themselves what they replace and delete: leave these out."
                )
            found = self._captured_topic(name, envelope, capture, topic)
            columns, schema = declared_columns(self.log, name, found, key, schema)
            declared = self.topic(
                found.topic, schema, key=columns[0] if len(columns) == 1 else None, **topic
            )
            return build_captured_table(
                declared,
                columns,
                found.options,
                group_of(self, found.options.transactions, self.topics, self.transactions),
                time=time,
                watermark=watermark,
                code=UserCode("", declared_at(), self.on_error),
                captured=capture is not None,
            )
        if not isinstance(key, str):
            raise ConfigError(
                f"The key of table {name!r} is {key!r}. Give one column, which is the record's key; for several say "
                f"app.topic({name!r}, …).table(key=…)."
            )
        declared = self.topic(name, schema, key=key, **topic)
        return declared.table(order=order, deleted=deleted, time=time, watermark=watermark, ttl=ttl)

    def _captured_topic(
        self,
        name: str,
        envelope: Envelope | None,
        capture: Capture | str | None,
        options: dict[str, Any],
    ) -> CapturedTopic:
        """Return the topic of a table with an envelope or a capture; complete the options of the topic."""
        if capture is None:
            return CapturedTopic(name, envelope_options(envelope, name))
        if envelope is not None:
            raise ConfigError(
                f"The table {name!r} has a capture and an envelope. The capture says what its records are: leave the "
                "envelope out."
            )
        found = captured_topic(capture, name, self.log)
        if found.partitions is not None:
            options.setdefault("partitions", found.partitions)
        options.setdefault("bad", "stop")
        return found

    def static_table(
        self, rows: Any, *, key: str | Sequence[str], name: str = "static table"
    ) -> Table:
        """Make a table of rows that are given here: a side input, such as a list of countries.

        Args:
            rows: A DataFrame of polars or pandas, an Arrow table, or what another app has written: a
                ``ms.view(…)`` or a ``ms.dataset(…)``, which is read once, here. Up to 16 MiB: it travels with
                the plan. Larger ones belong into a topic: see :meth:`table`.
            key: The columns that identify a row.
            name: The table's name in ledger and errors.

        A run that gives other rows replaces them all at once, with its first batch, and what is derived
        from them changes as far as they differ. They are rows of the year 1970 to what goes by time.

        Raises:
            ConfigError: two rows have one key, they are too many, or a column has a type that cannot be
                kept.

        Example::

            countries = app.static_table(pl.read_csv("countries.csv"), key="code")
        """
        kernel, shape = build_static_table(rows, key, name, self.names)
        return Table(self, OperatorNode((), kernel), shape)

    def view_table(self, view: View, *, name: str | None = None) -> Table:
        """Make a table that follows a view of another app: it has the view's rows, and changes as they do.

        Args:
            view: A view, opened with ``ms.view("prices", app="shop")``; of this log, another one, or a database.
            name: The table's name in ledger and errors; by default ``view`` and the view's.

        While the app runs, the view's changes are copied into a topic of its log, ``<app>.view.<other app>.<view>``, once
        and in the order of the view; the table is that topic's. So what the app saw is in its log, and
        a replay gives the same. At the start of a run all that the view has by then is there. A view that was created
        again, or has forgotten changes that were not copied yet, is compared with the topic as a whole.
        The key is the view's. Lists and structs are JSON text, as they are in views.

        Raises:
            ConfigError: it is a view of this app, or has no key. When it runs: the view was given other columns.

        Example::

            prices = app.view_table(ms.view("prices", app="shop"))
            orders.lookup(prices, on="item").view("orders_with_prices", key="id")
        """
        made = build_view_table(self, view, name)
        self.drop_replaced()
        if made.topic.name in self.topics:
            raise ConfigError(
                f"The view {view.name!r} of the app {view.app!r} is followed twice. Use the first table."
            )
        self.topics[made.topic.name] = made.topic
        self.partitions[made.topic.name] = made.topic.partitions
        self.followed = (*self.followed, made.followed)
        return made.table

    def spark_session(
        self,
        *,
        cores: int | None = None,
        master: str | None = None,
        settings: Mapping[str, str] | None = None,
    ) -> SparkSession:
        """Start Spark as the app needs it, until the process ends, and return the session.

        Make the DataFrames that the app is to read with it. ``cores``, ``master`` and ``settings`` are as for :meth:`run`.
        """
        with spark_extra():
            from millstream.spark.runtime.session import start_session  # noqa: PLC0415 - loads pyspark

        return start_session(
            self.name, folder=self.folder, cores=cores, master=master, settings=settings
        )

    def from_spark(
        self,
        frame: DataFrame,
        *,
        time: Column,
        watermark: WatermarkRule = IN_ORDER,
        lateness: Duration = "0 seconds",
        name: str = "dataframe",
    ) -> Stream:
        """Read a streaming Spark DataFrame as a stream, besides topics.

        Args:
            frame: Made with :meth:`spark_session`; anything that Spark reads as a stream, and steps
                on it that keep no state. Its columns are the stream's.
            time: The event time: a timestamp column, or an expression that gives a datetime.
            watermark: How far the watermark stays behind the newest event: its delay. A DataFrame
                has no partitions that we know of: all of it counts as one, which is never idle.
            lateness: See :meth:`Topic.stream`.
            name: The stream's name in ledger and errors.

        The order of its rows is not known, so whether they are late is judged by the watermark of the
        batch before. Effectively once, if its source gives the same rows for a
        batch that is repeated.

        Raises:
            ConfigError: the DataFrame is not streaming, or has columns that we cannot take; the
                watermark uses what only records of a topic have.

        Example::

            rates = app.spark_session().readStream.format("rate").load()
            app.from_spark(rates, time="timestamp").view("latest", key="value")
        """
        with spark_extra():
            from millstream.spark.dataframes import streaming_schema  # noqa: PLC0415 - loads pyspark

        schema = streaming_schema(frame)
        columns = dict(polars_table(schema.empty_table()).schema)
        expression = as_expression(time, what="from_spark's time")
        check_time(expression, columns, name)
        check_dataframe_watermark(watermark, name)
        node = DataFrameNode(self.names.unique(name), frame, schema, expression, watermark)
        lateness_us = to_us(lateness, what="stream's lateness")
        return Stream(self, node, StreamShape(columns, lateness_us=lateness_us, names=self.names))

    def plan(self, buckets: Buckets | None = None) -> JobPlan:
        """Compile the part of the graph that leads to the outputs.

        Raises:
            ConfigError: there is no output, or nothing is read.
        """
        self.drop_replaced()
        if not self.outputs:
            raise ConfigError(
                f"The app {self.name!r} has no view and no other output. End a stream with "
                ".view(name), .to(topic), .dataset(path) or .foreach(function)."
            )
        self.check_newest()
        buckets = buckets or Buckets(self.buckets)
        plan = compile_plan(self.name, self.outputs, buckets, self.on_error)
        check_plan(plan)
        return plan

    def job(self) -> Job:
        """Describe the app to what runs it."""
        self.plan()  # an app without an output is refused before anything starts
        return self._job(self.plan)

    def job_of(self, node: GraphNode, columns: ColumnTypes, name: str) -> Job:
        """Describe a plan of its own whose one output, by a name, is the rows of a node."""
        output = Output(name, node, (), tuple(columns.items()))
        return self._job(lambda buckets: compile_plan(self.name, [output], buckets, self.on_error))

    def _job(self, compiled: Callable[[Buckets], JobPlan]) -> Job:
        return Job(
            app=self.name,
            log=self.log,
            folder=self.folder,
            state_store=self.state_store,
            topics=dict(self.partitions),
            bucket_count=self.buckets,
            compile=compiled,
            dashboard=[to_plain(panel) for panel in self.panels],
            state=self._state_url,
            starts={name: topic.start for name, topic in self.topics.items()},
        )

    def run(
        self,
        *,
        until: Until = "stopped",
        timeout: Duration | None = None,
        count: int | None = None,
        start: str | datetime | Sequence[str] | None = None,
        on_progress: Callable[[Progress], None] | None = None,
        on_alarm: Callable[[str], None] | None = None,
        on_started: Callable[[], None] | None = None,
        show: bool | TextIO | None = None,
        engine: EngineName | None = None,
        cores: int | None = None,
        master: str | None = None,
        rows_per_batch: int = 1_000_000,
        settings: Mapping[str, str] | None = None,
        same_expressions: bool = False,
        metrics: str | None = None,
        ready_within: Duration = "5 minutes",
    ) -> Report:
        """Run the pipeline from where the last run stopped.

        Args:
            until: ``"stopped"``: until Ctrl-C, which lets the current batch finish (a second one
                does not). ``"caught-up"``: until all records that the log had at the start are processed. A
                function of the Progress: until it gives True.
            timeout: Stop, after the current batch, when this long has passed.
            count: Stop, after the current batch, when this run has read so many records.
            start: Where streams begin if the app has no state yet, instead of where their topics are declared to: a word
                or a time as for :meth:`topic`, or ``"topic/partition/offset"`` of each partition that is named.
            on_progress: Called after every committed batch, in the order of batches.
            on_alarm: Called with an alarm's message; see ``late_alarm`` and ``dead_max``.
            on_started: Called when the run has begun: declaration and state fit, and batches may come.
            show: Show progress on standard error, or on this stream: the phases of the start, then a table in a
                terminal, else lines. By default in a terminal only, and not with ``on_progress``.
            engine: ``"spark"``, or ``"local"``: in this process, without Java, for development; the next run may be on the
                other. By default ``--engine`` of the command line, MILLSTREAM_ENGINE, or Spark. See docs/dev.md.
            cores: Cores to use; by default as many as this machine has.
            master: The address of a Spark cluster, such as ``"spark://host:7077"``; by default Spark runs on this
                machine, as a part of the run. Read docs/cluster.md first.
            rows_per_batch: The most records that one batch reads.
            settings: Spark settings that override ours.
            same_expressions: Confirm, after an upgrade of polars or Python, that the expressions and functions which
                read as before are the same. A run that needs it says so.
            metrics: Serve ``/metrics`` for Prometheus, ``/healthz`` and ``/readyz`` at this ``HOST:PORT``.
            ready_within: ``/readyz`` is 503 when records have waited and no batch was committed for so long.

        Raises:
            ConfigError: something is declared wrongly, or the state belongs to another program; the
                message says which step differs, and how.
            UserCodeError: an expression or function failed; the message names the step.
            FencedError: a newer run of this app has replaced this one.
            JobFailedError: the job stopped for another reason; the message says where.
        Guarantees: effectively once. All outputs of a batch take effect, or the next run completes them; views in the
            app's own store, position and ledger are committed together. After a kill at any moment, the next run
            continues and the results are the same.
        """
        alarm = None if self.late_alarm is None else LateAlarm(self.late_alarm, on_alarm)
        chosen = choose_engine(engine)
        options = RunOptions(
            until=until if callable(until) else choose("run's until", until, UNTIL_OPTIONS),
            timeout_s=None if timeout is None else to_us(timeout, what="run's timeout") / 1e6,
            count=None if count is None else at_least_one(count, "run's count"),
            on_progress=on_progress if alarm is None else alarm.wrap(on_progress),
            cores=cores,
            master=master,
            rows_per_batch=at_least_one(rows_per_batch, "run's rows_per_batch"),
            settings=dict(settings or {}),
            same_expressions=same_expressions,
            dead_max=self.dead_max,
            start=asked_start(start),
            on_alarm=on_alarm,
            on_started=lambda _start: None if on_started is None else on_started(),
        )
        run = AppRun(
            self.job(),
            self.followed,
            self._state_folder,
            self._store_address,
            metrics,
            to_us(ready_within, what="run's ready_within") / 1e6,
            self.alert_rules,
            chosen,
        )
        report = run.run(options, shown_on(show=show, by_default=on_progress is None))
        messages = () if alarm is None else alarm.messages
        return replace(report, alarms=(*messages, *report.alarms))
