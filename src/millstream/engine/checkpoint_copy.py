"""A copy of Spark's checkpoint in the state store, so that a run may begin on a machine that has none.

Of a job without state of Spark's own, the checkpoint says one thing: which records each batch reads. A batch
that was begun may have been told to some sinks, or have written journals, so it has to be repeated as it was
planned, wherever the next run is.

1. Spark writes the plan of batch N to its checkpoint, on the driver's disk, and calls the sink.
2. The plans of N and of the batch before it go to the state store, if no newer run has begun. A crash before
   leaves a plan that nobody has acted on: the next run may plan another one.
3. The batch is run, and committed by the state store. A crash before leaves a plan that the next run acts on,
   here or elsewhere.

A run that begins has taken its number before it reads the copy, so the copy does not change any more. Where the
checkpoint of its folder does not agree with it (there is none, or the app has run elsewhere since), a new one
is made of it, whole before it has its name.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from millstream.engine.job_metadata import CHECKPOINT_ID_FILE, load_or_create_checkpoint_id
from millstream.engine.source.offsets import offset_in_plan, planned_offset
from millstream.kernels.plan import JobPlan
from millstream.log.files import DISK, replace_file
from millstream.object_store.place import StatePlace
from millstream.views.commit.committer import BatchCommitter
from millstream.views.schema import JOB
from millstream.views.sink import RunStart
from millstream.views.state_store.store import StateStore
from millstream.views.store_location import StoreLocation

DESCRIPTION = "checkpoint"  # in the state store
COMMITTED = 'v1\n{"nextBatchWatermarkMs":0}'  # Spark's own watermarks are not used


def may_be_elsewhere(plan: JobPlan, place: StatePlace | None, store: StoreLocation) -> bool:
    """Return whether a run may begin in another folder: whether all that it needs is elsewhere.

    Native steps and DataFrames of the user's keep things of their own in the checkpoint.
    """
    if isinstance(store, Path) or plan.natives or plan.frames:
        return False
    return place is not None or not plan.stages


@dataclass(frozen=True)
class CheckpointCopy:
    """What a checkpoint holds: Spark's name of the query, and the plans of the last two batches."""

    checkpoint_id: str
    metadata: str
    offsets: Mapping[int, str] = field(repr=False)

    @classmethod
    def read(cls, checkpoint: Path, last: int) -> CheckpointCopy:
        """Read the plans up to batch ``last``, which has just been planned."""
        return cls(
            (checkpoint / CHECKPOINT_ID_FILE).read_text().strip(),
            (checkpoint / "metadata").read_text(),
            {
                number: (checkpoint / "offsets" / str(number)).read_text()
                for number in range(max(0, last - 1), last + 1)
            },
        )

    def to_message(self) -> dict[str, Any]:
        """Return what the state store keeps of it."""
        return {
            **asdict(self),
            "offsets": {str(number): plan for number, plan in self.offsets.items()},
        }

    @classmethod
    def from_message(cls, message: Any) -> CheckpointCopy | None:
        """Return the copy that a state store keeps; None if it has none."""
        if not message:
            return None
        offsets = {int(number): plan for number, plan in message["offsets"].items()}
        return cls(message["checkpoint_id"], message["metadata"], offsets)

    def restore(self, checkpoint: Path, next_batch_id: int) -> bool:
        """Make the checkpoint of this copy, unless it is there; return whether it was made."""
        if self._is_at(checkpoint):
            return False
        new = checkpoint.with_name(f"{checkpoint.name}.new")
        shutil.rmtree(new, ignore_errors=True)  # step 1; what a crash leaves is removed here
        files = {CHECKPOINT_ID_FILE: self.checkpoint_id, "metadata": self.metadata}
        for number, plan in self.offsets.items():
            files[f"offsets/{number}"] = plan
            if number < next_batch_id:
                files[f"commits/{number}"] = COMMITTED
        for name, text in files.items():  # step 2
            (new / name).parent.mkdir(parents=True, exist_ok=True)
            replace_file(DISK, new / name, text.encode())
        shutil.rmtree(checkpoint, ignore_errors=True)  # step 3; after it the copy counts
        new.rename(checkpoint)  # step 4
        DISK.sync_folder(checkpoint.parent)
        return True

    def _is_at(self, checkpoint: Path) -> bool:
        """Return whether a checkpoint agrees with this copy; it may have one more plan, on which nobody acted."""
        last = max(self.offsets)
        try:
            there = CheckpointCopy.read(checkpoint, last)
        except FileNotFoundError:
            return False
        planned = (int(path.name) for path in (checkpoint / "offsets").glob("[0-9]*"))
        return there == self and max(planned) <= last + 1


def offset_of_batch(
    state_store: StateStore, app: str, checkpoint: Path, batch_id: int
) -> dict[str, Any] | None:
    """Return the source offset at which a batch ends, as the state store has it planned, or else a folder's checkpoint.

    A folder in which the app did not run last may have another plan of a batch, which was never run. None if neither says.
    """
    copy = CheckpointCopy.from_message(state_store.description(app, DESCRIPTION))
    if copy is not None and batch_id in copy.offsets:
        return offset_in_plan(copy.offsets[batch_id])
    return planned_offset(checkpoint, batch_id)


@dataclass(frozen=True)
class CheckpointStore:
    """The copy of a job's checkpoint in its state store, if the job ``may_move`` to another folder."""

    app: str
    folder: Path
    committer: BatchCommitter
    may_move: bool

    def load_or_create_id(self) -> str:
        """Return the id of the app's checkpoint; create one if there is none."""
        copy = self._copy()
        return load_or_create_checkpoint_id(self.folder) if copy is None else copy.checkpoint_id

    def restore(self, next_batch_id: int, on_notice: Callable[[str], None]) -> None:
        """Make the folder's checkpoint again if the app has run elsewhere since. The run has begun."""
        copy = self._copy()
        if copy is not None and copy.restore(self.folder / "checkpoint", next_batch_id):
            on_notice(
                f"{self.app} has run in another folder before: this run goes on from batch {next_batch_id}, as "
                "the state store has it."
            )

    def save(self, batch_id: int) -> None:
        """Keep the plan of a batch before anything is done for it."""
        if self.may_move:
            copy = CheckpointCopy.read(self.folder / "checkpoint", batch_id)
            start = RunStart(self.app, JOB, self.committer.run, copy.checkpoint_id)
            store = self.committer.state_store
            store.put_run_description(start, DESCRIPTION, copy.to_message())

    def _copy(self) -> CheckpointCopy | None:
        if not self.may_move:
            return None
        found = self.committer.state_store.description(self.app, DESCRIPTION)
        return CheckpointCopy.from_message(found)
