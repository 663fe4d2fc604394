"""What every target of a batch must do, and what a crash between two of them leaves.

A batch may go to several targets: the app's state store, other view stores, the
topics of a log, datasets, functions of the user's. No transaction spans them. Instead each target
commits its part in a transaction of its own, with the fence ``(app, job, run, batch_id)`` in it,
and the state store commits last, with position and ledger. The state store's fence is therefore the last word on
whether a batch is done; a batch that is not is run again, the same, and every target that has its
part already finds its own fence and does nothing.

A run begins in these steps, and a batch is committed in those after them:

=====================================  ==========================================================
a crash, or a failure, after           leaves
=====================================  ==========================================================
1. the targets are opened              nothing; only now may a run number be taken, so that a run
                                       that cannot write to a target fences off no other
2. the state store gave the run its number    the older run is refused by the state store, and may still commit
                                       a batch to other targets; the batch is in Spark's offset
                                       log by then, so whoever runs it next runs the same
3. some targets know the run           the same, of those that do not
4. all targets know the run            no older run can commit anywhere
5. the state store has the run's program      the same; Spark starts after this
6. some targets committed the batch    these are ahead of the state store by one batch; the next run
                                       repeats it, they return False, the others commit
7. all targets but the state store did        the same
8. the state store committed                  the batch is done; a repetition is answered by the state store
=====================================  ==========================================================

The state store notes with each batch which targets had a part in it. When a run begins, each target must
hold what the state store has noted, or the one batch more of row 6. Anything else (a target deleted,
or restored from another time than the state store) is refused before a row is written; so is a program that
would make something else of that batch (`views/state_store/program_tables.py`).

A function of the user's has no transaction: row 6 repeats its call, under the same key.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import polars as pl

from millstream.errors import CorruptionError
from millstream.views.coverage import CoverageSpan, OutputSink
from millstream.views.schema import Fence


@dataclass(frozen=True)
class SinkBatch:
    """What a batch gives to its targets: rows by output, and what of the log they reflect.

    ``rows`` have the output's columns and ours, whose names begin with ``__``. An output without
    rows is not in it. A mapping in ``position`` is laid over that of the batches before.
    """

    rows: Mapping[str, pl.DataFrame] = field(default_factory=dict)
    position: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RunStart:
    """A run that begins: what it takes over, and with which checkpoint it works.

    ``coverage`` says of every output that the app has had since when it is fed, for targets to keep.
    """

    app: str
    job: str
    run: int
    checkpoint_id: str
    coverage: Mapping[OutputSink, Sequence[CoverageSpan]] = field(default_factory=dict)

    @property
    def job_label(self) -> str:
        """Name the job in errors."""
        return f"the job {self.job!r} of the app {self.app!r}"

    @property
    def reset_advice(self) -> str:
        """Say what to do where the app is to begin anew, here and everywhere."""
        return f"Begin anew with the app and all that it writes: `millstream reset {self.app}`"


def check_written(where: str, given: int, written: int) -> None:
    """Make sure that a target wrote the rows that it was given.

    Raises:
        CorruptionError: it did not; what it wrote must not be committed.
    """
    if given != written:
        raise CorruptionError(
            f"The ledger does not balance: {where} was given {given} rows and wrote {written}. "
            "Nothing of this batch was committed there. Please report this; the log still holds "
            "every event."
        )


class Sink(Protocol):
    """Something that takes part of each batch, beside the state store.

    Called from one thread. After an error the target is closed, and another run opens it anew.
    """

    @property
    def name(self) -> str:
        """What the target is called in errors: an address without credentials, a folder, a step."""

    @property
    def identity(self) -> str:
        """What tells this target from one that was put in its place; kept by the state store."""

    @property
    def has_fence(self) -> bool:
        """Whether the target keeps a fence of its own; False for a function of the user's."""

    def begin_run(self, start: RunStart) -> int | None:
        """Refuse all older runs from now on; return the last batch held, None if there is none.

        Called once, before the first batch, after every crash. Must be durable on return.

        Raises:
            FencedError: a newer run has begun.
            ConfigError: the batches held were made with another checkpoint, or what is there does
                not fit what was declared.
        """

    def participates(self, part: SinkBatch) -> bool:
        """Say whether this batch has a part for the target. Depends on nothing but the batch."""

    def commit(self, fence: Fence, part: SinkBatch) -> bool:
        """Commit the target's part with its fence, all or nothing; durable on return.

        Called with rising batch ids; after a crash again with the last one, and the same part.

        Returns:
            True when committed now, False when this batch was committed before (nothing is done).

        Raises:
            FencedError: a newer run has begun; nothing was committed.
            ConfigError: rows do not fit the target.
            UserCodeError: a function of the user's failed.
        """

    def close(self) -> None:
        """Give back what was opened. Closing twice is allowed."""
