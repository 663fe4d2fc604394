"""The version that was switched away from, kept so that going back reads only what came since.

``previous/`` in the app's folder is a state store of the old program as of the switch: its program, the manifests of
all its steps with links to their runs of state, and the rows of the views that the new program has not, or has
otherwise. It is true of the old program for ever, so nothing has to be undone if the switch then fails. It is made under
another name and renamed; the next switch replaces it, and it is dropped when its time has run out
(`views/runs/version_folders.py`).

A deployment of a program whose steps and views are all in it begins there, instead of at the start of the log; a
rollback (`ops/rollback.py`) begins nowhere else.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from millstream.client.open import open_reader
from millstream.client.reader import Reader
from millstream.engine.checkpoint_copy import offset_of_batch
from millstream.engine.stages.journal_files import JOURNAL_FOLDER
from millstream.engine.stages.run_copies import copy_runs
from millstream.engine.stages.run_files import RunFiles
from millstream.kernels.adopted_state import StatePart, combine_state, move_manifests
from millstream.kernels.definition import canonical_text
from millstream.kernels.plan import JobPlan
from millstream.log.files import DISK
from millstream.object_store.folder import FolderStore
from millstream.object_store.place import StatePlace
from millstream.views.commit.committer import DEAD_LETTERS_VIEW, view_schemas
from millstream.views.coverage import (
    STATE_STORE_VIEW,
    CoverageSpan,
    OutputCoverage,
    is_complete,
    partial_note,
    spans_to_json,
)
from millstream.views.position import SOURCE_OFFSET
from millstream.views.runs.version_folders import (
    PREVIOUS_FOLDER,
    PREVIOUS_NEW_FOLDER,
    write_kept_until,
)
from millstream.views.schema import JOB, Fence, ViewChange, ViewSchema
from millstream.views.state_store.definition_comparison import same_definition, whole_definition
from millstream.views.state_store.program import StoredProgram, buckets_of_state
from millstream.views.state_store.program_paths import ProgramPaths
from millstream.views.state_store.program_tables import RunProgram
from millstream.views.state_store.store import StateStore
from millstream.views.store_location import STATE_STORE_FILE, open_state_store

if TYPE_CHECKING:
    from millstream.engine.local_run import LocalRun

BEGUN_FROM = "begun_from"
"""The description of a store that begins with what another version had: a :class:`KeptCoverage`, as JSON."""


@dataclass(frozen=True)
class KeptCoverage:
    """The coverage of the views that a version was kept with, and the position that it had come to."""

    position: Mapping[str, Any]
    spans: Mapping[str, tuple[CoverageSpan, ...]]

    def to_json(self) -> dict[str, Any]:
        """Return plain values, for the description."""
        spans = {view: spans_to_json(spans) for view, spans in self.spans.items()}
        return {"position": self.position, "spans": spans}

    @classmethod
    def from_json(cls, values: Mapping[str, Any] | None) -> KeptCoverage | None:
        """Return the object of what :meth:`to_json` returned; None of none."""
        if values is None:
            return None
        spans = {
            view: tuple(CoverageSpan.from_json(one) for one in spans)
            for view, spans in values["spans"].items()
        }
        return cls(values["position"], spans)


def put_runs(
    source: Path, manifests: Mapping[tuple[int, int], bytes], target: Path | StatePlace, run: int
) -> Callable[[Sequence[Any]], list[Any]]:
    """Put the runs of a folder where those of an app are, durably, under the number of the app's ``run``.

    Return what they are called there: an entry of a manifest for an entry. In a folder they are links.
    """
    if isinstance(target, StatePlace):
        there = RunFiles(target.open("runs"), run)
        moved = copy_runs(manifests.values(), RunFiles(FolderStore(source), run), there)
        there.store.close()
        return moved

    def name(was: str) -> str:  # so that no earlier run removes it
        return f"{run}-{was.partition('-')[2]}"

    link_runs(source, target, name)
    return lambda entry: [name(entry[0]), *entry[1:]]


def link_runs(source: Path, target: Path, name: Callable[[str], str] = str) -> None:
    """Make all runs of state of a folder appear in another one, durably, without copying them.

    The journal beside them is of a batch that is not committed, so it belongs to no version.
    """
    target.mkdir(parents=True, exist_ok=True)
    for path in sorted(source.glob("*")) if source.exists() else ():
        if path.name == JOURNAL_FOLDER:
            continue
        link = target / name(path.name)
        link.unlink(missing_ok=True)
        os.link(path, link)
    DISK.sync_folder(target)


def keep_previous(
    folder: Path,
    live: StateStore,
    app: str,
    views: Sequence[str],
    *,
    place: StatePlace | None,
    run: int,
    at: str,
    until: datetime,
    by_run: bool,
) -> None:
    """Make ``previous.new/`` of what the live program has, as of its last batch, for the ``run`` that switches.

    ``views`` are those whose rows are kept; ``at`` is the time of the run, which fills what is new if it is ``by_run``. ``place`` has the runs of state if the folder
    has not; then they are copied. Nothing is kept where it is not known from where the live program reads on.
    """
    program = live.program(app, JOB)
    offset = _source_offset(folder, live, app)
    if program is None or offset is None:
        return
    made = folder / PREVIOUS_NEW_FOLDER
    shutil.rmtree(made, ignore_errors=True)
    state: Mapping[tuple[int, int], bytes] = live.state_manifests(app, JOB)
    if place is None:
        link_runs(folder / "runs", made / "runs")
    else:
        source, target = (
            RunFiles(place.open("runs"), run),
            RunFiles(FolderStore(made / "runs"), run),
        )
        state = move_manifests(state, copy_runs(state.values(), source, target))
        source.store.close()
    with open_state_store(made / STATE_STORE_FILE) as store:
        for view in views:
            store.declare(live.schema(view))
        own_run, _ = store.begin_run(
            app, JOB, PREVIOUS_FOLDER, RunProgram(program, live.outputs(app, JOB), at)
        )
        store.commit(
            Fence(app, JOB, own_run, 0),
            [ViewChange(view, live.scan(view)) for view in views],
            position=live.position(app),
            status={SOURCE_OFFSET: offset},
            state=state,
        )
    write_kept_until(folder, until, run, filled_at=at if by_run else None)


def _source_offset(folder: Path, live: StateStore, app: str) -> dict[str, Any] | None:
    """Return the source offset after the last batch: in the status, or in the plan of the batch."""
    found: dict[str, Any] | None = live.status(app, JOB).get(SOURCE_OFFSET)
    if found is not None:
        return found
    return offset_of_batch(live, app, folder / "checkpoint", live.last_batch_id(app, JOB) or 0)


def has_read_past(position: Mapping[str, Any], ends: Mapping[str, Sequence[int]]) -> bool:
    """Return whether a position is behind the ``ends`` of a topic, in any partition."""
    return any(
        offset > ends[topic][int(partition)]
        for topic, offsets in position.items()
        if topic in ends
        for partition, offset in offsets.items()
    )


def has_lost_records(log: Reader, offset: Mapping[str, Any], topics: Iterable[str]) -> bool:
    """Return whether the log no longer holds some records behind a source offset, in any of its ``topics``."""
    return any(
        read < start
        for topic in topics
        for (read, *_), (start, _) in zip(
            offset["topics"].get(topic, ()), log.offsets(topic), strict=False
        )
    )


@dataclass(frozen=True)
class PreviousVersion:
    """A version that was kept in an app's ``folder``."""

    app: str
    folder: Path

    def program(self) -> StoredProgram | None:
        """Return the program of this version; None if none is kept."""
        if not self._store.exists():
            return None
        with open_state_store(self._store, readonly=True) as store:
            return store.program(self.app, JOB)

    def coverage(self) -> dict[str, tuple[CoverageSpan, ...]]:
        """Return the coverage of the views of which this version has rows, by name."""
        if not self._store.exists():
            return {}
        with open_state_store(self._store, readonly=True) as store:
            there = {one.name for one in store.views()}
            outputs = store.outputs(self.app, JOB)
        return {
            name: one.spans
            for (name, label), one in outputs.items()
            if label == STATE_STORE_VIEW and name in there
        }

    @property
    def _store(self) -> Path:
        return self.folder / PREVIOUS_FOLDER / STATE_STORE_FILE

    def begin(
        self,
        run: LocalRun,
        part: JobPlan,
        ends: Mapping[str, Sequence[int]],
        *,
        partial_ok: bool,
    ) -> str | None:
        """Let a run of a part of a program begin where this version ended, if it has all of the part.

        Otherwise nothing happens, and the reason is returned, as a text.

        Args:
            ends: Where the app has read up to.
            partial_ok: Begin also with views that the version had in part; they keep their coverage.
        """
        if not self._store.exists():
            return "none is kept"
        with open_state_store(self._store, readonly=True) as store:
            kept = _KeptPart(store, self.app, part, ends)
            reason = next(kept.refusals(open_reader(run.log), partial_ok=partial_ok), None)
            if reason is None:
                self._begin(run, kept)
        return reason

    def _begin(self, run: LocalRun, kept: _KeptPart) -> None:
        """Begin with what is kept. Rows are never there without their coverage.

        ===================================  ===============================================================
        a crash after                        leaves
        ===================================  ===============================================================
        1. the coverage is described         a store without a batch, which the next deployment removes
        2. the runs of state are linked      the same
        3. state and rows are committed      the part, as the version had it
        ===================================  ===============================================================
        """
        with open_state_store(run.store) as begun:
            begun.put_description(self.app, BEGUN_FROM, kept.coverage.to_json())
        link_runs(self.folder / PREVIOUS_FOLDER / "runs", run.folder / "runs")
        state = StatePart(kept.store.state_manifests(self.app, JOB), kept.keys)
        run.begin_from(
            kept.offset,
            kept.position,
            [ViewChange(one.name, kept.store.scan(one.name)) for one in kept.schemas],
            combine_state(kept.part, state, StatePart({}, {})),
            partitioning=kept.program.partitioning,
        )


@dataclass(frozen=True)
class _KeptPart:
    """What the store of a kept version has of a part of a program, for an app that has read up to ``ends``."""

    store: StateStore
    app: str
    part: JobPlan
    ends: Mapping[str, Sequence[int]]

    @cached_property
    def program(self) -> StoredProgram:
        program = self.store.program(self.app, JOB)
        assert program is not None, "it was kept with its program"
        return program

    @cached_property
    def _now(self) -> StoredProgram:
        return StoredProgram.of(self.part, self.program.partitioning)

    @cached_property
    def schemas(self) -> list[ViewSchema]:
        return [one for one in view_schemas(self.part) if one.name != DEAD_LETTERS_VIEW]

    @cached_property
    def offset(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.store.status(self.app, JOB)[SOURCE_OFFSET]
        return found

    @cached_property
    def position(self) -> dict[str, Any]:
        read = self.store.position(self.app)
        return {topic: offsets for topic, offsets in read.items() if topic in self.ends}

    @cached_property
    def coverage(self) -> KeptCoverage:
        spans = {one.name: self._outputs[one.name].spans for one in self.schemas}
        return KeptCoverage(self.position, spans)

    @cached_property
    def keys(self) -> dict[str, str]:
        """Under which key the version has each step of the part."""
        found = {}
        for key, step in self._now.steps.items():
            alike = self._keys_by_definition.get(canonical_text(step["definition"]), ())
            same = [one for one in alike if self._is_same(one, step)]
            if same:
                found[key] = same[-1]
        return found

    def _is_same(self, kept: str, step: Mapping[str, Any]) -> bool:
        return same_definition(whole_definition(self.program.steps[kept]), whole_definition(step))

    def refusals(self, log: Reader, *, partial_ok: bool) -> Iterator[str]:
        """Yield why the part cannot begin with what is kept, as texts that go on from "the version"."""
        divided = buckets_of_state(self.program)
        if self.program.format != self._now.format:
            yield "its state has the format of another version of Millstream"
            return
        if divided != self.part.buckets:
            yield f"the app was rescaled since, from {divided.count} buckets to {self.part.buckets.count}"
        if len(self.keys) < len(self._now.steps):
            yield "it has other steps"
        yield from self._lacking_views(partial_ok=partial_ok)
        if not partial_ok:
            yield from self._steps_perhaps_partial()
        if has_read_past(self.position, self.ends):
            yield "the app was restored to a time before it was left, and has not read all that it had read"
        if has_lost_records(log, self.offset, self.ends):
            yield "the log no longer holds all records that were read since"

    def _lacking_views(self, *, partial_ok: bool) -> Iterator[str]:
        there = {one.name: one for one in self.store.views()}
        for schema in self.schemas:
            known = self._outputs.get(schema.name)
            definition = self.part.program.outputs[schema.name]
            is_same = known is not None and same_definition(
                json.loads(known.definition), definition
            )
            if known is None or not is_same or there.get(schema.name) != schema:
                yield f"it has not the rows of the view {schema.name!r}"
            elif not partial_ok and not is_complete(known.spans):
                yield f"its view {schema.name!r} {partial_note(known.spans)}"

    def _steps_perhaps_partial(self) -> Iterator[str]:
        """Yield the steps of which no view says that they are of all records: the coverage of topics does not."""
        paths, whole = ProgramPaths(self.program), set[str]()
        for one in self._outputs.values():
            if is_complete(one.spans):
                whole |= paths.steps_of(json.loads(one.definition))
        for key in sorted({*self.keys.values()} - whole):
            name = self.program.steps[key]["name"]
            yield f"no view says whether its step {name!r} was computed of all records"

    @cached_property
    def _outputs(self) -> dict[str, OutputCoverage]:
        outputs = self.store.outputs(self.app, JOB)
        return {name: one for (name, label), one in outputs.items() if label == STATE_STORE_VIEW}

    @cached_property
    def _keys_by_definition(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for key, step in self.program.steps.items():
            found.setdefault(canonical_text(step["definition"]), []).append(key)
        return found
