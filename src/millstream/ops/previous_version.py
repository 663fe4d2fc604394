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

import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from millstream.client.open import open_reader
from millstream.client.reader import Reader
from millstream.kernels.adopted_state import StatePart, combine_state
from millstream.kernels.definition import canonical_text
from millstream.kernels.plan import JobPlan
from millstream.log.files import DISK
from millstream.spark.source.offsets import planned_offset
from millstream.views.commit.committer import DEAD_LETTERS_VIEW, view_schemas
from millstream.views.coverage import STATE_STORE_VIEW, is_complete
from millstream.views.position import SOURCE_OFFSET
from millstream.views.runs.version_folders import (
    PREVIOUS_FOLDER,
    PREVIOUS_NEW_FOLDER,
    write_kept_until,
)
from millstream.views.schema import JOB, Fence, ViewChange, ViewSchema
from millstream.views.state_store.program import StoredProgram
from millstream.views.state_store.program_tables import RunProgram
from millstream.views.state_store.store import StateStore
from millstream.views.store_location import STATE_STORE_FILE, open_state_store

if TYPE_CHECKING:
    from millstream.spark.local_run import LocalRun

BEGUN_FROM = "begun_from"
"""The description of a store that was begun with what another version had, instead of at the start of the log."""


def link_runs(source: Path, target: Path, name: Callable[[str], str] = str) -> None:
    """Make all runs of state of a folder appear in another one, durably, without copying them."""
    target.mkdir(parents=True, exist_ok=True)
    for path in sorted(source.glob("*")) if source.exists() else ():
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
    run: int,
    at: str,
    until: datetime,
) -> None:
    """Make ``previous.new/`` of what the live program has, as of its last batch, for the ``run`` that switches.

    ``views`` are those whose rows are kept; ``at`` is the time of the run. Nothing is kept where it is not known from
    where the live program reads on.
    """
    program = live.program(app, JOB)
    offset = _source_offset(folder, live, app)
    if program is None or offset is None:
        return
    made = folder / PREVIOUS_NEW_FOLDER
    shutil.rmtree(made, ignore_errors=True)
    link_runs(folder / "runs", made / "runs")
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
            state=live.state_manifests(app, JOB),
        )
    write_kept_until(folder, until, run)


def _source_offset(folder: Path, live: StateStore, app: str) -> dict[str, Any] | None:
    """Return the source offset after the last batch: in the status, or in Spark's offset log."""
    found: dict[str, Any] | None = live.status(app, JOB).get(SOURCE_OFFSET)
    if found is not None:
        return found
    return planned_offset(folder / "checkpoint", live.last_batch_id(app, JOB) or 0)


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

    @property
    def _store(self) -> Path:
        return self.folder / PREVIOUS_FOLDER / STATE_STORE_FILE

    def begin(self, run: LocalRun, part: JobPlan, ends: Mapping[str, Sequence[int]]) -> bool:
        """Let a run of a part of a program begin where this version ended, if it has all of the part.

        Nothing happens, and False is returned, if it has not, or has read more than ``ends``, or the log has lost
        records since.
        """
        if not self._store.exists():
            return False
        with open_state_store(self._store, readonly=True) as store:
            program = store.program(self.app, JOB)
            schemas = [one for one in view_schemas(part) if one.name != DEAD_LETTERS_VIEW]
            keys = None if program is None else _keys(program, part)
            if program is None or keys is None or not self._has_views(store, part, schemas):
                return False
            position = {
                topic: offsets
                for topic, offsets in store.position(self.app).items()
                if topic in ends
            }
            if has_read_past(position, ends):
                return False
            offset = store.status(self.app, JOB)[SOURCE_OFFSET]
            if has_lost_records(open_reader(run.log), offset, ends):
                return False
            link_runs(self.folder / PREVIOUS_FOLDER / "runs", run.folder / "runs")
            kept = StatePart(store.state_manifests(self.app, JOB), keys)
            run.begin_from(
                offset,
                position,
                [ViewChange(schema.name, store.scan(schema.name)) for schema in schemas],
                combine_state(part, kept, StatePart({}, {})),
                partitioning=program.partitioning,
            )
        # A crash before this leaves rows that have all, and are later said to lack what the log has lost.
        with open_state_store(run.store) as begun:
            begun.put_description(self.app, BEGUN_FROM, PREVIOUS_FOLDER)
        return True

    def _has_views(self, store: StateStore, part: JobPlan, schemas: Sequence[ViewSchema]) -> bool:
        """Return whether the version has all rows of some views."""
        outputs, there = store.outputs(self.app, JOB), {one.name: one for one in store.views()}
        for schema in schemas:
            known = outputs.get((schema.name, STATE_STORE_VIEW))
            definition = canonical_text(part.program.outputs[schema.name])
            if known is None or known.definition != definition or not is_complete(known.spans):
                return False
            if there.get(schema.name) != schema:
                return False
        return True


def _keys(program: StoredProgram, part: JobPlan) -> dict[str, str] | None:
    """Return under which key the version has each step of a plan; None if it has not all, or divides keys otherwise."""
    now = StoredProgram.of(part, program.partitioning)
    division = program.partitioning
    divided = division.get("bucket_count", program.buckets), division.get("hash_seed", 0)
    if divided != (part.buckets.count, part.buckets.seed) or program.format != now.format:
        return None
    known = {canonical_text(step["definition"]): key for key, step in program.steps.items()}
    texts = {key: canonical_text(step["definition"]) for key, step in now.steps.items()}
    if not all(text in known for text in texts.values()):
        return None
    return {key: known[text] for key, text in texts.items()}
