"""What surrounds a run of an app: its display, its figures, its alerts, the views it follows, its dead letters."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from millstream.errors import RetriableError
from millstream.metrics.exposition import Exposition
from millstream.metrics.server import serve_metrics
from millstream.pipeline.engine_choice import EngineName
from millstream.pipeline.progress_table import ProgressTable, both
from millstream.pipeline.spark_extra import spark_extra
from millstream.views.address import StateStoreAddress
from millstream.views.alerts.rule import AlertRule
from millstream.views.alerts.watch import AlertWatch, AppAlertStore
from millstream.views.dead_letter_relay import relay
from millstream.views.followed_view import FollowedView, Followers
from millstream.views.runs.control_files import stop_request_file
from millstream.views.runs.progress import Report
from millstream.views.server.app_metrics import AppMetrics
from millstream.views.server.catalog import ViewCatalog
from millstream.views.sink import RunStart
from millstream.views.store_location import open_state_store

if TYPE_CHECKING:
    from millstream.engine.job import Job, RunOptions


@dataclass(frozen=True)
class AppRun:
    """One run of an app.

    ``state_folder`` has the folders of apps, ``store`` is the app's state store, if that is a database.
    ``alerts`` are told while it runs. ``metrics`` is where figures are served; ``ready_within_s`` is for how long records may wait while no batch is
    committed, before the run is not ready.
    """

    job: Job
    followed: tuple[FollowedView, ...]
    state_folder: Path
    store: StateStoreAddress | None
    metrics: str | None = None
    ready_within_s: float = 300.0
    alerts: Sequence[AlertRule] = ()
    engine: EngineName = "spark"

    def run(self, options: RunOptions, stream: TextIO | None) -> Report:
        """Run it to its end, with its progress shown on ``stream``. See :meth:`millstream.App.run`."""
        run_job = runner_of(self.engine)
        job = self.job
        with ExitStack() as stack:
            if stream is not None:
                live = stack.enter_context(ProgressTable(stream))
                options = replace(
                    options,
                    on_progress=both(live.show, options.on_progress),
                    on_phase=live.phase,
                    on_notice=live.note,
                )
            if self.metrics is not None:
                options = stack.enter_context(self._serving_metrics(self.metrics, options))
            if self.alerts:
                options = stack.enter_context(self._telling_alerts(options))
            stop_request = stop_request_file(job.folder.absolute())
            stack.enter_context(Followers(job.log, self.followed, stop_request))
            report = run_job(job, options)
        with suppress(RetriableError):  # another process owns the folder: they wait in the view
            relay(job.log, job.app, self.state_folder, self.store)
        return report

    @contextmanager
    def _serving_metrics(self, listen: str, options: RunOptions) -> Iterator[RunOptions]:
        """Serve the app's figures until the block ends; yield options that tell when the run has started."""
        started: list[RunStart] = []

        def start(began: RunStart) -> None:
            options.on_started(began)
            started.append(began)

        with closing(ViewCatalog(self.state_folder)) as catalog:
            figures = AppMetrics(catalog, self.job.log, apps=lambda: [self.job.app])

            def why_not_started() -> str | None:
                return None if started else "The run has not started yet."

            def why_stalled() -> str | None:
                return figures.why_stalled(self.job.app, self.ready_within_s) if started else None

            exposition = Exposition(
                {"apps": figures.read}, [why_not_started, figures.why_not_ready, why_stalled]
            )
            with closing(figures), serve_metrics(listen, exposition) as url:
                options.on_phase(f"metrics are at {url}")
                yield replace(options, on_started=start)

    @contextmanager
    def _telling_alerts(self, options: RunOptions) -> Iterator[RunOptions]:
        """Tell alerts until the block ends, from when the run has started; look a last time at the end."""
        stopped = threading.Event()
        with ExitStack() as opened:

            def start(started: RunStart) -> None:
                options.on_started(started)
                catalog = opened.enter_context(closing(ViewCatalog(self.state_folder)))
                figures = AppMetrics(catalog, self.job.log, apps=lambda: [self.job.app])
                opened.callback(figures.close)
                store = opened.enter_context(closing(open_state_store(self.job.state_store)))
                watch = AlertWatch(
                    self.job.app, self.alerts, {"apps": figures.read}, AppAlertStore(store, started)
                )
                thread = threading.Thread(
                    target=watch.run, args=(stopped,), name="millstream alerts", daemon=True
                )
                thread.start()
                opened.callback(thread.join)
                opened.callback(
                    stopped.set
                )  # before the join, and that before what it uses is closed

            yield replace(options, on_started=start)


def runner_of(engine: EngineName) -> Callable[[Job, RunOptions], Report]:
    """Return what runs a job on an engine. Only Spark's loads pyspark."""
    if engine == "local":
        from millstream.engine.local_engine import run_local  # noqa: PLC0415 - see above

        return run_local
    with spark_extra():
        from millstream.spark.job import run_job  # noqa: PLC0415 - see above

    return run_job
