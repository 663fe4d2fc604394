"""What an edit does to a program: the values that a comparison returns, part by part. How it decides is in `program_change.py`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from millstream.views.state_store.step_fill import StepFill
from millstream.views.state_store.table_fill import TableFill
from millstream.views.state_store.view_fill import ViewFill

Verdict = Literal["keeps", "drops", "rebuilds", "refuses"]
"""What happens to a part; in this order, from the least to the most."""

PartKind = Literal["step", "view", "topic", "dataset", "function"]
_ORDER: tuple[Verdict, ...] = get_args(Verdict)


@dataclass(frozen=True)
class PartChange:
    """What an edit does to one part of an app: the state of a step, or the rows of an output.

    ``why`` are texts. ``was`` is the name of a step before, if that is all that changed. ``topics`` are
    those whose records it needs again. ``key`` is what the state of a step is kept under, now. ``filled_from`` is the
    view of which a view gets all its rows, and ``filled_from_table`` the step of whose state it does. ``filled_from_steps`` are the tables
    of whose state a step is computed, and a view below it. ``is_addition``: it
    is filled, and nothing that was there is lost by it.
    """

    kind: PartKind
    name: str
    verdict: Verdict
    why: tuple[str, ...] = ()
    was: str | None = None
    topics: tuple[str, ...] = ()
    key: str | None = None
    filled_from: str | None = None
    filled_from_table: str | None = None
    filled_from_steps: tuple[str, ...] = ()
    is_addition: bool = False

    @property
    def is_made_anew(self) -> bool:
        """Whether it is a view that gets all its rows by the change: of what the log has, or of what fills it."""
        filled = self.filled_from or self.filled_from_table or self.filled_from_steps
        return self.kind == "view" and (self.verdict == "rebuilds" or bool(filled))

    @property
    def is_computed(self) -> bool:
        """Whether it is computed anew, of what the log has."""
        filled = self.filled_from or self.filled_from_table or self.filled_from_steps
        return self.verdict == "rebuilds" and not filled


@dataclass(frozen=True)
class ProgramChange:
    """What an edit does to an app. ``refusals`` concern the app as a whole.

    ``kept`` has the steps that keep their state: the key of it now, and the key that it was stored under. ``fills`` says of
    each view that is filled from another one how, ``table_fills`` of each that is filled from a table, and ``step_fills`` of each step
    that is computed of the state of tables.
    """

    parts: tuple[PartChange, ...]
    refusals: tuple[str, ...] = ()
    kept: Mapping[str, str] = field(default_factory=dict)
    fills: Mapping[str, ViewFill] = field(default_factory=dict)
    table_fills: Mapping[str, TableFill] = field(default_factory=dict)
    step_fills: Mapping[str, StepFill] = field(default_factory=dict)

    @property
    def step_filled_views(self) -> frozenset[str]:
        """The views that are filled with the steps above them."""
        return frozenset(p.name for p in self.parts if p.kind == "view" and p.filled_from_steps)

    @property
    def verdict(self) -> Verdict:
        """The most that happens to any part."""
        found = [part.verdict for part in self.parts]
        return "refuses" if self.refusals else max(found, key=_ORDER.index, default="keeps")

    @property
    def topics(self) -> tuple[str, ...]:
        """The topics whose records are needed again."""
        needed = (t for part in self.parts if part.verdict == "rebuilds" for t in part.topics)
        return tuple(sorted(set(needed)))

    @property
    def only_fills_new(self) -> bool:
        """Whether all that changes is filled, nothing that is there is lost, and nothing has to be read for it."""
        changed = [part for part in self.parts if part.verdict != "keeps"]
        moved = any(now != was for now, was in self.kept.items())
        return bool(changed) and not moved and all(part.is_addition for part in changed)

    @property
    def moves_state(self) -> bool:
        """Whether stored state is not exactly what a run of the program would find."""
        changes = any(part.kind == "step" and part.verdict != "keeps" for part in self.parts)
        return changes or any(now != was for now, was in self.kept.items())
