"""What is fixed when an app's state is created, and the checkpoint that belongs to it.

The app's state store keeps the numbers of buckets and Spark partitions, with the program that created the
state (`views/state_store/program.py`): it commits last, so it decides. Spark's checkpoint is a folder
beside it; it must belong to the views, and be as old as they are.
"""

from __future__ import annotations

import os
import uuid
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from millstream.errors import ConfigError
from millstream.log.files import DISK, replace_file
from millstream.views.address import StateStoreAddress
from millstream.views.runs.control_files import reset_command
from millstream.views.schema import JOB
from millstream.views.store_location import (
    StoreLocation,
    open_state_store,
    place_of,
    state_store_exists,
)

CHECKPOINT_ID_FILE = "millstream-checkpoint-id"


@dataclass(frozen=True)
class JobMetadata:
    """How an app's state is divided. A rescale changes the number of buckets and of partitions; the rest is fixed.

    ``partitions`` is the number of tasks that work on a large batch.
    ``shuffle_partitions`` is its first value: native steps may hold state of Spark's own, which is divided
    by it. ``hash_seed`` is that of all hashes of keys. ``state_buckets`` is how many buckets the manifests are of, until
    the next run has made those of ``bucket_count``, and ``declared_buckets`` what the app asked for when its state was
    created; 0: the same.
    """

    bucket_count: int
    partitions: int
    shuffle_partitions: int
    hash_seed: int = 0
    state_buckets: int = 0
    declared_buckets: int = 0

    @property
    def partitioning(self) -> dict[str, int]:
        """The numbers as the view store keeps them."""
        return asdict(self)


def load_or_create_job_metadata(
    app: str, location: StoreLocation, wanted: JobMetadata
) -> JobMetadata:
    """Return the app's metadata: ``wanted`` if its state does not exist yet.

    Raises:
        ConfigError: the state is divided into another number of buckets.
    """
    stored = load_job_metadata(app, location)
    if stored is None:
        # Some outputs may have the first batch already, which must be the same when it is repeated.
        seed = _stored_hash_seed(app, location)
        return wanted if seed is None else replace(wanted, hash_seed=seed)
    declared = stored.declared_buckets or stored.bucket_count
    if wanted.bucket_count not in (declared, stored.bucket_count):
        place = place_of(location)
        raise ConfigError(
            f"The app's state in {place} is divided into {stored.bucket_count} buckets and the app "
            f"asks for {wanted.bucket_count}. Use buckets={declared}, and divide the state by millstream rescale {app} "
            f"--buckets {wanted.bucket_count}; or start over: {reset_command(place)}."
        )
    return stored


def load_job_metadata(app: str, location: StoreLocation) -> JobMetadata | None:
    """Return the stored metadata; None if the app has committed nothing yet."""
    if not state_store_exists(location):
        return None
    # Not readonly: its tables may be missing after a crash.
    with open_state_store(location) as state_store:
        held, program = state_store.last_batch_id(app, JOB), state_store.program(app, JOB)
    if held is None or program is None or not program.partitioning:
        return None
    return JobMetadata(**program.partitioning)


def _stored_hash_seed(app: str, location: StoreLocation) -> int | None:
    """Return the hash seed of an app that has begun a run; None if it has not."""
    if not state_store_exists(location):
        return None
    with open_state_store(location) as state_store:
        program = state_store.program(app, JOB)
    return None if program is None else program.partitioning.get("hash_seed")


def save_job_metadata(
    app: str, location: StoreLocation, metadata: JobMetadata, *, was: JobMetadata
) -> None:
    """Store other numbers of buckets and of tasks that share them, for the next run.

    Raises:
        ConflictError: they are no longer what they ``was``, as a run has begun meanwhile.
    """
    with open_state_store(location) as state_store:
        state_store.set_partitioning(app, JOB, metadata.partitioning, was=was.partitioning)


def load_or_create_checkpoint_id(folder: Path) -> str:
    """Return the id of the folder's checkpoint; create one if there is none."""
    # A crash after step 1 or 2 leaves an empty checkpoint without an id, and perhaps a draft of one; after
    # step 3 one with an id that no batch has: the next start uses it. A checkpoint that Spark has used and
    # that has no id belongs to something else: the views refuse the new id if they hold batches.
    checkpoint = folder / "checkpoint"
    checkpoint.mkdir(parents=True, exist_ok=True)  # step 1
    identity = checkpoint / CHECKPOINT_ID_FILE
    if not identity.exists():
        new = uuid.uuid4().hex
        draft = checkpoint / f"{CHECKPOINT_ID_FILE}.{new}"
        replace_file(DISK, draft, new.encode())  # step 2
        try:
            os.link(draft, identity)
            draft.unlink()
        except FileExistsError:  # of two first starts at once, one is the first
            draft.unlink()
        except OSError:  # a file system without links: of two first starts the last one counts
            draft.replace(identity)
        DISK.sync_folder(checkpoint)  # step 3
    return identity.read_text().strip()


def check_checkpoint_current(
    folder: Path, next_batch_id: int, location: StoreLocation | None = None
) -> None:
    """Make sure that the checkpoint is as old as the views.

    The checkpoint has every batch that the views hold: otherwise Spark would plan some of them again, with
    other ranges, and the views would skip them, as they hold batches of those numbers. And it has at most
    one more, which was begun and not committed: otherwise Spark would never repeat those that the views
    lack.

    Raises:
        ConfigError: one of them is older than the other.
    """
    checkpoint = folder / "checkpoint"
    if isinstance(location, StateStoreAddress):
        command = location.reset_command_with(folder)
    else:
        command = reset_command(folder)
    begun, done = (_last_batch_id(checkpoint / name) for name in ("offsets", "commits"))
    if begun < next_batch_id - 1:
        raise ConfigError(
            f"The checkpoint in {folder} ends with batch {begun}, but the views hold batches up to "
            f"{next_batch_id - 1}: it is older than they are. Restore the checkpoint that belongs "
            f"to them, or start over from the log: {command}."
        )
    if begun > next_batch_id or done >= next_batch_id:
        held = f"batches up to {next_batch_id - 1}" if next_batch_id else "no batch"
        raise ConfigError(
            f"The checkpoint in {folder} ends with batch {max(begun, done)}, but the views hold {held}: "
            "they are older than it, or were created again. Restore the views that belong to it, or "
            f"start over from the log: {command}."
        )


def _last_batch_id(folder: Path) -> int:
    known = [int(path.name) for path in folder.glob("[0-9]*") if path.name.isdigit()]
    return max(known, default=-1)
