"""The part of an app for notebooks: it runs in the background, and shows itself as a drawing."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from millstream.errors import ConfigError
from millstream.notebook.cells import is_newest
from millstream.notebook.graph_svg import graph_svg
from millstream.notebook.html import titled_html
from millstream.pipeline.background_run import (
    BackgroundRun,
    BackgroundStatus,
    run_of,
    stored_state,
)
from millstream.pipeline.engine_choice import EngineName, choose_engine
from millstream.pipeline.progress_table import both
from millstream.pipeline.questions import QueryableApp
from millstream.views.commit.pipeline_graph import pipeline_graph
from millstream.views.followed_view import FollowedView
from millstream.views.runs.progress import Progress, Report

if TYPE_CHECKING:
    from millstream.pipeline.topic import Topic

_ROWS_PER_BATCH = 100_000  # a stop waits for one batch


@dataclass(repr=False)
class BackgroundApp(QueryableApp):
    """The part of an app that is about runs in the background."""

    topics: dict[str, Topic] = field(default_factory=dict, init=False)
    followed: tuple[FollowedView, ...] = field(default=(), init=False, repr=False)
    _background: BackgroundRun | None = field(default=None, init=False, repr=False)

    def __repr__(self) -> str:
        self.drop_replaced()
        topics, outputs = ", ".join(self.topics), ", ".join(one.name for one in self.outputs)
        return f"App({self.name!r}: topics {topics or 'none'}; outputs {outputs or 'none'})"

    def drop_replaced(self) -> None:
        """Forget all that cells of a notebook declared before they ran again: a run would create their topics."""
        super().drop_replaced()
        for name, topic in [*self.topics.items()]:
            if not is_newest(topic.cell):
                del self.topics[name], self.partitions[name]
        self.followed = tuple(one for one in self.followed if one.topic in self.topics)

    def _repr_html_(self) -> str | None:
        """Draw the pipeline; None where there is none yet."""
        try:
            graph = pipeline_graph(self.plan())
        except ConfigError:
            return None
        return titled_html(self.name, graph_svg(graph))

    @abstractmethod
    def run(self, *args: Any, **options: Any) -> Report:
        """Run the pipeline."""

    def start(
        self,
        *,
        engine: EngineName | None = None,
        rows_per_batch: int = _ROWS_PER_BATCH,
        on_progress: Callable[[Progress], None] | None = None,
        **options: Any,
    ) -> BackgroundRun:
        """Run the pipeline in the background, and return: for notebooks, and programs that do something beside it.

        A run that this process has started in the app's folder is stopped first, so a cell can be run again. A mistake
        that shows as the run begins is raised here, if that takes no longer than three seconds. Of a later failure the next cell of a
        notebook says a sentence; elsewhere :meth:`stop` raises it. The run ends with the process.

        Args:
            engine: ``"local"``, in this process, or ``"spark"``. By default what ``--engine`` or MILLSTREAM_ENGINE
                says, or ``"local"``.
            rows_per_batch: The most records that one batch reads. :meth:`stop` waits for the batch in hand.
            on_progress: Called after every batch, in the thread that runs it.
            options: Those of :meth:`run`, but for ``show``.

        Raises:
            ConfigError: as :meth:`run`.

        Example::

            app.start()
            app.status
            app.stop()
        """
        if "show" in options:
            raise ConfigError("start was given show=, and shows nothing. Look at app.status.")
        chosen = choose_engine(engine, "local")
        self.plan()
        known = run_of(self.folder)
        if known is not None:
            known.stop()

        def run(note: Callable[[Progress], None], began: Callable[[], None]) -> Report:
            return self.run(
                engine=chosen,
                rows_per_batch=rows_per_batch,
                on_progress=both(note, on_progress),
                on_started=began,
                show=False,
                **options,
            )

        started = BackgroundRun(self.name, self.folder, self.state_store, chosen, run)
        self._background = started
        started.begin()
        return started

    def stop(self) -> BackgroundStatus:
        """Stop what :meth:`start` has started, after the batch in hand; return how it stands then.

        Raises:
            MillstreamError: what the run failed with, if nobody has been told yet.
        """
        known = run_of(self.folder) or self._background
        return self.status if known is None else known.stop()

    @property
    def status(self) -> BackgroundStatus:
        """How the run that this process has started stands, or what the app's views reflect, if it has started none."""
        known = run_of(self.folder) or self._background
        if known is not None:
            return known.status
        position, views = stored_state(self.name, self.state_store)
        return BackgroundStatus(self.name, "not started", position=position, views=views)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the run: it belongs to this process."""
        return {**super().__getstate__(), "_background": None}
