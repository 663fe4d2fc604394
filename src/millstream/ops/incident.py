"""From a batch that failed to a test that fails: `millstream capture-incident`.

Of the batch that comes next all is there: Spark's offset log has its range and its time, the log its records, and the
state store the state before it. Of earlier ones the state is computed again (`ops/state_before.py`). All of it is packed into a
folder, with the code, which pytest runs: see `ops/incident_replay.py`.

```
<folder>/
  test_incident_<app>_<batch>.py  the test; pytest wants other names in other folders
  incident.json  the app, the batch, its range and time, how it failed, versions of libraries
  code/          the file of the app, and the modules beside it that it has imported
  input/         the records of the batch, one file for each partition
  state/         the state before it: its runs, and a state store with the manifests; and the answers of services that the
                 batch has stored (journal/)
```
"""

from __future__ import annotations

import json
import platform
import re
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from importlib.metadata import distributions
from pathlib import Path
from typing import TYPE_CHECKING, Any

from millstream.client.open import open_reader
from millstream.client.recorded import RecordedInput
from millstream.engine.first_offsets import FirstOffsets, load_first_offsets
from millstream.engine.source.offsets import (
    SourceOffset,
    check_declared,
    first_offset,
    planned_offset,
)
from millstream.engine.stages.journal_files import DRAFT, JOURNAL_FOLDER
from millstream.engine.stages.run_files import object_name
from millstream.errors import ConfigError, ConflictError, OffsetOutOfRangeError
from millstream.kernels.adopted_state import Manifests
from millstream.kernels.state.operator_state import run_names
from millstream.object_store.address import is_url
from millstream.ops.state_before import EarlierBatches
from millstream.ops.version_retention import utc_now
from millstream.views.position import SOURCE_OFFSET
from millstream.views.runs.control_files import active_runs
from millstream.views.runs.failure import last_failure
from millstream.views.schema import JOB, Fence
from millstream.views.state_store.program import StoredProgram
from millstream.views.state_store.program_tables import RunProgram
from millstream.views.state_store.store import StateStore
from millstream.views.store_location import (
    STATE_STORE_FILE,
    open_state_store,
    state_store_exists,
)

if TYPE_CHECKING:
    from millstream.engine.local_run import LocalProgress
    from millstream.pipeline.app import App

NOTE = "incident.json"

_TEST = '''"""Batch {batch_id} of the app {app!r} {failed}

Here it is run again: its records (input/) over the state before it (state/), by the program in code/. {fails}
Mend the program in code/, or let APP be the file that you work on.
"""

from pathlib import Path

from millstream.testing import replay_incident

FOLDER = Path(__file__).parent
APP = FOLDER / "code" / {file!r}


def test_the_batch_runs():
    rows = replay_incident(FOLDER, APP)
    assert rows is not None  # by view, a frame of the rows that the batch sets
'''
_FAILED = ("failed:\n\n{}", "It fails as it\nfailed then, and passes once the program is mended.")
_COMMITTED = (
    "was committed.",
    "It fails if\nthe program's code fails on a row of it, which became a dead letter. What else is wrong, assert of the rows.",
)


@dataclass(frozen=True)
class Incident:
    """A batch that was packed into a folder: how many records, and how the app's last run ended, if that is known.

    ``committed``: it was committed, and is not the one that failed.
    """

    app: str
    batch_id: int
    folder: Path
    records: int
    failure: str | None
    committed: bool = False


@dataclass(frozen=True)
class _Batch:
    """A batch from one source offset to another, over a program's state, whose runs are in a folder."""

    batch_id: int
    start: SourceOffset
    end: SourceOffset
    program: StoredProgram
    manifests: Manifests
    position: Mapping[str, Any]
    runs: Path
    committed: bool = False
    read: Mapping[str, int] = field(default_factory=dict)  # topic → records, where it is known


def capture_incident(
    app: App,
    file: Path,
    folder: Path | None = None,
    batch_id: int | None = None,
    on_batch: Callable[[LocalProgress], None] | None = None,
    *,
    clock: Callable[[], datetime] = utc_now,
) -> Incident:
    """Pack a batch of an app into a folder, which pytest runs.

    The state before a batch that was committed is computed again from a known state, by the batches as they were; the app
    may run meanwhile. For the batch that comes next it has to be stopped.

    Args:
        file: What declares the app. It is packed with the modules beside it that are imported now.
        folder: It is made, and must not be there; by default ``incident-APP-BATCH``, here.
        batch_id: By default the batch that comes next.
        on_batch: Called after every batch that was run again to compute the state.

    Raises:
        ConfigError: there is no such batch, or not all of it any more; the app has steps of Spark's own; its runs of state are
            in an object store, and the batch comes next; an earlier batch, and the app is not declared as it ran, or asks
            a service; or the folder is there.
        ConflictError: the app runs, and the batch comes next.
    """
    _check_possible(app)
    number = _number_of(app, batch_id)
    folder = folder or Path(f"incident-{app.name}-{number}")
    if folder.exists():
        raise ConfigError(f"{folder} is there already. Give a folder that is not.")
    made = folder.with_name(f".{folder.name}.incomplete")
    shutil.rmtree(made, ignore_errors=True)
    try:
        batch = _find_earlier(app, number, made / "scratch", on_batch) or _find_next(app)
        done = _pack(app, batch, file, made, clock().isoformat(timespec="seconds"))
        made.rename(folder)  # a crash before leaves a folder that the next call removes
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return replace(done, folder=folder)


def _pack(app: App, batch: _Batch, file: Path, made: Path, at: str) -> Incident:
    """Write all that a batch depends on into a folder."""
    check_declared(batch.end.to_json(), app.plan())
    records = _write_input(app, batch, made / "input")
    _write_state(app, batch, made / "state", at)
    shutil.rmtree(made / "scratch", ignore_errors=True)
    _write_code(file, made / "code")
    failure = None if batch.committed else last_failure(app.folder)
    note = {
        "app": app.name,
        "batch_id": batch.batch_id,
        "captured_at": at,
        "committed": batch.committed,
        "start": batch.start.to_json(),
        "end": batch.end.to_json(),
        "position": batch.position,
        "failure": None if failure is None else asdict(failure),
        "versions": library_versions(),
    }
    (made / NOTE).write_text(json.dumps(note, indent=2))
    said = "how is not known" if failure is None else f"{failure.kind}: {failure.reason}"
    failed, fails = _COMMITTED if batch.committed else _FAILED
    text = _TEST.format(
        app=app.name,
        batch_id=batch.batch_id,
        failed=failed.format(_quoted(said)),
        fails=fails,
        file=file.name,
    )
    (made / f"{_test_name(app.name, batch.batch_id)}.py").write_text(text)
    failed_with = None if failure is None else said
    return Incident(app.name, batch.batch_id, made, records, failed_with, batch.committed)


def library_versions() -> dict[str, str]:
    """Return the versions of Python and of all packages that are installed here."""
    found = {one.metadata["Name"]: one.version for one in distributions()}
    return {"Python": platform.python_version(), **dict(sorted(found.items()))}


def _test_name(app: str, batch_id: int) -> str:
    return "test_incident_" + re.sub(r"\W", "_", f"{app}_{batch_id}")


def _quoted(text: str) -> str:
    """Return a text for a docstring, as lines of it."""
    plain = text.replace("\\", "\\\\").replace('"""', "'''").replace("\0", "\\0")
    return "\n".join(f"    {line}" for line in plain.splitlines())


def _check_possible(app: App) -> None:
    if not state_store_exists(app.state_store):
        raise ConfigError(f"{app.name} has never run: there is no batch of it.")
    if names := app.plan().spark_steps:
        raise ConfigError(
            f"{', '.join(map(repr, names))} of {app.name} is computed by Spark, and a batch is run again without it."
        )


def _number_of(app: App, batch_id: int | None) -> int:
    """Return which batch is asked for.

    Raises:
        ConfigError: the app has not come to it.
    """
    with open_state_store(app.state_store, readonly=True) as store:
        last = store.last_batch_id(app.name)
    following = 0 if last is None else last + 1
    if batch_id is not None and batch_id > following:
        raise ConfigError(
            f"{app.name} has not come to batch {batch_id}: the one that comes next is {following}."
        )
    return following if batch_id is None else batch_id


def _find_earlier(
    app: App, number: int, scratch: Path, on_batch: Callable[[LocalProgress], None] | None
) -> _Batch | None:
    """Return a batch that was committed, with the state before it as it is computed again; None: it was not."""
    with open_state_store(app.state_store, readonly=True) as store:
        last = store.last_batch_id(app.name)
        if last is None or number > last:
            return None
        found = EarlierBatches(app, store).compute(number, scratch, on_batch)
    return _Batch(
        number,
        SourceOffset.from_json(found.start),
        SourceOffset.from_json(found.end),
        found.program,
        found.manifests,
        found.position,
        found.runs,
        committed=True,
        read=found.read,
    )


def _find_next(app: App) -> _Batch:
    """Return the batch that comes next.

    Raises:
        ConfigError: it was not planned, or the state before it is in an object store.
        ConflictError: the app runs.
    """
    if active_runs(app.folder):
        raise ConflictError(
            f"{app.name} runs, and the batch may be committed meanwhile. Stop it (millstream stop {app.name})."
        )
    if is_url(app.state):
        raise ConfigError(
            f"The runs of state of {app.name} are in an object store, from which none are packed. Run it with its state in "
            "a folder to capture the batch that comes next; an earlier one (--batch) needs no state of the app."
        )
    with open_state_store(app.state_store, readonly=True) as store:
        program, last = store.program(app.name, JOB), store.last_batch_id(app.name)
        known = store.status(app.name, JOB).get(SOURCE_OFFSET)
        manifests, position = store.state_manifests(app.name, JOB), store.position(app.name)
        first = load_first_offsets(store, app.name)
    following = 0 if last is None else last + 1
    if program is None:
        raise ConfigError(f"{app.name} has never run: there is no batch of it.")
    if program.partitioning.get("state_buckets"):
        raise ConfigError(
            f"{app.name} was rescaled, and has not run since: its state is not divided yet as its batch would be. Capture "
            "the batch once the app has run into it again."
        )
    checkpoint = app.folder / "checkpoint"
    planned = planned_offset(checkpoint, following)
    before = planned_offset(checkpoint, following - 1) or known
    if planned is None or (following and before is None):
        raise ConfigError(
            f"Batch {following} of {app.name} was never begun: its last run ended in order. Nothing is there to capture."
        )
    start = _begin(app, planned, first) if before is None else before
    return _Batch(
        following,
        SourceOffset.from_json(start),
        SourceOffset.from_json(planned),
        program,
        manifests,
        position,
        app.folder / "runs",
    )


def _begin(app: App, end: Mapping[str, Any], first: FirstOffsets) -> dict[str, Any]:
    """Return the source offset where the first batch begins: the start of the log, or where the app began to read."""
    log, starts = open_reader(app.log), {}
    for topic in end["topics"]:
        known = first.get(topic, ())
        others = log.offsets(topic)[len(known) :]
        begins = (*known, *(start for start, _ in others))
        starts[topic] = {str(number): start for number, start in enumerate(begins)}
    return first_offset(end, starts)


def _write_input(app: App, batch: _Batch, folder: Path) -> int:
    folder.mkdir(parents=True)
    reader = open_reader(app.log).pinned(batch.end.topic_ids)
    recorded, records = RecordedInput(folder), 0
    for topic in sorted(batch.end.topics):
        before = records
        starts = batch.start.offsets(topic) if topic in batch.start.topics else []
        for partition, end in enumerate(batch.end.offsets(topic)):
            start = starts[partition] if partition < len(starts) else 0
            try:
                records += recorded.record(reader, topic, partition, start, end)
            except OffsetOutOfRangeError as error:
                raise ConfigError(
                    f"Batch {batch.batch_id} of {app.name} reads {topic}/{partition} [{start}, {end}), and the log no longer "
                    f"holds all of that: {error}. It cannot be captured any more."
                ) from None
        if records - before != batch.read.get(topic, records - before):
            raise ConfigError(
                f"Batch {batch.batch_id} of {app.name} has read {batch.read[topic]:,} records of {topic}, and the log holds "
                f"{records - before:,} of them: compaction has removed the others. It cannot be captured any more."
            )
    return records


def _write_state(app: App, batch: _Batch, folder: Path, at: str) -> None:
    """Write the manifests before a batch into a state store of its own, and copy the runs that they name."""
    (folder / "runs").mkdir(parents=True)
    messages = (one for each in batch.manifests.values() for one in json.loads(each).values())
    for name in {object_name(run) for message in messages for run in run_names(message)}:
        shutil.copyfile(batch.runs / name, folder / "runs" / name)
    _copy_answers(batch, folder / JOURNAL_FOLDER)
    with open_state_store(folder / STATE_STORE_FILE) as store:
        _put(store, app.name, batch, at)


def _copy_answers(batch: _Batch, folder: Path) -> None:
    """Copy what the batch has learned from outside: a repetition reads it, and does not ask again."""
    folder.mkdir()
    for path in sorted((batch.runs / JOURNAL_FOLDER).glob(f"{batch.batch_id}-*")):
        if not path.name.endswith(DRAFT):
            shutil.copyfile(path, folder / path.name.partition("-")[2])


def _put(store: StateStore, app: str, batch: _Batch, at: str) -> None:
    run, _ = store.begin_run(app, JOB, "incident", RunProgram(batch.program, {}, at))
    fence = Fence(app, JOB, run, 0)
    store.commit(fence, [], position=batch.position, status={}, state=batch.manifests)


def _write_code(file: Path, folder: Path) -> None:
    """Copy the file of an app, and the modules in its folder that were imported."""
    root = file.resolve().parent
    folder.mkdir(parents=True)
    shutil.copyfile(file, folder / file.name)
    for module in tuple(sys.modules.values()):
        path = getattr(module, "__file__", None)
        if path is None or not _is_own(Path(path), root):
            continue
        target = folder / Path(path).resolve().relative_to(root)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)


def _is_own(path: Path, root: Path) -> bool:
    """Return whether a module is of the program, and not installed in an environment beside it."""
    found = path.resolve()
    installed = {"site-packages", "dist-packages"} & {*found.parts}
    return found.suffix == ".py" and found.is_relative_to(root) and not installed
