"""App: a named pipeline over one log. Its name is the identity of its state, views and progress."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from millstream.durations import Duration, to_us
from millstream.errors import ConfigError
from millstream.kernels.plan import JobPlan
from millstream.pipeline.compile import compile_plan
from millstream.pipeline.graph import Output
from millstream.pipeline.schema import fields_of
from millstream.pipeline.streams import Stream, Topic
from millstream.views.late_alarm import LateAlarm, check_share
from millstream.views.progress import Progress, Report, Until

if TYPE_CHECKING:
    from millstream.spark.job import Job

_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}")


@dataclass
class App:
    """A pipeline: declare topics, streams and views on it, then :meth:`run` it.

    Args:
        name: The identity of the app's state and views: lower-case letters, digits, ``-``, ``_``.
        log: The folder of the log.
        buckets: Into how many hash ranges keys are divided; fixed at the birth of the app's state.
            More buckets let more cores share a stage; each costs a little in every batch.
        late_alarm: A share of late events, such as 0.01. When more of what the last 20 batches read
            came too late, that is said once: to the log, to ``run``'s on_alarm, and in the report.

    Example::

        app = ms.App("ads", log="./data")
        events = app.topic("ad-events", AdEvent, key="user")
        rate = events.stream(time="at").window(ms.tumbling("1 hour"), by="ad").agg(n=ms.count())
        rate.view("events_by_hour")
        print(app.run(until="caught-up"))
    """

    name: str
    log: str | Path
    buckets: int = 4
    late_alarm: float | None = None
    topics: dict[str, Topic] = field(default_factory=dict, init=False)
    outputs: list[Output] = field(default_factory=list, init=False)
    _names: Counter[str] = field(default_factory=Counter, init=False, repr=False)

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ConfigError(
                f"The app's name is {self.name!r}. Use up to 63 lower-case letters, digits, '-' "
                "and '_', beginning with a letter or digit."
            )
        if not 1 <= self.buckets <= 4096:
            raise ConfigError(f"buckets is {self.buckets}. Allowed are 1 to 4096.")
        check_share(self.late_alarm)
        if str(self.log).startswith("kafka://"):
            raise ConfigError(
                f"The log is {str(self.log)!r}; pipelines read logs in a folder. Give a folder."
            )

    @property
    def folder(self) -> Path:
        """Where the app keeps its state, views and log file: ``<log>/apps/<name>``."""
        return Path(self.log) / "apps" / self.name

    def topic(
        self, name: str, schema: type, *, key: str | None = None, partitions: int = 4
    ) -> Topic:
        """Declare a topic: its values are JSON objects with the fields of a dataclass.

        ``key`` names the field that chooses the partition. A run creates the topic, with that many
        partitions, where the log has none of the name.
        """
        fields = fields_of(schema, what=f"topic {name!r}")
        if key is not None and key not in {f.name for f in fields}:
            names = ", ".join(f.name for f in fields)
            raise ConfigError(f"The key of topic {name!r} is {key!r}. Its fields are {names}.")
        if name in self.topics:
            raise ConfigError(f"Topic {name!r} is declared twice. Use the first declaration.")
        self.topics[name] = Topic(self, name, fields, key, partitions)
        return self.topics[name]

    def unique_name(self, name: str) -> str:
        """Give a step its name; the second of the same name is ``name #2``."""
        self._names[name] += 1
        count = self._names[name]
        return name if count == 1 else f"{name} #{count}"

    def add_view(self, name: str, stream: Stream, key: tuple[str, ...]) -> None:
        """Enter a view as an output; :meth:`Stream.view` is how to declare one."""
        if any(output.name == name for output in self.outputs):
            raise ConfigError(f"The view {name!r} is declared twice. Give one another name.")
        self._names[name] += 1
        self.outputs.append(Output(name, stream.node, key, tuple(stream.columns.items())))

    def plan(self, bucket_labels: tuple[int, ...] | None = None) -> JobPlan:
        """Compile what leads to the views.

        Raises:
            ConfigError: there is no view, so nothing would come out.
        """
        if not self.outputs:
            raise ConfigError(
                f"The app {self.name!r} has no view. End a stream with .view(name), so that "
                "something comes out."
            )
        labels = bucket_labels or tuple(range(self.buckets))
        return compile_plan(self.name, self.outputs, labels)

    def job(self) -> Job:
        """Describe the app to what runs it."""
        self.plan()  # an app without a view is refused before Spark starts
        return self._job(self.plan)

    def job_of(self, stream: Stream) -> Job:
        """Describe a plan of its own whose one output is the stream."""
        output = Output("to_spark", stream.node, (), tuple(stream.columns.items()))
        return self._job(lambda labels: compile_plan(self.name, [output], labels))

    def _job(self, compiled: Callable[[tuple[int, ...]], JobPlan]) -> Job:
        from millstream.spark.job import Job  # noqa: PLC0415 - loads pyspark

        partitions = {topic.name: topic.partitions for topic in self.topics.values()}
        return Job(self.name, Path(self.log), self.folder, partitions, self.buckets, compiled)

    def run(
        self,
        *,
        until: Until = "stopped",
        timeout: Duration | None = None,
        on_progress: Callable[[Progress], None] | None = None,
        on_alarm: Callable[[str], None] | None = None,
        cores: int | None = None,
        rows_per_batch: int = 1_000_000,
        settings: Mapping[str, str] | None = None,
    ) -> Report:
        """Run the pipeline on Spark, going on where it was.

        Args:
            until: ``"stopped"``: until Ctrl-C, which lets the batch at work finish (a second one
                does not). ``"caught-up"``: until all that the log held at the start is taken in. A
                function of the Progress: until it gives True.
            timeout: Stop, after the batch at work, when this long has passed.
            on_progress: Called after every committed batch, in the order of batches.
            on_alarm: Called with what the alarm over late events says; see ``late_alarm``.
            cores: Cores to use on this machine; by default all.
            rows_per_batch: The most records that one batch reads.
            settings: Spark settings that win over ours.

        Raises:
            ConfigError: something is declared wrongly, or the state belongs to another pipeline.
            UserCodeError: an expression or function failed; the message names the step.
            FencedError: a newer run of this app has taken over.
            JobFailedError: the job stopped for another reason; the message says where.
        Guarantees: effectively once. Views, position and ledger of a batch are committed together;
            killed at any moment, the next run goes on and the answer is the same.
        """
        from millstream.spark.job import RunOptions, run_job  # noqa: PLC0415 - loads pyspark

        alarm = None if self.late_alarm is None else LateAlarm(self.late_alarm, on_alarm)
        options = RunOptions(
            until=until,
            timeout_s=None if timeout is None else to_us(timeout, what="run's timeout") / 1e6,
            on_progress=on_progress if alarm is None else alarm.beside(on_progress),
            cores=cores,
            rows_per_batch=rows_per_batch,
            settings=dict(settings or {}),
        )
        report = run_job(self.job(), options)
        return report if alarm is None else replace(report, alarms=tuple(alarm.sounded))
