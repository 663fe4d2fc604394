"""The tables of a job's program and of the coverage of its outputs.

One transaction updates both, once a run has begun in all sinks. The functions take its connection.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial

from millstream.errors import ConfigError, ConflictError
from millstream.views.coverage import (
    FUNCTION,
    STATE_STORE_VIEW,
    BatchBoundary,
    CoverageSpan,
    OutputCoverage,
    OutputSink,
    next_coverage,
)
from millstream.views.runs.control_files import reset_command
from millstream.views.sink import RunStart
from millstream.views.state_store.database import Database, StoreName
from millstream.views.state_store.definition_comparison import same_definition, same_text
from millstream.views.state_store.program import StoredProgram, check_same_program

_DIVIDING = ("hash_seed", "bucket_count", "state_buckets")  # what says which bucket has a key


@dataclass(frozen=True)
class RunProgram:
    """A run that is to begin: its program and outputs, and when (RFC 3339).

    ``same_expressions``: see :func:`millstream.views.state_store.program.check_same_program`. ``end_offsets`` are
    where the next records of outputs come that are topics, once the run has begun there.
    """

    program: StoredProgram
    outputs: Mapping[OutputSink, OutputCoverage]
    at: str
    same_expressions: bool = False
    end_offsets: Mapping[OutputSink, Sequence[int]] = field(default_factory=dict)


def stored_program(db: Database, app: str, job: str) -> StoredProgram | None:
    """Return the program that created a job's state; None before its first run."""
    row = db.execute(
        "SELECT program FROM _programs WHERE app = ? AND job = ?", (app, job)
    ).fetchone()
    return None if row is None else StoredProgram.from_json(row[0])


def stored_outputs(db: Database, app: str, job: str) -> dict[OutputSink, OutputCoverage]:
    """Return the coverage of all outputs that a job has had."""
    rows = db.execute(
        "SELECT name, sink, value FROM _outputs WHERE app = ? AND job = ? ORDER BY name, sink",
        (app, job),
    )
    return {(name, sink): OutputCoverage.from_json(json.loads(value)) for name, sink, value in rows}


def stored_coverage(db: Database, app: str | None, view: str) -> tuple[CoverageSpan, ...]:
    """Return the spans that a view covers; () of a view that is no output, such as ``dead_letters``."""
    row = db.execute(
        "SELECT value FROM _outputs WHERE name = ? AND sink = ? AND app = coalesce(?, app)",
        (view, STATE_STORE_VIEW, app),
    ).fetchone()
    return () if row is None else OutputCoverage.from_json(json.loads(row[0])).spans


def check_program(
    db: Database, app: str, job: str, beginning: RunProgram, store: StoreName
) -> None:
    """Make sure that a program fits the stored state. Every program does before the first batch.

    Raises:
        ConfigError: it does not, or the store does not know the program that created the state.
    """
    next_batch_id = next_boundary(db, app, job, beginning.at).batch_id
    if next_batch_id == 0:
        return
    stored = stored_program(db, app, job)
    if stored is None:
        raise ConfigError(
            f"{store.shown} holds batches up to {next_batch_id - 1} of the job {job!r} of the app {app!r}, and does "
            "not say by what program they were made. Restore it, or start over from the log: "
            f"{reset_command(store.place)}."
        )
    check_same_program(
        stored, beginning.program, store.place, same_expressions=beginning.same_expressions
    )
    was, now = stored.partitioning, beginning.program.partitioning
    if any(was[name] != now[name] for name in _DIVIDING if name in was and name in now):
        raise ConfigError(
            f"The state of the app {app!r} in {store.shown} was created or divided by another process since this run "
            "began, and the keys are in other buckets. Run the app again."
        )


def register_program(
    db: Database,
    app: str,
    job: str,
    beginning: RunProgram,
    store: StoreName,
    *,
    filled: Mapping[OutputSink, OutputCoverage] | None = None,
) -> None:
    """Store the program of a run that begins, and the coverage of its outputs; of some, what they are ``filled`` with.

    Raises:
        ConfigError: the program does not fit the stored state.
    """
    check_program(db, app, job, beginning, store)
    put_program(db, app, job, beginning, filled or {})


def put_program(
    db: Database,
    app: str,
    job: str,
    beginning: RunProgram,
    rebuilt: Mapping[OutputSink, OutputCoverage],
) -> None:
    """Store a program that fits the state, or whose state is stored in the same transaction.

    ``rebuilt`` is the coverage of outputs whose rows are another's from here on.
    """
    now = next_boundary(db, app, job, beginning.at)
    stored = stored_program(db, app, job) if now.batch_id else None
    program = beginning.program
    if stored is not None and stored.partitioning:
        program = replace(program, partitioning=stored.partitioning)
    db.execute(
        "INSERT INTO _programs VALUES (?, ?, ?) ON CONFLICT (app, job) DO UPDATE SET program = excluded.program",
        (app, job, program.to_json()),
    )
    outputs = {**next_outputs(db, app, job, beginning), **rebuilt}
    db.execute("DELETE FROM _outputs WHERE app = ? AND job = ?", (app, job))
    db.executemany(
        "INSERT INTO _outputs VALUES (?, ?, ?, ?, ?)",
        [
            (app, job, *output, json.dumps(asdict(one), ensure_ascii=False))
            for output, one in outputs.items()
        ],
    )


def put_state(db: Database, app: str, job: str, manifests: Mapping[tuple[int, int], bytes]) -> None:
    """Replace all manifests of a job."""
    db.execute("DELETE FROM _state WHERE app = ? AND job = ?", (app, job))
    db.executemany(
        "INSERT INTO _state VALUES (?, ?, ?, ?, ?)",
        [(app, job, stage, bucket, one) for (stage, bucket), one in manifests.items()],
    )


def next_outputs(
    db: Database, app: str, job: str, beginning: RunProgram
) -> dict[OutputSink, OutputCoverage]:
    """Return the coverage of all outputs of a job as of a run that is to begin."""
    same = partial(_same_definition, same_expressions=beginning.same_expressions)
    now = next_boundary(db, app, job, beginning.at)
    after = next_coverage(stored_outputs(db, app, job), beginning.outputs, now, same)
    for output, offsets in beginning.end_offsets.items():
        after[output] = after[output].begun_at(now, offsets)
    return after


def check_interrupted_batch(
    db: Database, start: RunStart, beginning: RunProgram, ahead: str
) -> None:
    """Make sure that a program produces the same rows for a batch that another program began.

    The sink ``ahead`` has committed the batch and the state store has not: it is run again, for the state
    store and for the sinks that lack it. Views of the state store, and functions, may differ.

    Raises:
        ConfigError: it would produce other rows, so that one batch would have rows of two programs.
    """
    app, job = start.app, start.job
    batch_id = next_boundary(db, app, job, beginning.at).batch_id
    stored = stored_program(db, app, job)
    was, now = _fenced_outputs(stored_outputs(db, app, job)), _fenced_outputs(beginning.outputs)
    same = partial(_same_definition, same_expressions=beginning.same_expressions)
    differing = [
        name
        for name, sink in sorted(was.keys() | now.keys())
        if (name, sink) not in was
        or (name, sink) not in now
        or not same(was[name, sink], now[name, sink])
    ]
    if stored is not None:
        # A rescale since then has stored the number that is wanted, which is that of the program.
        buckets = stored.partitioning.get("state_buckets") or stored.buckets
        was_divided = buckets, stored.partitioning.get("hash_seed")
        program = beginning.program
        if was_divided != (program.buckets, program.partitioning.get("hash_seed")):
            command = f"millstream rescale {app} --buckets {buckets}"
            hint = f" (first of all: {command})" if buckets != program.buckets else ""
            differing.append(f"how keys are divided: it was begun with {buckets} buckets{hint}")
    if stored is not None and stored.given:  # a table that was added is in the definitions
        differing += _other_rows(stored.given, beginning.program.given)
    if differing:
        raise ConfigError(
            f"{ahead} holds batch {batch_id} of {start.job_label}, which was interrupted before the app's own "
            f"views had it, and the program was changed since then ({', '.join(differing)}): the batch would "
            "have rows of two programs. Run the program once as it was, and then change it. "
            f"{start.reset_advice}."
        )


def _other_rows(was: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Name the static tables whose rows are others: they are in no definition."""
    others = (name for name in sorted(was.keys() | now.keys()) if was.get(name) != now.get(name))
    return [f"the rows of {name!r}" for name in others]


def _fenced_outputs(outputs: Mapping[OutputSink, OutputCoverage]) -> dict[OutputSink, str]:
    """Return the definitions of the outputs that are written to a sink with a fence of its own."""
    return {
        output: one.definition
        for output, one in outputs.items()
        if output[1] not in (STATE_STORE_VIEW, FUNCTION) and one.spans[-1].until is None
    }


def next_boundary(db: Database, app: str, job: str, at: str) -> BatchBoundary:
    """Return the boundary before the batch that is committed next."""
    row = db.execute(
        "SELECT batch_id, position FROM _fences WHERE app = ? AND job = ?", (app, job)
    ).fetchone()
    last, position = row or (None, None)
    return BatchBoundary(0 if last is None else last + 1, json.loads(position or "{}"), at)


def _same_definition(was: str, now: str, *, same_expressions: bool) -> bool:
    if was == now:
        return True
    same = same_text if same_expressions else same_definition
    return same(json.loads(was), json.loads(now))


def update_partitioning(
    db: Database,
    app: str,
    job: str,
    partitioning: Mapping[str, int],
    store: StoreName,
    *,
    was: Mapping[str, int],
) -> None:
    """Store how a job's work is divided from now on, if it still is as it ``was`` when the caller read it.

    Raises:
        ConfigError: there is no such job.
        ConflictError: it is divided in another way.
    """
    stored = stored_program(db, app, job)
    if stored is None:
        raise ConfigError(
            f"{store.shown} knows no job {job!r} of an app {app!r}. Run the app first."
        )
    # What an earlier version stored lacks numbers that were added since, which are 0.
    if any(stored.partitioning.get(name, 0) != number for name, number in was.items()):
        raise ConflictError(
            f"Another process has changed how the state of the app {app!r} in {store.shown} is divided, since this one "
            "read it. Nothing was changed. Do it again."
        )
    text = replace(stored, partitioning=dict(partitioning)).to_json()
    db.execute("UPDATE _programs SET program = ? WHERE app = ? AND job = ?", (text, app, job))
