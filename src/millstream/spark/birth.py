"""What is fixed when an app's state is born, and the check that a later run still fits it.

``job.json`` in the app's folder says into how many buckets and Spark partitions the state is
divided, and which stateful steps it belongs to. A run whose stateful steps differ is refused before
Spark sees it: Spark would fail with an error of its own, or read one step's state as another's.
"""

from __future__ import annotations

import json
import os
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millstream.errors import ConfigError, CorruptionError
from millstream.kernels.plan import JobPlan

_FILE = "job.json"
_CHECKPOINT_ID = "millstream-checkpoint-id"


@dataclass(frozen=True)
class Birth:
    """The numbers fixed at the birth of an app's state, and how it is shared out now.

    ``label_partitions`` is the number of Spark partitions that the labels of buckets were chosen
    for; ``partitions``, the number of tasks that work on a large batch, is the same until the app is
    rescaled. ``hash_seed`` is that of all hashes of keys.
    """

    bucket_count: int
    partitions: int
    label_partitions: int
    hash_seed: int = 0


def born(folder: Path, wanted: Birth) -> Birth:
    """Give the app's birth numbers, taking ``wanted`` when its state does not exist yet."""
    stored = stored_birth(folder)
    if stored is None:
        return wanted
    if stored.bucket_count != wanted.bucket_count:
        raise ConfigError(
            f"The app's state in {folder} is divided into {stored.bucket_count} buckets and the app "
            f"asks for {wanted.bucket_count}. Use buckets={stored.bucket_count}, or give the app "
            "another name to build its state anew."
        )
    return stored


def stored_birth(folder: Path) -> Birth | None:
    """Give the birth numbers on record; None when the app has no state yet."""
    path = folder / _FILE
    if not path.exists():
        return None
    stored = _load(path)
    return Birth(
        stored["buckets"], stored["partitions"], stored["label_partitions"], stored["hash_seed"]
    )


def write_partitions(folder: Path, partitions: int) -> None:
    """Record that the buckets are now shared by another number of tasks."""
    values = _load(folder / _FILE) | {"partitions": partitions}
    write_whole(folder / _FILE, json.dumps(values, indent=1))


def enter(folder: Path, birth: Birth, plan: JobPlan) -> str:
    """Record the birth, or check the plan against it; give the checkpoint's id.

    Raises:
        ConfigError: the stateful steps are others than those that the state was made by.
    """
    folder.mkdir(parents=True, exist_ok=True)
    steps = fingerprint(plan)
    path = folder / _FILE
    checkpoint = folder / "checkpoint"
    if path.exists():
        _require_same(folder, _load(path)["steps"], steps)
    # A crash after step 1 leaves a checkpoint without state and a new id: the next start takes that
    # id over. After step 2 all is there. Without step 2 nothing was committed, so nothing is lost.
    checkpoint.mkdir(exist_ok=True)
    identity = checkpoint / _CHECKPOINT_ID
    if not identity.exists():
        write_whole(identity, uuid.uuid4().hex)  # step 1
    if not path.exists():
        values = {
            "buckets": birth.bucket_count,
            "partitions": birth.partitions,
            "label_partitions": birth.label_partitions,
            "hash_seed": birth.hash_seed,
            "steps": steps,
        }
        write_whole(path, json.dumps(values, indent=1))  # step 2
    return identity.read_text().strip()


def require_current(folder: Path, next_batch_id: int) -> None:
    """Make sure that the checkpoint knows every batch that the views hold.

    Otherwise Spark would plan some of them anew, with other ranges, and the views, which hold
    batches of those numbers, would leave them out.

    Raises:
        ConfigError: the checkpoint is older than the views.
    """
    offsets = folder / "checkpoint" / "offsets"
    known = [int(path.name) for path in offsets.glob("[0-9]*") if path.name.isdigit()]
    last = max(known, default=-1)
    if last < next_batch_id - 1:
        raise ConfigError(
            f"The checkpoint in {folder} ends with batch {last}, but the views hold batches up to "
            f"{next_batch_id - 1}: it is older than they are. Restore the checkpoint that belongs "
            "to them, or delete the app's folder to rebuild both from the log."
        )


def fingerprint(plan: JobPlan) -> dict[str, dict[str, Any]]:
    """Describe each stateful step by what its state depends on."""
    steps: dict[str, dict[str, Any]] = {}
    for depth, stage in enumerate(plan.stages):
        for operator in stage.operators:
            steps[operator.kernel.name] = {
                "stage": depth,
                "port": operator.port,
                "clocks": [clock.name for clock in operator.clocks],
                **operator.kernel.fingerprint(),
            }
    steps["sources"] = {source.name: source.topic for source in plan.sources}
    return steps


def _require_same(folder: Path, stored: dict[str, Any], now: dict[str, Any]) -> None:
    if stored == now:
        return
    changed = sorted(name for name in {*stored, *now} if stored.get(name) != now.get(name))
    raise ConfigError(
        f"The pipeline's stateful steps are not those that its state in {folder} was made by; what "
        f"differs: {', '.join(repr(name) for name in changed)}. Undo the change, give the app "
        "another name to build its state anew beside the old, or delete that folder to rebuild it "
        "from the log."
    )


def _load(path: Path) -> dict[str, Any]:
    try:
        values: dict[str, Any] = json.loads(path.read_text())
    except ValueError as error:
        raise CorruptionError(
            f"{path} is damaged ({error}). Restore it, or delete the app's folder to rebuild its "
            "state from the log."
        ) from error
    if "hash_seed" not in values:
        raise ConfigError(
            f"The state in {path.parent} was made by an earlier version, which kept it elsewhere. Go on "
            "with that version, or delete the app's folder to rebuild its state from the log."
        )
    return values


def write_whole(path: Path, text: str) -> None:
    """Write a file so that after a crash it is there whole, or not at all."""
    half_made = path.with_name(f".{path.name}.{os.getpid()}")
    with half_made.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    half_made.rename(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
