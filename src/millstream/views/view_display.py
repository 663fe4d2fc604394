"""How a notebook shows a view: as a table of its newest rows, or as a plot over time, both updated as it changes."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import polars as pl

from millstream.choices import did_you_mean
from millstream.errors import ConfigError, EnvironmentProblem
from millstream.notebook.html import titled_html
from millstream.notebook.live_display import Bundle, show_live
from millstream.views.query import Query, QueryResult, ViewReader
from millstream.views.schema import ViewSchema

if TYPE_CHECKING:
    import altair as alt

_ROWS = 10  # as many as polars shows
_VEGA_LITE = "application/vnd.vegalite.v5+json"
_VEGA_LITE_SCHEMA = "https://vega.github.io/schema/vega-lite/v5.json"
_POINTS_MAX = 5_000  # what Vega-Lite draws in a moment


def show_table(store: ViewReader, view: str) -> None:
    """Show a view in the cell that runs: its newest rows if its key has a time, else its first ones."""

    def render() -> Bundle:
        found = newest_rows(store, view, _ROWS)
        batch = "before its first batch" if found.batch_id is None else f"batch {found.batch_id}"
        count = store.count(view)
        note = f"{count:,} {'row' if count == 1 else 'rows'}, {batch}"
        table = re.sub(r"<small>shape: .*?</small>", "", found.rows._repr_html_())
        return {
            "text/plain": f"{view}: {note}\n{found.rows}",
            "text/html": titled_html(view, table, note),
        }

    show_live(render, store.version)


def newest_rows(store: ViewReader, view: str, limit: int) -> QueryResult:
    """Return so many rows of a view: of the latest times if its key has a time, else the first by key."""
    time = time_column(store.schema(view))
    return store.select(view, Query(order=() if time is None else (f"-{time}",), limit=limit))


def time_column(schema: ViewSchema) -> str | None:
    """Return the first column of the key that is a time; None if there is none."""
    return next((name for name in schema.key if schema.dtypes[name].is_temporal()), None)


@dataclass(frozen=True, repr=False)
class ViewPlot:
    """A plot of a view over time, which a notebook shows and goes on updating. See :meth:`View.plot`."""

    store: ViewReader
    view: str
    x: str
    y: str
    by: str | None

    def chart(self) -> alt.Chart:
        """Return the plot of the view as it is now, as a chart of Altair's, to be changed or saved.

        Raises:
            EnvironmentProblem: Altair is not installed.
        """
        try:
            import altair as alt  # noqa: PLC0415 - an extra
        except ImportError:
            raise EnvironmentProblem(
                "plot needs Altair, which is not installed. Run: pip install 'millstream[notebook]'"
            ) from None
        order = (f"-{self.x}",)
        rows = self.store.select(self.view, Query(order=order, limit=_POINTS_MAX)).rows
        wanted = [one for one in (self.x, self.y, self.by) if one is not None]
        encoded: dict[str, Any] = {
            "x": alt.X(field=self.x, type=_axis_type(rows.schema[self.x]), title=self.x),
            "y": alt.Y(field=self.y, type="quantitative", title=self.y),
        }
        if self.by is not None:
            encoded["color"] = alt.Color(field=self.by, type="nominal", title=self.by)
        drawn = alt.Chart(rows.select(wanted)).mark_line(point=True).encode(**encoded)
        chart: alt.Chart = drawn.properties(title=self.view, width=520, height=220)
        return chart

    def _ipython_display_(self) -> None:
        self.chart()  # without Altair, that is said here
        show_live(lambda: _chart_bundle(self.chart(), repr(self)), self.store.version)

    def __repr__(self) -> str:
        by = "" if self.by is None else f", by {self.by}"
        return f"Plot of {self.view}: {self.y} over {self.x}{by}"


def _chart_bundle(chart: alt.Chart, text: str) -> Bundle:
    """Return what to show of a chart.

    Altair's own HTML loads its scripts from the network. JupyterLab has Vega-Lite 5, which draws what we draw just as 6
    does: front ends are given that, unless the user has chosen a renderer.
    """
    import altair as alt  # noqa: PLC0415 - an extra

    if alt.renderers.active == "default" and "google.colab" not in sys.modules:
        drawing = {**chart.to_dict(), "$schema": _VEGA_LITE_SCHEMA}
        return {_VEGA_LITE: drawing, "text/plain": text}
    found: Any = chart._repr_mimebundle_()
    bundle: Bundle = dict(found[0] if isinstance(found, tuple) else found)
    return {**bundle, "text/plain": text}


def plot_of(store: ViewReader, view: str, x: str | None, y: str | None, by: str | None) -> ViewPlot:
    """Choose what a plot shows where that is not said: the time, the first number, and what is left of the key.

    Raises:
        ConfigError: there is no such column, or none that can be shown.
    """
    schema = store.schema(view)
    x = x or time_column(schema) or _first(schema, lambda dtype: dtype.is_temporal())
    others = [name for name in schema.names if name not in schema.key]
    y = y or _first(schema, lambda dtype: dtype.is_numeric(), others)
    for what, column in (("x", x), ("y", y), ("by", by)):
        if column is None and what != "by":
            raise ConfigError(
                f"The view {view!r} has no column of {'times' if what == 'x' else 'numbers'} to plot; it has "
                f"{', '.join(schema.names)}. Name one as {what}=."
            )
        if column is not None and column not in schema.names:
            raise ConfigError(
                f"plot names {column!r}, and the view {view!r} has {', '.join(schema.names)}."
                f"{did_you_mean(column, schema.names)}"
            )
    assert x is not None
    assert y is not None
    rest = [name for name in schema.key if name != x and not schema.dtypes[name].is_temporal()]
    return ViewPlot(store, view, x, y, by or (rest[0] if len(rest) == 1 else None))


def _first(
    schema: ViewSchema, fits: Callable[[pl.DataType], bool], names: Sequence[str] | None = None
) -> str | None:
    chosen = schema.names if names is None else names
    return next((name for name in chosen if fits(schema.dtypes[name])), None)


def _axis_type(dtype: pl.DataType) -> Literal["temporal", "quantitative", "nominal"]:
    if dtype.is_temporal():
        return "temporal"
    return "quantitative" if dtype.is_numeric() else "nominal"
