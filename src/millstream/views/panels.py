"""The panels of an app's dashboard, as plain values that are stored with the app.

An app declares them (:meth:`millstream.App.dashboard`); the page of `millstream ui` draws them from
the app's views, live. :mod:`millstream.views.server.panel_data` computes the numbers from the rows of
the views.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from millstream.durations import to_us
from millstream.errors import ConfigError

_ROWS_MAX = 100
_PLACES_MAX = 12


@dataclass(frozen=True)
class Measure:
    """A number over some rows: how many there are, or the sum of a column, or one sum per another.

    Args:
        label: Its name on the panel.
        column: The column that is added up; None counts rows.
        per: The column whose sum it is divided by, as clicks are by impressions.
        unit: ``"percent"`` for a share of one, otherwise a text after the number, such as ``"€"``; by
            default nothing.
        places: To how many decimal places it is rounded; by default not at all.

    """

    label: str
    column: str | None = None
    per: str | None = None
    unit: str = ""
    places: int | None = None

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(name for name in (self.column, self.per) if name is not None)


@dataclass(frozen=True)
class Lines:
    """A chart of measures over time: one point for each value of the column ``time``.

    ``last`` is the shown interval, which ends at the newest point.
    """

    title: str
    view: str
    measures: tuple[Measure, ...]
    time: str = "window_start"
    last: str = "2 hours"

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.time, *_columns(self.measures))


@dataclass(frozen=True)
class Top:
    """A table of the ``rows`` values of the column ``by`` that have the most of the first measure.

    Where ``time`` names a column, only rows of the newest interval ``last`` of it count.
    """

    title: str
    view: str
    by: str
    measures: tuple[Measure, ...]
    rows: int = 10
    time: str | None = None
    last: str = "2 hours"

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.by, *((self.time,) if self.time else ()), *_columns(self.measures))


@dataclass(frozen=True)
class Limits:
    """Bars of a value against its limit, one for each row, those nearest to their limit first.

    Where ``newest`` names a column, such as a day, only the row of each label with the largest value in
    it counts. Value and limit are rounded to ``places`` decimal places, by default not at all.
    """

    title: str
    view: str
    label: str
    value: str
    limit: str
    unit: str = ""
    rows: int = 20
    newest: str | None = None
    places: int | None = None

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.label, self.value, self.limit, *((self.newest,) if self.newest else ()))


@dataclass(frozen=True)
class Counters:
    """Large numbers: each measure over all rows of the view."""

    title: str
    view: str
    measures: tuple[Measure, ...]

    @property
    def columns(self) -> tuple[str, ...]:
        return _columns(self.measures)


@dataclass(frozen=True)
class Newest:
    """The rows with the largest values in the column ``by``, usually a time: what happened last."""

    title: str
    view: str
    by: str
    show: tuple[str, ...]
    rows: int = 10

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.by, *self.show)


Panel = Lines | Top | Limits | Counters | Newest
_KINDS: dict[str, type[Panel]] = {
    "lines": Lines,
    "top": Top,
    "limits": Limits,
    "counters": Counters,
    "newest": Newest,
}


def _columns(measures: Sequence[Measure]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for measure in measures for name in measure.columns))


def to_plain(panel: Panel) -> dict[str, Any]:
    """Return a panel as plain values, as they are stored and sent."""
    kind = next(name for name, made in _KINDS.items() if made is type(panel))
    return {"kind": kind, **asdict(panel)}


def from_plain(values: Mapping[str, Any]) -> Panel:
    """Return the panel of values made by :func:`to_plain`."""
    made = _KINDS[values["kind"]]
    known = {field.name for field in fields(made)}
    given = {name: value for name, value in values.items() if name in known}
    if "measures" in given:
        given["measures"] = tuple(Measure(**each) for each in given["measures"])
    if "show" in given:
        given["show"] = tuple(given["show"])
    return made(**given)


def check_panel(panel: Panel, views: Mapping[str, Sequence[str]]) -> None:
    """Make sure that a panel can be drawn from these views, given as name → columns.

    Raises:
        ConfigError: there is no such view or column, or a number is out of range.
    """
    what = f"The panel {panel.title!r}"
    if panel.view not in views:
        raise ConfigError(
            f"{what} shows the view {panel.view!r}; the app has {', '.join(views) or 'none yet'}. "
            "Correct the name, or declare the view first."
        )
    for name in panel.columns:
        if name not in views[panel.view]:
            raise ConfigError(
                f"{what} shows the column {name!r} of the view {panel.view!r}, which has "
                f"{', '.join(views[panel.view])}. Choose one of them."
            )
    if isinstance(panel, Lines | Top):
        to_us(panel.last, what=f"{what}: last")
    if isinstance(panel, Lines | Top | Counters) and not panel.measures:
        raise ConfigError(f"{what} has no measures. Give at least one.")
    rounded = panel.measures if isinstance(panel, Lines | Top | Counters) else [panel]
    for places in (getattr(each, "places", None) for each in rounded):
        if places is not None and not 0 <= places <= _PLACES_MAX:
            raise ConfigError(f"{what} has places={places}. Allowed are 0 to {_PLACES_MAX}.")
    if isinstance(panel, Top | Limits | Newest) and not 1 <= panel.rows <= _ROWS_MAX:
        raise ConfigError(f"{what} has rows={panel.rows}. Allowed are 1 to {_ROWS_MAX}.")
