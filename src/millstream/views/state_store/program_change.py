"""What an edited program does to the state and the outputs of the one before, part by part.

===================================  ========  ==========================================================
a part                               verdict   because
===================================  ========  ==========================================================
step, defined as before              keeps     its state is found by its definition, whatever its name is
process function of a newer version  keeps     it has a way from the state of the older one: all else is defined as
that migrates                                  before
step, new or defined differently     rebuilds  its state has to be computed from the log
step that is no longer there         drops     nothing reads its state any more
step above or below one that         rebuilds  what a step has given out is not kept, and would be given
rebuilds, that gives rows to a view            out at other moments if it were computed again: where partitions were
that is made anew, or to one with              idle, with other late events. So all of a path, and all that gives rows
rows of a step that rebuilds                   to a view, is of one computation
step that cannot be compared         refuses   another version of polars or Python describes it differently
output, defined as before            keeps     its rows are those of the program
output that is new, or differs       keeps     it takes effect at the next batch; earlier rows stay
in stateless steps alone
view below a step that rebuilds      rebuilds  its rows are computed with the step's state
view with other columns or key, or   rebuilds  its table is another one, or other rows belong there
of other steps than it was
view that is new or was left out     keeps     it is filled from a view that has all its rows, and all that happened
view with other columns or key, of   rebuilds  is in it (`view_fill.py`). Where its table is made anew that takes a
a step that keeps                              deployment, which reads nothing for it. Without such a view: as above
any of these, right below a table    rebuilds  a deployment fills it from the table's state (`table_fill.py`)
that keeps its state
step, or what its views are made     rebuilds  a deployment fills it, and all below it, of the tables' state
anew of, behind tables that keep               (`step_fill.py`), and reads nothing for it
their state
topic, dataset, function, view in a  keeps     what was written cannot be taken back: it takes effect at
database, below such a step                    the next batch
dataset or view in a database with   refuses   its rows stand where Millstream cannot replace them
other columns or key
output that is no longer there       keeps     its rows stay, and are no longer written
===================================  ========  ==========================================================

Nothing here reads or changes a store: `millstream plan` shows it, and a test can compute it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from millstream.kernels.definition import canonical_text, without_code
from millstream.views.coverage import (
    FUNCTION,
    STATE_STORE_VIEW,
    OutputCoverage,
    OutputSink,
    format_boundary,
)
from millstream.views.state_store.definition_comparison import (
    same_definition,
    same_text,
    whole_definition,
)
from millstream.views.state_store.definition_difference import differences
from millstream.views.state_store.fill_search import FillSearch
from millstream.views.state_store.part_change import PartChange, PartKind, ProgramChange
from millstream.views.state_store.program import StoredProgram
from millstream.views.state_store.program_paths import ProgramPaths
from millstream.views.state_store.program_state import (
    ProgramOutputs,
    ProgramState,
    state_store_output,
)
from millstream.views.state_store.step_fill import StepFill, StepFillSearch
from millstream.views.state_store.table_fill import TableFill, whole_steps
from millstream.views.state_store.view_fill import ViewFill


def compare_programs(
    left: ProgramState,
    now: StoredProgram,
    declared: ProgramOutputs,
    *,
    same_expressions: bool = False,
    again: Collection[str] = (),
) -> ProgramChange:
    """Return what the program ``now`` does to the state and outputs that another one has left.

    What needs no state takes effect at the boundary of ``left``.

    Args:
        again: Views that are computed anew whatever is there, as a version that is kept has rows of them that are not.
        same_expressions: The user states that expressions and functions whose text is the same are the
            same, although another version of polars or Python describes them differently.
    """
    steps = _Steps(left.program, now, same_expressions=same_expressions)
    remade = {
        view: why for view in declared.schemas if (why := _remade(view, left, declared, steps))
    }
    remade |= {view: (*remade.get(view, ()), _KEPT_HAS_MORE) for view in again}
    views = {
        view: json.loads(one.definition)
        for (view, label), one in declared.coverage.items()
        if label == STATE_STORE_VIEW
    }
    found = FillSearch(left, declared, steps.kept, steps.stored_paths).found(remade)
    fills = {view: fill for view, fill in found.items() if view not in again}
    filled = {view: fill for view, fill in fills.items() if not isinstance(fill, str)}
    steps.rebuild_whole_paths(
        views,
        remade.keys() - filled.keys(),
        lambda readers, above: StepFillSearch(
            declared.steps,
            _whole(left, steps),
            readers,
            above,
            declared.paths,
            again,
        ),
    )
    kept = {view: fill for view, fill in filled.items() if fill.step in steps.kept}
    parts = [*steps.changes()]
    rebuilt = {part.key for part in parts if part.verdict in ("rebuilds", "refuses")}
    outputs = _Outputs(left, declared, steps, frozenset(filter(None, rebuilt)), remade, fills)
    return ProgramChange(
        (*parts, *outputs.changes()),
        (),
        steps.kept,
        {view: fill for view, fill in kept.items() if isinstance(fill, ViewFill)},
        {view: fill for view, fill in kept.items() if isinstance(fill, TableFill)},
        steps.filled,
    )


def _whole(left: ProgramState, steps: _Steps) -> set[str]:
    """Return the steps that keep their state, which was computed of all records."""
    whole = whole_steps(steps.stored_paths, left.outputs.written())
    return {key for key, stored in steps.kept.items() if stored in whole}


def pair_steps(stored: StoredProgram, now: StoredProgram) -> dict[str, str]:
    """Return which step of a stored program each step of another one is, or was before an edit, by their keys."""
    steps = _Steps(stored, now, same_expressions=True)
    return {**dict(steps.changed_pairs()), **steps.kept}


# ── steps ───────────────────────────────────────────────────────────────────────────────────


@dataclass
class _Steps:
    """Pairs the steps of two programs.

    ``again``: steps that are as before and are rebuilt; the key before, and why. ``migrated``: kept steps whose state
    goes from an older version to a newer one, and what that is. ``filled``: steps that are computed of the state of tables.
    """

    stored: StoredProgram
    now: StoredProgram
    same_expressions: bool
    kept: dict[str, str] = field(default_factory=dict)
    unclear: dict[str, str] = field(default_factory=dict)
    again: dict[str, tuple[str, str]] = field(default_factory=dict)
    migrated: dict[str, str] = field(default_factory=dict)
    filled: dict[str, StepFill] = field(default_factory=dict)

    def __post_init__(self) -> None:
        waiting: dict[str, list[str]] = {}
        for key in sorted(self.stored.steps):
            waiting.setdefault(canonical_text(self.stored.steps[key]["definition"]), []).append(key)
        for key in sorted(self.now.steps):
            left = waiting.get(canonical_text(self.now.steps[key]["definition"]), [])
            now = _definition(self.now, key)
            alike = [one for one in left if same_definition(_definition(self.stored, one), now)]
            if alike:
                self.kept[key] = alike[0]
            if len(alike) > 1:
                left.remove(alike[0])
        self._pair_migrated()
        if self.stored.versions != self.now.versions:
            self._pair_same_texts()

    @cached_property
    def paths(self) -> ProgramPaths:
        """The paths of the program as it is now."""
        return ProgramPaths(self.now)

    @cached_property
    def stored_paths(self) -> ProgramPaths:
        """The paths of the program that has run."""
        return ProgramPaths(self.stored)

    def rebuild_whole_paths(
        self, views: Mapping[str, Any], remade: Iterable[str], search: SearchOf
    ) -> None:
        """Rebuild all steps on a path with one that is rebuilt, or that gives rows to a view of which rows are.

        The state of a step says what it will give out, and not what it has given out. If a step below it were
        computed of what it gives out in a second reading, it would miss rows, or have them twice. So would a view
        that has its rows, if they are computed anew because of another step. Steps that are filled of tables concern no other.

        Args:
            views: The definitions of the views in the state store.
            remade: Those of them that are made anew.
            search: Returns what finds steps to fill, by the steps that read each, and those above each view.
        """
        above_views = {view: self.paths.steps_of(definition) for view, definition in views.items()}
        given = {key for view in remade for key in self.paths.next_steps_of(views[view])}
        given &= {*self.kept}
        new = self.now.steps.keys() - self.kept.keys() - self.unclear.keys()
        finder = search(self._readers(), above_views)
        filled, settled = finder.found(given | new), False
        while not settled:
            why = self._rebuilt_with(
                given - filled.keys(), new - filled.keys(), filled, above_views
            )
            left = finder.found(filled, {*why, *(new | given) - filled.keys()})
            filled, settled = left, left.keys() == filled.keys()
        why |= dict.fromkeys(given & filled.keys(), _GIVES_ROWS)
        self.filled = filled
        self.again = {key: (self.kept.pop(key), text) for key, text in why.items()}

    def _rebuilt_with(
        self,
        given: set[str],
        new: set[str],
        filled: Collection[str],
        above_views: Mapping[str, set[str]],
    ) -> dict[str, str]:
        """Return the kept steps that are rebuilt from the log, as ``given`` and ``new`` ones are; and why."""
        above = {
            key: self.paths.steps_of(step["definition"]) for key, step in self.now.steps.items()
        }
        why = dict.fromkeys(given, _GIVES_ROWS)
        waiting = [*sorted(why), *sorted(new)]
        while waiting:
            rebuilt = waiting.pop()
            name = self.now.steps[rebuilt]["name"]
            for key in sorted(self.kept.keys() - why.keys() - {*filled}):
                if key in above[rebuilt]:
                    why[key] = f"the step {name!r} below it is rebuilt, of what it gives out"
                elif rebuilt in above[key]:
                    why[key] = f"the step {name!r} above it is rebuilt"
                elif shared := [view for view, of in above_views.items() if {key, rebuilt} <= of]:
                    why[key] = (
                        f"the view {shared[0]!r} has rows of it and of {name!r}, which is rebuilt"
                    )
                else:
                    continue
                waiting.append(key)
        return why

    def _readers(self) -> dict[str, set[str]]:
        """Return the steps that take the rows of each step."""
        found: dict[str, set[str]] = {}
        for key, step in self.now.steps.items():
            for above in self.paths.next_steps_of(step["definition"]):
                found.setdefault(above, set()).add(key)
        return found

    def tables_of(self, keys: Iterable[str]) -> tuple[str, ...]:
        """Return the names of the tables of whose state steps are computed, if all of them are; () otherwise."""
        fills = [self.filled.get(key) for key in keys]
        tables = {table for fill in fills if fill is not None for table in fill.tables}
        return () if None in fills else tuple(sorted(self.now.steps[one]["name"] for one in tables))

    def _pair_migrated(self) -> None:
        """Keep the state of process functions that have a way from the version that is stored."""
        taken = {*self.kept.values()}
        left = [key for key in self.stored.steps if key not in taken]
        for key in self.now.steps:
            if key in self.kept:
                continue
            found = [
                old
                for old in left
                if _migrates(_definition(self.stored, old), _definition(self.now, key))
            ]
            if len(found) == 1:
                left.remove(found[0])
                self.kept[key] = found[0]
                was, now = (
                    _definition(program, one)["version"]
                    for program, one in ((self.stored, found[0]), (self.now, key))
                )
                self.migrated[key] = f"its state is migrated from version {was} to {now}"

    def _pair_same_texts(self) -> None:
        """Keep, or find unclear, what reads as before and is described by other versions."""
        taken = {*self.kept.values()}
        for key in self.now.steps:
            if key in self.kept or key not in self.stored.steps or key in taken:
                continue
            if not same_text(_definition(self.stored, key), _definition(self.now, key)):
                continue
            stem = key.partition("#")[0]
            alone = sum(other.partition("#")[0] == stem for other in self.now.steps) == 1
            (self.kept if self.same_expressions and alone else self.unclear)[key] = key

    def changes(self) -> Iterator[PartChange]:
        """Yield what happens to each step of the program, then to those that are no longer there."""
        pairs = dict(self.changed_pairs())
        for key, step in self.now.steps.items():
            name = step["name"]
            if key in self.kept:
                before = self.stored.steps[self.kept[key]]["name"]
                was = None if before == name else before
                migrated = (self.migrated[key],) if key in self.migrated else ()
                yield PartChange("step", name, "keeps", migrated, was=was, key=key)
            elif key in self.again:
                _, reason = self.again[key]
                yield self._rebuilt(key, (reason,))
            elif key in self.unclear:
                yield PartChange("step", name, "refuses", (self._versions(),), key=key)
            elif key in pairs:
                why = _reasons(_definition(self.stored, pairs[key]), _definition(self.now, key))
                yield self._rebuilt(key, why)
            else:
                yield self._rebuilt(
                    key, (_NEW_STEP if key in self.filled else _NOT_FILLED,), is_new=True
                )
        used = {*self._paired.values(), *pairs.values()}
        for key, step in self.stored.steps.items():
            if key not in used:
                yield PartChange("step", step["name"], "drops", ("it is no longer there",))

    def _rebuilt(self, key: str, why: tuple[str, ...], *, is_new: bool = False) -> PartChange:
        """Return the change of a step that is computed anew: of the log, or of the state of tables."""
        step = self.now.steps[key]
        topics = tuple(sorted(self.paths.topics_of(step["definition"])))
        if key in self.filled:
            return PartChange(
                "step",
                step["name"],
                "rebuilds",
                why,
                key=key,
                filled_from_steps=self.tables_of([key]),
                is_addition=is_new,
            )
        return PartChange("step", step["name"], "rebuilds", why, topics=topics, key=key)

    def changed_pairs(self) -> Iterator[tuple[str, str]]:
        """Pair what is left, the new with the old: by key, then by name, then the only two that are left."""
        used = {*self._paired.values()}
        gone = [key for key in self.stored.steps if key not in used]
        new = [key for key in self.now.steps if key not in self._paired]
        for key in [key for key in new if key in gone]:
            gone.remove(key)
            new.remove(key)
            yield key, key
        for key in list(new):
            name = self.now.steps[key]["name"]
            named = [one for one in gone if self.stored.steps[one]["name"] == name]
            if named:
                gone.remove(named[0])
                new.remove(key)
                yield key, named[0]
        if len(gone) == len(new) == 1:
            yield new[0], gone[0]

    @property
    def _paired(self) -> dict[str, str]:
        again = {key: was for key, (was, _) in self.again.items()}
        return {**self.kept, **again, **self.unclear}

    def _versions(self) -> str:
        moved = (
            f"{name} was {self.stored.versions.get(name)} and is {version}"
            for name, version in self.now.versions.items()
            if self.stored.versions.get(name) != version
        )
        return (
            f"it reads as before, and {', '.join(moved)}: no code can be compared across such versions. If "
            "nothing was changed, confirm it by --same-expressions"
        )


SearchOf = Callable[[Mapping[str, Collection[str]], Mapping[str, Collection[str]]], StepFillSearch]
_GIVES_ROWS = "a view is made anew that has its rows"
_NEW_STEP = "it is new"
_NOT_FILLED = (
    "it is new, and is computed from the log: no view holds the event times and the order of rows"
)


def _definition(program: StoredProgram, key: str) -> Any:
    return whole_definition(program.steps[key])


def _migrates(was: Any, now: Any) -> bool:
    """Return whether a process function takes over the state of an older version of itself."""
    if not (
        now.get("migrates") and was.get("class") == now["class"] and was["version"] < now["version"]
    ):
        return False
    same = [{name: one[name] for name in one if name not in _OF_VERSION} for one in (was, now)]
    return same_definition(*same)


_OF_VERSION = frozenset(
    {"function", "states", "outputs", "version", "migrates", "processing_timers"}
)
"""What a newer version of a process function may define differently."""


def _reasons(was: Any, now: Any) -> tuple[str, ...]:
    """Return how definitions differ, without what follows from something else that does."""
    found = list(differences(was, now))
    causes = [one.text for one in found if not one.derived]
    return tuple(dict.fromkeys(causes or [one.text for one in found]))


# ── outputs ─────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class _Outputs:
    """Compares the outputs of two programs."""

    left: ProgramState
    declared: ProgramOutputs
    steps: _Steps
    rebuilt: frozenset[str]
    remade: Mapping[str, tuple[str, ...]]
    fills: Mapping[str, ViewFill | TableFill | str]

    def changes(self) -> Iterator[PartChange]:
        """Yield what happens to each output of the program, then to those that are left out."""
        for output, declared in self.declared.coverage.items():
            yield self._change(output, self.left.outputs.coverage.get(output), declared)
        for (name, label), before in self.left.outputs.coverage.items():
            if (name, label) not in self.declared.coverage and before.spans[-1].until is None:
                why = f"it is left out: its rows stay, and are no longer written from {self._next}"
                yield PartChange(_kind(label), name, "keeps", (why,))

    @property
    def _next(self) -> str:
        return format_boundary(self.left.boundary)

    def _change(
        self, output: OutputSink, before: OutputCoverage | None, declared: OutputCoverage
    ) -> PartChange:
        name, label = output
        kind = _kind(label)
        definition = json.loads(declared.definition)
        below = bool(self.rebuilt & self.steps.paths.steps_of(definition))
        if label == STATE_STORE_VIEW:
            remade = self.remade.get(name, ())
            if below or remade:
                return self._remade(name, remade, definition, below=below)
            since = "it is new" if before is None else "it was left out, and is written again"
            if isinstance(fill := self.fills.get(name), ViewFill):
                return PartChange(kind, name, "keeps", (since,), filled_from=fill.source)
            if isinstance(fill, TableFill):
                return _of_table(name, (since,), fill, is_addition=True)
        elif kind in ("view", "dataset") and before is not None:
            shape = _columns_differ(json.loads(before.definition), definition)
            if shape:
                refused = (*shape, "its rows cannot be replaced: give it another name or place")
                return PartChange(kind, name, "refuses", refused)
        why = self._from_now(before, declared, below=below)
        if label == STATE_STORE_VIEW:
            why = (*why, *self._not_filled(name))
        return PartChange(kind, name, "keeps", why)

    def _remade(
        self, view: str, remade: tuple[str, ...], definition: Any, *, below: bool
    ) -> PartChange:
        """Return what happens to a view that has other rows, or another table."""
        fill = self.fills.get(view)
        if isinstance(fill, ViewFill) and not below:
            return PartChange("view", view, "rebuilds", remade, filled_from=fill.source)
        if isinstance(fill, TableFill) and not below:
            return _of_table(view, remade, fill, is_addition=False)
        above = ["a step above it is rebuilt"] if below else []
        steps = self.rebuilt & self.steps.paths.steps_of(definition)
        if tables := self.steps.tables_of(steps):
            is_new = state_store_output(view) not in self.left.outputs.coverage
            return PartChange(
                "view",
                view,
                "rebuilds",
                ("it is new",) if is_new else (*remade, *above),
                filled_from_steps=tables,
                is_addition=is_new,
            )
        why = (*remade, *self._not_filled(view), *above)
        topics = tuple(sorted(self.steps.paths.topics_of(definition)))
        return PartChange("view", view, "rebuilds", why, topics=topics)

    def _not_filled(self, view: str) -> list[str]:
        """Say why a view that is new, or has another table, is not filled from one that is there."""
        fill = self.fills.get(view)
        return [f"it is not filled from a view, as {fill}"] if isinstance(fill, str) else []

    def _from_now(
        self, before: OutputCoverage | None, declared: OutputCoverage, *, below: bool
    ) -> tuple[str, ...]:
        """Say since when an output is what the program says."""
        if before is None:
            return (f"it is new, and is written from {self._next}",)
        resumed = (
            f"it is written again from {self._next}" if before.spans[-1].until is not None else None
        )
        was, now = json.loads(before.definition), json.loads(declared.definition)
        if self._is_same(was, now):
            return () if resumed is None else (resumed,)
        why = ["a step above it is rebuilt"] if below else [*_reasons(was, now)]
        return (*why, f"takes effect at {self._next}; what was written before stays")

    def _is_same(self, was: Any, now: Any) -> bool:
        upgraded = self.left.program.versions != self.steps.now.versions
        return same_definition(was, now) or (upgraded and same_text(was, now))


def _of_table(view: str, why: tuple[str, ...], fill: TableFill, *, is_addition: bool) -> PartChange:
    table = fill.table.name
    return PartChange(
        "view", view, "rebuilds", why, filled_from_table=table, is_addition=is_addition
    )


_KEPT_HAS_MORE = "it goes on with the rows of the version that is kept, as it lacks some of them"


def _remade(
    view: str, left: ProgramState, declared: ProgramOutputs, steps: _Steps
) -> tuple[str, ...]:
    """Return why a view's table is made anew, whatever becomes of the steps above it; () if it is not."""
    was, now = left.outputs.schemas.get(view), declared.schemas[view]
    before = left.outputs.coverage.get(state_store_output(view))
    if was is None or before is None:
        return ()
    if was != now:
        return (was.difference(now),)
    if steps.stored.versions != steps.now.versions or before.spans[-1].until is not None:
        return ()  # the steps are not called what they were; or the view was left out before, by another program
    stored = steps.stored_paths.next_steps_of(json.loads(before.definition))
    reads = steps.paths.next_steps_of(
        json.loads(declared.coverage[state_store_output(view)].definition)
    )
    kept = {steps.kept[key] for key in reads if key in steps.kept}
    if {*steps.kept} >= reads and kept < stored:
        return ("it has the rows of a step that it no longer reads",)
    return () if kept <= stored else ("it has the rows of another step",)


def _kind(label: str) -> PartKind:
    if label == FUNCTION:
        return "function"
    if label.startswith("topic "):
        return "topic"
    return "dataset" if label.startswith("dataset ") else "view"


def _columns_differ(was: Any, now: Any) -> tuple[str, ...]:
    """Return what differs in the columns and the key of two outputs."""
    shapes = [without_code({name: one[name] for name in ("key", "columns")}) for one in (was, now)]
    return tuple(one.text for one in differences(*shapes))
