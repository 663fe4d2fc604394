"""The contract of a sink, and what a crash between the commits of two sinks leaves.

A batch may go to several sinks: the app's state store, other view stores, the topics of a log, datasets,
functions of the user's. No transaction spans them. Instead, each sink commits its part in a transaction
of its own, with the fence ``(app, job, run, batch_id)`` in it, and the state store commits last, with
position and ledger. So the state store's fence decides whether a batch is done. A batch that is not done
is run again with the same rows, and a sink that has its part already finds its fence and does nothing.

A run begins with steps 1 to 5; each batch is committed with steps 6 to 8:

========================================  ============================================================
a crash, or a failure, after              leaves
========================================  ============================================================
1. the sinks are opened                   nothing; a run number is taken only now, so that a run that
                                          cannot write to a sink fences no other run
2. the state store assigned a run number  the state store refuses the older run, which may still commit
                                          a batch to other sinks; that batch is in Spark's offset log,
                                          so the next run runs it again with the same rows
3. some sinks have begun the run          the same, for the other sinks
4. all sinks have begun the run           no older run can commit anywhere
5. the state store has the run's program  the same; Spark starts after this
6. some sinks committed the batch         these are ahead of the state store by one batch; the next run
                                          repeats it, they return False, the others commit
7. all sinks but the state store did      the same
8. the state store committed              the batch is done; it refuses a repetition
========================================  ============================================================

The state store records with each batch which sinks had a part in it. When a run begins, each sink must
hold the recorded batches, or the one more of row 6. Anything else (a sink was deleted, or restored from
another time than the state store) is refused before a row is written. So is a program that would produce
other rows for that batch (`views/state_store/program_tables.py`).

A function of the user's has no transaction: row 6 repeats its call, under the same key.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import polars as pl

from millstream.errors import CorruptionError
from millstream.views.coverage import CoverageSpan, OutputSink
from millstream.views.schema import Fence
from millstream.views.staging import PartitionStager, StagedRows, Stager


@dataclass(frozen=True)
class SinkBatch:
    """The part of a batch that goes to its sinks: rows by output, and what of the log they reflect.

    ``rows`` have the output's columns and ours, whose names begin with ``__``. An output is in ``staged`` instead
    if tasks have written its rows, and in neither if it has none. ``position`` is merged into that of the
    batches before.
    """

    rows: Mapping[str, pl.DataFrame] = field(default_factory=dict)
    position: Mapping[str, Any] = field(default_factory=dict)
    staged: Mapping[str, StagedRows] = field(default_factory=dict)

    def has(self, output: str) -> bool:
        """Return whether there are rows of an output."""
        return output in self.rows or output in self.staged


@dataclass(frozen=True)
class RunStart:
    """A run that begins, and its checkpoint.

    ``coverage`` has the spans of every output that the app has had, for sinks to store.
    """

    app: str
    job: str
    run: int
    checkpoint_id: str
    coverage: Mapping[OutputSink, Sequence[CoverageSpan]] = field(default_factory=dict)

    @property
    def job_label(self) -> str:
        """The name of the job in errors."""
        return f"the job {self.job!r} of the app {self.app!r}"

    @property
    def reset_advice(self) -> str:
        """A sentence that says how to start the app over, here and in all other sinks."""
        return f"To start the app over with all that it writes: `millstream reset {self.app}`"


def check_written(where: str, given: int, written: int) -> None:
    """Make sure that a sink wrote the rows that it was given.

    Raises:
        CorruptionError: it did not; its transaction must not be committed.
    """
    if given != written:
        raise CorruptionError(
            f"The ledger does not balance: {where} was given {given} rows and wrote {written}. "
            "Nothing of this batch was committed there. Please report this; the log still holds "
            "every event."
        )


@runtime_checkable
class SizedRecordSink(Protocol):
    """A sink whose records have a largest size."""

    def record_bytes_max(self, output: str) -> int | None:
        """Return how many bytes key and value of an output's record may have in all; None: it is not this sink's."""


class Sink(Protocol):
    """Writes a part of each batch, beside the state store.

    Called from one thread. After an error the sink is closed, and another run opens it again.
    """

    @property
    def name(self) -> str:
        """The name of the sink in errors: an address without credentials, a folder, a step."""

    @property
    def identity(self) -> str:
        """Tells this sink from another one under the same name; the state store records it."""

    @property
    def has_fence(self) -> bool:
        """Whether the sink keeps a fence of its own; False for a function of the user's."""

    def begin_run(self, start: RunStart) -> int | None:
        """Refuse all older runs from now on; return the last committed batch, None if there is none.

        Called once, before the first batch, after every crash. Must be durable on return.

        Raises:
            FencedError: a newer run has begun.
            ConfigError: the batches held were made with another checkpoint, or what is there does
                not fit what was declared.
        """

    def end_offsets(self) -> Mapping[OutputSink, Sequence[int]]:
        """Return where the next records of each output come, by partition, of sinks that give records offsets.

        Called when a run has begun, so that no other one writes any more; {} of other sinks.
        """

    def participates(self, part: SinkBatch) -> bool:
        """Return whether this batch has a part for the sink. Depends on nothing but the batch."""

    def stager(self, fence: Fence, output: str) -> Stager | PartitionStager | None:
        """Return what stages rows of one of the sink's outputs in a batch that is about to be committed.

        None if the output is not this sink's, or the driver has to give it its rows.
        """

    def commit(self, fence: Fence, part: SinkBatch) -> bool:
        """Commit the sink's part with its fence, all or nothing; durable on return.

        Called with rising batch ids; after a crash again with the last one, and the same part.

        Returns:
            True when committed now, False when this batch was committed before (nothing is done).

        Raises:
            FencedError: a newer run has begun; nothing was committed.
            ConfigError: rows do not fit the sink.
            UserCodeError: a function of the user's failed.
        """

    def close(self) -> None:
        """Release what was opened. Closing twice is allowed."""
